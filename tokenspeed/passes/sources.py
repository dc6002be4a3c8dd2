"""Which lines of the model a node came from, kept through every rewrite.

The tracer leaves a stack trace in a node's meta; here it is shortened to places for people:
`models/qwen3.py:95 > models/layers.py:24`, innermost last. A pass replaces nodes by new ones that
know no line: those inherit the lines of what stood in their place, and its names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from torch import fx

KEY = "sources"
"""Where in a node's meta its places stand: a tuple, without repetition."""

_ORIGINS = "origins"
"""Where the names stand of the nodes, before all passes, that a node is or came from."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_PACKAGE = Path(__file__).parent.parent


def mark(graph: fx.Graph) -> None:
    """Give each node the place that its stack trace names."""
    for node in graph.nodes:
        if KEY not in node.meta:
            place = place_of(node.meta.get("stack_trace") or "")
            node.meta[KEY] = (place,) if place and node.op != "placeholder" else ()
            node.meta[_ORIGINS] = (node.name,)


def sources_of(node: fx.Node) -> tuple[str, ...]:
    found: tuple[str, ...] = node.meta.get(KEY, ())
    return found


def origins_of(node: fx.Node) -> tuple[str, ...]:
    found: tuple[str, ...] = node.meta.get(_ORIGINS, ())
    return found


def place_of(trace: str) -> str:
    """The last frame of a stack trace that is not torch's, after the last one before it that is in
    another file: a layer's line says what is computed, its model's line which of the calls it is.
    """
    frames = [frame for frame in _FRAME.findall(trace) if not _is_torch(frame[0])]
    # A comprehension is a frame of its own, on the line that it stands on.
    frames = list(dict.fromkeys(frames))
    if not frames:
        return ""
    *callers, last = frames
    others = [frame for frame in callers if frame[0] != last[0]] or callers
    return " > ".join(f"{_short(path)}:{line}" for path, line in (*others[-1:], last))


def inherit(new: Iterable[fx.Node], replaced: Iterable[fx.Node]) -> None:
    """Give nodes that know no place those of the nodes that they stand for."""
    replaced = list(replaced)
    places = tuple(dict.fromkeys(place for node in replaced for place in sources_of(node)))
    origins = tuple(dict.fromkeys(name for node in replaced for name in origins_of(node)))
    for node in new:
        node.meta.setdefault(KEY, places)
        node.meta.setdefault(_ORIGINS, origins)


def _is_torch(path: str) -> bool:
    return "/torch/" in path or path.startswith("<")


def _short(path: str) -> str:
    """Relative to the package; of a file elsewhere, its name and its folder's."""
    file = Path(path)
    if file.is_relative_to(_PACKAGE):
        return file.relative_to(_PACKAGE).as_posix()
    return "/".join(file.parts[-2:])
