"""The house rules that a parser can check: layers, imports, sizes, and what must never appear."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tokenspeed"
MAX_LINES = 350
MAX_FUNCTION_LINES = 50

LAYERS = (
    {
        *("batch", "constraint", "request", "timeline", "options", "config", "server_config"),
        *("draft", "resolve", "log", "ledger", "outputs", "spans", "prompts", "progress"),
        *("wording", "peers", "keywords", "output_file", "machine_facts", "attention_backends"),
    },
    {"kernels", "kv", "text"},
    {"passes", "models", "loader"},
    {"compile", "structured", "parsers"},
    {"engine"},
    {"server", "llm"},
    {"bench"},
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

NAMED_MODULES: dict[str, set[str]] = {
    "tokenspeed/__init__.py": {"llm", "request"},
    "tokenspeed/cli/batch.py": {"server.batch"},
    "tokenspeed/cli/bench.py": {"cli.bench_serve", "cli.bench_offline", "cli.bench_startup"},
    "tokenspeed/cli/bench_offline.py": {"bench.offline"},
    "tokenspeed/cli/bench_serve.py": {"bench.serve"},
    "tokenspeed/cli/bench_startup.py": {"bench.command"},
    "tokenspeed/cli/cache.py": {"engine.cache_commands", "engine.cache_upkeep"},
    "tokenspeed/cli/main.py": {
        *("cli.serve", "cli.batch", "cli.warmup", "cli.cache", "cli.bench", "cli.env"),
        *("cli.explain", "cli.version"),
    },
    "tokenspeed/cli/explain.py": {"engine.explain", "engine.verify"},
    "tokenspeed/cli/print_config.py": {"engine.settled", "server.checks"},
    "tokenspeed/cli/serve.py": {"server.serve"},
    "tokenspeed/cli/warmup.py": {"engine.warmup"},
    "tokenspeed/engine/attention_makers.py": {"kernels.flashinfer_prefill"},
    "tokenspeed/engine/client.py": {"engine.process"},
    "tokenspeed/engine/compile_job.py": {"engine.compile_process"},
    "tokenspeed/engine/rehearsal.py": {"engine.rehearsal_process"},
    "tokenspeed/engine/process.py": {"engine.serving"},
    "tokenspeed/engine/program.py": {"compile.pipeline"},
    "tokenspeed/compile/warm.py": {"compile.artifacts"},
    "tokenspeed/server/process.py": {"server.sibling"},
    "tokenspeed/server/serve.py": {"server.run", "server.checks"},
    "tokenspeed/server/siblings.py": {"server.process"},
    "tokenspeed/structured/host.py": {"structured.zygote"},
}
"""File -> modules that it names as strings: imported when they must be, or run as programs."""

PRIVATE_TORCH = {
    "tokenspeed/compile/inductor_api.py",
    "tokenspeed/compile/matcher.py",
    "tokenspeed/compile/torch_api.py",
    "tokenspeed/passes/torch_api.py",
}
"""Where torch's private interfaces may be used, so that a new torch is looked at there alone."""

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
    assert rooms == LAYER_OF.keys()


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


def named_modules(tree: ast.AST) -> set[str]:
    """Modules of ours that stand in strings, without `tokenspeed.`"""
    strings = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    found = (re.fullmatch(r"tokenspeed((?:\.\w+)+)", text) for text in strings)
    return {match[1].removeprefix(".") for match in found if match}


def test_modules_named_as_strings_stand_in_the_table() -> None:
    found = {name_of(path): named_modules(tree_of(path)) for path in source_files()}
    assert {name: modules for name, modules in found.items() if modules} == NAMED_MODULES


@pytest.mark.parametrize("name", NAMED_MODULES)
def test_modules_named_as_strings_exist_and_lie_downward(name: str) -> None:
    for module in NAMED_MODULES[name]:
        assert (PACKAGE / f"{module.replace('.', '/')}.py").exists()
        imported = ast.parse(f"import tokenspeed.{module}")
        assert room_of(ROOT / name) == "" or not upward_edges(ROOT / name, imported)


def private_torch(tree: ast.AST) -> list[str]:
    """Uses of what torch calls private, or experimental. (An operator's name is its schema's.)"""
    names = [(module, node.lineno) for module, node in imported_modules(tree)]
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    names += [(ast.unparse(node), node.lineno) for node in attributes]
    return [f"line {line}: {name}" for name, line in names if _PRIVATE_TORCH.match(name)]


_PRIVATE_TORCH = re.compile(r"torch\.(?!ops\.)(\w+\.)*(_(?!_)|experimental\b)")


@pytest.mark.parametrize("path", source_files(), ids=name_of)
def test_private_torch_is_used_in_few_places(path: Path) -> None:
    assert name_of(path) in PRIVATE_TORCH or not private_torch(tree_of(path))


@pytest.mark.parametrize(
    ("line", "is_private"),
    [
        ("from torch._inductor import config", True),
        ("from torch import _C", True),
        ("from torch.fx.experimental.symbolic_shapes import ShapeEnv", True),
        ("import torch.fx.experimental", True),
        ("f(torch._ops.OpOverload)", True),
        ("f(torch.__version__, torch.ops.mkldnn._linear_pointwise, self.torch._x)", False),
    ],
)
def test_private_torch_is_found(line: str, is_private: bool) -> None:
    assert bool(private_torch(ast.parse(line))) == is_private


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
