"""Run requests through an engine in this process and gather what each one got."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.config import Config, make_config
from tokenspeed.engine.build import build_engine
from tokenspeed.engine.engine import Engine
from tokenspeed.request import (
    FinishReason,
    GenerateRequest,
    RequestDelta,
    SamplingParams,
    TokenLogprob,
)


@dataclass
class Outcome:
    """All deltas of one request, joined."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0

    def push(self, delta: RequestDelta) -> None:
        assert self.finish_reason is None, "a delta after the end"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.num_cached_tokens += delta.num_cached_tokens
        self.finish_reason, self.stop_token = delta.finish_reason, delta.stop_token
        self.error = delta.error


def tiny_config(folder: str, **options: Any) -> Config:
    values = {
        "model": folder,
        "skip_tokenizer_init": True,
        "device": "cpu",
        "block_size": 4,
        "max_total_tokens": 1024,
        "max_num_seqs": 8,
    }
    return make_config(values | options)


def tiny_engine(folder: str, **options: Any) -> Engine:
    return build_engine(tiny_config(folder, **options), lambda phase, detail: None)


def request(name: str, prompt_ids: list[int], seed: int = 0, **params: Any) -> GenerateRequest:
    params = {"temperature": 0.0, "max_tokens": 12, "logprobs": 2} | params
    return GenerateRequest(
        id=name, prompt_ids=prompt_ids, params=SamplingParams(**params), seed=seed
    )


def run(engine: Engine, requests: Iterable[GenerateRequest]) -> dict[str, Outcome]:
    """Add all, step until nothing is left, check the engine."""
    outcomes = {}
    for each in requests:
        engine.add(each)
        outcomes[each.id] = Outcome()
    while engine.has_work:
        for delta in engine.step():
            outcomes[delta.request_id].push(delta)
    engine.check()
    assert all(outcome.finish_reason for outcome in outcomes.values())
    return outcomes
