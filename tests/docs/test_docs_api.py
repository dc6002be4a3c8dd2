"""docs/api.md names every route, every field of a request and every code of an error."""

from __future__ import annotations

import ast
import json
import re

import msgspec
import pytest
from code_in_documents import ROOT

from tokenspeed.server import openapi
from tokenspeed.server.api import APIS
from tokenspeed.server.calls import CALLS

DOCS = ROOT / "docs"
API = (DOCS / "api.md").read_text()
FORMS = (DOCS / "structured-output.md").read_text()


def words(text: str) -> set[str]:
    """Names in inline code."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))


def test_every_route_is_named() -> None:
    for path in json.loads(openapi.document())["paths"]:
        shown = re.sub(r"/\{\w+\}", "", path)
        assert f"`{shown}`" in API or f" {shown}`" in API or f" {shown}/" in API, path


REQUESTS = {each.path: each.request for each in (*APIS.values(), *CALLS) if each.answer is not None}


@pytest.mark.parametrize("path", REQUESTS)
def test_every_field_is_named(path: str) -> None:
    fields = {field.encode_name for field in msgspec.structs.fields(REQUESTS[path])}
    assert fields - words(API) - words(FORMS) == set()


MAKERS = {"APIError": None, "bad_request": 400, "unavailable": 503, "InvalidRequest": 400}
"""What makes errors, and with which status (None: it is given)."""
PLACES = {"unavailable": 1, "bad_request": 2, "InvalidRequest": 2}
"""Where they are given the code, if not by name."""


STARLETTES = {(405, None)}
"""What is made elsewhere and handed on."""


def errors_made() -> set[tuple[int, str | None]]:
    """Status and code of each error that is made anywhere, where both are written down there."""
    found = set()
    for source in (ROOT / "tokenspeed").rglob("*.py"):
        for call in ast.walk(ast.parse(source.read_text())):
            if not isinstance(call, ast.Call) or (maker := ast.unparse(call.func)) not in MAKERS:
                continue
            status = MAKERS[maker]
            if status is None:
                status = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
            place = PLACES.get(maker, len(call.args))
            given = [each.value for each in call.keywords if each.arg == "code"]
            code = next(iter(given + call.args[place : place + 1]), ast.Constant(None))
            if status is not None and isinstance(code, ast.Constant):
                found.add((status, code.value))
    return found


def test_every_error_has_a_row() -> None:
    told: set[tuple[int, str | None]] = set()
    for row in re.findall(r"^\| [45]\d\d.*", API, re.MULTILINE):
        statuses, _, codes = (cell.strip() for cell in row.split("|")[1:-1])
        known: list[str | None] = [*re.findall(r"`(\w+)`", codes)]
        if not known or "none" in codes:
            known.append(None)
        told |= {(int(status), code) for status in statuses.split(", ") for code in known}
    made = errors_made() | STARLETTES
    assert {(404, "model_not_found"), (403, "key_required"), (400, "invalid_json")} <= made
    assert made - told == set()
    assert told - made == set(), "no longer made"
