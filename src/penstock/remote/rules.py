"""How a service is asked, as the user says it; and what its replies mean for that."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.errors import UsageError
from penstock.remote.budget import Budget, Prices
from penstock.remote.pace import PaceRules

REFUSED = {429, 503, 529}  # there are too many requests: the same one is sent again, as often as it takes
UNAVAILABLE = 503  # of them, the one that may have other causes than too many requests
PASSING = {408, 409, 425, 500, 502, 504}  # something went wrong that may pass: it is sent again, so many times


@dataclass(frozen=True, kw_only=True, slots=True)
class AskingRules:
    """How a service is asked, as the user says."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    throttle_delay_secs: float = 1.0
    max_outage_secs: float = 600.0
    budget: Budget = field(default_factory=Budget)
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute"):
            check_positive(name, getattr(self, name), "a number over 0, or None for no limit", optional=True)
        for name in ("throttle_delay_secs", "max_outage_secs"):
            check_positive(name, getattr(self, name), "seconds, more than 0")
        for name, kind in (("budget", Budget), ("prices", Prices)):
            if not isinstance(getattr(self, name), kind):
                raise UsageError(
                    f"{name}={getattr(self, name)!r}: expected a {kind.__name__}, from penstock.handlers.remote"
                )
        if self.budget.max_cost is not None and self.prices == Prices():
            raise UsageError("max_cost needs prices=Prices(input_tokens=..., output_tokens=..., request=...)")

    def describe(self) -> list[str]:
        """The limits that are set, in words."""
        rates = {"requests": self.requests_per_minute, "tokens": self.tokens_per_minute}
        told = [f"at most {most:,g} {what} a minute" for what, most in rates.items() if most is not None]
        return told + ([f"a budget of {', '.join(self.budget.describe())}"] if self.budget.is_set else [])

    @property
    def pace(self) -> PaceRules:
        return PaceRules(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            throttle_delay=self.throttle_delay_secs,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """When a request is sent again that has failed."""

    num_retries: int = 8
    retry_filter: Callable[[Exception], bool] = lambda error: True

    def __post_init__(self) -> None:
        if not isinstance(self.num_retries, int) or isinstance(self.num_retries, bool) or self.num_retries < 0:
            raise UsageError(f"num_retries={self.num_retries!r}: expected a whole number, 0 or more")
        if not callable(self.retry_filter):
            raise UsageError(f"retry_filter={self.retry_filter!r}: expected a function of an error that gives True or False")


def retry_after(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Seconds, as a service says them or as a date; None: it does not say."""
    told = headers.get("retry-after-ms") or ""
    if told.replace(".", "", 1).isdigit():
        return float(told) / 1000
    told = (headers.get("retry-after") or "").strip()
    if not told:
        return None
    if told.replace(".", "", 1).isdigit():
        return float(told)
    import email.utils

    try:
        return max(0.0, email.utils.parsedate_to_datetime(told).timestamp() - now())
    except (TypeError, ValueError):
        return None


def check_at_least_one(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name}={value!r}: expected a whole number of at least 1")


def check_positive(name: str, value: object, expected: str, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise UsageError(f"{name}={value!r}: expected {expected}")
