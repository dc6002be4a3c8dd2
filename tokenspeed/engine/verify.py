"""`tokenspeed explain --verify`: is what passes and compiler made of a model the same model?

Random ids go through the weights in one step, and each piece computes its part with and without
each pass on the same activations (`compile.replay`). What departs by more than rounding is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from tokenspeed.batch import forward_context
from tokenspeed.compile.entry import Damaged, Entry
from tokenspeed.compile.key import Target
from tokenspeed.compile.lower import token_argument
from tokenspeed.compile.matcher import pass_manager
from tokenspeed.compile.pipeline import Planned, plan_graphs
from tokenspeed.compile.plan import Program
from tokenspeed.compile.ranges import range_name
from tokenspeed.compile.replay import (
    TOLERANCES,
    Deviation,
    Replay,
    Stages,
    error_of,
    token_counts,
    worst,
)
from tokenspeed.compile.runner import Executable
from tokenspeed.compile.warm import load_program
from tokenspeed.config import Config
from tokenspeed.engine.block_weights import settle_layout
from tokenspeed.engine.explain import entry_of
from tokenspeed.engine.explain_text import table
from tokenspeed.engine.model import ServedModel, resolve_served
from tokenspeed.engine.program import target_of
from tokenspeed.engine.quarantine import disable_passes
from tokenspeed.engine.warmup import CompileError
from tokenspeed.kernels.attend import PrologueFirst, reference
from tokenspeed.loader import empty_model, load_weights
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.passes import PASS_NAMES, Stage
from tokenspeed.passes.manager import PassManager
from tokenspeed.passes.rewrite import EVERY, TokenRange
from tokenspeed.text.errors import ModelError


def verify(config: Config, *, as_json: bool, quarantine: bool, settings_file: str | None) -> int:
    """Print how far each pass moves each piece; 1 if one is at fault, or if nothing can be run.
    `quarantine`: disable what is at fault in `settings_file`, or say how. Raises ConfigError for
    settings that cannot be taken.
    """
    try:
        entry = entry_of(config)
        model = settle_layout(resolve_served(config), config)
        found = deviations(model, config, target_of(model, config), entry)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    except (CompileError, Damaged, OSError) as error:
        logger.error("%s", error)
        return 1
    wrong = [each for each in worst(found) if each.is_wrong]
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        print(_text(found, wrong))
    if quarantine:
        _quarantine(wrong, settings_file)
    return 1 if wrong else 0


def deviations(
    model: ServedModel, config: Config, target: Target, entry: Entry | None
) -> list[Deviation]:
    """Every pass in every call of every piece; with an entry, its compiled pieces as well."""
    logger.info("replaying a step of %s", model.source.name)
    module = empty_model(model.make, model.dtype, model.device)
    load_weights(
        module,
        model.family.weights,
        model.source,
        load_format=config.model.load_format,
        seed=config.model.seed,
    )
    whole = _managers(Stage.GRAPH, target, EVERY)
    planned = plan_graphs(model.make, dtype=model.dtype, device=model.device, graph_pass=whole)
    stages = {
        key: {
            range_name(each): Stages(piece, _managers(Stage.PIECE, target, each))
            for each in (target.ranges if token_argument(piece) else (EVERY,))
        }
        for key, piece in planned.pieces.items()
    }
    compiled = load_program(entry).pieces if entry is not None else {}
    replay = Replay(planned.plan, stages, compiled, model.dtype)
    pieces = {key: replay.wrapped(key, each.forward) for key, each in planned.pieces.items()}
    step = _Step(model, module, config.model.seed)
    plain = None
    if rules := [report.name for report in whole.reports if report.off is None]:
        plain = plan_graphs(model.make, dtype=model.dtype, device=model.device)
    for token_range in target.ranges:
        for num_tokens in token_counts(token_range):
            replay.restart(range_name(token_range), num_tokens)
            attended = step.run(Program(planned.plan, pieces), num_tokens)
            if plain is not None:
                without = step.run(_eager(plain), num_tokens)
                replay.found += _moved(rules[0], num_tokens, attended, without, model.dtype)
    return replay.found


def _managers(stage: Stage, target: Target, token_range: TokenRange) -> PassManager:
    return pass_manager(
        stage,
        dtype=target.dtype,
        device=target.device.type,
        token_range=token_range,
        fuses_prologue=target.fuses_prologue,
        disabled=target.disabled_passes,
    )


def _eager(planned: Planned) -> Program:
    return Program(planned.plan, {key: each.forward for key, each in planned.pieces.items()})


_Attended = list[tuple[Tensor, Tensor, Tensor]]
"""Queries, keys and values of each layer, as attention takes them."""


def _moved(
    rule: str, num_tokens: int, attended: _Attended, without: _Attended, dtype: torch.dtype
) -> list[Deviation]:
    """What the pass over whole functions made of each layer's queries, keys and values."""
    return [
        Deviation(rule, "attend", "all", num_tokens, layer, error_of(*pair), TOLERANCES[dtype])
        for layer, pair in enumerate(zip(attended, without, strict=True))
    ]


