"""Runs that ask a service: one pace for all processes, a budget, answers that are not paid for twice, no key anywhere."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
import traceback
from datetime import date
from pathlib import Path

import cloudpickle
import httpx
import numpy as np
import pytest

import penstock as ps
from http_server import Answer, HttpServer, chat
from penstock.errors import BadRowsError, BudgetSpentError, EngineError, RowError, StepError, UsageError
from penstock.handlers.remote import Budget, HttpModelHandler, OpenAICompatibleModelHandler, Prices, kserve_answer
from penstock.inference.service_handler import RunPlace
from penstock.remote.answers import KeptAnswers
from penstock.remote.contents import contents_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a script: no worker imports this file

KEY = "sk-Zq7/never-to-be-seen-93a"


def plus_one(body, headers):
    return Answer({"y": body["x"] + 1})


def request_of(row):
    return {"x": int(row)}


def answer_of(body):
    return body["y"]


class Limited:
    """A service with a limit: a bucket of half a second that fills at `rate` a second. It says when to come back."""

    def __init__(self, rate):
        self.rate, self.level, self.at = rate, rate / 2, time.monotonic()

    def __call__(self, body, headers):
        now = time.monotonic()
        self.level = min(self.rate / 2, self.level + (now - self.at) * self.rate)
        self.at = now
        if self.level < 1:
            return Answer(b"slow down", status=429, headers={"retry-after": "1"})
        self.level -= 1
        return plus_one(body, headers)


def test_processes_keep_one_limit_together():
    """Four processes, each of which alone would ask at the whole rate: few requests are refused."""
    with HttpServer(Limited(100)) as server:
        handler = HttpModelHandler(server.url, request_of, answer_of, requests_per_minute=6000)
        p = ps.Pipeline(workers=4, progress=False)
        made = (p | ps.Create(range(500)) | "ask" >> ps.RunInference(handler)).collect()
        statuses = [status for _, status in server.statuses]
    assert [each.inference for each in made] == list(range(1, 501))
    assert statuses.count(200) == 500
    assert statuses.count(429) < 0.02 * len(statuses)
    assert p.result.metrics.counter("throttled_milli_secs", step="ask") > 0


def test_a_limit_that_nobody_was_told_is_found():
    with HttpServer(Limited(100)) as server:
        handler = HttpModelHandler(server.url, request_of, answer_of, max_in_flight=32)
        p = ps.Pipeline(workers=2, progress=False)
        made = (p | ps.Create(range(400)) | "ask" >> ps.RunInference(handler)).collect()
        statuses = [status for _, status in server.statuses]
    assert [each.inference for each in made] == list(range(1, 401))
    assert statuses.count(200) == 400
    refused = p.result.metrics.counter("requests_refused", step="ask")
    assert refused == statuses.count(429)
    assert refused < 400  # without a pace of their own they would come again and again


# The budget.


def budgeted(folder, url, **settings):
    handler = HttpModelHandler(url, request_of, answer_of, max_in_flight=4, **settings)
    p = ps.Pipeline(workers=0, progress=False, run_dir=str(folder / "run"))
    rows = p | ps.ReadFromText(str(folder / "in.txt")) | "ask" >> ps.RunInference(handler)
    rows | ps.Map(lambda made: f"{made.example} {made.inference}") | ps.WriteToText(str(folder / "out"))
    return p


def lines_of(folder, name="out"):
    return [line for path in sorted(folder.glob(f"{name}/part-*")) for line in path.read_text().splitlines()]


def test_a_budget_stops_the_run_and_a_larger_one_resumes_it_without_paying_twice(tmp_path):
    (tmp_path / "in.txt").write_text("".join(f"{n}\n" for n in range(100)))
    with HttpServer(plus_one) as server:
        with pytest.raises(
            BudgetSpentError, match=r"step 'ask': the budget max_requests=40 is spent: 40 requests"
        ) as raised:
            budgeted(tmp_path, server.url, budget=Budget(max_requests=40)).run()
        assert "set a larger budget and resume the run" in str(raised.value)
        assert "--accept-change code" in "".join(raised.value.__notes__)
        assert server.seen == 40
        with pytest.raises(BudgetSpentError):  # the same one is spent for good
            budgeted(tmp_path, server.url, budget=Budget(max_requests=40)).run()
        assert server.seen == 40
        result = budgeted(tmp_path, server.url, budget=Budget(max_requests=100)).run()
        assert server.seen == 100
        assert max(server.answered.values()) == 1
    assert lines_of(tmp_path) == [f"{n} {n + 1}" for n in range(100)]
    assert result.metrics.counter("answers_reused") == 40
    assert result.metrics.counter("requests") == 100  # those of the whole run
    assert not (tmp_path / "run/.penstock-answers").exists()


@pytest.mark.parametrize("own_client", [False, True], ids=["http", "a client of one's own"])
def test_the_manifest_of_a_resumed_run_has_what_all_of_it_took(tmp_path, own_client):
    for part in range(3):
        (tmp_path / f"in-{part}.txt").write_text("".join(f"{part * 10 + n}\n" for n in range(10)))
    prices = Prices(request=0.5, input_tokens=1.0)

    def run(url, most):
        settings = {"budget": Budget(max_requests=most), "prices": prices}
        handler = HttpModelHandler(url, request_of, answer_of, max_in_flight=1, **settings)
        if own_client:
            handler = Posts(url, max_batch_size=1, max_concurrent_requests=1, **settings)
        p = ps.Pipeline(workers=1, progress=False, run_dir=str(tmp_path / "run"))
        rows = p | ps.ReadFromText(str(tmp_path / "in-*.txt")) | "ask" >> ps.RunInference(handler)
        rows | ps.Map(str) | ps.WriteToText(str(tmp_path / "out"))
        return p.run().metrics

    with HttpServer(lambda body, headers: Answer({"y": 1, "usage": {"input_tokens": 7, "output_tokens": 2}})) as server:
        with pytest.raises(BudgetSpentError):
            run(server.url, 17)
        metrics = run(server.url, 100)
        assert server.seen == 30
    assert metrics.counter("answers_reused") > 0
    told = json.loads((tmp_path / "run/manifest.json").read_text())["metrics"]["ask"]
    names = ("requests", "input_tokens", "output_tokens", "cost_micros")
    assert [told[name] for name in names] == [30, 210, 60, 30 * 500_007]
    assert [metrics.counter(name) for name in names] == [30, 210, 60, 30 * 500_007]


class Posts(ps.RemoteModelHandler):
    def __init__(self, url, **settings):
        super().__init__(**settings)
        self.url = url

    def create_client(self):
        return httpx.Client()

    def request(self, batch, client, inference_args=None):
        replies = [client.post(self.url, json={"x": row}).raise_for_status().json() for row in batch]
        for reply in replies:
            self.used_tokens(reply["usage"]["input_tokens"], reply["usage"]["output_tokens"])
        return [reply["y"] for reply in replies]


def test_tokens_and_money():
    def answer(body, headers):
        return Answer(chat("hi", prompt_tokens=1000, completion_tokens=500))

    prices = Prices(input_tokens=2.0, output_tokens=10.0)  # 0.007 for a request
    with HttpServer(answer) as server:
        settings = {"prices": prices, "max_in_flight": 1}
        handler = OpenAICompatibleModelHandler(server.url, "m", **settings)
        p = ps.Pipeline(workers=0, progress=False)
        (p | ps.Create(["a"] * 10) | "ask" >> ps.RunInference(handler)).collect()
        counter = p.result.metrics.counter
        assert (counter("input_tokens"), counter("output_tokens"), counter("cost_micros")) == (10_000, 5_000, 70_000)
        for budget in (Budget(max_cost=0.035), Budget(max_tokens=7500)):
            before = server.seen
            handler = OpenAICompatibleModelHandler(server.url, "m", budget=budget, **settings)
            with pytest.raises(BudgetSpentError, match="nothing of this run is kept; with run_dir= it could be resumed"):
                (ps.Pipeline(workers=0) | ps.Create(["a"] * 10) | ps.RunInference(handler)).collect()
            assert server.seen - before == 5
    with pytest.raises(UsageError, match="max_cost needs prices="):
        OpenAICompatibleModelHandler("http://127.0.0.1:1", "m", budget=Budget(max_cost=1.0))
    with pytest.raises(UsageError, match="max_requests=0: expected a whole number over 0"):
        Budget(max_requests=0)


def test_tokens_of_any_endpoint_that_tells_of_them():
    usages = [{"prompt_tokens": 5, "completion_tokens": 2}, {"input_tokens": 10, "output_tokens": None}, None, "many"]

    def answer(body, headers):
        return Answer({"y": 1, "usage": usages[body["x"]]})

    with HttpServer(answer) as server:
        p = ps.Pipeline(workers=0)
        handler = HttpModelHandler(server.url, request_of, answer_of, prices=Prices(input_tokens=1.0))
        (p | ps.Create(range(4)) | ps.RunInference(handler)).collect()
        counter = p.result.metrics.counter
        assert (counter("input_tokens"), counter("output_tokens"), counter("cost_micros")) == (15, 2, 15)


def test_explain_says_what_a_run_would_take_and_asks_nobody():
    handler = OpenAICompatibleModelHandler(
        "http://127.0.0.1:1/v1",
        "m",
        prompt="{text}",
        request_args={"max_tokens": 7},
        requests_per_minute=3000,
        budget=Budget(max_cost=5.0),
        prices=Prices(input_tokens=2.0, output_tokens=10.0),
    )
    p = ps.Pipeline(workers=2)
    p | ps.Create([{"text": "four" * 10}] * 500) | "ask" >> ps.RunInference(handler)
    told = p.explain()
    assert "at most 3,000 requests a minute, a budget of max_cost=5.0" in told
    estimate = "about 500 requests, 5,000 input tokens, at most 3,500 output tokens, cost 0.045"
    assert f"step 'ask': {estimate} (from a sample of 100 of 500 rows)" in told
    p = ps.Pipeline(workers=0)
    handler = OpenAICompatibleModelHandler("http://127.0.0.1:1", "m", prices=Prices(input_tokens=2.0, output_tokens=1.0))
    p | ps.Create(["four"] * 1000) | "ask" >> ps.RunInference(handler)
    assert "about 1,000 requests, 1,000 input tokens, cost at least 0.002 (" in p.explain(), "without max_tokens"
    p = ps.Pipeline(workers=0)
    p | ps.Create([1]) | ps.Map(str) | "ask" >> ps.RunInference(OpenAICompatibleModelHandler("http://127.0.0.1:1", "m"))
    assert "step 'ask': no estimate, because other steps come before it" in p.explain()


# Nothing is paid for twice.


def test_only_kept_answers_are_removed(tmp_path):
    """Not an output in run_dir that has such a name, nor what somebody else has put beside the answers."""
    (tmp_path / "in.txt").write_text("1\n2\n")
    kept = tmp_path / "run/.penstock-answers"
    with HttpServer(lambda body, headers: plus_one(body, headers) if body["x"] == 1 else Answer(status=400)) as server:
        for spoiled in (True, False):
            p = ps.Pipeline(workers=0, progress=False, run_dir=str(tmp_path / "run"))
            made = (
                p
                | ps.ReadFromText(str(tmp_path / "in.txt"))
                | "ask" >> ps.RunInference(HttpModelHandler(server.url, request_of, answer_of))
            )
            made | ps.Map(lambda each: str(each.inference)) | ps.WriteToText(str(tmp_path / "run/answers"))
            with pytest.raises(StepError) if spoiled else contextlib.nullcontext():
                p.run()
            if spoiled:
                (run,) = kept.iterdir()
                (run / "mine.db").write_text("mine")
                server.answer = plus_one
    assert lines_of(tmp_path / "run", "answers") == ["2", "3"]
    assert [path.name for path in kept.rglob("*")] == [run.name, "mine.db"]


def test_a_bad_answer_to_a_row_that_may_fail_is_not_paid_for_again(tmp_path):
    """Its row fails for good. One that ends the run is asked for again when that is resumed."""
    (tmp_path / "in.txt").write_text("1\n2\n3\n")

    def run(url, handled):
        handler = HttpModelHandler(url, request_of, answer_of, max_in_flight=1, num_retries=0)
        step = ps.RunInference(handler)
        p = ps.Pipeline(workers=0, progress=False, run_dir=str(tmp_path / f"run {handled}"))
        rows = p | ps.ReadFromText(str(tmp_path / "in.txt"))
        made = rows | "ask" >> (step.with_exception_handling(exc_class=RowError) if handled else step)
        made = made[0] if handled else made
        made | ps.Map(fails_once, str(tmp_path / f"failed {handled}")) | ps.WriteToText(str(tmp_path / f"out {handled}"))
        with contextlib.suppress(StepError):
            p.run()
            return p.result.metrics

    for handled in (True, False):
        with HttpServer(lambda body, headers: Answer({"z": 1} if body["x"] == 2 else {"y": body["x"]})) as server:
            run(server.url, handled)
            metrics = run(server.url, handled)
            asked = [body["x"] for body in server.bodies]
        assert asked == ([1, 2, 3] if handled else [1, 2, 2])
    assert lines_of(tmp_path, "out True") == ["1", "3"]
    assert metrics is None


def fails_once(made, marker):
    if not os.path.exists(marker):
        Path(marker).touch()
        raise ValueError("once")
    return str(made.inference)


def test_a_disk_that_is_full_ends_the_run_and_loses_nothing(tmp_path):
    answers = KeptAnswers(str(tmp_path), "run", "ask")
    answers.keep(b"1" * 16, b"small")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most[1]))
    try:
        with pytest.raises(EngineError, match=r"an answer cannot be kept in .*\.penstock-answers"):
            answers.keep(b"2" * 16, os.urandom(200_000))
        with pytest.raises(EngineError, match="make room there, and run the same command again"):
            KeptAnswers(str(tmp_path), "run", "ask").keep(b"2" * 16, os.urandom(200_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    answers.keep(b"3" * 16, b"there is room")
    answers.close()
    later = KeptAnswers(str(tmp_path), "run", "ask")
    assert [later.find(each * 16) for each in (b"1", b"2", b"3")] == [b"small", None, b"there is room"]
    later.close()


SCRIPT = """
import sys
import penstock as ps
from penstock.handlers.remote import HttpModelHandler

