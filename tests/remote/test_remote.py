"""Models behind HTTP: requests, answers, failures, columns, retries."""

from __future__ import annotations

import json
import math
import random
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from http_server import Answer, HttpServer, chat
from penstock.errors import BadRowsError, BudgetSpentError, RowError, ServiceUnavailableError, StepError, UsageError
from penstock.handlers.remote import (
    Budget,
    HttpModelHandler,
    OpenAICompatibleModelHandler,
    Prices,
    kserve_answer,
    kserve_request,
)
from penstock.inference.remote_handler import RateLimitExceeded
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.inference.stream import open_stream
from penstock.observe.metrics import Metrics
from penstock.remote.gate import LONGEST_TOLD
from penstock.testing import check_handler


def upper(body, headers):
    return Answer(chat(body["messages"][-1]["content"].upper(), prompt_tokens=3, completion_tokens=2))


def plus_one(body, headers):
    return Answer({"y": body["x"] + 1})


def request_of(row):
    return {"x": row}


def answer_of(body):
    return body["y"]


def http_handler(url, **settings):
    return HttpModelHandler(url, request_of, answer_of, **{"timeout": 20.0, "max_in_flight": 16, **settings})


def asked(rows, handler, **options):
    """The answers, and the run."""
    p = ps.Pipeline(**{"workers": 0, "progress": False, **options})
    made = (p | ps.Create(rows) | "ask" >> ps.RunInference(handler)).collect()
    return [each.inference for each in made], p.result


def handled(rows, handler, tmp_path, **options):
    """The answers, and (row, message) of those that failed, sorted."""
    p = ps.Pipeline(workers=0, progress=False, **options)
    step = ps.RunInference(handler).with_exception_handling()
    good, failures = p | ps.Create(rows) | "ask" >> step
    good | ps.Map(lambda made: {"y": made.inference}) | "good" >> ps.WriteToJsonl(str(tmp_path / "good"))
    told = failures.failed_inferences if hasattr(failures, "failed_inferences") else failures
    told | ps.Map(lambda each: {"x": each[0], "why": each[1].message}) | "bad" >> ps.WriteToJsonl(str(tmp_path / "bad"))
    p.run()
    read = {
        name: [json.loads(line) for path in sorted((tmp_path / name).glob("*")) for line in path.read_text().splitlines()]
        for name in ("good", "bad")
    }
    return [row["y"] for row in read["good"]], {row["x"]: row["why"] for row in read["bad"]}


def test_answers_in_order_on_every_way_of_running(pipeline):
    with HttpServer(plus_one) as server:
        p = pipeline(progress=False)
        made = (p | ps.Create(range(300)) | ps.RunInference(http_handler(server.url))).collect()
        assert made == [ps.PredictionResult(row, row + 1, server.url) for row in range(300)]
        assert server.seen == 300
        assert server.connections <= 2 * 16 + 8  # they are used again
        assert p.result.metrics.counter("requests") == 300


def test_the_contract_of_handlers():
    with HttpServer(plus_one) as server:
        check_handler(http_handler(server.url), [1, 2, 3, 4])


def test_the_contract_of_handlers_of_columns():
    with HttpServer(upper) as server:
        handler = OpenAICompatibleModelHandler(f"{server.url}/v1", "m", prompt="{a}-{b}")
        check_handler(handler, [{"a": n, "b": "x" * n} for n in range(1, 5)])


def test_a_row_that_takes_long_holds_up_no_other():
    """The first row is answered when all others are."""
    others = threading.Event()

    def answer(body, headers):
        if body["x"] == 0:
            return Answer({"y": 1}, until=others.is_set)
        if server.seen >= 150:
            others.set()
        return plus_one(body, headers)

    with HttpServer(answer) as server:
        made, _ = asked(range(150), http_handler(server.url, max_in_flight=4, timeout=100.0))
    assert made == list(range(1, 151))


