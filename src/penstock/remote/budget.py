"""What requests cost, and the budget that they may not exceed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import UsageError

MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Of a model, in whatever money the user counts."""

    input_tokens: float = 0.0  # for a million of them
    output_tokens: float = 0.0
    request: float = 0.0  # for one

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "request"):
            price: object = getattr(self, name)
            if not isinstance(price, (int, float)) or isinstance(price, bool) or not 0 <= price < float("inf"):
                what = "the price of one request" if name == "request" else "the price of a million tokens"
                raise UsageError(f"Prices({name}={price!r}): expected {what}, 0 or more")


@dataclass(frozen=True, slots=True)
class Spending:
    """What one request, or many, took."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def plus(self, more: Spending) -> Spending:
        return Spending(
            self.requests + more.requests,
            self.input_tokens + more.input_tokens,
            self.output_tokens + more.output_tokens,
        )

    def cost(self, prices: Prices) -> float:
        tokens = self.input_tokens * prices.input_tokens + self.output_tokens * prices.output_tokens
        return tokens / MILLION + self.requests * prices.request


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The most that all requests of a run may take together, resumed runs included."""

    max_requests: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens", "max_cost"):
            most: object = getattr(self, name)
            kinds = (int, float) if name == "max_cost" else (int,)
            if most is not None and (not isinstance(most, kinds) or isinstance(most, bool) or not most > 0):
                what = "an amount of money" if name == "max_cost" else "a whole number"
                raise UsageError(f"{name}={most!r}: expected {what} over 0, or None for no limit")

    @property
    def is_set(self) -> bool:
        """Whether there is any limit; without one, nothing is added up."""
        return any(most is not None for most in (self.max_requests, self.max_tokens, self.max_cost))

    def describe(self) -> list[str]:
        """The limits that are set."""
        limits = {"max_requests": self.max_requests, "max_tokens": self.max_tokens, "max_cost": self.max_cost}
        return [f"{name}={most:,}" for name, most in limits.items() if most is not None]

    def spent(self, use: Spending, prices: Prices) -> str | None:
        """Which limit is reached, in words; None: more may be asked."""
        found: Mapping[str, tuple[float, float | None]] = {
            "max_requests": (use.requests, self.max_requests),
            "max_tokens": (use.input_tokens + use.output_tokens, self.max_tokens),
            "max_cost": (use.cost(prices), self.max_cost),
        }
        for name, (taken, most) in found.items():
            if most is not None and taken >= most:
                return f"{name}={most:,}"
        return None
