"""Requests over HTTP, by httpx: connections are kept open and used again."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import logging
import os
import re
import ssl
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, unquote_plus, urlsplit
from urllib.request import getproxies as _proxies

try:
    import httpx
except ImportError as exc:
    from penstock.errors import MissingPackageError

    raise MissingPackageError("httpx", "remote") from exc
if tuple(map(int, httpx.__version__.split(".")[:2])) < (0, 27):
    from penstock.errors import MissingPackageError

    raise MissingPackageError("httpx", "remote", f"{httpx.__version__} is installed, but 0.27 or later is needed")

from penstock.errors import UsageError
from penstock.remote.service import BrokenOff, Reply, Unreachable

CONNECT_TIMEOUT = 10.0  # seconds, if the user's own are not fewer
EACH = 4  # connections of a client: httpx looks at all that it has for each request, so few clients with many are slow
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
KEYS = re.compile(r"key|token|secret|passw|auth|sig|code|credential", re.IGNORECASE)  # in the names of a query
SHORTEST_SECRET = 6  # characters: shorter values of headers are no secrets, and would be found everywhere


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Where a key comes from, and headers that may hold secrets. The key itself is never kept in it: it is pickled."""

    api_key_env: str | None = None
    api_key: Callable[[], str] | None = None
    headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None

    def __post_init__(self) -> None:
        if self.api_key_env is not None and not (
            isinstance(self.api_key_env, str) and VARIABLE.fullmatch(self.api_key_env)
        ):  # not shown: it may be the key
            raise UsageError("api_key_env: expected the name of an environment variable, such as 'OPENAI_API_KEY'")
        if self.api_key is not None and not callable(self.api_key):
            raise UsageError(
                "api_key: expected a function that returns the key, so that it is never stored with the pipeline; for one "
                "in an environment variable, api_key_env='NAME'"
            )
        if self.headers is not None and not callable(self.headers) and not isinstance(self.headers, Mapping):
            raise UsageError("headers: expected a dict, or a function that returns one")

    def __repr__(self) -> str:
        return "Credentials(...)"

    @property
    def can_change(self) -> bool:
        return callable(self.api_key) or callable(self.headers)

    def made(self) -> dict[str, str]:
        """The headers of requests, with the key."""
        made = dict(self.headers() if callable(self.headers) else self.headers or {})
        key = self._key()
        if key is not None:
            made["Authorization"] = f"Bearer {key}"
        return made

    def _key(self) -> str | None:
        if self.api_key is not None:
            return self.api_key()
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise UsageError(
                f"the environment variable {self.api_key_env}, which api_key_env= names, is not set in the process that "
                "sends requests; set it where the run is started"
            )
        return key.strip()


