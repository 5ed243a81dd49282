"""The requests and answers of OpenAI's API, which most servers of language models understand. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import RemoteRequestError, UsageError
from penstock.remote.budget import Spending
from penstock.remote.json_schema import misfit

PATHS = {"chat": "chat/completions", "completions": "completions", "embeddings": "embeddings"}
CHARACTERS = 4  # of a token, about


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAIFormat:
    """How a row becomes the body of a request, and the body of a reply an answer.

    task: "chat", "completions" or "embeddings". schema: a JSON schema of answers to chats, which are read as JSON.
    args: fields of every request, such as temperature. full_response: the answer is the whole body."""

    model: str
    task: str = "chat"
    system: str | None = None
    schema: Mapping[str, Any] | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    full_response: bool = False

    def __post_init__(self) -> None:
        if self.task not in PATHS:
            raise UsageError(f"task={self.task!r}: expected one of {', '.join(map(repr, PATHS))}")
        for name, value in [("system", self.system), ("response_schema", self.schema)]:
            if value is not None and self.task != "chat":
                raise UsageError(f"{name}= is for task='chat', not for {self.task!r}")

    @property
    def path(self) -> str:
        """Below the base URL."""
        return PATHS[self.task]

    def body(self, row: Any, args: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The request for a row: a text; of a chat also a list of messages."""
        made: dict[str, Any] = {"model": self.model}
        if self.task == "chat":
            made["messages"] = self._messages(row)
        else:
            made["prompt" if self.task == "completions" else "input"] = _text(row)
        if self.schema is not None:
            name = str(self.schema.get("title", "answer"))
            made["response_format"] = {"type": "json_schema", "json_schema": {"name": name, "schema": dict(self.schema)}}
        return {**made, **self.args, **(args or {})}

    def _messages(self, row: Any) -> list[Mapping[str, Any]]:
        if isinstance(row, str):
            own: list[Mapping[str, Any]] = [{"role": "user", "content": row}]
        elif isinstance(row, Sequence) and row and all(isinstance(each, Mapping) for each in row):
            own = list(row)
        else:
            raise ValueError(
                f"a row of a chat is a text or a list of messages (dicts with role and content), got {row!r:.200}"
            )
        return own if self.system is None else [{"role": "system", "content": self.system}, *own]

    def tokens(self, content: bytes, body: Mapping[str, Any]) -> float:
        """About how many a request takes, before it is sent."""
        return len(content) / CHARACTERS + _most_output(body)

    def expected(self, body: Mapping[str, Any]) -> Spending:
        """The same of its texts alone, input and output told apart."""
        given = body.get("messages") or body.get("prompt") or body.get("input") or ""
        texts = [given] if isinstance(given, str) else [str(message.get("content", "")) for message in given]
        return Spending(1, -(-sum(map(len, texts)) // CHARACTERS), _most_output(body))

    def read(self, body: bytes) -> tuple[Any, Spending]:
        """The answer in the body of a reply. Raises whatever shows that it is none."""
        told = json.loads(body)
        if not isinstance(told, dict):
            raise TypeError(f"expected an object, got {type(told).__name__}")
        if told.get("error"):
            raise RemoteRequestError(f"the service answered with an error: {told['error']!r}")
        use = usage_of(told)
        return (told if self.full_response else self._answer(told)), use

    def _answer(self, told: Mapping[str, Any]) -> Any:
        if self.task == "embeddings":
            (one,) = told["data"]
            vector = one["embedding"]
            if not isinstance(vector, (list, str)):
                raise TypeError(f"expected a list of numbers for embedding, got {type(vector).__name__}")
            return vector if isinstance(vector, str) else _float32(vector)
        answers = [self._choice(choice) for choice in told["choices"]]
        if not answers:
            raise ValueError("choices is empty")
        return answers[0] if len(answers) == 1 else answers

    def _choice(self, choice: Mapping[str, Any]) -> Any:
        if self.task == "completions":
            return _text(choice["text"])
        message = choice["message"]
        if message.get("refusal"):
            raise RemoteRequestError(f"the model refused: {message['refusal']!r}")
        text = message["content"]
        if self.schema is None:
            return _text(text)
        try:
            made = json.loads(_text(text))
        except ValueError as exc:
            why = f" (finish_reason is {choice['finish_reason']!r})" if choice.get("finish_reason") != "stop" else ""
            raise ValueError(f"the content is not JSON{why}: {exc}") from None
        if wrong := misfit(made, self.schema):
            raise ValueError(f"the content does not fit response_schema: {wrong}")
        return made


def _float32(vector: list[Any]) -> Any:
    """The numbers as an array: models compute embeddings in 32 bits or less, and JSON has them in decimals."""
    import numpy as np

    if not vector or set(map(type, vector)) - {int, float}:
        raise ValueError("expected numbers, and nothing else, in embedding")
    with np.errstate(over="ignore"):
        made = np.array(vector, np.float64).astype(np.float32)
    if not np.isfinite(made).all():
        raise ValueError("expected numbers that 32 bits can hold in embedding")
    return made


def _most_output(body: Mapping[str, Any]) -> int:
    most = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    return int(most) if isinstance(most, (int, float)) else 0


def usage_of(told: Any) -> Spending:
    """One request, and the tokens that its reply says it took, under the names of OpenAI or of Anthropic."""
    usage = told.get("usage") if isinstance(told, Mapping) else None
    if not isinstance(usage, Mapping):
        return Spending(1)
    found = [usage.get(f"{name}_tokens") for name in ("prompt", "input", "completion", "output")]
    counts = [each if isinstance(each, int) else 0 for each in found]
    return Spending(1, counts[0] or counts[1], counts[2] or counts[3])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {type(value).__name__}")
    return value
