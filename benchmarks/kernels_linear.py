"""Linear layers on a GPU: fused kernels against cuBLAS and separate kernels, and the table.

    python benchmarks/kernels_linear.py [--out RESULT.json] [--table TABLE.json] [--tokens N ...]

For the shapes of Qwen3-0.6B and Qwen3-8B in bfloat16, with random weights that exceed the caches,
inside CUDA graphs:

    tune    every candidate tile, every algorithm that cuBLASLt proposes, and torch's way, for each
            op and token count; the winners are the table in `kernels/linear_tiles_h200.json`
    layer   the linear layers of a whole decoder layer, one after the other, as they depend on each
            other, beside torch's products with add_rms_norm and silu_mul kernels: up to 32 tokens
            five ops by the table (`fused`), above that the same products by the table (`chosen`)

and before both, every winner against float32 (relative error, beside that of cuBLAS).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels import gemv, linear_tiles, skinny
from tokenspeed.kernels import rms_norm as norms
from tokenspeed.kernels.linear import (
    by_library,
    gate_up,
    launch,
    linear,
    linear_add,
    norm_gate_up,
    norm_linear,
)
from tokenspeed.kernels.linear_tiles import Site, Tile, Way
from tokenspeed.kernels.linear_tuning import (
    TOKENS,
    made_up_weights,
    make_call,
    microseconds,
    tune,
)
from tokenspeed.kernels.rms_norm import add_rms_norm
from tokenspeed.kernels.silu_mul import silu_mul
from tokenspeed.passes.rewrite import TokenRange

WEIGHT_BYTES = 256 << 20
EPS = 1e-6
DTYPE = "bfloat16"
FEW_TOKENS, HEAD_TOKENS = 32, 256


@dataclass(frozen=True)
class Model:
    hidden: int
    qkv: int
    attention: int
    inner: int
    vocab: int

    def sites(self) -> Iterator[tuple[Site, TokenRange]]:
        """Each with the token counts that it is asked for."""
        qkv, o = (self.qkv, self.hidden), (self.hidden, self.attention)
        gate_up, down = (2 * self.inner, self.hidden), (self.hidden, self.inner)
        fused = {"norm_linear": [qkv], "linear_add": [o, down], "norm_gate_up": [gate_up]}
        for kind, shapes in fused.items():
            for shape in shapes:
                yield Site(kind, *shape, DTYPE), TokenRange(1, FEW_TOKENS)
        for kind, shape in (("linear", qkv), ("linear", o), ("gate_up", gate_up), ("linear", down)):
            yield Site(kind, *shape, DTYPE), TokenRange(FEW_TOKENS + 1)
        yield Site("linear", self.vocab, self.hidden, DTYPE), TokenRange(1, HEAD_TOKENS)


MODELS = {
    "qwen3-0.6b": Model(1024, 4096, 2048, 3072, 151936),
    "qwen3-8b": Model(4096, 6144, 4096, 12288, 151936),
}


def draw(*shape: int) -> Tensor:
    """About as large as the weights of a model."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def exact(call: Any) -> Tensor:
    """In float32, without any rounding on the way."""
    x = call.x.float()
    if call.norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + call.eps) * call.norm.float()
    out = x @ call.w.float().t()
    if call.gate:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out if call.residual is None else out + call.residual.float()


def check(site: Site, w: Tensor, table: linear_tiles.TileTable) -> list[dict[str, Any]]:
    """Each winner's error, at its limit and one below."""
    (entry,) = [entry for entry in table.entries if entry.site == site]
    rows = []
    for choice in entry.choices:
        last = min(choice.max_tokens, TOKENS[-1])
        for num_tokens in {last, max(1, last - 1)}:
            call = make_call(site, w, num_tokens)
            want = exact(call)
            ours, again = launch(call, choice.way), launch(call, choice.way)
            errors = {
                "ours": relative_error(ours, want),
                "library": relative_error(by_library(call), want),
            }
            assert errors["ours"] < 1.1 * errors["library"] + 1e-4, (site, choice, errors)
            assert torch.equal(ours, again), (site, choice, "two runs differ")
            rows.append({"site": site, "tokens": num_tokens, **errors})
    return rows


Layer = Sequence[Tensor]
"""o, gate and up, down, and the next layer's qkv, with the two norms' weights last."""