def test_a_host_and_models_by_key_ask_in_batches():
    with HttpServer(plus_one) as server:
        p = ps.Pipeline(workers=1, progress=False)
        step = ps.RunInference(http_handler(server.url)).with_exception_handling(timeout=60)
        good, _ = p | ps.Create(range(50)) | "ask" >> step
        assert [each.inference for each in good.collect()] == list(range(1, 51))
        assert p.result.metrics.counter("requests", step="ask") == 50
        keyed = ps.KeyedModelHandler([ps.KeyModelMapping(["a", "b"], http_handler(server.url))])
        made = (ps.Pipeline(workers=0) | ps.Create([("a", 1), ("b", 2)]) | ps.RunInference(keyed)).collect()
        assert [(key, each.inference) for key, each in made] == [("a", 2), ("b", 3)]


# OpenAI's API.


def test_a_chat_over_columns_into_a_column(tmp_path):
    pq.write_table(pa.table({"title": ["a", "b"], "text": ["x", "y"], "n": [1, 2]}), tmp_path / "in.parquet")
    with HttpServer(upper) as server:
        handler = OpenAICompatibleModelHandler(
            f"{server.url}/v1/",
            "small",
            prompt="{title}: {text}",
            system="be brief",
            request_args={"temperature": 0, "max_tokens": 5},
            output_column="said",
        )
        p = ps.Pipeline(workers=0)
        made = p | ps.ReadFromParquet(str(tmp_path / "in.parquet")) | ps.RunInference(handler, inference_args={"seed": 7})
        assert [(row["n"], row["said"], row["said_model_id"]) for row in made.collect()] == [
            (1, "A: X", "small"),
            (2, "B: Y", "small"),
        ]
        (body, _) = server.bodies[0], server.bodies[1]
        assert body == {
            "model": "small",
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a: x"}],
            "temperature": 0,
            "max_tokens": 5,
            "seed": 7,
        }
        assert server.paths[0] == "/v1/chat/completions"
        metrics = p.result.metrics
        assert (metrics.counter("input_tokens"), metrics.counter("output_tokens")) == (6, 4)


def test_messages_completions_embeddings_and_structured_output():
    def answer(body, headers):
        if "input" in body:
            return Answer({"data": [{"embedding": [len(body["input"]), 0.5]}], "usage": {"prompt_tokens": 1}})
        if "prompt" in body:
            return Answer({"choices": [{"text": body["prompt"][::-1]}]})
        schema = body["response_format"]["json_schema"]
        return Answer(chat(json.dumps({"name": schema["name"], "said": body["messages"][0]["content"]})))

    with HttpServer(answer) as server:
        ask = lambda rows, **settings: asked(rows, OpenAICompatibleModelHandler(server.url, "m", **settings))[0]  # noqa: E731
        assert ask(["abc", "d"], task="completions") == ["cba", "d"]
        assert [list(vector) for vector in ask(["abc", "d"], task="embeddings")] == [[3, 0.5], [1, 0.5]]
        schema = {"title": "city", "type": "object"}
        assert ask([[{"role": "user", "content": "Ulm"}]], response_schema=schema) == [{"name": "city", "said": "Ulm"}]


def test_embeddings_of_a_table_are_lists_of_a_fixed_size(tmp_path):
    pq.write_table(pa.table({"text": ["a", "bb", "ccc"]}), tmp_path / "in.parquet")
    answer = lambda body, headers: Answer({"data": [{"embedding": [len(body["input"]), 0.1]}]})  # noqa: E731
    with HttpServer(answer) as server, ps.Pipeline(workers=0, progress=False) as p:
        handler = OpenAICompatibleModelHandler(server.url, "m", task="embeddings", columns="text", output_column="vector")
        p | ps.ReadFromParquet(tmp_path / "in.parquet") | ps.RunInference(handler) | ps.WriteToParquet(tmp_path / "out")
    out = pq.read_table(tmp_path / "out")
    assert out.schema.field("vector").type == pa.list_(pa.float32(), 2)
    assert out["vector"].to_pylist() == [[size, pytest.approx(0.1)] for size in (1, 2, 3)]


