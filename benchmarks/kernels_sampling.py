"""Sampling and scoring on one GPU: the kernels beside plain torch, FlashInfer and the floor.

    python benchmarks/kernels_sampling.py [--out RESULT.json]

sample    `sample_rows` of bfloat16 logits, as the engine calls it, and of float32 ones. FlashInfer
          samples from float32 logits by rejection: sorted by nothing either, but its tokens are
          not those of a seed and a position. Torch is the reference, which waits for the device.
score     `score_rows`, with the 20 likeliest tokens and without, beside torch's logsumexp and topk.

Random normal logits times `spread`: 1 is flat (thousands of tokens in top-p), 6 is peaked. The
floor is one read of the logits at the speed of an 8 GiB copy. Times of kernels are medians of
replays of CUDA graphs over logits that together exceed the L2 cache; of torch's reference, medians
of calls. `agreement` is the share of rows with the reference's token.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenspeed.bench.machine import facts, gpu_speed
from tokenspeed.kernels import sample_rows, score_rows
from tokenspeed.kernels.linear_tuning import microseconds
from tokenspeed.kernels.sample_rows import RowParams

try:
    import flashinfer
except ImportError:
    flashinfer = None

CUDA = torch.device("cuda")
VOCAB = 151936
ROWS = (1, 8, 64, 256)
SPREADS = (1.0, 3.0, 6.0)
ROTATED_BYTES = 256 << 20
MAX_COPIES = 1000
CALLS = 7
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_k 20, top_p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "min_p 0.1": {"temperature": 0.8, "min_p": 0.1},
}
MIXED = "a kind a row"


def params_of(kinds: list[dict[str, float]]) -> RowParams:
    def column(name: str, default: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([each.get(name, default) for each in kinds], dtype=dtype, device=CUDA)

    order = torch.arange(len(kinds), device=CUDA)
    return RowParams(
        column("temperature", 1.0),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0),
        column("min_p", 0.0).log(),
        order,
        torch.zeros_like(order),
    )


def flashinfer_call(kind: dict[str, float]) -> Callable[[Tensor], Tensor]:
    """Its way to the same distribution."""
    sampling, heat = flashinfer.sampling, kind["temperature"]
    top_p, top_k = kind.get("top_p", 1.0), int(kind.get("top_k", 0))

    def call(logits: Tensor) -> Tensor:
        scaled = logits / heat
        if top_k:
            return sampling.top_k_top_p_sampling_from_logits(scaled, top_k, top_p)
        if "min_p" in kind:
            return sampling.min_p_sampling_from_probs(scaled.softmax(-1), kind["min_p"])
        if top_p < 1.0:
            return sampling.top_p_sampling_from_probs(scaled.softmax(-1), top_p)
        return sampling.sampling_from_logits(scaled)

    return call


class Bench:
    """Logits of one batch size and spread, several times: float32, and bfloat16 on demand."""

    def __init__(self, count: int, spread: float) -> None:
        torch.manual_seed(0)
        copies = min(max(2, ROTATED_BYTES // (2 * count * VOCAB)), MAX_COPIES)
        self.wide = [spread * torch.randn(count, VOCAB, device=CUDA) for _ in range(copies)]
        self.narrow = [each.bfloat16() for each in self.wide]
        self.positions = torch.arange(count, device=CUDA) + 100

    def sample(self, logits: Tensor, params: RowParams, greedy: bool) -> tuple[Tensor, Tensor]:
        return sample_rows.launch(logits, self.positions, *params, bans=False, greedy=greedy)

    def reference(self, logits: Tensor, params: RowParams, greedy: bool) -> tuple[Tensor, Tensor]:
        return sample_rows.reference(logits, self.positions, *params, bans=False, greedy=greedy)

    def sampling(self, kinds: list[dict[str, float]]) -> dict[str, Any]:
        params = params_of(kinds)
        greedy = all(each["temperature"] == 0.0 for each in kinds)
        result = {
            f"ours_{name}_us": self._time(lambda x: self.sample(x, params, greedy), which)
            for name, which in (("bf16", self.narrow), ("fp32", self.wide))
        }
        pairs = [
            (self.sample(x, params, greedy)[0], self.reference(x, params, greedy)[0])
            for x in self.wide[:4]
        ]
        same = torch.stack([ours == theirs for ours, theirs in pairs]).float().mean()
        result["agreement"] = round(float(same), 6)
        result["torch_fp32_us"] = self._eager(lambda x: self.reference(x, params, greedy))
        if flashinfer is not None and not greedy and all(each == kinds[0] for each in kinds):
            result |= self._flashinfer(flashinfer_call(kinds[0]))
        return result

    def _flashinfer(self, call: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """In a graph if it can be, else by calls. An error is told: other numbers are wanted."""
        try:
            call(self.wide[0])
        except Exception as error:
            return {"flashinfer_error": f"{type(error).__name__}: {error}"[:200]}
        try:
            return {"flashinfer_fp32_us": self._time(call, self.wide)}
        except Exception:
            return {"flashinfer_fp32_eager_us": self._eager(call)}

    def scoring(self) -> dict[str, Any]:
        ids = torch.arange(len(self.positions), device=CUDA)
        result = {}
        for name, with_top in (("chosen", False), ("top 20", True)):
            for side, call in (("ours", score_rows.launch), ("torch", score_rows.reference)):
                result[f"{name}, {side}_bf16_us"] = self._time(
                    lambda x, call=call, with_top=with_top: call(x, ids, with_top), self.narrow
                )
        return result

    @staticmethod
    def _time(call: Callable[[Tensor], object], logits: list[Tensor]) -> float:
        return round(microseconds([lambda each=each: call(each) for each in logits]), 2)

    def _eager(self, call: Callable[[Tensor], object]) -> float:
        call(self.wide[0])
        torch.cuda.synchronize()
        return round(
            statistics.median(_seconds(lambda: call(self.wide[1])) for _ in range(CALLS)) * 1e6, 2
        )


def _seconds(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": facts() | gpu_speed(), "sample": {}, "score": {}}
    torch.cuda.empty_cache()
    for count in ROWS:
        floor_us = 2 * count * VOCAB / report["machine"]["copy_tb_s"] / 1e6
        for spread in SPREADS:
            bench = Bench(count, spread)
            works = {name: [kind] * count for name, kind in KINDS.items()}
            if count > 1:
                works[MIXED] = (list(KINDS.values()) * count)[:count]
            for name, kinds in works.items():
                if name == "greedy" and spread != SPREADS[0]:
                    continue
                found = {**bench.sampling(kinds), "floor_bf16_us": round(floor_us, 2)}
                report["sample"][f"{count} rows, spread {spread:g}, {name}"] = found
                print(count, spread, name, found, flush=True)
            if spread == 3.0:
                found = {**bench.scoring(), "floor_bf16_us": round(floor_us, 2)}
                report["score"][f"{count} rows"] = found
                print(count, "score", found, flush=True)
            del bench
            torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
