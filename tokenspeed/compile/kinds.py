"""Which few layers to capture so that a plan of any depth can be made of them.

A layer's kind is a fingerprint of what can reach the graph. A plan's rows at a layer depend on that
layer and its two predecessors: the piece between two sequence calls is the end of one layer and
the beginning of the next, and it reads results that the one before made. So the shortest walk that
shows every run of three neighbouring kinds of the real model (beginning and end included) shows
all there is. A uniform model needs three layers, whatever its depth.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

from torch import nn

_EDGE = "edge"
_MAX_STATES = 100_000
"""States of the search before it gives up: a second or so."""

Window = tuple[str, str, str]


def kind_of(layer: nn.Module, index: int) -> str:
    """A layer's kind: classes, plain attributes, shapes, dtypes and devices of its tensors. Its own
    `index`, kept in an attribute `layer`, is no part of it.
    """
    facts: list[object] = []
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if not k.startswith("_")}
        if plain.get("layer") == index:
            plain["layer"] = "own"
        facts.append((name, type(module).__module__, type(module).__qualname__, plain))
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        facts.append((name, tuple(tensor.shape), tensor.dtype, tensor.device))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:8]


def windows(kinds: Sequence[str]) -> list[Window]:
    """The run of three that ends at each layer, and at the tail behind the last one."""
    padded = [_EDGE, _EDGE, *kinds, _EDGE]
    return list(zip(padded, padded[1:], padded[2:], strict=False))


def layers_to_capture(kinds: Sequence[str]) -> list[int]:
    """Indices of the layers to capture, in the order to stack them; all of them where no fewer
    show every window.
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
    """Breadth first over (last two kinds, windows seen); None if the search grows too large."""
    bit = {window: 1 << i for i, window in enumerate(dict.fromkeys(windows(kinds)))}
    goal = (1 << len(bit)) - 1
    after: dict[tuple[str, str], list[Window]] = {}
    for window in bit:
        after.setdefault(window[:2], []).append(window)
    start = ((_EDGE, _EDGE), 0)
    came_from = {start: start}
    queue = deque([start])
    while queue and len(came_from) < _MAX_STATES:
        state = queue.popleft()
        last_two, seen = state
        if last_two[1] == _EDGE and seen == goal:
            walk = []
            while state != start:
                walk.append(state[0][1])
                state = came_from[state]
            return walk[:0:-1]
        for window in after.get(last_two, ()):
            follower = (window[1:], seen | bit[window])
            if follower not in came_from:
                came_from[follower] = state
                queue.append(follower)
    return None