def test_arguments_of_a_row_go_before_those_of_the_step():
    with HttpServer(lambda body, headers: Answer(chat(f"{body['temperature']} {body['seed']}"))) as server:
        handler = OpenAICompatibleModelHandler(
            server.url, "m", columns="text", args_column="own", request_args={"temperature": 0, "seed": 1}, output_column="y"
        )
        rows = [{"text": "a", "own": {"temperature": 0.7}}, {"text": "b", "own": None}, {"text": "c", "own": {"seed": None}}]
        made = ps.Pipeline(workers=0) | ps.Create(rows) | ps.RunInference(handler, inference_args={"seed": 2})
        assert [row["y"] for row in made.collect()] == ["0.7 2", "0 2", "0 2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"prompt": "{t}", "columns": ["u"]},
            r"prompt='{t}' needs \['t'\], but columns=\['u'\] leaves them out",
        ),
        ({"columns": ["a", "b"]}, r"columns=\['a', 'b'\] are several: .* such as prompt='{a}: {b}'"),
        ({"columns": ["a", "b"], "args_column": "b", "prompt": "{c}"}, "leaves them out"),
        ({"columns": ["a", "b"], "args_column": "c"}, "are several"),
        ({"args_column": "c"}, r"args_column='c': name the column of texts, too"),
    ],
)
def test_settings_that_make_no_request_are_refused_at_once(settings, message):
    with pytest.raises(UsageError, match=message):
        OpenAICompatibleModelHandler("http://127.0.0.1:1", "m", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": "n"}, r"column 'n' holds int64, but requests are made of texts or chats: .* prompt=\"{n}\""),
        ({"columns": "messages", "task": "embeddings"}, r"column 'messages' holds list<.*, but requests are made of texts:"),
        ({}, r"the rows are dicts with \['n', 'text', 'messages', 'own'\].* columns='text', .* prompt=\"{text}\""),
        ({"prompt": "{t}"}, r"columns \['t'\] are missing: the table has .* check prompt= and columns="),
        ({"columns": "text", "args_column": "n"}, r"args_column='n': the column holds int64; expected structs"),
    ],
)
def test_a_table_that_makes_no_request_ends_the_run_before_any(tmp_path, settings, message):
    message_of = [{"role": "user", "content": "x"}]
    rows = [{"n": n, "text": "x", "messages": message_of, "own": {"seed": n}} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    with HttpServer(upper) as server:
        handler = OpenAICompatibleModelHandler(server.url, "m", output_column="said", **settings)
        read = ps.Pipeline(workers=0, progress=False) | ps.ReadFromParquet(tmp_path / "in.parquet")
        good, _ = read | ps.RunInference(handler).with_exception_handling()
        with pytest.raises(UsageError, match=message):
            good.collect()
        assert server.seen == 0


def test_columns_that_make_a_request(tmp_path):
    message_of = [{"role": "user", "content": "x"}]
    rows = [{"n": n, "text": "x", "messages": message_of, "own": {"seed": n}} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    given = [
        {"columns": "messages"},
        {"columns": ["text"]},
        {"columns": "text", "prompt": "{text}"},
        {"columns": ["n", "text"], "prompt": "{text}", "args_column": "own"},
    ]
    with HttpServer(upper) as server:
        for settings in given:
            handler = OpenAICompatibleModelHandler(server.url, "m", output_column="said", **settings)
            read = ps.Pipeline(workers=0, progress=False) | ps.ReadFromParquet(tmp_path / "in.parquet")
            assert [row["said"] for row in (read | ps.RunInference(handler)).collect()] == ["X", "X", "X"]
        assert [body.get("seed") for body in server.bodies[-3:]] == [0, 1, 2]


def test_a_field_for_arguments_that_the_columns_leave_out():
    with pytest.raises(UsageError, match=r"args_column='own' is not in columns='text'; name it there, in a list"):
        http_handler("http://127.0.0.1:1", columns="text", args_column="own")


def test_kserve():
    def answer(body, headers):
        (given,) = body["inputs"]
        assert (given["shape"], given["datatype"]) == ([1, 2], "FP32")
        total = sum(given["data"])
        return Answer({"outputs": [{"name": "sum", "shape": [1, 1], "datatype": "FP32", "data": [total]}]})

    with HttpServer(answer) as server:
        handler = HttpModelHandler(f"{server.url}/v2/models/m/infer", kserve_request("x"), kserve_answer("sum"))
        assert asked([[1.0, 2.0], [3.0, 4.0]], handler)[0] == [[3.0], [7.0]]
    assert kserve_answer()({"outputs": [{"name": "y", "shape": [1], "data": [5]}]}) == 5
    types = [
        ([1, 2.5], [2], "FP32"),
        ([[1, 2], [3, 4]], [2, 2], "INT64"),
        ("text", [], "BYTES"),
        ([True], [1], "BOOL"),
        ([], [0], "FP32"),
        (np.arange(3.0), [3], "FP64"),
        (np.arange(3, dtype="uint8"), [3], "UINT8"),
        ([np.float32(1), np.float32(2)], [2], "FP32"),
    ]
    for row, shape, datatype in types:
        (made,) = kserve_request("x")(row)["inputs"]
        assert (made["shape"], made["datatype"]) == ([1, *shape], datatype)
        json.dumps(made)
    assert kserve_request("x", "FP64")([1])["inputs"][0]["datatype"] == "FP64"
    for row, why in [(b"ab", "got bytes; decode"), ([1, "a"], "got int and str"), ([None], "got NoneType")]:
        with pytest.raises(TypeError, match=why):
            kserve_request("x")(row)
    with pytest.raises(ValueError, match="expected lists of one length"):
        kserve_request("x")([[1, 2], [3]])
    with pytest.raises(ValueError, match="there is no output 'z'; the outputs are y"):
        kserve_answer("z")({"outputs": [{"name": "y", "shape": [1], "data": [5]}]})


def test_a_proxy():
    with HttpServer(plus_one) as proxy:
        handler = http_handler("http://model.example/v1", httpx_args={"proxy": proxy.url})
        assert asked([1, 2], handler)[0] == [2, 3]
        assert set(proxy.paths) == {"http://model.example/v1"}


# What goes wrong.


def test_bad_answers_are_failures_of_their_rows_with_the_beginning_of_the_body(tmp_path):
    bad = {
        1: Answer(b"<html>not JSON"),
        2: Answer({"other": "shape"}),
        3: Answer({"error": {"message": "inside a 200"}}),
        4: Answer({"message": "row 4 is too long"}, status=400),
        5: Answer([]),
    }
    with HttpServer(lambda body, headers: bad.get(body["x"]) or plus_one(body, headers)) as server:
        good, failed = handled(range(8), http_handler(server.url), tmp_path)
        seen = server.seen
    assert good == [1, 7, 8]
    assert seen == 8  # none is sent again
    assert "it begins: <html>not JSON" in failed[1]
    assert "KeyError: 'y'; it begins: {\"other\"" in failed[2]
    assert "inside a 200" in failed[3]
    assert 'status 400: {"message": "row 4 is too long"}' in failed[4]
    assert "it begins: []" in failed[5]


def test_bad_answers_of_a_language_model(tmp_path):
    bad = {
        "1": Answer({"choices": []}),
        "2": Answer({"error": {"message": "quota"}}),
        "3": Answer(chat(None)),
        "4": Answer({"choices": [{"message": {"content": '{"cut', "refusal": None}, "finish_reason": "length"}]}),
        "5": Answer({"choices": [{"message": {"content": None, "refusal": "no"}}]}),
    }
    with HttpServer(lambda body, headers: bad.get(body["messages"][0]["content"]) or Answer(chat("{}"))) as server:
        handler = OpenAICompatibleModelHandler(server.url, "m", response_schema={"type": "object"})
        good, failed = handled([*"012345", 6], handler, tmp_path)  # whatever a row is
    assert good == [{}]
    assert "choices is empty" in failed["1"]
    assert "quota" in failed["2"]
    assert "expected a text, got NoneType" in failed["3"]
    assert "the content is not JSON (finish_reason is 'length')" in failed["4"]
    assert "the model refused: 'no'" in failed["5"]
    assert "a row of a chat is a text or a list of messages" in failed[6]


@pytest.mark.parametrize(
    ("schema", "good", "bad", "why"),
    [
        ({"type": "object", "required": ["a"]}, {"a": 1}, {"b": 1}, "the answer has no 'a', which the schema requires"),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 2.0}, {"a": 2.5}, "['a'] is of type float; expected integer"),
        ({"properties": {"a": {"type": "number"}}}, {"a": 2}, {"a": True}, "['a'] is of type bool; expected number"),
        ({"type": ["string", "null"]}, None, 1, "is of type int; expected string or null"),
        ({"items": {"enum": ["x", "y"]}}, ["x", "y"], ["x", "z"], "the answer[1] is 'z'; expected one of ['x', 'y']"),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"a": 1}, {"c": 1}, "['c'] is not expected"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, [], {}, "is of type dict; expected string"),
        ({"$defs": {"n": {"type": "null"}}, "items": {"$ref": "#/$defs/n"}}, [None], [0], "is of type int; expected null"),
        ({"allOf": [{"const": 3}]}, 3, 4, "is 4; expected 3"),
    ],
)
def test_an_answer_that_does_not_fit_its_schema_is_a_failure(tmp_path, schema, good, bad, why):
    said = {"good": json.dumps(good), "bad": json.dumps(bad)}
    with HttpServer(lambda body, headers: Answer(chat(said[body["messages"][0]["content"]]))) as server:
        handler = OpenAICompatibleModelHandler(server.url, "m", response_schema=schema)
        made, failed = handled(["good", "bad"], handler, tmp_path)
    assert made == [good]
    assert "the content does not fit response_schema: the answer" in failed["bad"]
    assert f"{why}; it begins: " in failed["bad"]


