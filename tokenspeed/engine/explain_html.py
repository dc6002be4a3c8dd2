"""An explanation as one HTML page without network: tables, and each piece's graph before and after.

A graph is a list of its ops in order, with an arc from each op to those that read it. Ops that a
pass replaced have the colour of what came in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import msgspec

from tokenspeed.compile.explanation import Explanation, PieceView, RangeView
from tokenspeed.compile.graph_receipt import Op
from tokenspeed.engine.explain_text import places_in_short, text_of

_ROW, _ARCS = 20, 120
"""Pixels: a row's height, the width of the arcs' column."""

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; }
pre, .op { font-family: ui-monospace, monospace; font-size: 12px; }
pre { overflow-x: auto; }
summary { cursor: pointer; font-weight: 600; padding: .3em 0; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1.5em; }
.graph { display: flex; overflow-x: auto; border: 1px solid #8886; border-radius: 4px; }
.graph svg { flex: none; }
.op { height: ROWpx; line-height: ROWpx; white-space: nowrap; padding: 0 .6em; }
.op b { font-weight: 600; }
.op i { color: #888; font-style: normal; }
.view, .input { opacity: .6; }
path { fill: none; stroke: #888; stroke-opacity: .45; }
path.on { stroke: #d33; stroke-opacity: 1; stroke-width: 2; }
.op:hover, .op.on { outline: 1px solid #d33; }
.new { border-left: 4px solid hsl(var(--hue) 70% 50%); background: hsl(var(--hue) 70% 50% / .18); }
""".replace("ROW", str(_ROW))

_SCRIPT = """
for (const op of document.querySelectorAll('.op')) {
  const graph = op.closest('.graph');
  const show = on => {
    for (const path of graph.querySelectorAll('path'))
      if (path.dataset.from === op.dataset.name || path.dataset.to === op.dataset.name)
        path.classList.toggle('on', on);
    if (op.dataset.group)
      for (const other of graph.parentElement.parentElement.querySelectorAll(
          `.op[data-group="${op.dataset.group}"]`)) other.classList.toggle('on', on);
  };
  op.addEventListener('mouseenter', () => show(true));
  op.addEventListener('mouseleave', () => show(false));
}
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def html_of(explained: Explanation) -> str:
    title = escape(f"TokenSpeed: {explained.entry}")
    pieces = "\n".join(part for piece in explained.pieces for part in _piece(piece))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        f"<details open><summary>Passes, kernels, pieces</summary>\n"
        f"<pre>{escape(text_of(explained))}</pre></details>\n"
        f"<h2>Graphs</h2>\n<p>An arc leads from an op to each that reads it. Colour: what a pass "
        f"replaced, and what came in its place. Point at an op to see its arcs and its lines in "
        f"the model.</p>\n{pieces}\n<script>{_SCRIPT}</script></body></html>\n"
    )


def _piece(piece: PieceView) -> Iterator[str]:
    for token_range, view in piece.ranges.items():
        words = "any tokens" if token_range == "all" else f"{token_range} tokens"
        title = f"{piece.name}, {words}: {view.num_before} to {view.num_after} ops"
        title += f", {len(view.graphs.kernels)} kernels, {piece.calls} times a step"
        labels = [each.source for each in piece.inputs]
        yield f"<details><summary>{escape(title)}</summary>{_pair(view, labels)}</details>"


def _pair(view: RangeView, labels: Sequence[str]) -> str:
    """Both graphs, side by side. `labels` are the inputs' names for people."""
    groups = _groups(view.graphs.after)
    before = {name: group for names, group in groups.items() for name in names}
    after = {op.name: groups[op.replaced] for op in view.graphs.after if op.replaced}
    halves = [
        f"<div><h3>{title}</h3>{_graph(_labelled(ops, labels), colours, len(groups))}</div>"
        for title, ops, colours in (
            ("Before the passes", view.graphs.before, before),
            ("After the passes", view.graphs.after, after),
        )
    ]
    return f'<div class="pair">{"".join(halves)}</div>'


def _labelled(ops: Sequence[Op], labels: Sequence[str]) -> list[Op]:
    """The ops, with the inputs' names for people as their arguments."""
    left = iter(labels)
    replace = msgspec.structs.replace
    return [replace(op, args=(next(left, ""),)) if op.op == "input" else op for op in ops]


def _groups(after: Sequence[Op]) -> dict[tuple[str, ...], int]:
    """A number for each set of ops that was replaced together."""
    found = dict.fromkeys(op.replaced for op in after if op.replaced)
    return {names: number for number, names in enumerate(found)}


def _graph(ops: Sequence[Op], colours: dict[str, int], num_colours: int) -> str:
    rows = {op.name: number for number, op in enumerate(ops)}
    arcs = "".join(
        _arc(name, op.name, rows[name], rows[op.name])
        for op in ops
        for name in dict.fromkeys(op.inputs)
    )
    height = len(ops) * _ROW
    lines = "".join(_line(op, colours.get(op.name), num_colours) for op in ops)
    svg = f'<svg width="{_ARCS}" height="{height}" role="img" aria-label="arcs">{arcs}</svg>'
    return f'<div class="graph">{svg}<div>{lines}</div></div>'


def _arc(start: str, end: str, upper: int, lower: int) -> str:
    """A curve on the left of the rows, the wider the farther they are apart."""
    reach = _ARCS - min(_ARCS - 4, 10 + 3 * (lower - upper))
    top, bottom = (row * _ROW + _ROW // 2 for row in (upper, lower))
    curve = f"M{_ARCS} {top} C{reach} {top} {reach} {bottom} {_ARCS} {bottom}"
    return f'<path data-from="{escape(start)}" data-to="{escape(end)}" d="{curve}"/>'


def _line(op: Op, group: int | None, num_groups: int) -> str:
    kind = "input" if op.op == "input" else "" if op.moves or op.op == "output" else "view"
    style = data = ""
    if group is not None:
        kind += " new"
        style = f' style="--hue:{360 * group // num_groups}"'
        data = f' data-group="{group}"'
    args = f"({', '.join(op.args)})" if op.args else ""
    where = escape("\n".join(op.sources) or "no line of the model")
    return (
        f'<div class="op {kind}" data-name="{escape(op.name)}"{data}{style} title="{where}">'
        f"{escape(op.name)} = <b>{escape(op.op)}</b>{escape(args)} <i>{escape(op.value)}  "
        f"{escape(places_in_short(op.sources, 1))}</i></div>"
    )
