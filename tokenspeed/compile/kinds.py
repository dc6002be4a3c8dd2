"""Which few layers to capture so that a plan of any depth can be made of them.

A layer's kind is a fingerprint of what can reach the graph. (So what sets a layer apart must stand
in an attribute of it: the model's own `forward` treats all alike.) A plan's rows at a layer depend
on that layer and its two predecessors: the piece between two sequence calls is the end of one layer
and the beginning of the next, and it reads results that the one before made. Three layers at the
beginning do not tell "two layers before" from "the first layer", so the shortest walk is taken that
shows every run of four neighbouring kinds of the real model, beginning and end included. A uniform
model needs four layers, whatever its depth.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

from torch import nn

_EDGE = "edge"
_MAX_STATES = 100_000
"""States of the search before it gives up: a second or so."""

_OF_TORCH = vars(nn.Module()).keys() - {"training"}
"""Where a module keeps its parts, hooks and the like: parameters and buffers count by shape."""

Window = tuple[str, str, str]
_Run = tuple[str, ...]


def kind_of(layer: nn.Module, index: int) -> str:
    """A layer's kind: classes, attributes, shapes, dtypes and devices of its tensors. Its own
    `index`, kept in an attribute `layer`, is no part of it.
    """
    facts: list[object] = []
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if k not in _OF_TORCH}
        if plain.get("layer") == index:
            plain["layer"] = "own"
        facts.append((name, type(module).__module__, type(module).__qualname__, plain))
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        facts.append((name, tuple(tensor.shape), tensor.dtype, tensor.device))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:8]


def windows(kinds: Sequence[str]) -> list[Window]:
    """The run of three that ends at each layer, and at the tail behind the last one."""
    return [(a, b, c) for a, b, c in _runs(kinds, 3)]


def _runs(kinds: Sequence[str], length: int) -> list[_Run]:
    padded = (*[_EDGE] * (length - 1), *kinds, _EDGE)
    return [padded[i : i + length] for i in range(len(kinds) + 1)]


def layers_to_capture(kinds: Sequence[str]) -> list[int]:
    """Indices of the layers to capture, in the order to stack them; all of them where no fewer
    show every run of four.
    """
    walk = _shortest_walk(kinds)
    everything = list(range(len(kinds)))
    if walk is None or len(walk) >= len(kinds):
        return everything
    spread: dict[str, deque[int]] = {}
    for kind in set(walk):
        real, uses = [i for i in everything if kinds[i] == kind], walk.count(kind)
        if uses > len(real):
            return everything
        # Far apart: a layer that computes with its index shows it as a difference between uses.
        spread[kind] = deque(real[i * (len(real) - 1) // max(uses - 1, 1)] for i in range(uses))
    return [spread[kind].popleft() for kind in walk]


def _shortest_walk(kinds: Sequence[str]) -> list[str] | None:
    """Breadth first over (last three kinds, runs seen); None if the search grows too large."""
    runs = _runs(kinds, 4)
    bit = {run: 1 << i for i, run in enumerate(dict.fromkeys(runs))}
    goal = (1 << len(bit)) - 1
    after: dict[_Run, list[_Run]] = {}
    for run in bit:
        after.setdefault(run[:-1], []).append(run)
    start = (runs[0][:-1], 0)
    came_from = {start: start}
    queue = deque([start])
    while queue and len(came_from) < _MAX_STATES:
        state = queue.popleft()
        last, seen = state
        if last[-1] == _EDGE and seen == goal:
            walk = []
            while state != start:
                walk.append(state[0][-1])
                state = came_from[state]
            return walk[:0:-1]
        for run in after.get(last, ()):
            follower = (run[1:], seen | bit[run])
            if follower not in came_from:
                came_from[follower] = state
                queue.append(follower)
    return None
