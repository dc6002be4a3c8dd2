"""A process whose engine, once ready, may compile nothing, and steps of random shapes through it.

    python tests/gpu/random_shapes.py OPTIONS SHAPES

OPTIONS are the engine's, as JSON. Requests come until steps have had SHAPES shapes, or there were
four times as many steps. The last line of the output is a `Report` as JSON. A process of its own,
since kernels that another test has launched would be known already.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from tokenspeed import ledger
from tokenspeed.batch import Batch
from tokenspeed.config import make_config
from tokenspeed.engine.build import build_engine
from tokenspeed.engine.engine import BatchRunner, Engine, LaunchedStep
from tokenspeed.request import FinishReason, GenerateRequest, SamplingParams

MOST_ROWS, MOST_PROMPT, MOST_OUTPUT = 64, 3000, 150

ASKED: dict[str, Callable[[random.Random, int], Any]] = {
    "top_k": lambda draw, _: draw.choice((1, 20, 5000)),
    "top_p": lambda draw, _: draw.uniform(0.05, 1.0),
    "min_p": lambda draw, _: draw.uniform(0.0, 0.3),
    "presence_penalty": lambda draw, _: draw.uniform(-2.0, 2.0),
    "frequency_penalty": lambda draw, _: draw.uniform(-2.0, 2.0),
    "repetition_penalty": lambda draw, _: draw.uniform(0.5, 2.0),
    "logit_bias": lambda draw, vocab: {
        draw.randrange(vocab): draw.uniform(-100.0, 100.0) for _ in range(draw.randint(1, 300))
    },
    "stop_token_ids": lambda draw, vocab: tuple(draw.choices(range(vocab), k=3)),
    "ignore_eos": lambda draw, _: True,
    "logprobs": lambda draw, _: draw.randint(0, 20),
    "prompt_logprobs": lambda draw, _: draw.randint(0, 20),
}
"""What a request may ask for, each by one chance in six."""


class Report(msgspec.Struct, kw_only=True):
    summary: str
    steps: int = 0
    shapes: int = 0
    """Distinct pairs of a step's tokens and rows."""
    requests: int = 0
    asked: list[str] = []
    """What some request has asked for."""
    preemptions: int = 0
    cached_tokens: int = 0
    startup: list[tuple[str, int]] = []
    """Compiles until the engine was ready, by kind."""
    compiled: list[str] = []
    """Later ones, which held requests up: kind, name and arguments."""
    compiled_between: list[str] = []
    """Those for CUDA graphs that were recorded between steps."""
    errors: list[str] = []
    """What requests ended with, each message once."""


class Observed:
    """A worker, and the shapes of what it has launched."""

    def __init__(self, worker: BatchRunner) -> None:
        self._worker = worker
        self.shapes: set[tuple[int, int]] = set()
        self.steps = 0

    def launch(self, batch: Batch) -> LaunchedStep:
        self.shapes.add((batch.num_tokens, len(batch.rows)))
        self.steps += 1
        return self._worker.launch(batch)

    def check_device(self) -> None:
        self._worker.check_device()


class Load:
    """Requests that come and go: up to a number of them at once, which changes now and then."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self._engine, self._draw = engine, random.Random(seed)
        self._vocab_size = engine.ready.vocab_size
        self._most_prompt = min(MOST_PROMPT, engine.ready.max_model_len - MOST_OUTPUT)
        self._prompts: list[list[int]] = [[1]]
        self._running: list[str] = []
        self._target = 1
        self.count = 0
        self.cached_tokens = 0
        self.asked: set[str] = set()
        self.errors: set[str] = set()

    def step(self, adds: bool) -> None:
        draw, engine = self._draw, self._engine
        if draw.random() < 0.1:
            self._target = draw.choice((1, 2, 7, 8, 9, 31, draw.randint(1, MOST_ROWS), MOST_ROWS))
        while adds and len(self._running) < self._target:
            self._add()
        left = draw.sample(self._running, min(len(self._running), draw.random() < 0.01))
        deltas = engine.abort(left)
        for delta in deltas + engine.step():
            self.cached_tokens += delta.num_cached_tokens
            if delta.finish_reason is not None:
                self._running.remove(delta.request_id)
            if delta.finish_reason is FinishReason.ERROR:
                self.errors.add(str(delta.error))

    def _add(self) -> None:
        self.count += 1
        params = SamplingParams(**self._params())
        self.asked |= {name for name in ASKED if getattr(params, name) != _default(name)}
        name = f"r{self.count}"
        self._engine.add(
            GenerateRequest(id=name, prompt_ids=self._prompt(), params=params, seed=self.count)
        )
        self._running.append(name)

    def _params(self) -> dict[str, Any]:
        draw = self._draw
        count = draw.randint(0, draw.choice((2, 2, 10, 40, MOST_OUTPUT)))
        found = {"max_tokens": count, "temperature": draw.choice((0.0, 0.0, 0.6, 1.0, 1.7))}
        for name, value_of in ASKED.items():
            if draw.random() < 1 / 6:
                found[name] = value_of(draw, self._vocab_size)
        if draw.random() < 1 / 6:
            found["min_tokens"] = draw.randint(0, count)
        return found

    def _prompt(self) -> list[int]:
        """A new one, or one of the last with another end."""
        draw = self._draw
        length = draw.randint(1, draw.choice((20, 300, self._most_prompt)))
        ids = draw.choices(range(self._vocab_size), k=length)
        if draw.random() < 0.25:
            before = draw.choice(self._prompts)
            ids[: len(before)] = before[:length]
        self._prompts = [*self._prompts[-15:], ids]
        return ids


def _default(name: str) -> Any:
    return getattr(SamplingParams(), name)


def observe(options: dict[str, Any], num_shapes: int) -> Report:
    """As a server does: most CUDA graphs are recorded between steps."""
    engine = build_engine(make_config(options), lambda phase, detail: None, defer_graphs=True)
    startup = [(each.kind, each.count) for each in ledger.totals()]
    report = Report(summary=engine.ready.summary, startup=startup)
    enter = ledger.report

    found = report.compiled

    def note(kind: Any, name: str, seconds: float, cause: str) -> None:
        found.append(f"{kind} {name} in {seconds:.2f} s: {cause}")
        enter(kind, name, seconds, cause)

    ledger.report = note
    worker = Observed(engine._worker)
    engine._worker = worker
    load = Load(engine)
    adds = True
    while adds or engine.has_work:
        adds = len(worker.shapes) < num_shapes and worker.steps < 4 * num_shapes
        found = report.compiled
        load.step(adds)
        found = report.compiled_between
        engine.prepare()
    engine.check()
    report.steps, report.shapes, report.requests = worker.steps, len(worker.shapes), load.count
    report.asked, report.errors = sorted(load.asked), sorted(load.errors)
    report.cached_tokens, report.preemptions = load.cached_tokens, engine.stats.preemptions
    return report


if __name__ == "__main__":
    print(msgspec.json.encode(observe(json.loads(sys.argv[1]), int(sys.argv[2]))).decode())
