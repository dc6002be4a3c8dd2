"""What a client is told when something cannot be done: OpenAI's error object, with its status.

`APIError` is the only exception that is shown to a client; `as_api_error` turns every other one
into it. A body never holds a traceback, a path or a whole input, and its message is bounded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

import msgspec

from tokenspeed.engine.attached import EngineAway, EngineDead
from tokenspeed.log import logger
from tokenspeed.request import InvalidRequest

MAX_MESSAGE_CHARS = 600

ANTHROPIC_PATH = "/v1/messages"
"""Where errors are told in Anthropic's way."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


class APIError(Exception):
    """An answer with an error status. `headers` go with it (Allow, Retry-After)."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = shorten(message)
        self.param = param if param is None else shorten(param, 100)
        self.code = code
        self.headers = headers or {}

    @property
    def envelope(self) -> ErrorEnvelope:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        return ErrorEnvelope(ErrorBody(self.message, kind, self.param, self.code))

    def body(self) -> bytes:
        return msgspec.json.encode(self.envelope)


@contextlib.contextmanager
def told_as(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals in the block that blame a field of `names` blame what it stands for: the request was
    made of another one.
    """
    try:
        yield
    except (APIError, InvalidRequest) as error:
        param = error.param or ""
        inner = next((name for name in names if re.match(rf"{name}\b", param)), None)
        if inner is None:
            raise
        told, message = names[inner], str(error)
        if message.startswith(param):
            message = told + message.removeprefix(param)
        status, headers = 400, None
        if isinstance(error, APIError):
            status, headers = error.status, error.headers
        raise APIError(status, message, param=told, code=error.code, headers=headers) from None


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, tag="error", tag_field="type", frozen=True):
    error: AnthropicErrorBody


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_body(error: APIError) -> bytes:
    """The error as clients of Anthropic's API read it, who look at its type and message."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, default)
    return msgspec.json.encode(AnthropicError(AnthropicErrorBody(kind, error.message)))


def body_for(path: str, error: APIError) -> bytes:
    """The error as clients of the API at `path` read it."""
    return anthropic_body(error) if path.startswith(ANTHROPIC_PATH) else error.body()


def shorten(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    """`text`, its middle left out where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    return APIError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> APIError:
    """A field that is known, but that this server cannot honour: refused, never dropped."""
    return bad_request(f"{param} is not supported: {why}", param, "unsupported_parameter")


def not_offered(message: str) -> APIError:
    """A route that clients know, and that nothing stands behind here."""
    return bad_request(message, None, "unsupported_operation")


def unavailable(message: str, code: str, retry_after_s: int = 5) -> APIError:
    """Nothing is wrong with the request; the same one may work a little later."""
    return APIError(503, message, code=code, headers={"Retry-After": str(retry_after_s)})


def overloaded(message: str) -> APIError:
    return APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})


def overdue(limit_s: float) -> APIError:
    """It would take as long again: clients are told not to send it again by themselves."""
    message = f"The request was not answered within {limit_s:g} s (--request-timeout)."
    return APIError(504, message, code="timeout", headers={"x-should-retry": "false"})


def engine_failed(message: str) -> APIError:
    """The request was in an engine that died: the same request may have killed it, so that clients
    are told not to send it again by themselves.
    """
    return APIError(500, message, code="engine_dead", headers={"x-should-retry": "false"})


def ended_by_operator() -> APIError:
    """Whoever runs the server wanted it so: clients are told not to send it again by themselves."""
    message = "The request was ended by whoever runs the server."
    return APIError(503, message, code="aborted", headers={"x-should-retry": "false"})


def as_api_error(error: Exception, what: str) -> APIError:
    """What a client is shown of `error`. An unforeseen one is shown without its text, and logged
    as the failure of `what`.
    """
    if isinstance(error, APIError):
        return error
    if isinstance(error, InvalidRequest):
        return bad_request(str(error), error.param, error.code)
    if isinstance(error, EngineAway):
        return unavailable("The engine is being started again.", "loading")
    if isinstance(error, EngineDead):
        return engine_failed("The engine stopped while it worked on this request.")
    logger.error("%s failed", what, exc_info=error)
    return APIError(500, "The server made an error on this request; its log has the cause.")
