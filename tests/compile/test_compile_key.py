"""The key: which sources are facts, how facts are digested and compared. What changes which fact is
tried in test_compile_key_matrix.py.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_tiny import tiny_family

from tokenspeed.compile import installation, key
from tokenspeed.compile.facts import differences, digest_of
from tokenspeed.compile.installation import PACKAGES, torch_build
from tokenspeed.compile.key import Target, facts_of
from tokenspeed.compile.ranges import token_ranges


def target(model: Callable[..., Any] | None = None) -> Target:
    family, config = tiny_family("LlamaForCausalLM")
    return Target(
        model=model or family.model,
        config=config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        ranges=token_ranges((0,)),
    )


BASE = facts_of(target())


@pytest.fixture
def copied_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's sources elsewhere, free to be edited."""
    for package in PACKAGES:
        shutil.copytree(installation._ROOT / package, tmp_path / package, dirs_exist_ok=True)
    monkeypatch.setattr(installation, "_ROOT", tmp_path)
    return tmp_path


def test_where_sources_lie_is_no_fact(copied_sources: Path) -> None:
    assert facts_of(target()) == BASE


@pytest.mark.parametrize("package", PACKAGES)
def test_a_line_of_a_source_misses(copied_sources: Path, package: str) -> None:
    path = sorted((copied_sources / package).glob("*.*"))[-1]
    path.write_text(path.read_text() + "\n# edited\n")
    (found,) = differences(facts_of(target()), BASE)
    assert found.name == f"sources.{package}/{path.name}"
    (copied_sources / package / "new.py").write_text("")
    assert len(differences(facts_of(target()), BASE)) == 2


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], key.Facts]:
    """A model in a package of its own: edits a file of it, and gives the facts."""
    package = tmp_path / "zoo"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text("class Layer: pass\n")
    (package / "names.py").write_text("NAME = 1\n")
    (package / "numbers.py").write_text("from .table import TABLE\nSCALE = 0.5\n")
    (package / "table.py").write_text("TABLE = (1, 2)\n")
    (package / "other.py").write_text("class Other: pass\n")
    (package / "model.py").write_text(
        "from zoo import names\nfrom zoo.layers import Layer\nfrom zoo.numbers import SCALE\n"
        "class Model(Layer): pass\nclass Twin(Layer): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("zoo.model").Model
    importlib.import_module("zoo.other")

    def edit(name: str) -> key.Facts:
        if name:
            (package / name).write_text((package / name).read_text() + "# edited\n")
        return facts_of(target(model))

    yield edit  # type: ignore[misc]
    for name in [name for name in sys.modules if name.split(".")[0] == "zoo"]:
        del sys.modules[name]


def test_a_model_is_its_file_and_those_it_is_made_of(
    own_model: Callable[[str], key.Facts],
) -> None:
    before = copy.deepcopy(own_model(""))
    assert {name for name in before["sources"] if name.startswith("zoo/")} == {
        *("zoo/model.py", "zoo/layers.py", "zoo/names.py", "zoo/numbers.py", "zoo/table.py")
    }
    assert own_model("other.py") == before
    for name in ("model.py", "layers.py", "names.py", "numbers.py", "table.py"):
        after = own_model(name)
        assert after != before
        before = after


def test_two_models_of_a_file_differ(own_model: Callable[[str], key.Facts]) -> None:
    here, there = own_model(""), facts_of(target(sys.modules["zoo.model"].Twin))
    assert (here["compile"].pop("model"), there["compile"].pop("model")) == ("Model", "Twin")
    assert here == there


def test_a_family_is_no_fact_of_another() -> None:
    models = {name for name in BASE["sources"] if name.startswith("models/")}
    assert {"models/llama.py", "models/layers.py", "models/rope.py"} <= models
    assert not models & {"models/qwen2.py", "models/qwen3.py", "models/__init__.py"}


def test_inert_fields_are_read_by_no_model() -> None:
    """What the deny-list promises: only the engine asks for them."""
    models = Path(installation._ROOT / "models")
    for name in key.INERT_FIELDS:
        for path in models.glob("*.py"):
            assert f"config.{name}" not in path.read_text(), path


def test_facts_survive_json_and_processes() -> None:
    assert json.loads(json.dumps(BASE)) == BASE
    code = "import test_compile_key as t; print(t.digest_of(t.BASE))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parent,
        env=os.environ | {"HOME": "/nowhere", "PYTHONHASHSEED": "7"},
    )
    assert done.stdout.strip() == digest_of(BASE), done.stderr


def test_differences_name_the_fact_and_both_values() -> None:
    found = differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3, "d": None}})
    assert [str(each) for each in found] == [
        "a.c 2 (there 3)",
        "a.d absent (there None)",
    ]
    assert differences({"a": 1}, {"a": 1}) == []


def test_torch_is_known_without_an_import() -> None:
    assert torch_build() == (torch.__version__, torch.version.git_version, torch.version.cuda)
    code = (
        "import sys; from tokenspeed.compile import fitness; fitness.Fitness([{}]).misfits({}); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_a_torch_that_is_not_there_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "torch_build", torch_build.__wrapped__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    versions = installation.installation()["versions"]
    assert (versions["torch"], versions["cuda"]) == (None, None)
