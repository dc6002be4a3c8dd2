"""What a fresh process loads, and that the package says the same of itself everywhere."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tokenspeed
from tokenspeed.config import GROUPS, OPTIONS
from tokenspeed.options import options_of

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "triton", "transformers")
LIGHT_MODULES = (
    "tokenspeed",
    "tokenspeed.cli.main",
    "tokenspeed.bench.serve",
    "tokenspeed.cli.serve",
    "tokenspeed.cli.batch",
    "tokenspeed.cli.bench",
    "tokenspeed.cli.bench_offline",
    "tokenspeed.cli.cache",
    "tokenspeed.cli.explain",
    "tokenspeed.cli.warmup",
    "tokenspeed.server.app",
    "tokenspeed.server.serve",
    "tokenspeed.server.run",
    "tokenspeed.server.process",
    "tokenspeed.server.sibling",
    "tokenspeed.engine.cache_upkeep",
    "tokenspeed.engine.client",
    "tokenspeed.text.source",
)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_front_processes_load_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = run(sys.executable, "-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["serve", "--help=compat"]])
def test_help_works_and_loads_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys; from tokenspeed.cli.main import main; status = main(sys.argv[1:]); "
        f"sys.exit(status or any(name in sys.modules for name in {HEAVY}))"
    )
    done = run(sys.executable, "-c", code, *words)
    assert done.returncode == 0, done.stderr
    assert "tokenspeed" in done.stdout.lower()


@pytest.mark.parametrize("action", ["ls", "prune --all", "verify"])
def test_what_a_cache_holds_is_told_without_torch(action: str, tmp_path: Path) -> None:
    code = (
        "import sys; from tokenspeed.cli.main import main; status = main(sys.argv[1:]); "
        f"sys.exit(status or any(name in sys.modules for name in {HEAVY}))"
    )
    done = run(sys.executable, "-c", code, "cache", *action.split(), "--cache-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_module_and_command_are_the_same() -> None:
    by_module = run(sys.executable, "-m", "tokenspeed", "version")
    by_command = run(str(Path(sys.executable).with_name("tokenspeed")), "version")
    assert by_module.stdout == by_command.stdout == f"TokenSpeed v{tokenspeed.__version__}\n"


def test_versions_and_requirements_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == tokenspeed.__version__
    makefile = (ROOT / "Makefile").read_text()
    torch = next(each for each in project["dependencies"] if each.startswith("torch"))
    assert f"TORCH := {torch}\n" in makefile


CLASSES = {settings.__name__: group for group, settings in GROUPS.items()}


def groups_by_name(tree: ast.AST) -> dict[str, set[str]]:
    """Variables of a file that hold a group of settings: parameters declared so, and names that
    `config.group` was assigned to.
    """
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.arg) and node.annotation is not None:
            group = CLASSES.get(ast.unparse(node.annotation))
            found.setdefault(node.arg, set()).update({group} if group else ())
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            else:
                pairs = [(target, value)]
        for target, value in pairs:
            if isinstance(value, ast.Attribute) and value.attr in GROUPS:
                found.setdefault(ast.unparse(target), set()).add(value.attr)
    return found


def options_read(tree: ast.AST) -> set[str]:
    """Options that a file reads from their own group, as in `config.server.port`."""
    holders, found = groups_by_name(tree), set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        groups = set(holders.get(ast.unparse(node.value), ()))
        if isinstance(node.value, ast.Attribute):
            groups.add(node.value.attr)
        if any(node.attr in OPTIONS_OF.get(group, ()) for group in groups):
            found.add(node.attr)
    return found


OPTIONS_OF = {
    group: {each.name for each in options_of(settings)} for group, settings in GROUPS.items()
}


def test_no_option_is_ignored() -> None:
    """Somewhere behind the command line, every option is read."""
    package = ROOT / "tokenspeed"
    files = [path for path in package.rglob("*.py") if path.parent.name != "cli"]
    read = set().union(*(options_read(ast.parse(path.read_text())) for path in files))
    assert OPTIONS.keys() - read == set()


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("f(config.server.port)", {"port"}),
        ("limits, other = self.config.scheduler, 1\nf(limits.max_num_seqs)", {"max_num_seqs"}),
        ("def f(cache: CacheConfig): return cache.block_size", {"block_size"}),
        ("f(url.port, pool.block_size)", set()),
        ("f(config.model.port)", set()),
        ("config.server.port = 1", set()),
    ],
)
def test_reads_of_options_are_told_apart(code: str, read: set[str]) -> None:
    assert options_read(ast.parse(code)) == read


def test_scripts_name_something_that_exists() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.keys() == {"tokenspeed", "ts"}
    for target in scripts.values():
        assert importlib.util.find_spec(target.partition(":")[0])
