"""Python in documents: it parses, what it imports exists, and what it passes is known."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from code_in_documents import DOCUMENTS, ROOT, name_of

import tokenspeed
from tokenspeed.config import OPTIONS
from tokenspeed.request import SamplingParams

FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = [
    pytest.param(code, id=f"{name_of(path)}-{number}")
    for path in DOCUMENTS
    for number, code in enumerate(FENCED.findall(path.read_text()))
]
KEYWORDS = {
    "SamplingParams": set(SamplingParams.__struct_fields__),
    "LLM": set(OPTIONS),
}


@pytest.mark.parametrize("code", PROGRAMS)
def test_programs_use_what_there_is(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            assert importlib.util.find_spec(node.module or "")
            if node.module == "tokenspeed":
                assert {each.name for each in node.names} <= set(tokenspeed.__all__)
        elif isinstance(node, ast.Import):
            assert all(importlib.util.find_spec(each.name) for each in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in KEYWORDS:
            given = {each.arg for each in node.keywords if each.arg}
            assert given <= KEYWORDS[ast.unparse(node.func)]


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 4
    assert Path(ROOT / "examples").is_dir()
