"""The little that handlers need of ASGI itself: headers, bodies, JSON answers, disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope, Send

from tokenspeed.server.errors import APIError, unavailable
from tokenspeed.server_config import ServerConfig

DISCARD_S = 5.0
MAX_DISCARD_BYTES = 16 << 20

T = TypeVar("T")


class ClientGone(Exception):
    """The client has left (or does not read any more): there is nobody to answer."""


class Body:
    """A request's body on its way in: hands on what comes, and knows whether it is over."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_over = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_over = not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Read what is left, within limits. A connection that is closed with unread data is reset,
        and a client that still sends never sees the refusal that it is sent.
        """
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while not self._is_over and size <= MAX_DISCARD_BYTES:
                    size += len((await self.receive()).get("body", b""))


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that (lower-case) name."""
    for key, value in scope["headers"]:
        if key.lower() == name:
            text: str = value.decode("latin-1")
            return text
    return None


async def send_json(
    send: Send, body: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    await send_body(send, body, b"application/json", status, headers)


async def send_body(
    send: Send,
    body: bytes,
    content_type: bytes,
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> None:
    """A whole answer at once."""
    fields = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    fields += [
        (name.lower().encode(), value.encode("latin-1", "replace"))
        for name, value in (headers or {}).items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


class BodyRoom:
    """Memory for the bodies of all requests that are being read and parsed, `size` bytes."""

    def __init__(self, size: int) -> None:
        self._num_free = size

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """A request's share: call what is given to take bytes, which are given back at the end.
        Raises a 503 where none are left.
        """
        num_taken = 0

        def take(count: int) -> None:
            nonlocal num_taken
            if count > self._num_free:
                raise unavailable("Too many large requests come in at once.", "overloaded", 1)
            num_taken += count
            self._num_free -= count

        try:
            yield take
        finally:
            self._num_free += num_taken


async def read_json_body(
    scope: Scope, receive: Receive, limits: ServerConfig, take: Callable[[int], None]
) -> bytes:
    """The body of a request with JSON. Raises APIError (415, 413, 408, 503) or ClientGone.

    A missing content type is taken as JSON. The declared length is checked first, then what comes,
    for which there must be room (see `BodyRoom`).
    """
    kind = (header(scope, b"content-type") or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise APIError(415, "The content type must be application/json.")
    max_bytes = limits.max_request_bytes
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(limits.body_timeout):
            return await _read(receive, max_bytes, take)
    except TimeoutError:
        raise APIError(
            408, f"The body took longer than {limits.body_timeout:g} s (--body-timeout)."
        ) from None


async def _read(receive: Receive, max_bytes: int, take: Callable[[int], None]) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        take(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(max_bytes: int) -> APIError:
    return APIError(413, f"The body is larger than {max_bytes} bytes (--max-request-bytes).")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and ClientGone raised, if the client leaves first.

    A handler that answers at once is not cancelled by the server when its client goes: this is what
    stops it. The body must have been read.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone("has left")
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
