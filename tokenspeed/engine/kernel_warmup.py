"""Before a server is ready: one launch of every kernel variant that its steps may take.

Triton compiles a kernel (or loads it from its cache) when it is first launched with arguments of
new kinds. Which variant a step takes hangs on its token count, on whether its rows are decodes,
chunks or both, and on whether the host knows their pages. All stand in the scratch slot here, so
nothing of the engine's state changes. Layers repeat, so most steps run the first few alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenspeed.batch import forward_context
from tokenspeed.compile.runner import Executable, PlanStep, run_steps
from tokenspeed.engine.pinned import send
from tokenspeed.engine.prefill_graphs import device_step
from tokenspeed.engine.slots import Slots
from tokenspeed.kernels.attention_flashinfer import MIN_TOKENS
from tokenspeed.kernels.attention_step import AttentionStep
from tokenspeed.kernels.device_step import DeviceAttention
from tokenspeed.kernels.linear_tiles import token_limits

_COUNTS = (1, 2, 16, 17, 32, 33, 64, 65, 128, 129)
"""Token counts around which kernels that serve any shape change theirs."""


@torch.inference_mode()
def warm_up_kernels(
    executable: Executable,
    attention: DeviceAttention,
    slots: Slots,
    *,
    max_rows: int,
    token_budget: int,
    num_kinds: int,
) -> None:
    """Launch them for steps of up to `max_rows` rows and `token_budget` tokens. The first
    `num_kinds` layers have every kind of attention.
    """
    first = _first_steps(executable, num_kinds)
    for rows in ([1], [min(_COUNTS[-1], token_budget, slots.max_len)]):  # of both token ranges
        _run(executable, attention, slots, rows, 0, executable.layers.steps)
    limits = {count for limit in token_limits() for count in (limit, limit + 1)}
    counts = sorted({*_COUNTS, *limits})
    for rows, num_decodes in _steps(counts, max_rows, token_budget, slots.max_len):
        _run(executable, attention, slots, rows, num_decodes, first)
    hidden = executable.embed(torch.zeros(max_rows, dtype=torch.int64, device=slots.device))
    for count in (count for count in counts if count <= max_rows):
        executable.head(hidden[:count])


def _first_steps(executable: Executable, num_kinds: int) -> list[PlanStep]:
    """The first steps, as many as have every piece and `num_kinds` sequence calls."""
    steps = executable.layers.steps
    missing, num_calls = {step.run for step in steps if not step.is_call}, 0
    for count, step in enumerate(steps, 1):
        missing.discard(step.run)
        num_calls += step.is_call
        if not missing and num_calls >= num_kinds:
            return steps[:count]
    return steps


def _steps(
    counts: list[int], max_rows: int, token_budget: int, max_len: int
) -> Iterator[tuple[list[int], int]]:
    """Query tokens by row, and how many of the first rows are decodes."""
    for count in counts:
        if count <= min(token_budget, max_len):
            yield [count], 0
        if count <= max_rows:
            yield [1] * count, count
        if count < min(max_rows, token_budget):
            yield [1] * count + [min(MIN_TOKENS, token_budget - count, max_len)], count


def _run(
    executable: Executable,
    attention: DeviceAttention,
    slots: Slots,
    rows: list[int],
    num_decodes: int,
    steps: list[PlanStep],
) -> None:
    """Run a step as the device alone knows it, and with what the host may know. All `steps` are
    followed by the last pieces, for the last token of each row.
    """
    layers = executable.layers
    numbers = [(slots.scratch, count, 0, False) for count in rows]
    total = sum(rows)
    query = slots.query(send(numbers, slots.device), total)
    chunks = rows[num_decodes:]
    plans: list[tuple[int, AttentionStep | None]] = [(slots.max_len, None)]
    if num_decodes:
        plans.append((total, None))  # contexts that are not divided
    if sum(chunks) >= MIN_TOKENS:
        plans.append((slots.max_len, _host_step(chunks, slots)))
    for max_context_len, host in plans:
        step = device_step(query, len(rows), total, max_context_len, num_decodes, host)
        attention.plan_device(step)
        values = layers.begin(executable.embed(query.ids), query.positions)
        with forward_context(attention):
            run_steps(steps, values)
            if steps is layers.steps:
                layers.finish(values, query.ends - 1)


def _host_step(chunks: list[int], slots: Slots) -> AttentionStep:
    starts = [0]
    for count in chunks:
        starts.append(starts[-1] + count)
    scratch = [table[slots.scratch] for table in slots.tables]
    return AttentionStep(starts, chunks, [[table] * len(chunks) for table in scratch])