def request_of(row):
    return {"x": int(row)}

def answer_of(body):
    return body["y"]

if __name__ == "__main__":
    url, folder = sys.argv[1:]
    handler = HttpModelHandler(url, request_of, answer_of, max_in_flight=8, api_key_env="SERVICE_KEY")
    p = ps.Pipeline(workers=2, run_dir=f"{folder}/run", progress=False)
    made = p | ps.ReadFromText(f"{folder}/in.txt") | "ask" >> ps.RunInference(handler)
    made | ps.Map(lambda each: f"{each.example} {each.inference}") | ps.WriteToText(f"{folder}/out")
    p.run()
"""


REMOTE = """
import json
import sys
import urllib.request
import penstock as ps

class Client(ps.RemoteModelHandler):
    def __init__(self, url, **settings):
        super().__init__(**settings)
        self.url = url

    def create_client(self):
        return self.url

    def request(self, batch, client, inference_args=None):
        return [self.one(int(row), client) for row in batch]

    def one(self, row, client):
        with urllib.request.urlopen(urllib.request.Request(client, json.dumps({"x": row}).encode())) as reply:
            return row, json.load(reply)["y"]

if __name__ == "__main__":
    url, folder = sys.argv[1:]
    handler = Client(url, max_batch_size=2, max_concurrent_requests=4)
    p = ps.Pipeline(workers=2, run_dir=f"{folder}/run", progress=False)
    made = p | ps.ReadFromText(f"{folder}/in.txt") | "ask" >> ps.RunInference(handler, inference_args={"seed": 1})
    made | ps.Map(lambda each: f"{each[0]} {each[1]}") | ps.WriteToText(f"{folder}/out")
    p.run()
