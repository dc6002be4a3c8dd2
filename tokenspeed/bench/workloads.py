"""Offline workloads and their definitions, for any engine that can say how long prompts took.

Prompts are token ids, no two alike; sampling is greedy, the end of sequence ignored, no prefix
reused. After a run that is not counted, `num_iters` runs, and their median:

    decode B     B prompts: (time for n + 1 tokens - time for 1) / n, in ms a step
    ttft L       one prompt of L tokens: time for one token, in ms
    throughput   prompts at once: prompt tokens/s where one token is asked for, else output tokens/s

An engine is a function of prompts and a number of tokens: seconds from giving it all of them until
it has generated that many for each.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

Seconds = Callable[[list[list[int]], int], float]
HostTime = Callable[[], float]
"""Seconds that the engine's thread has spent on steps so far, without waiting."""

DECODE_MS, TTFT_MS = "ms a step", "ms"
INPUT_SPEED, OUTPUT_SPEED = "prompt tokens/s", "output tokens/s"
_WARM_UP_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One figure: `num_prompts` of `input_len` tokens; `output_len` tokens are asked for each."""

    name: str
    unit: str
    num_prompts: int
    input_len: int
    output_len: int

    @property
    def is_speed(self) -> bool:
        """Whether more is better."""
        return self.unit in (INPUT_SPEED, OUTPUT_SPEED)

    @property
    def total_len(self) -> int:
        """Tokens that a sequence comes to."""
        return self.input_len + self.output_len

    def measure(self, seconds: Seconds, vocab_size: int) -> float:
        """One run, in `unit`."""
        ids = prompts(self.num_prompts, self.input_len, vocab_size)
        counts = (self.output_len, 1) if self.unit == DECODE_MS else (self.output_len,)
        return self.figure([seconds(ids, count) for count in counts])

    def figure(self, times: Sequence[float]) -> float:
        """What the calls' seconds come to, in `unit`."""
        if self.unit == TTFT_MS:
            return 1e3 * times[0]
        if self.unit == DECODE_MS:
            return 1e3 * (times[0] - times[1]) / (self.output_len - 1)
        counted = self.input_len if self.unit == INPUT_SPEED else self.output_len
        return self.num_prompts * counted / times[0]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a workload came to: the median, and every run. `host_ms`: the host's part of the
    median where that is a time: what its thread does, without waiting. None where nobody says.
    """

    name: str
    unit: str
    num_prompts: int
    input_len: int
    output_len: int
    median: float
    runs: list[float]
    host_ms: float | None = None


def latency_workloads(
    batch_sizes: Iterable[int] = (1, 8, 64, 256),
    input_len: int = 128,
    steps: int = 128,
    ttft_lens: Iterable[int] = (128, 8192),
) -> list[Workload]:
    """Steps at each batch size, and times to the first token."""
    decode = [
        Workload(
            name=f"decode{size}",
            unit=DECODE_MS,
            num_prompts=size,
            input_len=input_len,
            output_len=steps + 1,
        )
        for size in batch_sizes
    ]
    return decode + [
        Workload(name=f"ttft{length}", unit=TTFT_MS, num_prompts=1, input_len=length, output_len=1)
        for length in ttft_lens
    ]


def throughput_workloads(
    prefill_prompts: int = 32,
    prefill_len: int = 4096,
    num_prompts: int = 256,
    input_len: int = 1024,
    output_len: int = 256,
) -> list[Workload]:
    """Prompts alone, and prompts with their answers."""
    return [
        Workload(
            name="prefill",
            unit=INPUT_SPEED,
            num_prompts=prefill_prompts,
            input_len=prefill_len,
            output_len=1,
        ),
        Workload(
            name="mixed",
            unit=OUTPUT_SPEED,
            num_prompts=num_prompts,
            input_len=input_len,
            output_len=output_len,
        ),
    ]


def measure(
    workloads: Iterable[Workload],
    seconds: Seconds,
    vocab_size: int,
    num_iters: int,
    host_time: HostTime | None = None,
) -> Iterator[Result]:
    """Each workload's result as soon as it is there."""
    for each in workloads:
        ids = prompts(each.num_prompts, each.input_len, vocab_size)
        seconds(ids, min(each.output_len, _WARM_UP_TOKENS))
        runs, of_host = [], []
        for _ in range(num_iters):
            parts: list[float] = []
            runs.append(each.measure(_clocked(seconds, host_time, parts), vocab_size))
            if host_time and not each.is_speed:
                of_host.append(each.figure(parts))
        yield Result(
            name=each.name,
            unit=each.unit,
            num_prompts=each.num_prompts,
            input_len=each.input_len,
            output_len=each.output_len,
            median=statistics.median(runs),
            runs=runs,
            host_ms=statistics.median(of_host) if of_host else None,
        )


def _clocked(seconds: Seconds, host_time: HostTime | None, parts: list[float]) -> Seconds:
    """The same, which notes the host's part of each call."""
    if host_time is None:
        return seconds
    clock = host_time

    def clocked(ids: list[list[int]], count: int) -> float:
        before = clock()
        took = seconds(ids, count)
        parts.append(clock() - before)
        return took

    return clocked


def prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Ids without a pattern that two prompts or positions share."""
    limit = vocab_size - 100 if vocab_size > 200 else vocab_size
    return [
        [(7919 * (row * length + at) + 31 * row) % limit for at in range(length)]
        for row in range(count)
    ]
