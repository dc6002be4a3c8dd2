"""The key of a cache entry: facts, and a digest of them.

Facts of the environment are an allow-list, so that paths, hosts, ports, memory, pool sizes, seeds
and log levels cannot get in. Of the model's config everything is in, less a short list of fields
that reach no graph: a false miss costs seconds, a false hit a wrong answer. Sources are facts file
by file, so that a miss can name the one that was edited.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tokenspeed.compile.facts import FORMAT, Facts
from tokenspeed.compile.installation import (
    cpu_instructions,
    digest_of_file,
    installation,
    package_sources,
)
from tokenspeed.compile.ranges import range_name
from tokenspeed.passes import PIPELINE
from tokenspeed.passes.rewrite import TokenRange
from tokenspeed.spans import span

INERT_FIELDS = frozenset({"max_model_len"})
"""Fields of a model's config that no graph depends on."""

_LAYER = re.compile(r"layers\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is to be compiled, and for what. `config` is the dataclass that `model` is made from."""

    model: Callable[..., Any]
    config: Any
    dtype: torch.dtype
    device: torch.device
    ranges: Sequence[TokenRange]
    fuses_prologue: bool = False
    """Whether the attention backend in use does RoPE and head norms itself."""
    disabled_passes: Sequence[str] = ()
    strict_passes: bool = False
    layout: Mapping[str, str] = field(default_factory=dict)
    """Modules whose weight is kept in blocks: path -> format."""
    changed_by: Sequence[Callable[..., Any]] = ()
    """Functions that change what `model` makes."""


@span("compile.key")
def facts_of(target: Target) -> Facts:
    """Every fact that decides what is compiled."""
    return {
        "format": FORMAT,
        "model": _model_facts(target.config),
        "layout": _layout_facts(target.layout),
        "sources": {name: digest_of_file(path) for name, path in sorted(_sources(target))},
        "compile": {
            "model": _name_of(target.model),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": target.device.type,
            "fuses_prologue": target.fuses_prologue,
            "strict_passes": target.strict_passes,
            "passes": {range_name(each): _pass_facts(target, each) for each in target.ranges},
        },
        **surroundings(target.device.type),
    }


def surroundings(device: str) -> Facts:
    """The facts of this installation and of this machine's `device`, whatever the model."""
    return {
        **installation(),
        "machine": machine_facts(device),
    }


def machine_facts(device: str) -> Facts:
    """The facts of this machine's `device`; none of a GPU that is not there."""
    if device != "cuda":
        return _cpu_facts()
    return _cuda_facts() if torch.cuda.is_available() else {}


def _model_facts(config: Any) -> Facts:
    plain = {k: v for k, v in dataclasses.asdict(config).items() if k not in INERT_FIELDS}
    facts: Facts = json.loads(json.dumps(plain))  # tuples become lists, as in a file that is read
    return facts


def _name_of(model: Callable[..., Any]) -> str:
    """Which class of its file it is."""
    return getattr(model, "__qualname__", "")


def _pass_facts(target: Target, token_range: TokenRange) -> Facts:
    """Each pass: on, or why it is off."""
    device, disabled = target.device.type, target.disabled_passes
    return {
        f"{i:02} {row.name}": row.why_off(device, token_range, target.fuses_prologue, disabled)
        or "on"
        for i, row in enumerate(PIPELINE)
    }


def _layout_facts(layout: Mapping[str, str]) -> Facts:
    """The formats of a path's layers, equal neighbours in one: "0-3 Q6_K, 4-29 Q4_K"."""
    runs: dict[str, list[tuple[int, int, str]]] = {}
    for number, path in sorted((_layer_of(path), path) for path in layout):
        known = runs.setdefault(_LAYER.sub("layers.*", path), [])
        first = known.pop()[0] if known and known[-1][1:] == (number - 1, layout[path]) else number
        known.append((first, number, layout[path]))
    return {
        pattern: ", ".join(f"{first}-{last} {format}" for first, last, format in known)
        for pattern, known in runs.items()
    }


def _layer_of(path: str) -> int:
    found = _LAYER.match(path)
    return int(found[1]) if found else 0


def _sources(target: Target) -> Iterator[tuple[str, Path]]:
    """The model's file, those of its package that it is made of, and whole packages."""
    yield from package_sources()
    for made_by in (target.model, *target.changed_by):
        for module in _modules_of(sys.modules[made_by.__module__]):
            path = Path(module.__file__ or "")
            yield f"{path.parent.name}/{path.name}", path


def _modules_of(first: ModuleType) -> list[ModuleType]:
    """A module and those beside it that it takes anything from, directly or through others."""
    package = first.__name__.rpartition(".")[0]
    found = {first.__name__: first}
    waiting = [first]
    while waiting:
        module = waiting.pop()
        for name in (*_modules_of_values(module), *_imported(module)):
            if package and name.startswith(f"{package}.") and name not in found:
                found[name] = sys.modules[name]
                waiting.append(found[name])
    return list(found.values())


def _modules_of_values(module: ModuleType) -> Iterator[str]:
    """Where the module's values come from, also through a module between; numbers do not say."""
    for alias, value in vars(module).items():
        if alias.startswith("__"):  # Dynamo puts modules of what it traced there
            continue
        name = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
        if isinstance(name, str):
            yield name


def _imported(module: ModuleType) -> Iterator[str]:
    """The modules that a module's source names."""
    for node in ast.walk(ast.parse(Path(module.__file__ or "").read_text())):
        if isinstance(node, ast.ImportFrom):
            parents = module.__name__.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name in sys.modules)


def _cuda_facts() -> Facts:
    major, minor = torch.cuda.get_device_capability()
    return {"gpu": torch.cuda.get_device_name(), "capability": f"{major}.{minor}"}


def _cpu_facts() -> Facts:
    """Objects are compiled for exactly this CPU's instructions, and loops for this many threads."""
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": cpu_instructions(),
        "threads": torch.get_num_threads(),
    }