"""


@pytest.mark.parametrize(("script", "kills"), [(SCRIPT, 2), (REMOTE, 1)], ids=["http", "a client of one's own"])
def test_a_killed_run_repeats_at_most_what_was_in_flight(tmp_path, script, kills):
    rows, in_flight = 400, 2 * 8
    (tmp_path / "in.txt").write_text("".join(f"{n}\n" for n in range(rows)))
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, str(tmp_path / "script.py")]
    environment = {**os.environ, "SERVICE_KEY": KEY}
    with HttpServer(plus_one) as server:
        command += [server.url, str(tmp_path)]
        for kill in range(1, kills + 1):
            run = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE)
            server.wait_for(kill * 100, run)
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        repeats = sum(server.answered.values()) - rows
    assert sorted(lines_of(tmp_path), key=lambda line: int(line.split()[0])) == [f"{n} {n + 1}" for n in range(rows)]
    assert repeats <= kills * in_flight


class Unshippable:
    def __reduce__(self):
        raise TypeError("not to be pickled")


def test_rows_are_known_again_by_their_contents():
    rows = [
        None,
        1,
        1.0,
        True,
        "1",
        b"1",
        [1],
        (1,),
        {"a": 1},
        {"a": 2},
        {1, 2},
        np.arange(3),
        np.arange(3.0),
        date(2026, 1, 2),
    ]
    digests = [contents_of(row) for row in rows]
    assert None not in digests
    assert len(set(digests)) == len(rows)
    assert digests == [contents_of(row) for row in pickle.loads(pickle.dumps(rows))]
    text = "".join(["a", "b"])  # whether a row holds one object twice, or two that are equal, is all the same
    assert contents_of({"x": text, "y": text}) == contents_of({"x": text, "y": "".join(["a", "b"])})
    assert contents_of({"x": Unshippable()}) is None
    itself: list[object] = []
    itself.append(itself)
    assert contents_of(itself) is None


def test_an_error_of_a_request_is_that_of_the_batch_also_where_some_rows_were_kept(tmp_path):
    """So that the row which it is about is looked for."""

    class Client(ps.RemoteModelHandler):
        def create_client(self):
            return None

        def request(self, batch, client, inference_args=None):
            if 3 in batch:
                raise ValueError("three")
            return batch

    for rows, error in [([1], None), ([1, 2, 3], ValueError)]:
        handler = Client(num_retries=0)
        handler.enter_run(RunPlace("ask", str(tmp_path / "shared"), str(tmp_path), "run 1"))
        model = handler.load_model()
        with pytest.raises(error, match="three") if error else contextlib.nullcontext():
            assert handler.run_inference(rows, model) == rows
        handler.close_model(model)


def test_answers_of_a_client_of_ones_own_are_kept_row_by_row(tmp_path):
    """Of a batch in which one row fails, the others are not asked for again; a row that cannot be pickled is."""
    asked: list[list[object]] = []
    odd = Unshippable()

    class Client(ps.RemoteModelHandler):
        def create_client(self):
            return None

        def request(self, batch, client, inference_args=None):
            asked.append(list(batch))
            values = [0 if row is odd else row * 10 for row in batch]
            if len(asked) == 1:
                raise BadRowsError({2: ValueError("three")}, values)
            return values

    def answers(args=None):
        handler = Client(num_retries=0, budget=Budget(max_requests=3))
        handler.enter_run(RunPlace("ask", str(tmp_path / "shared"), str(tmp_path), "run 1"))
        model = handler.load_model()
        try:
            return handler.run_inference([1, 2, 3, odd], model, args), handler.take_counts(model)
        finally:
            handler.close_model(model)

    with pytest.raises(BadRowsError):
        answers()
    assert answers() == ([10, 20, 30, 0], {"requests": 2, "answers_reused": 2})  # those of the whole run
    assert answers({"seed": 1}) == ([10, 20, 30, 0], {"requests": 1})  # those are other requests
    assert asked == [[1, 2, 3, odd], [3, odd], [1, 2, 3, odd]]
    with pytest.raises(BudgetSpentError, match="max_requests=3"):  # that of the whole run
        answers()


# Keys.


def everything_in(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_the_key_is_sent_and_is_nowhere_else(tmp_path):
    """Of a run that fails, whose service tells the key back, and is resumed: all files, output, errors, explain, metrics."""
    (tmp_path / "in.txt").write_text("".join(f"{n}\n" for n in range(60)))
    (tmp_path / "script.py").write_text(SCRIPT)
    told = {"fails": True}

    def answer(body, headers):
        if told["fails"] and body["x"] == 50:
            return Answer(f"wrong: {headers['authorization']}".encode(), status=400)
        return plus_one(body, headers)

    environment = {**os.environ, "SERVICE_KEY": KEY, "TMPDIR": str(tmp_path)}
    with HttpServer(answer) as server:
        command = [sys.executable, str(tmp_path / "script.py"), server.url, str(tmp_path)]
        failed = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert failed.returncode != 0
        assert "wrong: Bearer ***" in failed.stderr
        left = everything_in(tmp_path)
        assert any(".penstock-answers" in str(path) for path in left)
        told["fails"] = False
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
        os.environ["SERVICE_KEY"] = KEY
        try:
            handler = HttpModelHandler(server.url, request_of, answer_of, api_key_env="SERVICE_KEY")
            p = ps.Pipeline(workers=0, progress=False)
            made = p | ps.Create([1]) | ps.RunInference(handler)
            said = [repr(handler), repr(vars(handler)), p.explain(), repr(made.collect())]
            said += [repr(p.result), json.dumps(p.result.metrics.to_json())]
        finally:
            del os.environ["SERVICE_KEY"]
    for text in [failed.stdout, failed.stderr, done.stdout, done.stderr, *said]:
        assert KEY not in text
    for path, content in {**left, **everything_in(tmp_path)}.items():
        assert KEY.encode() not in content, path


def tells_the_key(body, headers):
    """Beside an answer, and in errors: at a place where they are cut, or far behind."""
    key = headers.get("authorization") or headers["x-api-key"]
    text = body["messages"][-1]["content"] if "messages" in body else str(body["x"])
    if text == "1":
        return Answer({"error": {"message": "x" * 260 + key}})
    if text == "2":
        return Answer(chat(None, debug=key) | {"choices": [{"message": {"refusal": "x" * 265 + key}}]})
    if text == "3":
        return Answer(("x" * 1190 + key.replace("/", "\\/")).encode(), status=400)
    return Answer(chat("fine") | {"y": 1, "debug": key})


def http_of(url, **settings):
    return HttpModelHandler(url, request_of, answer_of, **settings)


def kserve_of(url, **settings):
    return HttpModelHandler(url, request_of, kserve_answer(), **settings)


def openai_of(url, **settings):
    return OpenAICompatibleModelHandler(url, "m", **settings)


def key_function():
    return os.environ["SERVICE_KEY"]


def key_headers():
    return {"X-Api-Key": os.environ["SERVICE_KEY"]}


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (http_of, {"api_key": key_function}),
        (kserve_of, {"headers": key_headers}),
        (openai_of, {"api_key_env": "SERVICE_KEY"}),
    ],
)
@pytest.mark.parametrize("handled", [True, False])
def test_no_part_of_a_key_that_a_service_tells_back_is_kept(tmp_path, monkeypatch, caplog, make, given, handled):
    """In 200s and in errors, whole or cut: in files, among them kept answers and dead letters, in errors and DEBUG logs."""
    caplog.set_level("DEBUG")
    monkeypatch.setenv("SERVICE_KEY", KEY)
    (tmp_path / "in.txt").write_text("0\n1\n2\n3\n4\n" if handled else "0\n1\n")
    said = []
    with HttpServer(tells_the_key) as server:
        step = ps.RunInference(make(server.url, max_in_flight=1, **given))
        p = ps.Pipeline(workers=0, progress=False, run_dir=str(tmp_path / "run"))
        rows = p | ps.ReadFromText(str(tmp_path / "in.txt"))
        if handled:
            good, bad = rows | "ask" >> step.with_exception_handling()
            (
                bad.failed_inferences
                | ps.Map(lambda each: f"{each[1]!r} {each[1].message}")
                | ps.WriteToText(str(tmp_path / "bad"))
            )
        else:
            good = rows | "ask" >> step
        good | ps.Map(lambda made: "fine") | ps.WriteToText(str(tmp_path / "out"))
        try:
            p.run()
        except StepError:
            said.append(traceback.format_exc())
        assert server.seen == 5 if handled else 2
    assert handled or (list((tmp_path / "run/.penstock-answers").iterdir()) and "***" in said[0])
    for text in [*said, caplog.text, *(content.decode("latin-1") for content in everything_in(tmp_path).values())]:
        assert KEY[:8] not in text


def test_a_key_from_a_function_is_asked_for_again_when_it_is_too_old():
    current = {"key": "old-key-0"}

    def answer(body, headers):
        if headers["authorization"] != "Bearer new-key-1":
            current["key"] = "new-key-1"
            return Answer(b"too old", status=401)
        return plus_one(body, headers)

    with HttpServer(answer) as server:
        handler = HttpModelHandler(server.url, request_of, answer_of, max_in_flight=1, api_key=lambda: current["key"])
        model = handler.load_model()
        assert handler.run_inference([1, 2], model) == [2, 3]
        handler.close_model(model)


@pytest.mark.parametrize("where", ["user:{}@127.0.0.1:{}/", "127.0.0.1:{1}/?api_key={0}", "{0}:@127.0.0.1:{1}/v1?api=2"])
def test_a_key_in_an_address_is_nowhere_else(tmp_path, caplog, where):
    """Of a run that fails, whose service tells the address and the login back."""
    caplog.set_level("DEBUG")
    (tmp_path / "in.txt").write_text("0\n1\n")
    seen = []

    def answer(body, headers):
        login = headers.get("authorization", "Basic ").removeprefix("Basic ")
        told = f"not here: {server.paths[-1]} {login} {base64.b64decode(login)}"
        seen.append(told)
        return plus_one(body, headers) if body.get("x") == 0 else Answer(told.encode(), status=404)

    with HttpServer(answer) as server:
        url = "http://" + where.format("hunter2%2Fsecret", server.port)
        for make in (http_of, openai_of):
            handler = make(url, max_in_flight=1)
            p = ps.Pipeline(workers=0, progress=False, run_dir=str(tmp_path / make.__name__))
            made = p | ps.ReadFromText(str(tmp_path / "in.txt")) | "ask" >> ps.RunInference(handler)
            made | ps.Map(str) | ps.WriteToText(str(tmp_path / "out"))
            said = [p.explain(), repr(handler), str(handler.model_id())]
            with pytest.raises(StepError):
                p.run()
            said.append(traceback.format_exc())
    assert "hunter2" in "".join(seen)
    for text in [*said, caplog.text, *(content.decode("latin-1") for content in everything_in(tmp_path).values())]:
        assert "hunter2" not in text
        assert base64.b64encode(b"user:hunter2/secret").decode() not in text


def test_a_key_in_an_address_that_a_client_of_ones_own_tells_is_nowhere(tmp_path, caplog):
    statuses = iter([429, 404, 404])
    (tmp_path / "in.txt").write_text("1\n")
    with HttpServer(lambda body, headers: Answer(b"no", status=next(statuses))) as server:
        asked = Posts(f"{server.url}/v1?api_key=hunter2-secret", num_retries=0, throttle_delay_secs=0.01)
        p = ps.Pipeline(workers=0, progress=False, run_dir=str(tmp_path / "run"))
        rows = p | ps.ReadFromText(str(tmp_path / "in.txt"))
        good, bad = rows | "ask" >> ps.RunInference(asked).with_exception_handling()
        bad.failed_inferences | ps.Map(lambda each: each[1].as_dict()) | ps.WriteToJsonl(str(tmp_path / "bad"))
        good | ps.Map(str) | ps.WriteToText(str(tmp_path / "out"))
        p.run()
    files = everything_in(tmp_path)
    assert any(b"404" in content and b"?..." in content for content in files.values())
    for text in [caplog.text, *(content.decode("latin-1") for content in files.values())]:
        assert "hunter2" not in text


def test_a_variable_that_is_not_set_is_named():
    handler = HttpModelHandler("http://127.0.0.1:1", request_of, answer_of, api_key_env="NO_SUCH_KEY")
    with pytest.raises(UsageError, match="the environment variable NO_SUCH_KEY, which api_key_env= names, is not set"):
        (ps.Pipeline(workers=0) | ps.Create([1]) | ps.RunInference(handler)).collect()
