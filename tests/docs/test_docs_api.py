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


PLACES = {"unavailable": 1, "bad_request": 2}
"""Where functions that make errors are given the code."""


def test_every_code_is_named() -> None:
    found: set[str] = set()
    for source in (ROOT / "tokenspeed" / "server").rglob("*.py"):
        for call in ast.walk(ast.parse(source.read_text())):
            if isinstance(call, ast.Call):
                given = [each.value for each in call.keywords if each.arg == "code"]
                place = PLACES.get(ast.unparse(call.func))
                given += call.args[place : place + 1] if place is not None else []
                found |= {each.value for each in given if isinstance(each, ast.Constant)}
    found = {code for code in found if isinstance(code, str)}
    assert {"model_not_found", "loading", "invalid_json"} <= found
    assert found - words(API) == set()