def test_embeddings_and_outputs_that_do_not_fit_cost_their_rows(tmp_path):
    """Nothing is put in their place: no number for a null, no first vector of several."""
    bad = {"null": [1, None], "text": ["1"], "true": [True], "large": [1e300], "empty": [], "nan": [float("nan")]}
    data = {"good": [{"embedding": [1, 0.5]}], "none": [], "two": [{"embedding": [1]}, {"embedding": [2]}], "other": [{}]}
    data |= {name: [{"embedding": vector}] for name, vector in bad.items()}
    with HttpServer(lambda body, headers: Answer({"data": data[body["input"]]})) as server:
        handler = OpenAICompatibleModelHandler(server.url, "m", task="embeddings")
        good, failed = handled(list(data), handler, tmp_path / "a")
    assert good == [[1, 0.5]]
    assert failed.keys() == data.keys() - {"good"}
    assert all("it begins: {" in message for message in failed.values())
    outputs = [{"shape": [1, 2], "data": [1]}, {"shape": [1, 1]}, {"shape": [1, 1], "data": [7]}]
    with HttpServer(lambda body, headers: Answer({"outputs": [{"name": "y", **outputs[body["x"]]}]})) as server:
        good, failed = handled(range(3), HttpModelHandler(server.url, request_of, kserve_answer("y")), tmp_path / "b")
    assert (good, sorted(failed)) == ([[7]], [0, 1])


