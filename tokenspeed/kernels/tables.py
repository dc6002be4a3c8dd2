"""The closed table of sequence calls: ops at which a captured graph is cut, and which run
outside its pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed.kernels.attend import run_attend


@dataclass(frozen=True)
class SequenceCall:
    """`run` takes the op's arguments in schema order, without the dispatcher's cost. Argument
    number `layer_arg` is the layer index, which a plan renumbers.
    """

    run: Callable[..., torch.Tensor]
    layer_arg: int


SEQUENCE_CALLS: dict[str, SequenceCall] = {
    "tokenspeed::attend": SequenceCall(run_attend, layer_arg=3),
}
