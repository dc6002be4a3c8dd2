"""Graphs as text, for people who look for what a pass did: a file for each stage.

    graph-N-STAGE.txt              what graph passes did to captured function N
    piece-HASH-RANGE-STAGE.txt     what piece passes did to a piece, for a range of token counts

STAGE is `0-before-PASS`, `1-before-PASS` and so on, for each pass that changed the graph, and at
the end `N-after`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import fx


def write_stages(folder: Path, name: str, stages: Sequence[tuple[str, fx.Graph]]) -> None:
    """Write what a pass manager kept of its last graph. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (step, graph) in enumerate(stages):
        stage = f"{number}-before-{step}" if step else f"{number}-after"
        (folder / f"{name}-{stage}.txt").write_text(f"{graph}\n")