def test_one_row_that_is_refused_ends_a_run_that_handles_nothing():
    with (
        HttpServer(lambda body, headers: Answer(b"no", status=422)) as server,
        pytest.raises(StepError, match=r"(?s)status 422: no.*row: 7"),
    ):
        asked([7], http_handler(server.url))


def test_a_key_that_is_not_accepted_ends_the_run_even_where_errors_are_handled(tmp_path):
    with (
        HttpServer(lambda body, headers: Answer(b"bad key", status=401)) as server,
        pytest.raises(UsageError, match="status 401: bad key; the key that was sent is not accepted"),
    ):
        handled([1], http_handler(server.url), tmp_path)


@pytest.mark.parametrize("workers", [2])
def test_failures_at_random_and_hangs(workers):
    chance = random.Random(5)

    def answer(body, headers):
        number = chance.random()
        if number < 0.01:
            return Answer(hang=True)
        if number < 0.2:
            return chance.choice([Answer(b"oh", status=500), Answer(drop=True), Answer(b"later", status=503)])
        return plus_one(body, headers)

    with HttpServer(answer) as server:
        made, result = asked(range(300), http_handler(server.url, timeout=1.0, throttle_delay_secs=0.1), workers=workers)
        answered = server.answered
    assert made == list(range(1, 301))
    assert len(answered) == 300
    assert result.metrics.counter("requests_retried") > 10


