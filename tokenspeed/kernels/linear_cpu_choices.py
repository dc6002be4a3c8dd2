"""What `linear` runs on a CPU: what is best for the weight's shape and the step's tokens.

An installed table names a kernel for each weight shape and range of T; they all read the weight in
its plain layout, so there is one copy of it, whatever T comes. Without a table it is torch's
`linear`. Shapes: x [T, K], w [N, K], bias [N] -> [T, N].

Kernels differ by float rounding. `rows` gives each token the same bits at every T it serves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels.linear_cpu import Linear
from tokenspeed.kernels.linear_cpu_tuning import LinearTable

_Choice = tuple[tuple[int, Linear], ...]
"""(up to how many tokens, what to run), ascending; the rest goes to torch."""

_choices: dict[torch.Size, _Choice] = {}
"""By the weight's shape, for all models of the process. They say what is fast on this machine; any
choice is right for any model.
"""


def onednn(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's product, where torch would ask MKL: the faster of the two depends on the CPU."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
    return out


def kernels(rows: Linear | None) -> dict[str, Linear]:
    """The kernels by name. `rows` comes from `native.load`, and is missing if it was not
    built.
    """
    found: dict[str, Linear] = {"torch": F.linear}
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        found["onednn"] = onednn
    if rows is not None:
        found["rows"] = rows
    return found


def install(table: LinearTable, available: Mapping[str, Linear]) -> None:
    """Choose by `table` from now on, in this process, where a shape has no choice yet: a model that
    runs goes on to the last bit when another one is loaded. A kernel that is not available is
    replaced by torch's.
    """
    for (num_rows, size), choices in table.by_shape().items():
        found = tuple((each.max_tokens, available.get(each.kernel, F.linear)) for each in choices)
        _choices.setdefault(torch.Size((num_rows, size)), found)


def uninstall() -> None:
    """Forget every choice: all is torch's again."""
    _choices.clear()


def run(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """As the table says."""
    for max_tokens, kernel in _choices.get(w.shape, ()):
        if x.shape[0] <= max_tokens:
            return kernel(x, w, bias)
    return F.linear(x, w, bias)