def fused_layer(x: Tensor, attention: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    o, gate_up, down, qkv, norm, next_norm = layer
    h = linear_add(attention, o, x)
    h = linear_add(norm_gate_up(h, norm, gate_up, EPS), down, h)
    return h, norm_linear(h, next_norm, qkv, None, EPS)


def unfused_layer(x: Tensor, attention: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    o, gate_up, down, qkv, norm, next_norm = layer
    normed, h = add_rms_norm(F.linear(attention, o), x, norm, EPS)
    inner = silu_mul(F.linear(normed, gate_up))
    normed, h = add_rms_norm(F.linear(inner, down), h, next_norm, EPS)
    return h, F.linear(normed, qkv)


def chosen_layer(x: Tensor, attention: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    o, merged, down, qkv, norm, next_norm = layer
    normed, h = add_rms_norm(linear(attention, o), x, norm, EPS)
    inner = gate_up(normed, merged)
    normed, h = add_rms_norm(linear(inner, down), h, next_norm, EPS)
    return h, linear(normed, qkv)


def layer_times(model: Model, num_tokens: int, layers: list[Layer]) -> dict[str, float]:
    """Microseconds a layer."""
    x, start = draw(num_tokens, model.hidden), draw(num_tokens, model.attention)

    def chain(step: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        h, attention = x, start
        for layer in layers:
            h, out = step(h, attention, layer)
            attention = out[:, : model.attention]
        return h

    found = {"unfused": microseconds([lambda: chain(unfused_layer)]) / len(layers)}
    if num_tokens > FEW_TOKENS:
        found["chosen"] = microseconds([lambda: chain(chosen_layer)]) / len(layers)
        found["error"] = relative_error(chain(chosen_layer), chain(unfused_layer).float())
        return found
    found["fused"] = microseconds([lambda: chain(fused_layer)]) / len(layers)
    early = gemv.launches_early
    for module in (gemv, skinny, norms):
        module.launches_early = lambda: False
    found["fused, launched in turn"] = microseconds([lambda: chain(fused_layer)]) / len(layers)
    for module in (gemv, skinny, norms):
        module.launches_early = early
    found["error"] = relative_error(chain(fused_layer), chain(unfused_layer).float())
    return found


def make_layers(model: Model) -> list[Layer]:
    o, gate_up, down, qkv = (
        (model.hidden, model.attention),
        (2 * model.inner, model.hidden),
        (model.hidden, model.inner),
        (model.qkv, model.hidden),
    )
    size = 2 * sum(rows * columns for rows, columns in (o, gate_up, down, qkv))
    scales = [torch.ones(model.hidden, device="cuda", dtype=torch.bfloat16)] * 2
    count = max(4, 2 * WEIGHT_BYTES // size)
    return [[*(draw(*shape) for shape in (o, gate_up, down, qkv)), *scales] for _ in range(count)]


def kernel_of(way: Way) -> str:
    if way is None:
        return "torch"
    return way.kernel if isinstance(way, Tile) else "cublaslt"


def summary(times: dict[tuple[Site, int], dict[Way, float]]) -> list[dict[str, Any]]:
    """For each site and token count: torch's way, the best of each kernel, TB/s of the weight and
    TFLOP/s.
    """
    rows = []
    for (site, num_tokens), found in times.items():
        terabyte = 2e-12 * site.num_rows * site.size
        row: dict[str, Any] = {**site._asdict(), "tokens": num_tokens}
        for kernel in ("torch", "cublaslt", "gemv", "skinny", "gated"):
            of_kernel = [(us, way) for way, us in found.items() if kernel_of(way) == kernel]
            if of_kernel:
                us, way = min(of_kernel, key=lambda pair: pair[0])
                cut = msgspec.structs.astuple(way)[1:] if isinstance(way, Tile) else None
                row[kernel] = {
                    "us": round(us, 2),
                    "TB/s": round(terabyte / us * 1e6, 2),
                    "TFLOP/s": round(num_tokens * terabyte / us * 1e6, 1),
                    "tile": cut,
                }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    args = parser.parse_args()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    result: dict[str, Any] = {"machine": machine, "ops": [], "errors": [], "layers": []}
    entries: list[linear_tiles.Entry] = []
    times: dict[tuple[Site, int], dict[Way, float]] = {}
    for name in args.models:
        began = time.perf_counter()
        tables = []
        times.clear()
        for site, asked in MODELS[name].sites():
            weights = made_up_weights(site, torch.device("cuda"))
            tokens = [count for count in args.tokens if asked.contains(TokenRange(count, count))]
            table = tune(
                {site: weights},
                machine,
                tokens,
                lambda site, n, way, us: times.setdefault((site, n), {}).update({way: us}),
            )
            result["errors"] += check(site, weights[0], table)
            tables += table.entries
        print(f"{name}: tuned in {time.perf_counter() - began:.1f} s", flush=True)
        result["ops"] += [{"model": name, **row} for row in summary(times)]
        entries += tables
        if args.table:
            text = linear_tiles.TileTable(machine, tuple(entries)).to_json()
            args.table.write_bytes(text.replace(b'{"kind"', b'\n{"kind"') + b"\n")
        linear_tiles.install(tables)
        layers = make_layers(MODELS[name])
        for num_tokens in args.tokens:
            row = {"model": name, "tokens": num_tokens}
            row |= layer_times(MODELS[name], num_tokens, layers)
            result["layers"].append(row)
            print(json.dumps(row), flush=True)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
