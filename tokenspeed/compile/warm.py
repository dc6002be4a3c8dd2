"""A program out of a cache entry: bytes and a plan. Nothing is captured and nothing compiled."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tokenspeed.compile import calls, plan
from tokenspeed.compile.entry import PLAN, Damaged, Entry, StoredPiece, Unloadable
from tokenspeed.compile.plan import Piece, PieceCall, Program
from tokenspeed.compile.ranges import by_tokens
from tokenspeed.passes.rewrite import TokenRange
from tokenspeed.spans import span

_ARTIFACTS = "tokenspeed.compile.artifacts"
"""Named, not imported: it imports Inductor, and many entries do not need it."""

_NOT_ITS_FAULT = (OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that say nothing about an entry, whose every byte has been checked by then."""


def load_program(entry: Entry) -> Program:
    """Load an entry's pieces. Raises Damaged where they prove to be bad, Unloadable where this
    machine fails.
    """
    inductor = import_inductor() if entry.artifacts else None
    with span("compile.cache_load"):
        try:
            return _load(entry, inductor.load_artifacts(entry) if inductor else {})
        except Exception as error:
            reason = f"its pieces cannot be loaded: {type(error).__name__}: {error}"
            here = (*_NOT_ITS_FAULT, *(inductor.COMPILER_ERRORS if inductor else ()))
            is_here = any(isinstance(each, here) for each in _causes(error))
            kind = Unloadable if is_here else Damaged
            raise kind(reason.splitlines()[0][:300]) from error


@span("process.import")
def import_inductor() -> Any:
    """What loads artifacts."""
    return importlib.import_module(_ARTIFACTS)


def _load(entry: Entry, loaded: Mapping[str, Piece]) -> Program:
    program_plan = plan.decode(entry.files[PLAN].decode())
    stored, asked = entry.manifest.contents.pieces, program_plan.piece_calls()
    if missing := asked.keys() - stored.keys():
        raise Damaged(f"the plan names the piece {min(missing)}, which is not there")
    pieces = {key: _piece(entry, stored[key], row, loaded) for key, row in asked.items()}
    return Program(program_plan, pieces)


def _piece(entry: Entry, stored: StoredPiece, row: PieceCall, loaded: Mapping[str, Piece]) -> Piece:
    device = str(entry.manifest.facts["compile"]["device"])
    by_range = {}
    for first, last, file in stored.files:
        piece = loaded.get(file)
        if piece is None:
            kept = calls.decode(entry.files[file])
            if (kept.num_inputs, len(kept.results)) != (len(row.args), row.num_outputs):
                raise Damaged(f"the piece {file} is not what the plan calls")
            piece = calls.load(kept, device)
        by_range[TokenRange(first, last)] = piece
    return by_tokens(by_range, stored.tokens)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
