"""An explanation as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenspeed.compile.explanation import Explanation, FunctionPasses, PieceView, RangeView
from tokenspeed.compile.graph_receipt import PieceMiss
from tokenspeed.passes import PIPELINE
from tokenspeed.passes.manager import PassReport

_MAX_PLACES = 4

Row = list[str]


def text_of(explained: Explanation) -> str:
    parts = [
        *_passes(explained),
        *_misses(explained.misses),
        *_kernels(explained),
        *_pieces(explained.pieces),
        [f"compiled in {_seconds(explained.seconds)}"],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def places_in_short(sources: Sequence[str], most: int = _MAX_PLACES) -> str:
    """Places by file: `models/qwen3.py:96 > models/layers.py:24,25,26`."""
    by_file: dict[str, list[str]] = {}
    for place in sources:
        file, _, line = place.rpartition(":")
        by_file.setdefault(file, []).append(line)
    places = [
        f"{file}:{','.join(sorted(dict.fromkeys(lines), key=int))}"
        for file, lines in by_file.items()
    ]
    rest = f", and {len(places) - most} more" if len(places) > most else ""
    return ", ".join(places[:most]) + rest


def table(head: Row, rows: Sequence[Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def kilobytes(num_bytes: int) -> str:
    return f"{num_bytes / 1024:.1f} KiB" if num_bytes else "-"


def _passes(explained: Explanation) -> Iterator[list[str]]:
    """A table for each token range: a row a pass, a column a piece."""
    ranges = dict.fromkeys(each for piece in explained.pieces for each in piece.ranges)
    for token_range in ranges:
        pieces = [piece for piece in explained.pieces if token_range in piece.ranges]
        head = ["PASS", *(f"{piece.name} x{piece.calls}" for piece in pieces), "SAVED", "OFF"]
        rows = [
            _pass_row(row.name, pieces, token_range)
            for row in PIPELINE
            if row.stage.value == "piece"
        ]
        yield [f"Passes over pieces, {_tokens(token_range)}: matched/expected", *table(head, rows)]
    yield _function_passes(explained.functions)
    yield [
        "SAVED is memory traffic that a pass takes off a step of 1 token, counted as if every op",
        "were a kernel of its own. ! marks fewer matches than expected, ERROR a pass undone.",
    ]


def _pass_row(name: str, pieces: Sequence[PieceView], token_range: str) -> Row:
    reports = [_report(piece.ranges[token_range].passes, name) for piece in pieces]
    saved = sum(
        each.saved * piece.calls for each, piece in zip(reports, pieces, strict=True) if each
    )
    offs = dict.fromkeys(each.off for each in reports if each and each.off)
    return [name, *map(_cell, reports), kilobytes(saved), ", ".join(filter(None, offs))]


def _report(passes: Sequence[PassReport], name: str) -> PassReport | None:
    return next((each for each in passes if each.name == name), None)


def _cell(report: PassReport | None) -> str:
    if report is None or report.off:
        return "off"
    if report.error:
        return "ERROR"
    if report.expected is None:
        return str(report.matched or "-")
    if not report.expected and not report.matched:
        return "-"
    short = " !" if report.matched < report.expected else ""
    return f"{report.matched}/{report.expected}{short}"


def _function_passes(functions: Sequence[FunctionPasses]) -> list[str]:
    names = dict.fromkeys(report.name for each in functions for report in each.passes)
    rows = []
    for name in names:
        reports = [_report(each.passes, name) for each in functions]
        offs = dict.fromkeys(each.off for each in reports if each and each.off)
        rows.append([name, *map(_cell, reports), ", ".join(filter(None, offs))])
    head = ["PASS", *(each.name for each in functions), "OFF"]
    return ["Passes over whole functions (of the layers that were captured)", *table(head, rows)]


def _misses(misses: Sequence[PieceMiss]) -> Iterator[list[str]]:
    if not misses:
        return
    lines = ["Nearest misses: passes that matched less than expected, or nothing"]
    for each in misses:
        miss = each.miss
        where = f"{each.piece}, {_tokens(each.token_range)}"
        place = f" ({miss.sources[0]})" if miss.sources else ""
        refused = f"{miss.check} refused: " if miss.check else ""
        lines += [
            f"  {each.rule} in {where}: {miss.matched} of {miss.total} ops are there",
            f"    at {miss.node}{place}: {refused}{miss.reason}",
        ]
    yield lines


def _kernels(explained: Explanation) -> Iterator[list[str]]:
    rows = [
        [
            piece.name + (" (a layer)" if piece.name == explained.layer else ""),
            _tokens(token_range),
            str(piece.calls),
            *(str(view.num_before), str(view.num_after), str(len(view.graphs.kernels))),
        ]
        for piece in explained.pieces
        for token_range, view in piece.ranges.items()
    ]
    head = ["PIECE", "TOKENS", "CALLS", "OPS BEFORE", "OPS AFTER", "KERNELS"]
    yield [
        f"Kernels: what the ops of a graph became, views not counted; {explained.layers} calls of "
        "attention a step besides",
        *table(head, rows),
    ]
    for piece in explained.pieces:
        for token_range, view in piece.ranges.items():
            yield _kernel_list(piece, token_range, view)


def _kernel_list(piece: PieceView, token_range: str, view: RangeView) -> list[str]:
    rows = [
        [f"  {number}", kernel.name, str(len(kernel.ops)), places_in_short(kernel.sources)]
        for number, kernel in enumerate(view.graphs.kernels, 1)
    ]
    title = f"Kernels of {piece.name}, {_tokens(token_range)}"
    return [title, *table(["  #", "KERNEL", "OPS", "FROM"], rows)] if rows else [title, "  none"]


def _pieces(pieces: Sequence[PieceView]) -> Iterator[list[str]]:
    for piece in pieces:
        rows = [["  " + each.source, each.value] for each in piece.inputs]
        rows += [["  returns", value] for value in piece.outputs]
        times = "once" if piece.calls == 1 else f"{piece.calls} times"
        yield [f"Piece {piece.name}, {piece.hash}, {times} a step", *table(["  INPUT", ""], rows)]


def _tokens(token_range: str) -> str:
    return "any tokens" if token_range == "all" else f"{token_range} tokens"


def _seconds(seconds: dict[str, float]) -> str:
    return ", ".join(f"{phase} {spent:.1f} s" for phase, spent in seconds.items())
