"""A piece, for one token range, as bytes that another process can load: by itself (`calls.py`), or
by Inductor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, fx

from tokenspeed import ledger
from tokenspeed.compile import calls, inductor_api, torch_api
from tokenspeed.compile.capture import UnsupportedGraph
from tokenspeed.compile.matcher import InductorPass
from tokenspeed.compile.piece import structure_hash
from tokenspeed.compile.plan import TokenArgument
from tokenspeed.compile.ranges import range_name
from tokenspeed.compile.to_calls import calls_of
from tokenspeed.passes.manager import PassManager
from tokenspeed.passes.rewrite import TokenRange
from tokenspeed.spans import span

_FEW_TOKENS = 16
_MANY_TOKENS = 8192
"""How many tokens kernels are tuned for, where the count is not known to be small."""


class Lowered(NamedTuple):
    """Bytes that `calls.load` takes, or, if not `is_calls`, `inductor_api.load`."""

    data: bytes
    is_calls: bool


def lower(
    piece: fx.GraphModule, device: str, token_range: TokenRange, manager: PassManager | None
) -> Lowered:
    """Take a piece through the manager's passes, and compile with Inductor what is more than calls
    then. Raises PassFailed as the passes do.
    """
    inputs = [torch_api.example_value(node) for node in piece.graph.find_nodes(op="placeholder")]
    found: calls.Calls | None = None

    def is_calls(graph: fx.Graph) -> bool:
        nonlocal found
        found = calls_of(graph, inputs)
        return found is not None

    name, cause = f"piece {structure_hash(piece)}", f"for {range_name(token_range)} tokens"
    # The piece's passes run inside Inductor: their seconds are in the receipt, not in a span.
    with span("compile.piece"), ledger.compiling("inductor", name, cause):
        passes = None if manager is None else InductorPass(manager)
        try:
            data = inductor_api.compile_graph(
                *(piece, inputs),
                passes=passes,
                settings=_settings(device, token_range),
                leave=is_calls,
            )
        except inductor_api.Left:
            assert found is not None
            return Lowered(calls.encode(found), is_calls=True)
        except Exception:
            if manager is not None and manager.failure is not None:
                raise manager.failure from None  # Inductor has put it into an error of its own
            raise
    return Lowered(data, is_calls=False)


def _settings(device: str, token_range: TokenRange) -> dict[str, Any]:
    settings: dict[str, Any] = {
        # What is asked of every call: an operator that returns other strides than it promised would
        # otherwise give wrong numbers without a word.
        "size_asserts": True,
        "unbacked_symint_fallback": _MANY_TOKENS if token_range.last is None else _FEW_TOKENS,
        # Worker processes would import torch first, for longer than these few compiles take.
        "compile_threads": 1,
    }
    if device == "cuda":
        # A kernel would write its best tiling beside its source: into the folder of the compile,
        # which is gone by then, whenever a start measures it.
        settings["autotune_local_cache"] = False
    return settings


def token_argument(piece: fx.GraphModule) -> TokenArgument | None:
    """Where the piece finds the token count; None if it does not depend on it."""
    values = map(torch_api.example_value, piece.graph.find_nodes(op="placeholder"))
    found = None
    for index, value in enumerate(values):
        if torch_api.is_symbol(value):
            return TokenArgument(index, is_count=True)
        if isinstance(value, Tensor) and any(map(torch_api.is_symbol, value.shape)):
            if not torch_api.is_symbol(value.shape[0]):
                raise UnsupportedGraph("the token count must be a tensor's first dimension")
            found = found or TokenArgument(index, is_count=False)
    return found
