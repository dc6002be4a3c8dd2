"""The house rules that a parser can check: layers, imports, sizes, and what must never appear."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tokenspeed"
MAX_LINES = 350
MAX_FUNCTION_LINES = 50

LAYERS = (
    {"batch", "request", "options", "config", "log", "ledger", "spans"},
    {"kernels", "kv", "text"},
    {"passes", "models", "loader", "parallel"},
    {"compile", "speculative", "structured", "parsers"},
    {"engine"},
    {"server", "llm", "bench"},
    {"cli", "__main__"},
)
"""Each layer imports only from those before it; packages of one layer never from each other."""

LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}

HEAVY_IMPORTS = {
    "tokenspeed/loader/gguf.py": "gguf",
    "tokenspeed/text/hub.py": "huggingface_hub",
    "tokenspeed/text/slow_tokenizer.py": "transformers",
}
"""File -> the heavy optional library that it may import inside a function."""

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def all_files() -> list[Path]:
    folders = ("tokenspeed", "tests", "examples", "benchmarks")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def room_of(path: Path) -> str:
    """The package or module of tokenspeed that a file belongs to; "" is tokenspeed itself."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Every absolute module name that is imported, `from a import b` as a and as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield node.module or "", node
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node


def upward_edges(path: Path, tree: ast.AST) -> list[str]:
    """Imports of `path` that the layers do not allow."""
    room, found = room_of(path), []
    for module, node in imported_modules(tree):
        parts = module.split(".")
        if parts[0] != "tokenspeed" or len(parts) < 2 or parts[1] not in LAYER_OF:
            continue
        here, there = LAYER_OF[room], LAYER_OF[parts[1]]
        is_sibling = here == there and room != parts[1]
        # The modules of the lowest layer are single files that build on each other; __main__ is
        # the command line's other name.
        if there > here or (is_sibling and here not in (0, len(LAYERS) - 1)):
            found.append(f"line {node.lineno}: {room} imports {module}")
    return found


@pytest.mark.parametrize("path", source_files(), ids=name_of)
def test_imports_go_downward(path: Path) -> None:
    if room_of(path):
        assert not upward_edges(path, tree_of(path))


def test_every_room_has_a_layer() -> None:
    rooms = {room_of(path) for path in source_files()} - {""}
    assert rooms <= LAYER_OF.keys()


@pytest.mark.parametrize(
    ("room", "line", "is_allowed"),
    [
        ("engine/engine.py", "from tokenspeed.kv.manager import KVManager", True),
        ("engine/engine.py", "import tokenspeed.server.app", False),
        ("models/llama.py", "from tokenspeed.loader import weights", False),
        ("models/llama.py", "from tokenspeed import loader", False),
        ("models/llama.py", "from tokenspeed.models import layers", True),
        ("kernels/attend.py", "from tokenspeed.kv.pool import PagePool", False),
        ("config.py", "from tokenspeed.options import option", True),
        ("config.py", "from tokenspeed.llm import LLM", False),
    ],
)
def test_upward_edges_are_found(room: str, line: str, is_allowed: bool) -> None:
    assert (not upward_edges(PACKAGE / room, ast.parse(line))) == is_allowed


@pytest.mark.parametrize("path", source_files(), ids=name_of)
def test_imports_stand_at_the_top(path: Path) -> None:
    found = []
    for function in ast.walk(tree_of(path)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for module, node in imported_modules(function):
                if module.split(".")[0] != HEAVY_IMPORTS.get(name_of(path)):
                    found.append(f"line {node.lineno}: {module}")
    assert not found, "imports inside functions hide what a file needs"


@pytest.mark.parametrize("path", all_files(), ids=name_of)
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", source_files(), ids=name_of)
def test_functions_stay_small(path: Path) -> None:
    found = [
        f"{node.name}: {length} lines"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not found


def test_no_room_for_odds_and_ends() -> None:
    paths = [path for path in all_files() if path.stem in FORBIDDEN_NAMES]
    folders = [
        path for path in PACKAGE.rglob("*") if path.is_dir() and path.name in FORBIDDEN_NAMES
    ]
    assert not paths + folders


def unsafe_things(tree: ast.AST) -> list[str]:
    """Ways to run code that came as data, and the switch that lets a model repository do so."""
    found = [
        f"line {node.lineno}: {module}"
        for module, node in imported_modules(tree)
        if module.split(".")[0] in FORBIDDEN_MODULES or module == "torch.load"
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "builtins.eval", "builtins.exec", "torch.load"):
                found.append(f"line {node.lineno}: {called}()")
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                found.append(f"line {node.value.lineno}: {node.arg}={ast.unparse(node.value)}")
        if isinstance(node, ast.Constant) and node.value == "trust_remote_code":
            found.append(f"line {node.lineno}: the word trust_remote_code as data")
    return found


@pytest.mark.parametrize("path", source_files(), ids=name_of)
def test_data_never_becomes_code(path: Path) -> None:
    assert not unsafe_things(tree_of(path))


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path, weights_only=True)",
        "from torch import load",
        "eval(text)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "f(trust_remote_code=flag)",
        "f(**{'trust_remote_code': True})",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_unsafe_things_are_found(line: str) -> None:
    assert unsafe_things(ast.parse(line))


def test_safe_things_are_let_pass() -> None:
    assert not unsafe_things(ast.parse("model.eval(); f(trust_remote_code=False); json.load(file)"))
