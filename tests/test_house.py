"""What a fresh process loads, and that the package says the same of itself everywhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tokenspeed
from tokenspeed.config import OPTIONS

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "triton", "transformers")
LIGHT_MODULES = (
    "tokenspeed",
    "tokenspeed.cli.main",
    "tokenspeed.cli.serve",
    "tokenspeed.cli.batch",
    "tokenspeed.cli.cache",
    "tokenspeed.cli.warmup",
    "tokenspeed.server.app",
    "tokenspeed.server.serve",
    "tokenspeed.server.run",
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


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_no_option_is_ignored(name: str) -> None:
    """Somewhere behind the command line, every option is read."""
    package = ROOT / "tokenspeed"
    readers = [
        path
        for path in package.rglob("*.py")
        if path.parent.name != "cli" and re.search(rf"\.{name}\b", path.read_text())
    ]
    assert readers, f"nothing reads {name}"


def test_scripts_name_something_that_exists() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.keys() == {"tokenspeed", "ts"}
    for target in scripts.values():
        assert importlib.util.find_spec(target.partition(":")[0])


def test_documents_link_to_files_that_exist() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"
