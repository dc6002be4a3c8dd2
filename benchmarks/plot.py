"""Pictures of results, as PNG.

    python benchmarks/plot.py engine   RESULT.json [...] [--peer RESULT.json] [--out FILE.png]
    python benchmarks/plot.py roofline RESULT.json [--out FILE.png]
    python benchmarks/plot.py serve    RESULT.json [...] [--out FILE.png]

    engine     throughput against latency of decoding, by batch size: results of gpu_engine.py,
               beside vLLM's published figures or a result of peers_vllm.py
    roofline   what kernels reach against what the card allows: a result of kernels_linear.py
    serve      throughput against latency of a server under rising load: results of `tokenspeed
               bench serve --output-json`, a curve for each `--metadata label=NAME`

Needs matplotlib (pip install 'tokenspeed[dev]'). The default places are in docs/images.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from published import PEER, PEER_CARD

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    sys.exit(f"plot.py needs matplotlib (pip install 'tokenspeed[dev]'): {error}")

IMAGES = Path(__file__).parents[1] / "docs" / "images"
OURS, PEERS, INK, FAINT = "#0b6e99", "#9a9a9a", "#222222", "#dddddd"
CURVES = ("#0b6e99", "#d1495b", "#66a182", "#edae49", "#5c4d7d", "#8d6a4f")
BATCHES = (1, 8, 64, 256)
WAYS = ("torch", "cublaslt", "gemv", "skinny")
TITLES = {"qwen3-0.6b": "Qwen3-0.6B", "qwen3-8b": "Qwen3-8B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}
STYLE = {
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def result_of(value: Any) -> tuple[str, dict[str, float]]:
    """(model, figures by workload) of a result of gpu_engine.py, those of an `earlier` run too."""
    if not isinstance(value, dict) or "model" not in value or "results" not in value:
        sys.exit("plot.py engine: a result of gpu_engine.py has a model and results")
    earlier = {name: each for name, each in value.get("earlier", {}).items() if name != "note"}
    return value["model"], earlier | value["results"]


def decode_curve(figures: dict[str, float]) -> tuple[list[float], list[float], list[int]]:
    """(ms a token of one request, tokens/s of all, batch sizes)."""
    batches = [batch for batch in BATCHES if isinstance(figures.get(f"decode{batch}"), float | int)]
    steps = [figures[f"decode{batch}"] for batch in batches]
    return steps, [1e3 * b / ms for b, ms in zip(batches, steps, strict=True)], batches


def engine(args: argparse.Namespace) -> Figure:
    models: dict[str, dict[str, float]] = {}
    for path in args.results:
        model, figures = result_of(json.loads(path.read_text()))
        models.setdefault(model, figures)
    peers = dict(PEER)
    if args.peer:
        found = json.loads(args.peer.read_text())
        peers[found["model"]] = {each["name"]: each["median"] for each in found["results"]}
    figure, axes = panels(len(models))
    for ax, (model, figures) in zip(axes, models.items(), strict=True):
        if model in peers:
            draw_decode(ax, peers[model], "vLLM 0.22.0", PEERS, below=True)
        draw_decode(ax, figures, "TokenSpeed", OURS, below=False)
        ax.set(title=TITLES.get(model, model), yscale="log", xlim=(0, None))
        ax.margins(y=0.1)
        ax.set_xlabel("time per output token of one request (ms)")
        ax.yaxis.set_major_formatter(lambda value, _: thousands(value))
    axes[0].set_ylabel("output tokens/s of all requests")
    axes[0].legend(loc="lower right")
    figure.suptitle("Decoding: throughput against latency, by batch size (up and left is better)")
    return figure


def draw_decode(
    ax: Axes, figures: dict[str, float], label: str, colour: str, *, below: bool
) -> None:
    ms, speeds, batches = decode_curve(figures)
    ax.plot(ms, speeds, "-o", color=colour, label=label, linewidth=2, markersize=5.5)
    for x, y, batch in zip(ms, speeds, batches, strict=True):
        place = {"xytext": (8, -9)} if below else {"xytext": (-6, 6), "ha": "right"}
        ax.annotate(
            f"{batch}", (x, y), textcoords="offset points", color=colour, fontsize=9, **place
        )


def roofline(args: argparse.Namespace) -> Figure:
    (path,) = args.results
    ops = json.loads(path.read_text())["ops"]
    models = list(dict.fromkeys(op["model"] for op in ops))
    figure, axes = panels(len(models))
    for ax, model in zip(axes, models, strict=True):
        chosen = [op for op in ops if op["model"] == model]
        draw_roof(ax)
        plain = [point(op, op["torch"]["us"]) for op in chosen]
        best = [point(op, min(op[name]["us"] for name in WAYS if name in op)) for op in chosen]
        ax.scatter(*zip(*plain, strict=True), s=16, color=PEERS, label="as torch asks cuBLAS")
        ax.scatter(*zip(*best, strict=True), s=16, color=OURS, label="as the table chooses")
        ax.set(title=TITLES.get(model, model), xscale="log", yscale="log")
        ax.set_xlabel("arithmetic intensity (FLOP a byte)")
        ax.set_xlim(0.7, 5000)
        ax.set_ylim(0.4, 1500)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[0].set_ylabel("TFLOP/s")
    axes[0].legend(loc="lower right")
    figure.suptitle("Linear layers of 1 to 8192 tokens, against the H200's roof")
    return figure


def point(op: dict[str, Any], us: float) -> tuple[float, float]:
    """(FLOP a byte, TFLOP/s): weights, inputs and outputs are moved once, two bytes a number."""
    rows, size, tokens = op["num_rows"], op["size"], op["tokens"]
    flop = 2 * rows * size * tokens
    moved = 2 * (rows * size + tokens * size + tokens * rows)
    return flop / moved, flop / us / 1e6


def draw_roof(ax: Axes) -> None:
    copy, matmul = PEER_CARD["copy_tb_s"], PEER_CARD["matmul_tflop_s"]
    ridge = matmul / copy
    ax.plot([0.1, ridge, 1e4], [0.1 * copy, matmul, matmul], color=INK, linewidth=1.2)
    ax.annotate(f"{copy:g} TB/s", (5, 5 * 1.5 * copy), color=INK, fontsize=9, ha="right")
    ax.annotate(f"{matmul:g} TFLOP/s", (690, 1.12 * matmul), color=INK, fontsize=9, ha="right")


def serve(args: argparse.Namespace) -> Figure:
    curves: dict[str, list[tuple[float, float, str]]] = {}
    for path in args.results:
        found = json.loads(path.read_text())
        load = found["max_concurrency"] or found["request_rate"]
        label = found.get("label", f"{found['model_id']} ({found['backend']})")
        key = "median_tpot_ms"
        if key in found:
            entry = (found[key], found["output_throughput"], f"{load}")
            curves.setdefault(label, []).append(entry)
    if not curves:
        raise SystemExit("plot.py: no result has a time per output token")
    figure, (ax,) = panels(1)
    for (label, entries), colour in zip(curves.items(), CURVES * len(curves), strict=False):
        entries.sort(key=lambda entry: entry[1])
        x, y, _ = zip(*entries, strict=True)
        ax.plot(x, y, "-o", color=colour, label=label, linewidth=2, markersize=5.5)
        for at, high, load in entries:
            ax.annotate(load, (at, high), textcoords="offset points", xytext=(6, -12),
                        color=colour, fontsize=9)  # fmt: skip
    ax.set(xlim=(0, None), ylim=(0, None), ylabel="output tokens/s")
    ax.set_xlabel("median time per output token (ms)")
    ax.yaxis.set_major_formatter(lambda value, _: thousands(value))
    ax.legend(loc="lower right")
    figure.suptitle("Serving: throughput against latency, by load\n(up and left is better)")
    return figure


def panels(count: int) -> tuple[Figure, list[Axes]]:
    figure, axes = pyplot.subplots(1, count, figsize=(4.6 * count + 0.4, 4.2), squeeze=False)
    return figure, list(axes[0])


def thousands(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


KINDS = {"engine": engine, "roofline": roofline, "serve": serve}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--peer", type=Path, help="engine: a result of peers_vllm.py")
    parser.add_argument("--out", type=Path, help="(default: docs/images/KIND.png)")
    args = parser.parse_args()
    if args.kind == "roofline" and len(args.results) != 1:
        parser.error("roofline takes one result")
    with matplotlib.rc_context(STYLE):
        figure = KINDS[args.kind](args)
        figure.suptitle(figure.get_suptitle(), fontsize=11.5, x=0.02, ha="left")
        figure.tight_layout()
        path = args.out or IMAGES / f"{args.kind}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    print(path)


if __name__ == "__main__":
    main()
