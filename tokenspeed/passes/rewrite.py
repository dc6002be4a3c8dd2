"""What a pass is: a pattern and its replacement, or a walk over the graph. Data and functions only.

The compiler turns a Rewrite into something that finds and replaces; no pass knows how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx


class TokenRange(NamedTuple):
    """Token counts `first` to `last`, both included (None: no limit)."""

    first: int = 0
    last: int | None = None

    def contains(self, other: TokenRange) -> bool:
        below = self.last is None or (other.last is not None and other.last <= self.last)
        return self.first <= other.first and below


EVERY = TokenRange()

FEW, MANY = TokenRange(0, 32), TokenRange(33)
"""Steps in which reading the weights, and starting kernels, is what takes the time; and others."""


@dataclass(frozen=True)
class PassContext:
    """What a pattern has to be traced for: the model's dtype, and every epsilon of a norm and scale
    of angles that stands in the graph. Facts of a graph, never a model's config.
    """

    dtype: torch.dtype
    eps: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An example operand. A pattern holds no device, so that of the examples is the CPU."""
        return torch.empty(shape, dtype=dtype or self.dtype)


@dataclass(frozen=True)
class Case:
    """One way to trace a pattern: example operands (a pattern holds none of their sizes, only
    relations between them), and the numbers that pattern and replacement are given by name.
    """

    inputs: tuple[Tensor, ...]
    numbers: Mapping[str, float] = field(default_factory=dict)


Operands = Mapping[str, Any]
"""A match's operands by the pattern's parameter names: fake tensors, or plain numbers."""


@dataclass(frozen=True)
class Miss:
    """The nearest that a graph came to a pass that did not match: `matched` of the pattern's
    `total` ops (of a walk's steps) are there, at `node` it ended. `reason` says what was to be
    there and what is. `check` names the check that refused what did match, or is empty.
    """

    matched: int
    total: int
    node: str
    sources: tuple[str, ...]
    reason: str
    check: str = ""

    @property
    def share(self) -> float:
        return self.matched / self.total

    def __str__(self) -> str:
        """In a line."""
        at = f" ({self.sources[0]})" if self.sources else ""
        refused = f"{self.check} refused: " if self.check else ""
        got = f"{self.matched} of {self.total} ops are there"
        return f"{got}; at {self.node}{at}: {refused}{self.reason}"


Count = Callable[[fx.Graph], int]


def never_refuse(operands: Operands) -> str | None:
    return None


@dataclass(frozen=True)
class Rewrite:
    """Replace what computes `pattern(*operands, **numbers)` by `replacement` of the same.

    `pattern` is a fused op's reference: what is matched is its trace, in the context's dtype.
    `check` says why a match must be left alone, or None. `expected` counts, before the pass runs
    and by a look that is wider than the pattern, how often it should match: 0 also spares the
    tracing. Operands that `given` names must be inputs of the graph: a kernel may read them before
    the one in front of it has ended.
    """

    name: str
    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    cases: Callable[[PassContext], Sequence[Case]]
    expected: Count
    check: Callable[[Operands], str | None] = never_refuse
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Walk:
    """Change the graph by hand; `run` returns how often. `nearest` looks for what it nearly did."""

    name: str
    run: Count
    expected: Count | None = None
    nearest: Callable[[fx.Graph], Miss | None] | None = None


@dataclass(frozen=True)
class Inline:
    """Put an op's reference, traced, in the op's place. Keys are operators' overloads, which take
    their tensors first, and then plain numbers.
    """

    name: str
    references: Mapping[Any, Callable[..., Any]]


Pass = Rewrite | Walk | Inline
