"""/openapi.json: the API as a document, made from the tables of routes and the types they name."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tokenspeed import __version__
from tokenspeed.server.api import APIS
from tokenspeed.server.calls import CALLS
from tokenspeed.server.errors import ANTHROPIC_PATH, AnthropicError, ErrorEnvelope
from tokenspeed.server.info import INFO_ROUTES
from tokenspeed.server.middleware import OPEN_PATHS

PATH = "/openapi.json"
_REFERENCE = "#/components/schemas/{name}"
_ERRORS = (ErrorEnvelope, AnthropicError)


@functools.cache
def document() -> bytes:
    """OpenAPI 3.1, as JSON."""
    rows: list[Any] = [*APIS.values(), *CALLS]
    kinds = {kind for row in rows for kind in (row.request, row.answer) if kind}
    kinds |= {route.answer for route in INFO_ROUTES if route.answer}
    ordered = sorted(kinds | set(_ERRORS), key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
    named = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for api in APIS.values():
        operation = _operation(api.path, api.summary, named, api.answer)
        content = operation["responses"]["200"]["content"]
        content["text/event-stream"] = {}  # 3.1 has no words for a stream of events
        paths[api.path] = {"post": operation | _body(named[api.request])}
    for call in CALLS:
        operation = _operation(call.path, call.summary, named, call.answer)
        paths[call.path] = {"post": operation | _body(named[call.request])}
    for route in INFO_ROUTES:
        path = route.path.replace(":path}", "}")
        operation = _operation(path, route.summary, named, route.answer)
        paths.setdefault(path, {})[route.method.lower()] = operation
    paths[PATH] = {"get": _operation(PATH, "This document", named, None)}
    for path, operations in paths.items():
        for method, operation in operations.items():
            words = re.findall(r"\w+", path)
            operation["operationId"] = "_".join([method, *words]) or method
    told = {
        "openapi": "3.1.0",
        "info": {"title": "TokenSpeed", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    return msgspec.json.encode(told)


def _operation(
    path: str, summary: str, named: Mapping[Any, Any], answer: Any | None
) -> dict[str, Any]:
    error = AnthropicError if path.startswith(ANTHROPIC_PATH) else ErrorEnvelope
    good: dict[str, Any] = {"description": "The answer"}
    if answer is not None:
        good["content"] = {"application/json": {"schema": named[answer]}}
    bad = {
        "description": "What is wrong",
        "content": {"application/json": {"schema": named[error]}},
    }
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": good, "default": bad}}
    if path not in OPEN_PATHS:
        operation["security"] = [{}, {"bearer": []}, {"key": []}]
    if names := re.findall(r"\{(\w+)\}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation


def _body(schema: Any) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