class _Step:
    """Runs programs on a model's weights: random ids as one whole sequence."""

    def __init__(self, model: ServedModel, module: nn.Module, seed: int) -> None:
        self._model = model
        self._module = module
        self._seed = seed

    def run(self, program: Program, num_tokens: int) -> _Attended:
        """What attention took, layer by layer."""
        executable = Executable(program, self._module)
        random = torch.Generator().manual_seed(self._seed)
        ids = torch.randint(self._model.config.vocab_size, (num_tokens,), generator=random)
        positions = torch.arange(num_tokens, device=self._model.device)
        specs = self._model.family.cache_specs(self._model.config)
        sequence = _OneSequence([spec.scale for spec in specs])
        with forward_context(sequence):
            x = executable.embed(ids.to(self._model.device))
            executable.head(executable.forward(x, positions))
        return sequence.attended


class _OneSequence(PrologueFirst):
    """Attends a step as one sequence, in plain torch. (Sinks are left out: these are activations to
    measure with.)
    """

    def __init__(self, scales: Sequence[float]) -> None:
        self.attended: _Attended = []
        self._scales = scales

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        self.attended.append((q, k, v))
        return reference(q, k, v, self._scales[layer])


def _text(found: Sequence[Deviation], wrong: Sequence[Deviation]) -> str:
    rows = [
        [
            *(each.rule, each.piece, each.token_range, f"{each.error:.1e}"),
            *(f"{each.tolerance:.0e}", f"{each.layer}, {each.tokens} tokens"),
            "WRONG" if each.is_wrong else "",
        ]
        for each in worst(found)
    ]
    head = ["PASS", "PIECE", "RANGE", "ERROR", "TOLERANCE", "WORST IN LAYER", ""]
    lines = table(head, rows)
    for each in wrong:
        calls = [one for one in found if (one.rule, one.piece) == (each.rule, each.piece)]
        first = next(one for one in calls if one.is_wrong)
        lines.append(
            f"at fault: {each.rule} in {each.piece}, first in layer {first.layer}: off by "
            f"{first.error:.1e}, where {first.tolerance:.0e} is rounding"
        )
    return "\n".join(lines if wrong else [*lines, "all passes compute what the model says"])


def _quarantine(wrong: Sequence[Deviation], settings_file: str | None) -> None:
    names = [name for name in dict.fromkeys(each.rule for each in wrong) if name in PASS_NAMES]
    if len(names) < len({each.rule for each in wrong}):
        logger.warning(
            "what the compiler itself made is wrong: no pass to leave out; -O0 runs none"
        )
    if not names:
        return
    if settings_file is None:
        print(f"--disable-pass {' '.join(names)}")
    else:
        disable_passes(Path(settings_file), names)
        logger.info("%s: disable-pass has %s now", settings_file, ", ".join(names))
