"""Models behind HTTP: any endpoint that takes and gives JSON, and those that understand OpenAI's API.

Each row is one request. Many are under way at once in each process, on one thread; all processes of a machine share one
pace, one budget and, where the run has a run_dir, the answers that were paid for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError
from penstock.handlers.prompts import PromptTemplate, check_request_columns, request_columns
from penstock.inference.service_handler import AsyncModelHandler
from penstock.io.files import without_secrets
from penstock.remote.budget import Budget, Prices, Spending
from penstock.remote.event_loop import event_loop, run
from penstock.remote.http import Credentials, HttpTransport
from penstock.remote.kserve import kserve_answer, kserve_request
from penstock.remote.meter import Meter
from penstock.remote.openai_format import OpenAIFormat, usage_of
from penstock.remote.rules import AskingRules, Retries, check_at_least_one, check_positive
from penstock.remote.service import Service

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "Budget",
    "HttpModelHandler",
    "OpenAICompatibleModelHandler",
    "Prices",
    "kserve_answer",
    "kserve_request",
]


class HttpClient:
    """What a process asks with."""

    def __init__(self, transport: HttpTransport, meter: Meter, service: Service) -> None:
        self.transport = transport
        self.meter = meter
        self.service = service


class HttpModelHandler(AsyncModelHandler[Any, Any, HttpClient]):
    """A model at an endpoint that is posted JSON and answers with JSON."""

    wraps_answers = True

    def __init__(
        self,
        url: str,
        request_fn: Callable[[Any], Any],
        answer_fn: Callable[[Any], Any],
        *,
        api_key_env: str | None = None,
        api_key: Callable[[], str] | None = None,
        headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
        timeout: float = 120.0,
        max_in_flight: int = 64,
        num_retries: int = 8,
        retry_filter: Callable[[Exception], bool] = lambda error: True,
        throttle_delay_secs: float = 1.0,
        max_outage_secs: float = 600.0,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        budget: Budget | None = None,
        prices: Prices | None = None,
        httpx_args: Mapping[str, Any] | None = None,
        args_column: str | None = None,
        **settings: Any,
    ) -> None:
        """url: where rows are posted to. request_fn(row): the JSON of its request. answer_fn(body): the answer in the JSON
        that came back; what it raises is the row's failure.

        api_key_env, api_key: the name of an environment variable that holds the key, or a function that gives it, sent as
        a bearer token. headers: more of them, or a function that gives them. timeout: seconds for one request.
        max_in_flight: requests of each process. num_retries: of a request that fails (5xx, broken off, timeout);
        retry_filter(error): whether to ask again. throttle_delay_secs: to wait after a request that was refused (429, 503)
        without Retry-After. max_outage_secs: without any answer, after which the run ends. requests_per_minute,
        tokens_per_minute: of all processes of the machine together, on Ray of the cluster; without them the pace is found
        by what is refused. Tokens are those that the `usage` of a reply names. budget, prices: what requests may take at
        most. httpx_args: more arguments of httpx.AsyncClient, such as proxy.
        args_column: of rows that are records, the name of the field with more fields for the request, a dict.
        settings: those of every handler, such as columns and output_column."""
        _check_url(url)
        check_at_least_one("max_in_flight", max_in_flight)
        check_positive("timeout", timeout, "seconds, more than 0")
        self._max_in_flight = max_in_flight  # before the limits of batches are checked
        super().__init__(**settings)
        names = self.input_columns() or ()
        if args_column is not None and names and (args_column not in names or isinstance(self._columns, str)):
            raise UsageError(f"args_column={args_column!r} is not in columns={self._columns!r}; name it there, in a list")
        self._url = url
        self._request_fn = request_fn
        self._answer_fn = answer_fn
        self._credentials = Credentials(api_key_env=api_key_env, api_key=api_key, headers=headers)
        self._timeout = timeout
        self._retries = Retries(num_retries=num_retries, retry_filter=retry_filter)
        self._rules = AskingRules(
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            throttle_delay_secs=throttle_delay_secs,
            max_outage_secs=max_outage_secs,
            budget=budget or Budget(),
            prices=prices or Prices(),
        )
        self._httpx_args = _checked_options(httpx_args)
        self._args_column = args_column

    def rows_in_flight(self) -> int:
        return self._max_in_flight

    def load_model(self) -> HttpClient:
        connect: dict[str, Any] = {"timeout": self._timeout, "connections": self._max_in_flight}
        transport = HttpTransport(self._url, self._credentials, options=self._httpx_args, **connect)
        meter = self.run_place.meter(self._rules, self._url)
        service = Service(without_secrets(self._url), transport, meter, self._retries, self._rules.prices, transport.redact)
        return HttpClient(transport, meter, service)

    async def answer(self, example: Any, model: HttpClient, inference_args: Mapping[str, Any] | None = None) -> Any:
        body = self._body(example, inference_args)
        content = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        return await model.service.answer(content, self._read, self._tokens(content, body))

    def _body(self, example: Any, inference_args: Mapping[str, Any] | None) -> Any:
        """The request of a row; fields of inference_args, and of its own column, take the place of others."""
        body = self._request_fn(example)
        more = {**(inference_args or {}), **self._own_args(example)}
        if not more:
            return body
        if not isinstance(body, Mapping):
            raise TypeError(f"inference_args are fields of a request that is a dict, got {type(body).__name__}")
        return {**body, **more}

    def _own_args(self, example: Any) -> Mapping[str, Any]:
        own = {} if self._args_column is None else example[self._args_column] or {}
        return {name: value for name, value in own.items() if value is not None}  # as columns have fields of other rows

    def _read(self, body: bytes) -> tuple[Any, Spending]:
        told = json.loads(body)
        return self._answer_fn(told), usage_of(told)

    def _tokens(self, content: bytes, body: Any) -> float:
        return 0.0

    def describe_requests(self) -> list[str]:
        return [f"up to {self._max_in_flight} requests in flight in each process", *self._rules.describe()]

    def estimate(self, examples: Sequence[Any], rows: int, args: Mapping[str, Any] | None = None) -> str | None:
        use = _scaled([self._expected(self._body(example, args)) for example in examples], rows)
        prices = self._rules.prices
        told = [f"about {use.requests:,} requests"]
        told += [f"{use.input_tokens:,} input tokens"] if use.input_tokens else []
        told += [f"at most {use.output_tokens:,} output tokens"] if use.output_tokens else []
        unknown = (prices.input_tokens and not use.input_tokens) or (prices.output_tokens and not use.output_tokens)
        least = "at least " if unknown and self._answers_in_tokens() else ""
        told += [f"cost {least}{use.cost(prices):,.4g}"] if use.cost(prices) else []
        return ", ".join(told)

    def _answers_in_tokens(self) -> bool:
        """Whether what it answers is paid for by its length, too."""
        return True

    def _expected(self, body: Any) -> Spending:
        """What a request takes, about."""
        return Spending(1)

    def take_counts(self, model: HttpClient) -> Mapping[str, int]:
        return model.meter.counts.take()

    def give_up(self, model: HttpClient, error: BaseException) -> None:
        event_loop().call_soon_threadsafe(model.service.give_up, error)

    def close_model(self, model: HttpClient) -> None:
        run(model.transport.close())
        model.meter.close()

    def model_id(self) -> str | None:
        return without_secrets(self._url)


class OpenAICompatibleModelHandler(HttpModelHandler):
    """A language model behind an API that understands OpenAI's: a vendor's, or a server of one's own.

    Rows are texts; for chats also lists of messages; with `prompt`, records whose columns it names."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        task: str = "chat",
        prompt: str | None = None,
        system: str | None = None,
        response_schema: Mapping[str, Any] | None = None,
        request_args: Mapping[str, Any] | None = None,
        full_response: bool = False,
        columns: str | Sequence[str] | None = None,
        args_column: str | None = None,
        **settings: Any,
    ) -> None:
        """base_url: such as "https://api.openai.com/v1". task: "chat", "completions" or "embeddings". prompt: a template
        over columns, "{title}: {text}". system: the first message of every chat. response_schema: a JSON schema for answers
        to chats, which are then given as what their JSON says. request_args: fields of every request, such as temperature
        and max_tokens; inference_args of the step go before them, and the row's own (args_column) before those.
        full_response: the answer is the whole body, as a dict. settings: those of HttpModelHandler."""
        self._prompt = None if prompt is None else PromptTemplate(prompt)
        columns = request_columns(self._prompt, columns, args_column)
        self._format = OpenAIFormat(
            model=model,
            task=task,
            system=system,
            schema=response_schema,
            args=dict(request_args or {}),
            full_response=full_response,
        )
        base, mark, query = str(base_url).partition("?")
        url = f"{base.rstrip('/')}/{self._format.path}{mark}{query}"
        super().__init__(url, _as_it_is, _as_it_is, columns=columns, args_column=args_column, **settings)

    def _body(self, example: Any, inference_args: Mapping[str, Any] | None) -> Any:
        return self._format.body(self._of_row(example), {**(inference_args or {}), **self._own_args(example)})

    def _of_row(self, example: Any) -> Any:
        if self._prompt is not None:
            return self._prompt.filled(example)
        if self._args_column is not None:
            own = [name for name in self.input_columns() or () if name != self._args_column]
            return example[own[0]] if len(own) == 1 else example
        return example

    def check_columns(self, schema: pa.Schema) -> None:
        takes = "texts or chats" if self._format.task == "chat" else "texts"
        check_request_columns(schema, self._prompt, self.input_columns(), self._args_column, takes)

    def _read(self, body: bytes) -> tuple[Any, Spending]:
        return self._format.read(body)

    def _tokens(self, content: bytes, body: Any) -> float:
        return self._format.tokens(content, body)

    def _expected(self, body: Any) -> Spending:
        return self._format.expected(body)

    def _answers_in_tokens(self) -> bool:
        return self._format.task != "embeddings"

    def model_id(self) -> str | None:
        return self._format.model


def _check_url(url: object) -> None:
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise UsageError(f"url={without_secrets(str(url))!r}: expected an address that begins with http:// or https://")


def _checked_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """httpx_args without what the handler has arguments of its own for."""
    for name in ("headers", "timeout"):
        if name in (given or {}):
            raise UsageError(f"httpx_args has {name!r} in it; give it to the handler itself: {name}=")
    return dict(given or {})


def _scaled(uses: Sequence[Spending], rows: int) -> Spending:
    """What so many rows take, if all are like these."""
    times = rows / max(1, len(uses))
    tokens = [sum(use.input_tokens for use in uses), sum(use.output_tokens for use in uses)]
    return Spending(rows, *(round(each * times) for each in tokens))


def _as_it_is(value: Any) -> Any:
    return value