def test_retries_end_and_are_for_errors_that_may_pass(tmp_path):
    with HttpServer(lambda body, headers: Answer(b"oh", status=500)) as server:
        _, failed = handled([1], http_handler(server.url, num_retries=2), tmp_path / "a")
        assert server.seen == 3
        assert "status 500: oh" in failed[1]
        handled([1], http_handler(server.url, retry_filter=lambda error: "500" not in str(error)), tmp_path / "b")
        assert server.seen == 4


def test_a_service_that_is_down_for_a_while_is_waited_for():
    """It goes away after the first answers, and comes back when a request was not answered."""
    came_back = []
    with HttpServer(plus_one) as first:
        handler = http_handler(first.url, max_in_flight=4)

        def answer(body, headers):
            if first.seen == 40:
                threading.Thread(target=go_away).start()
            return plus_one(body, headers)

        def go_away():
            first.pause()
            first.refused_one.wait(60)
            came_back.append(True)
            first.resume()

        first.answer = answer
        made, result = asked(range(200), handler)
    assert made == list(range(1, 201))
    assert came_back
    assert result.metrics.counter("requests_unreachable") > 0


def test_a_service_that_stays_away_ends_the_run():
    with HttpServer(plus_one) as server:
        url = server.url
    with pytest.raises(ServiceUnavailableError, match=r"answered no request for .* max_outage_secs is 0.3"):
        asked([1], http_handler(url, max_outage_secs=0.3))


@pytest.mark.parametrize("own_client", [False, True], ids=["http", "a client of one's own"])
def test_a_service_that_asks_to_wait_for_a_day_is_asked_again_and_ends_the_run(caplog, own_client):
    class Client(ps.RemoteModelHandler):
        def create_client(self):
            return None

        def request(self, batch, client, inference_args=None):
            raise RateLimitExceeded("tomorrow", retry_after=86_400)

    with HttpServer(lambda body, headers: Answer(b"tomorrow", status=429, headers={"retry-after": "86400"})) as server:
        handler = Client(max_outage_secs=0.3) if own_client else http_handler(server.url, max_outage_secs=0.3)
        with pytest.raises(ServiceUnavailableError, match=r"answered no request for .*tomorrow.* max_outage_secs is 0.3"):
            asked([1], handler, workers=0)
    assert "the service asks to wait for 86400 s (Retry-After); it is asked again after 0.3 s" in caplog.text
    assert LONGEST_TOLD <= 60


@pytest.mark.parametrize(
    ("answer", "hosted", "settings", "error"),
    [
        (Answer(b"no", status=401), False, {"requests_per_minute": 2}, UsageError),
        (Answer(b"no", status=401), True, {"requests_per_minute": 2}, UsageError),
        (Answer(b"no", status=400), False, {"requests_per_minute": 2}, StepError),
        (Answer({"y": 1}), False, {"requests_per_minute": 20, "budget": Budget(max_requests=1)}, BudgetSpentError),
        (Answer({"y": 1}), True, {"requests_per_minute": 20, "budget": Budget(max_requests=1)}, BudgetSpentError),
    ],
    ids=["key", "key in a host", "row", "budget", "budget in a host"],
)
def test_rows_that_wait_when_the_run_ends_are_not_sent(answer, hosted, settings, error):
    """At so few requests a minute, to wait for all of them would take longer than any test may."""
    with HttpServer(lambda body, headers: answer) as server:
        make = Hosted if hosted else HttpModelHandler
        with pytest.raises(error):
            asked(range(200), make(server.url, request_of, answer_of, **settings))
        assert server.seen == 1


class Hosted(HttpModelHandler):
    def share_model_across_processes(self):
        return True


@pytest.mark.parametrize("own_client", [False, True])
def test_many_rows_end_with_the_first_one_that_finds_the_service_away_for_too_long(own_client):
    tries = []

    class Away(ps.RemoteModelHandler):
        def create_client(self):
            return None

        def request(self, batch, client, inference_args=None):
            tries.append(len(batch))
            raise ConnectionRefusedError("nobody is there")

    with HttpServer(plus_one) as server:
        url = server.url
    handler = Away(max_batch_size=1, max_outage_secs=0.3) if own_client else http_handler(url, max_outage_secs=0.3)
    p = ps.Pipeline(workers=0, progress=False)
    with pytest.raises(ServiceUnavailableError):
        (p | ps.Create(range(200)) | "ask" >> ps.RunInference(handler)).collect()
    assert len(tries) <= 8 + 2  # those of all threads, and then one at a time


