"""Language models behind a server of one's own, such as vLLM or llama.cpp, that a run starts, watches and ends.

    rows of all processes -> a host (one for each copy) -> HTTP, many requests at once -> the server, started by the host

The server is the model of its host: it is loaded, replaced and unloaded as any model is, under the same deadlines. When it
dies, its host is started again with a new one, and the rows that it held are sent again; a row that ends one server after
the other is found.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from penstock.errors import ModelLoadError, UsageError
from penstock.handlers.remote import HttpClient, OpenAICompatibleModelHandler
from penstock.handlers.server_process import HOST, PORT, ServerCommand, ServerProcess, start_server
from penstock.inference.handler_checks import checked_path
from penstock.remote.http import Credentials, HttpTransport
from penstock.remote.service import BrokenOff, Reply, Service, Unreachable

__all__ = ["ServerModelHandler"]

logger = logging.getLogger(__name__)

MODEL = "{model}"
LOOPBACK = {HOST, "localhost", "[::1]", "::1"}
LONGEST_LOOK = 30.0  # seconds
TASKS = {"openai-chat": "chat", "openai-completions": "completions", "openai-embeddings": "embeddings"}


class ServerTransport(HttpTransport):
    """Sends requests to a server of ours. That one gets no answer because the server has ended is no failure of its row.

    A server that answers nothing any more is ended: requests that wait there break off, as if it had died."""

    def __init__(
        self, server: ServerProcess, path: str, credentials: Credentials, hang_timeout: float, **settings: Any
    ) -> None:
        super().__init__(f"{server.url}{path}", credentials, **settings)
        self.server = server
        self._hang_timeout = hang_timeout
        self._silent_since: float | None = None  # when the first request was sent since it has last answered one
        self._waiting = 0  # requests
        self._watch: asyncio.Task[None] | None = None  # while requests wait; of the loop's thread, as all of this

    async def __call__(self, content: bytes) -> Reply:
        self._silent_since = self._silent_since or time.monotonic()
        self._waiting += 1
        self._watch = self._watch or asyncio.create_task(_watched(weakref.ref(self)))
        try:
            reply = await super().__call__(content)
            self._silent_since = time.monotonic() if self._waiting > 1 else None
            return reply
        except (Unreachable, BrokenOff) as exc:
            lost = await asyncio.to_thread(self.server.lost)  # it waits for the server's end: other requests run meanwhile
            if lost is not None:
                raise lost from exc
            raise
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await super().close()

    async def look(self) -> float:
        """Whether the server is alive, if it has been silent for long. Seconds until the next look; 0: there is no need."""
        silent = time.monotonic() - (self._silent_since or time.monotonic())
        if self._waiting and silent >= self._hang_timeout:
            if not await asyncio.to_thread(self.server.answers, min(self._hang_timeout, LONGEST_LOOK)):
                logger.warning("%s has answered nothing for %.0f s: this server is ended", self.server.url, silent)
                await asyncio.to_thread(self.server.end_hanging, silent)
                return 0.0
            self._silent_since, silent = time.monotonic(), 0.0  # it is at work, if slowly
        if not self._waiting:
            self._watch = None
            return 0.0
        return self._hang_timeout - silent


async def _watched(of: weakref.ref[ServerTransport]) -> None:
    """While requests wait. It holds the transport only while it looks: a server ends when nothing refers to it any more."""
    while (transport := of()) is not None and (pause := await transport.look()):
        del transport
        await asyncio.sleep(pause)


class ServerModelHandler(OpenAICompatibleModelHandler):
    """A model server that understands OpenAI's API, started by the run on this machine: one for all processes, or
    model_copies of them. Rows and answers are those of OpenAICompatibleModelHandler."""

    def __init__(
        self,
        command: str | Sequence[str],
        ready_url: str = f"http://{HOST}:{PORT}/health",
        protocol: str = "openai-chat",
        *,
        model: str | os.PathLike[str] = "",
        model_name: str = "",
        base_path: str = "/v1",
        start_timeout: float = 600.0,
        max_in_flight: int = 64,
        key_variable: str | None = None,
        log_file: str | None = None,
        timeout: float = 600.0,
        hang_timeout: float = 120.0,
        num_retries: int = 2,
        max_batch_size: int | None = 1,
        **settings: Any,
    ) -> None:
        """command: the program and its arguments, or a line of them; no shell runs it. `{port}` in it stands for a free
        port, `{model}` for `model`. The server must listen on the loopback interface alone (127.0.0.1).
        ready_url: is asked until it answers with status 200; `{port}` as above. protocol: "openai-chat",
            "openai-completions" or "openai-embeddings".
        model: the path or name of what the server loads; a refresh or a model for each key replaces it.
        model_name: what requests call the model; `model`, if empty. base_path: of the API, below the server's address.
        start_timeout: seconds until it is ready; else the run ends, with the end of the server's log.
        max_in_flight: requests at once to each server, a few more than it works on at a time.
        key_variable: an environment variable by which the server takes a key (vLLM: VLLM_API_KEY): a new one is made for
            each start, and requests carry it, so that other users of the machine cannot use the server.
        log_file: all that the server prints is appended to it. timeout: seconds for one request.
        hang_timeout: seconds without an answer to any request, after which ready_url is asked; if that is not answered
            either, the server is ended and started again.
        settings: those of OpenAICompatibleModelHandler and of every handler, such as prompt, columns and model_copies."""
        self._command = _checked_command(command)
        self._ready_url = _checked_url(ready_url)
        self._model = os.fspath(model)
        if self._model and not self._takes_model():
            raise UsageError(f"model={self._model!r}: the command has no {MODEL} in it, so the server would not know of it")
        if not self._model and self._takes_model():
            raise UsageError(f"the command has {MODEL} in it; give model=, the path or name that it stands for")
        for name, seconds in [("start_timeout", start_timeout), ("hang_timeout", hang_timeout)]:
            if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds > 0:
                raise UsageError(f"{name}={seconds!r}: expected seconds, more than 0")
        self._base_path = "/" + base_path.strip("/") if base_path.strip("/") else ""
        self._start_timeout = start_timeout
        self._hang_timeout = hang_timeout
        self._key_variable = key_variable
        self._log_file = None if log_file is None else os.path.abspath(log_file)
        super().__init__(
            f"http://{HOST}{self._base_path}",
            model_name or self._model or "model",
            task=_task_of(protocol),
            max_in_flight=max_in_flight,
            timeout=timeout,
            num_retries=num_retries,
            max_batch_size=max_batch_size,
            **settings,
        )
        if self._credentials.api_key is not None or self._credentials.api_key_env is not None:
            raise UsageError("the key of a server that is started here is made for it: see key_variable=")

    def load_model(self) -> HttpClient:
        place, name = self.run_place, str(self.model_id())  # not its address: answers are kept by this name
        try:
            server = start_server(self._server_command())
        except ModelLoadError as exc:
            raise ModelLoadError(f"step {place.step!r}: {exc}") from None
        transport = self._transport(server)
        meter = place.meter(self._rules, own_service=True)
        service = Service(name, transport, meter, self._retries, self._rules.prices, transport.redact)
        return HttpClient(transport, meter, service)

    def _transport(self, server: ServerProcess) -> ServerTransport:
        key = server.key
        credentials = Credentials(api_key=(lambda: key) if key else None, headers=self._credentials.headers)
        path = f"{self._base_path}/{self._format.path}"
        options = {"trust_env": False, **self._httpx_args}  # no proxy reaches this machine's loopback
        connect: dict[str, Any] = {
            "timeout": self._timeout,
            "connections": self._max_in_flight,
            "hang_timeout": self._hang_timeout,
        }
        return ServerTransport(server, path, credentials, options=options, **connect)

    def _server_command(self) -> ServerCommand:
        """What is run, with the model's path in it."""
        return ServerCommand(
            command=tuple(argument.replace(MODEL, self._model) for argument in self._command),
            ready_url=self._ready_url,
            start_timeout=self._start_timeout,
            key_variable=self._key_variable,
            log_file=self._log_file,
        )

    def model_id(self) -> str | None:
        return self._model or self._format.model

    def model_files(self) -> Sequence[str]:
        return (self._model,) if os.path.exists(self._model) else ()

    def model_bytes(self, model: HttpClient) -> int | None:
        transport = model.transport
        return transport.server.memory_bytes() if isinstance(transport, ServerTransport) else None

    def update_model_path(self, model_path: str) -> None:
        if not self._takes_model():
            what = f"write {MODEL} for its path in the command, and give model="
            raise UsageError(f"{type(self).__name__} cannot serve another model: {what}")
        path = checked_path(model_path)
        if self._format.model == self._model:
            self._format = replace(self._format, model=path)
        self._model = path

    def share_model_across_processes(self) -> bool:
        return True

    def max_concurrent_batches(self) -> int:
        """Each row is a request, and the next one goes when one is answered: the server never waits for the last of a
        batch."""
        return max(1, self._max_in_flight // (self._max_batch_size or 1))

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        return {"max_batch_size": 1, **super().batch_elements_kwargs()}

    def describe_requests(self) -> list[str]:
        return [f"up to {self._max_in_flight} requests in flight at each server", *self._rules.describe()]

    def _takes_model(self) -> bool:
        return any(MODEL in argument for argument in self._command)


def _task_of(protocol: str) -> str:
    if protocol not in TASKS:
        raise UsageError(f"protocol={protocol!r}: expected one of {', '.join(map(repr, TASKS))}")
    return TASKS[protocol]


def _checked_command(command: object) -> tuple[str, ...]:
    """The arguments, or UsageError."""
    parts = shlex.split(command) if isinstance(command, str) else command
    if not isinstance(parts, Sequence) or not parts or not all(isinstance(part, (str, os.PathLike)) for part in parts):
        raise UsageError(f"command={command!r}: expected a program and its arguments, such as ['server', '--port', ...]")
    made = tuple(os.fspath(part) for part in parts)
    if not any(PORT in part for part in made):
        raise UsageError(f"command={command!r}: expected {PORT} in it, which stands for the port that the server listens on")
    return made


def _checked_url(url: object) -> str:
    """Where a server of this machine is asked whether it is ready, or UsageError."""
    parts = urlsplit(url) if isinstance(url, str) else None
    address = parts.netloc.removesuffix(f":{PORT}") if parts is not None else ""
    if parts is None or parts.scheme not in ("http", "https") or not parts.netloc.endswith(f":{PORT}"):
        raise UsageError(f"ready_url={url!r}: expected an address with {PORT}, such as 'http://{HOST}:{PORT}/health'")
    if address not in LOOPBACK:
        raise UsageError(f"ready_url={url!r}: the server is on this machine: expected http://{HOST}:{PORT}/...")
    return str(url)