class HttpTransport:
    """Posts JSON to one address. Made in any thread, used on the loop's alone."""

    def __init__(
        self, url: str, credentials: Credentials, *, timeout: float, connections: int, options: Mapping[str, Any]
    ) -> None:
        """timeout: seconds for a request, from when it is sent. options: more arguments of httpx.AsyncClient, such as proxy
        and verify."""
        _spare_lookups()
        self._url = url
        self._credentials = credentials
        self._timeout = timeout
        self._headers = credentials.made()
        urls = [url, *(value for value in (options.get("proxy"), *_proxies().values()) if isinstance(value, str))]
        self._secrets = _secrets_of(self._headers).union(*map(_secrets_in, urls))  # all that were sent so far
        library = logging.getLogger("httpx")
        if library.level == logging.NOTSET:
            library.setLevel(logging.WARNING)  # it logs each request, with all of its address
        given = {
            "timeout": httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT), pool=None),
            "limits": httpx.Limits(max_connections=EACH, max_keepalive_connections=EACH),
            "headers": {"Content-Type": "application/json", **self._headers},
            **options,
        }
        try:
            given["verify"] = _verified(given)
            self._clients = [httpx.AsyncClient(**given) for _ in range(-(-connections // EACH))]
            self._free = [client for client in self._clients for _ in range(EACH)]  # the last one was used last
            self._parsed = httpx.URL(url)
        except (TypeError, httpx.InvalidURL) as exc:
            raise UsageError(f"httpx does not take these settings: {self.redact(str(exc))}") from None

    async def __call__(self, content: bytes) -> Reply:
        sent = self._headers  # other requests run on this thread at each await, and may change them
        reply = await self._post(content)
        if reply.status == 401 and self._credentials.can_change:  # the key may be too old
            if sent == self._headers:  # else another request has fetched a new key meanwhile
                self._headers = await asyncio.to_thread(self._credentials.made)
                self._secrets |= _secrets_of(self._headers)
                for client in self._clients:
                    client.headers.update(self._headers)
            if sent != self._headers:
                reply = await self._post(content)
        return reply

    async def close(self) -> None:
        """End the connections. On the loop's thread, as all that uses them."""
        for client in self._clients:
            await client.aclose()

    def redact(self, text: str) -> str:
        """The text without keys that were sent."""
        for secret in sorted(self._secrets, key=len, reverse=True):  # one may be in another
            text = text.replace(secret, "***")
        return text

    async def _post(self, content: bytes) -> Reply:
        if not self._free:  # more at once than was said: httpx lets them wait
            return await self._posted(self._clients[0], content)
        client = self._free.pop()  # no await between the look and this: no lock
        try:
            return await self._posted(client, content)
        finally:
            self._free.append(client)

    async def _posted(self, client: httpx.AsyncClient, content: bytes) -> Reply:
        try:
            async with asyncio.timeout(self._timeout):  # httpx has none for the whole of a request
                response = await client.post(self._parsed, content=content)
        except TimeoutError as exc:
            raise BrokenOff(f"no answer within {self._timeout:g} s") from exc
        except (httpx.UnsupportedProtocol, httpx.LocalProtocolError) as exc:
            raise UsageError(f"the request cannot be sent: {self.redact(str(exc))}") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
            if isinstance(_root(exc), ssl.SSLCertVerificationError):
                raise UsageError(
                    f"the certificate of the service is not accepted: {exc}; see httpx_args={{'verify': ...}}"
                ) from None
            raise Unreachable(f"no connection: {type(exc).__name__}: {exc}") from exc
        except httpx.TimeoutException as exc:
            raise BrokenOff(f"no answer within {self._timeout:g} s ({type(exc).__name__})") from exc
        except httpx.TransportError as exc:
            raise BrokenOff(f"the connection broke off: {type(exc).__name__}: {exc}") from exc
        return Reply(response.status_code, response.headers, response.content)


def _secrets_of(headers: Mapping[str, str]) -> set[str]:
    """What must not be shown of headers, also as JSON and Python write it in texts."""
    return _as_written([value.removeprefix("Bearer ").removeprefix("Basic ") for value in headers.values()])


def _secrets_in(url: str) -> set[str]:
    """Of an address: its password, also as a header has it, and what its query has under the name of a key."""
    parts = urlsplit(url)
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    login = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode() if user else ""
    named = [each.partition("=") for each in parts.query.split("&")]
    said = [password or user, login, *(value for name, _, value in named if KEYS.search(name))]
    return _as_written([*said, *map(unquote, said), *map(unquote_plus, said)])


def _as_written(values: Iterable[str]) -> set[str]:
    written = [(value, json.dumps(value)[1:-1], repr(value)[1:-1], value.replace("/", "\\/")) for value in values]
    return {secret for each in written for secret in each if len(secret) >= SHORTEST_SECRET}


def _spare_lookups() -> None:
    """httpcore tries to import sniffio several times for each request. Where it is not installed, Python goes through all of
    its path each time, which takes a quarter of the time of a request: so it is noted that there is none."""
    if importlib.util.find_spec("sniffio") is None:
        sys.modules["sniffio"] = None  # type: ignore[assignment]


def _verified(options: Mapping[str, Any]) -> ssl.SSLContext:
    """One for all clients: to make it takes longer than many requests."""
    verify = options.get("verify", True)
    if isinstance(verify, ssl.SSLContext):
        return verify
    return httpx.create_ssl_context(verify, options.get("cert"), options.get("trust_env", True))


def _root(exc: BaseException) -> BaseException:
    while (cause := exc.__cause__ or exc.__context__) is not None:
        exc = cause
    return exc
