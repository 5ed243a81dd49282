"""RemoteModelHandler: a model behind a client of its own, such as a vendor's package. The author writes plain functions."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic

from penstock.errors import BadRowsError, EngineError, PredictionCountError, UsageError
from penstock.inference.handler import ExampleT, ModelT, PredictionT
from penstock.inference.service_handler import ServiceHandler
from penstock.io.files import without_secrets
from penstock.remote.budget import Budget, Prices, Spending
from penstock.remote.pace import backoff
from penstock.remote.rules import REFUSED, UNAVAILABLE, AskingRules, Retries, check_at_least_one, retry_after

if TYPE_CHECKING:
    from penstock.remote.ending import Ending
    from penstock.remote.meter import Meter


class RateLimitExceeded(Exception):  # noqa: N818  (Beam's name)
    """The service has refused a request because there were too many: for request() to raise. All processes of the machine
    slow down, and the rows are sent again. retry_after: seconds to wait, if the service says so."""

    def __init__(self, message: str = "too many requests", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RemoteClient(Generic[ModelT]):
    """What create_client() gave, with the pace and the budget of its step."""

    def __init__(self, client: ModelT, meter: Meter) -> None:
        self.client = client
        self.meter = meter


class _Asking(Generic[ModelT]):
    """The requests for one batch, which one thread makes, and what they took."""

    def __init__(self, model: RemoteClient[ModelT], ending: Ending) -> None:
        self.client = model.client
        self.meter = model.meter
        self.ending = ending
        self._use = Spending()

    def used(self, use: Spending, prices: Prices) -> None:
        self.meter.used(use, prices)
        self._use = self._use.plus(use)

    def take_use(self) -> Spending:
        """Since this was last asked."""
        taken, self._use = self._use, Spending()
        return taken


_asking: ContextVar[_Asking[Any] | None] = ContextVar("asking", default=None)  # whose request this thread makes


class RemoteModelHandler(ServiceHandler[ExampleT, PredictionT, Any]):
    """A model at a remote endpoint, asked by a client of its own. Define create_client() and request().

    All processes of the machine share one pace: when one request is refused, all of them slow down. What is refused waits
    and is sent again; what fails otherwise is sent again as often as num_retries says."""

    def __init__(
        self,
        namespace: str = "",
        num_retries: int = 5,
        throttle_delay_secs: float = 1.0,
        retry_filter: Callable[[Exception], bool] = lambda error: True,
        *,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        max_outage_secs: float = 600.0,
        max_concurrent_requests: int = 8,
        budget: Budget | None = None,
        prices: Prices | None = None,
        **settings: Any,
    ) -> None:
        """namespace: of its metrics. num_retries: of a request that fails. throttle_delay_secs: to wait after a request that
        was refused without a word on how long. retry_filter: whether an error is transient. requests_per_minute,
        tokens_per_minute: of all processes of the machine together, on Ray of the cluster; without them the pace is found
        by what is refused. Tokens are those that request() tells of: see used_tokens(). max_outage_secs: without any
        answer, after which the run ends. max_concurrent_requests: threads that call request() at once in each process.
        budget, prices: what requests may take at most; a request counts as one, tokens by used_tokens().
        settings: those of every handler, such as max_batch_size."""
        check_at_least_one("max_concurrent_requests", max_concurrent_requests)
        super().__init__(**settings)
        self._namespace = namespace
        self._retries = Retries(num_retries=num_retries, retry_filter=retry_filter)
        self._rules = AskingRules(
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            throttle_delay_secs=throttle_delay_secs,
            max_outage_secs=max_outage_secs,
            budget=budget or Budget(),
            prices=prices or Prices(),
        )
        self._max_concurrent_requests = max_concurrent_requests

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for own, instead in [("load_model", "create_client"), ("run_inference", "request")]:
            if own in vars(cls):
                raise UsageError(f"{cls.__name__} defines {own}(), which RemoteModelHandler does itself: define {instead}()")

    def create_client(self) -> Any:
        """The client that request() is given. Called once in each process that sends requests."""
        raise NotImplementedError(f"{type(self).__name__} must define create_client(self)")

    def request(
        self, batch: Sequence[ExampleT], client: Any, inference_args: Mapping[str, Any] | None = None
    ) -> Iterable[PredictionT]:
        """One prediction for each example, in order. Called from several threads at once (max_concurrent_requests).

        Raise RateLimitExceeded where the service has refused the request; errors of clients with a status_code of 429 or 503
        count as that. Raise BadRowsError, with the values of the others, for rows that failed alone: only these are sent
        again. Any other error is that of the whole batch."""
        raise NotImplementedError(f"{type(self).__name__} must define request(self, batch, client, inference_args)")

    def used_tokens(self, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """For request() to call on its own thread, with what the service says that it took: it counts for the metrics, the
        limits, the prices and the budget."""
        if (asking := _asking.get()) is None:
            raise UsageError("used_tokens() is for request() to call, on the thread that it was called on")
        asking.used(Spending(0, input_tokens, output_tokens), self._rules.prices)
        asking.meter.gate.used(input_tokens + output_tokens)

    def load_model(self) -> RemoteClient[Any]:
        return RemoteClient(self.create_client(), self.run_place.meter(self._rules))

    def run_inference(
        self, batch: Sequence[ExampleT], model: RemoteClient[Any], inference_args: Mapping[str, Any] | None = None
    ) -> list[PredictionT]:
        from penstock.remote.kept_rows import KeptAnswersByRow

        kept = KeptAnswersByRow(model.meter, str(self.model_id()), batch, inference_args)
        values, found = kept.found(self._rules.prices)
        asked = rows = [at for at in range(len(batch)) if at not in found]
        tried = 0
        failed: dict[int, Exception] = {}
        with model.meter.gate.request() as ending:
            asking = _Asking(model, ending)
            while rows:
                errors = self._attempt(batch, rows, values, asking, inference_args)
                for at in rows:
                    if at not in errors:
                        kept.keep(at, values[at], asking.take_use())  # with the first one goes what all of them took
                tried += 1
                rows = [at for at, error in errors.items() if self._again(error, tried)]
                failed |= {at: error for at, error in errors.items() if at not in rows}
                if rows:
                    model.meter.counts.add("requests_retried")
                    ending.sleep_thread(backoff(tried, _chance()))
        if failed:
            first = next(iter(failed.values()))
            if len(failed) == len(asked) and all(error is first for error in failed.values()):
                raise first  # of the batch, and not of its rows
            raise BadRowsError(failed, values)
        return values

    def _attempt(
        self,
        batch: Sequence[ExampleT],
        rows: list[int],
        values: list[Any],
        asking: _Asking[Any],
        args: Mapping[str, Any] | None,
    ) -> dict[int, Exception]:
        """Ask for some rows of a batch. Their values are put in place; the errors of the others, by position."""
        errors: dict[int, Exception] = {}
        try:
            made = self._asked([batch[at] for at in rows], asking, args)
        except BadRowsError as exc:
            if exc.values is None:
                raise
            made, errors = list(exc.values), {rows[at]: error for at, error in exc.errors.items()}
        except (UsageError, EngineError):
            raise
        except Exception as exc:
            return dict.fromkeys(rows, exc)
        if len(made) != len(rows):
            what = f"{type(self).__name__}.request() returned {len(made)} predictions for {len(rows)} examples"
            raise PredictionCountError(f"{what}; it must return one per example, in the same order")
        for at, value in zip(rows, made, strict=True):
            values[at] = value
        return errors

    def _again(self, error: Exception, tried: int) -> bool:
        return tried <= self._retries.num_retries and bool(self._retries.retry_filter(error))

    def _asked(self, rows: list[ExampleT], asking: _Asking[Any], args: Mapping[str, Any] | None) -> list[PredictionT]:
        """One request; again while it is refused."""
        meter = asking.meter
        while True:
            meter.gate.enter_thread(asking.ending)  # on this thread, which may wait here: each batch has one of its own
            meter.account.begin_request()  # after the wait: others may have spent the budget meanwhile
            sent = meter.gate.pace.now()
            token = _asking.set(asking)
            try:
                made = list(self.request(rows, asking.client, args))
            except Exception as exc:
                _hide_secrets(exc)
                if _is_unreachable(exc):
                    meter.account.take_back()
                    meter.gate.unreachable(sent, f"{type(exc).__name__}: {exc}")
                    continue
                meter.counts.add("requests")
                status = None if isinstance(exc, BadRowsError) else _refusal(exc)
                if status is not None:
                    told = _told_wait(exc)
                    limits = told is not None or status != UNAVAILABLE
                    wait = meter.gate.refused(sent, told, f"{type(exc).__name__}: {exc}", limits=limits)
                    asking.ending.sleep_thread(wait)
                    continue
                asking.used(Spending(1), self._rules.prices)
                meter.gate.pace.answered()
                raise
            finally:
                _asking.reset(token)
            meter.counts.add("requests")
            asking.used(Spending(1), self._rules.prices)
            meter.gate.pace.answered()
            return made

    def describe_requests(self) -> list[str]:
        return [f"up to {self._max_concurrent_requests} requests at once in each process", *self._rules.describe()]

    def estimate(self, examples: Sequence[ExampleT], rows: int, args: Mapping[str, Any] | None = None) -> str | None:
        cost = Spending(rows).cost(self._rules.prices)
        return f"at most {rows:,} requests, one for each batch{f', cost {cost:,.4g}' if cost else ''}; tokens are not known"

    def give_up(self, model: RemoteClient[Any], error: BaseException) -> None:
        model.meter.gate.end(error)

    def take_counts(self, model: RemoteClient[Any]) -> Mapping[str, int]:
        return model.meter.counts.take()

    def close_model(self, model: RemoteClient[Any]) -> None:
        model.meter.close()

    def max_concurrent_batches(self) -> int:
        return self._max_concurrent_requests

    def get_metrics_namespace(self) -> str:
        return self._namespace or super().get_metrics_namespace()


def _chance() -> float:
    import random

    return random.random()


def _refusal(exc: Exception) -> int | None:
    """The status of an error that means too many requests, by what clients of services call it; None: it means no such."""
    if isinstance(exc, RateLimitExceeded):
        return 429
    response = getattr(exc, "response", None)
    codes = [getattr(exc, "status_code", None), getattr(exc, "code", None), getattr(response, "status_code", None)]
    return next((code for code in codes if isinstance(code, int) and code in REFUSED), None)


def _is_unreachable(exc: BaseException) -> bool:
    """Whether nobody was there, by what the system said: clients raise errors of their own because of that."""
    if isinstance(exc, BadRowsError):
        return False
    return any(isinstance(cause, (ConnectionRefusedError, socket.gaierror)) for cause in _with_causes(exc))


def _hide_secrets(exc: BaseException) -> None:
    """Clients tell the address that they asked, with the key that may be in it."""
    for each in [exc, *(exc.errors.values() if isinstance(exc, BadRowsError) else ())]:
        for cause in _with_causes(each):
            cause.args = tuple(without_secrets(arg) if isinstance(arg, str) else arg for arg in cause.args)


def _with_causes(exc: BaseException) -> Iterator[BaseException]:
    """An error and those that led to it."""
    seen: set[int] = set()
    cause: BaseException | None = exc
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def _told_wait(exc: Exception) -> float | None:
    if isinstance(exc, RateLimitExceeded):
        return exc.retry_after
    headers = getattr(getattr(exc, "response", None), "headers", None)
    if not isinstance(headers, Mapping):
        return None
    return retry_after({str(name).lower(): str(value) for name, value in headers.items()})