def test_a_bundle_that_fails_leaves_the_session_to_others():
    """As on Beam, where the next attempt comes to the same process."""
    with HttpServer(lambda body, headers: Answer(b"no", status=400) if body["x"] == 3 else Answer({})) as server:
        handler = HttpModelHandler(server.url, request_of, lambda body: 1, max_in_flight=2)
        spec = InferenceSpec.of(handler)
        sessions = ProcessSessions(Metrics())
        for _ in range(2):
            stream = open_stream(spec, "ask", sessions)
            with pytest.raises(StepError, match="status 400: no"):
                assert not [*stream.push(list(range(10))), *stream.finish()]
            stream.close()
        stream = open_stream(spec, "ask", sessions)
        made = [row for each in [*stream.push([1, 2]), *stream.finish()] for row in each.block]
        stream.close()
        sessions.close()
    assert [each.inference for each in made] == [1, 1]


# RemoteModelHandler.


class TooManyError(Exception):
    status_code = 429


class Flaky(ps.RemoteModelHandler):
    """Fails for some rows once, in one of several ways."""

    def create_client(self):
        return {"seen": set(), "calls": []}

    def request(self, batch, client, inference_args=None):
        client["calls"].append(list(batch))
        new = [row for row in batch if row not in client["seen"]]
        client["seen"].update(batch)
        if new and new[0] == 28:
            raise TooManyError("slow down")
        if new and new[0] == 29:
            raise ps.RateLimitExceeded(retry_after=0.01)
        if new and new[0] % 10 == 5:
            values = [row * 2 for row in batch]
            raise BadRowsError({batch.index(row): ConnectionError("once") for row in new}, values)
        return [row * 2 for row in batch]


def test_the_contract_of_beam(pipeline):
    handler = Flaky(throttle_delay_secs=0.01, max_batch_size=1, max_concurrent_requests=2)
    p = pipeline(progress=False)
    assert (p | ps.Create(range(30)) | ps.RunInference(handler)).collect() == list(range(0, 60, 2))
    assert p.result.metrics.counter("requests_refused") == 2
    assert p.result.metrics.counter("requests_retried") == 3


def test_only_rows_that_failed_are_sent_again():
    calls = []

    class Half(ps.RemoteModelHandler):
        def create_client(self):
            return None

        def request(self, batch, client, inference_args=None):
            calls.append(list(batch))
            if len(calls) == 1:
                raise BadRowsError({1: ConnectionError("once")}, [10, None, 30])
            return [row * 10 for row in batch]

    handler = Half(min_batch_size=3, max_batch_size=3)
    model = handler.load_model()
    assert handler.run_inference([1, 2, 3], model) == [10, 20, 30]
    assert calls == [[1, 2, 3], [2]]


def test_a_service_that_a_client_of_ones_own_cannot_reach_is_waited_for():
    """However often: it is no failure of the rows."""
    tries = []

    class Away(ps.RemoteModelHandler):
        def create_client(self):
            return None

        def request(self, batch, client, inference_args=None):
            tries.append(len(batch))
            if len(tries) > 2:
                return batch
            try:
                raise ConnectionRefusedError("nobody is there")
            except OSError as exc:
                raise RuntimeError("a client's own error") from exc

    p = ps.Pipeline(workers=0)
    made = (p | ps.Create([1, 2]) | "ask" >> ps.RunInference(Away(num_retries=0, min_batch_size=2))).collect()
    assert made == [1, 2]
    counter = p.result.metrics.counter
    assert (counter("requests"), counter("requests_unreachable")) == (1, 2)


