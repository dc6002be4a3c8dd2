"""`--print-config`: settings as a settings file, with where each comes from or why it is so. Those
that nobody set and nothing settled are left out, unless all are asked for.

What settings leave open is settled by the engine's own function, on this machine and for the model;
the engine is imported for it, and a machine on which it cannot be still prints what was given.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

from tokenspeed.cli.settings import Resolved
from tokenspeed.draft import Resolution
from tokenspeed.options import ConfigError, Option, options_of
from tokenspeed.resolve import levels

_SETTLER = "tokenspeed.engine.settled"
_CHECKS = "tokenspeed.server.checks"


def print_settled(resolved: Resolved, *, with_text: bool = False) -> None:
    """Print the settings of a start. Raises ConfigError for what it could not have here; with
    `with_text` it reads tokenizer and chat template, and files of a server, as well.
    """
    shows_all, resolution = _shows_all(resolved), None
    try:
        settler = importlib.import_module(_SETTLER)
    except (ImportError, OSError) as error:  # OSError: a broken CUDA library
        problem = f"the engine cannot be imported: {type(error).__name__}: {error}"
    else:
        resolution, problem = settler.settled(resolved.config)
    if with_text:
        checks = importlib.import_module(_CHECKS)
        checks.check_start(resolved.config, has_model=problem is None)
    print("\n".join(listing(resolved, resolution, problem, shows_all)))


def print_given(resolved: Resolved) -> None:
    """Print the settings of a command that starts nothing."""
    print("\n".join(listing(resolved, None, None, _shows_all(resolved))))


def _shows_all(resolved: Resolved) -> bool:
    words = resolved.own["--print-config"]
    if words not in ((), ("all",)):
        raise ConfigError(f"--print-config stands alone or is --print-config=all, got {words[0]!r}")
    return bool(words)


def listing(
    resolved: Resolved, resolution: Resolution | None, problem: str | None, shows_all: bool
) -> Iterator[str]:
    """The lines. `problem`: why some of it is open. Secrets are left out."""
    notes = [*resolved.notes, *(resolution.notes if resolution else ())]
    yield from (f"# {note}" for note in notes)
    if problem is not None:
        yield f"# what hangs on the model stays open: {problem}"
    config = resolution.config if resolution else resolved.config
    reasons = resolution.reasons if resolution else {}
    known, num_left_out = {**resolved.sources, **reasons}, 0
    for group, settings in vars(config).items():
        options = options_of(type(settings))
        shown = [each for each in options if shows_all or each.name in known]
        num_left_out += len(options) - len(shown)
        yield from (f"# {group}" for _ in shown[:1])
        for option in shown:
            why = known.get(option.name, "default")
            yield _line(option, getattr(settings, option.name), why)
    if num_left_out:
        yield f"# {num_left_out} more are what they are by default: --print-config=all"
    if resolution is not None:
        yield from _levels(resolution)


def _line(option: Option, value: Any, why: str) -> str:
    if option.secret and value:
        count = len(value) if option.is_list else 1
        return f"# {option.name}: {count} not shown  # {why}"
    shown = json.dumps(list(value) if option.is_list else value)
    return f"{option.name}: {shown}  # {why}"


def _levels(resolution: Resolution) -> Iterator[str]:
    config = resolution.config
    yield "# what each level does and costs"
    backend = config.compile.attention_backend
    for level, what, problem in levels(config.model.device, backend):
        taken = " (this start)" if level == config.compile.level else ""
        yield f"#   -O{level}{taken}: {what}"
        if problem is not None:
            yield f"#        not here: {problem}"