def test_tokens_and_money_of_a_client_of_ones_own():
    class Counting(ps.RemoteModelHandler):
        def create_client(self):
            return None

        def request(self, batch, client, inference_args=None):
            self.used_tokens(100 * len(batch), output_tokens=50)
            return batch

    def step(**settings):
        prices = Prices(input_tokens=1000.0, request=2.0)
        return ps.RunInference(Counting(max_batch_size=1, max_concurrent_requests=1, prices=prices, **settings))

    p = ps.Pipeline(workers=0)
    rows = p | ps.Create(range(4)) | "ask" >> step(requests_per_minute=6000)
    told = p.explain()
    assert "step 'ask': at most 4 requests, one for each batch, cost 8; tokens are not known" in told
    assert "up to 1 requests at once in each process, at most 6,000 requests a minute" in told
    assert rows.collect() == [0, 1, 2, 3]
    counted = {name: p.result.metrics.counter(name) for name in ("input_tokens", "output_tokens", "cost_micros")}
    assert counted == {"input_tokens": 400, "output_tokens": 200, "cost_micros": 8_400_000}
    for budget in (Budget(max_tokens=300), Budget(max_cost=4.2)):
        with pytest.raises(BudgetSpentError, match="2 requests, 200 input and 100 output tokens, cost 4.2"):
            (ps.Pipeline(workers=0) | ps.Create(range(4)) | step(budget=budget)).collect()
    with pytest.raises(UsageError, match=r"used_tokens\(\) is for request\(\) to call"):
        Counting().used_tokens(1)


def test_errors_that_outlast_the_retries_are_the_rows(tmp_path):
    class Broken(ps.RemoteModelHandler):
        def create_client(self):
            return None

        def request(self, batch, client, inference_args=None):
            if 3 in batch:
                raise ValueError("three")
            return batch

    handler = Broken(num_retries=0, max_batch_size=4)
    p = ps.Pipeline(workers=0)
    good, _ = p | ps.Create(range(8)) | ps.RunInference(handler).with_exception_handling()
    assert good.collect() == [0, 1, 2, 4, 5, 6, 7]


def test_what_a_remote_handler_may_not_define():
    with pytest.raises(UsageError, match="defines load_model.*define create_client"):
        type("Wrong", (ps.RemoteModelHandler,), {"load_model": lambda self: None})


# Wrong settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "speech"}, "task='speech': expected one of 'chat'"),
        ({"task": "embeddings", "system": "x"}, "system= is for task='chat'"),
        ({"prompt": "no names"}, "at least one column in braces"),
        ({"prompt": "{a.b}"}, r"\{a\.b\} is not the name of a column"),
        ({"prompt": "{"}, "write a brace that is not a column twice"),
        ({"max_in_flight": 0}, "max_in_flight=0"),
        ({"timeout": math.inf}, "timeout=inf"),
        ({"num_retries": -1}, "num_retries=-1"),
        ({"httpx_args": {"headers": {"x": "sk-secret"}}}, "httpx_args has 'headers' in it; .*: headers="),
        ({"httpx_args": {"timeout": 1}}, "httpx_args has 'timeout' in it; .*: timeout="),
        ({"requests_per_minute": 0}, "requests_per_minute=0"),
        ({"api_key": "sk-secret"}, "api_key: expected a function"),
        ({"api_key_env": "sk-secret"}, "api_key_env: expected the name of an environment variable"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(settings, message):
    with pytest.raises(UsageError, match=message) as raised:
        OpenAICompatibleModelHandler("http://127.0.0.1:1/v1", "m", **settings)
    assert "sk-secret" not in str(raised.value)


def test_a_client_of_ones_own_that_may_ask_nothing_is_refused():
    with pytest.raises(UsageError, match="max_concurrent_requests=0: expected a whole number of at least 1"):
        Flaky(max_concurrent_requests=0)


def test_a_retry_of_the_step_is_refused():
    with pytest.raises(UsageError, match=r"with_retry\(\): HttpModelHandler already retries requests"):
        ps.RunInference(http_handler("http://127.0.0.1:1")).with_retry(ps.Retry())


def test_rows_that_cannot_be_sent_fail_alone(tmp_path):
    with HttpServer(plus_one) as server:
        good, failed = handled([1, float("nan"), 3], http_handler(server.url), tmp_path)
    assert good == [2, 4]
    assert len(failed) == 1
    assert issubclass(RowError, Exception)
