"""Run passes over a graph, in order, and say what each did.

The manager knows a pass as a function from a graph to a count. It times, cleans up, checks and
reports; a pass only rewrites. A pass that raises is undone, reported by name and skipped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from torch import fx

from tokenspeed.log import logger
from tokenspeed.passes.rewrite import Count, Miss, TokenRange
from tokenspeed.passes.sources import mark
from tokenspeed.passes.traffic import traffic

_PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Step:
    """A pass as the manager runs it. `run` rewrites a graph in place and returns how often. `off`
    says why it does not run, or is None. `refused` is filled by `run`: why matches were left alone,
    in the last graph. `nearest` looks for the nearest miss in a graph that `run` has left.
    """

    name: str
    run: Count
    expected: Count | None = None
    off: str | None = None
    refused: list[str] = field(default_factory=list)
    nearest: Callable[[fx.Graph], Miss | None] | None = None


class PassReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a pass did to a graph. `expected` is None where a pass does not predict. `saved` are
    bytes of memory traffic at one token (`traffic`).
    """

    name: str
    matched: int = 0
    expected: int | None = None
    off: str | None = None
    error: str | None = None
    refused: tuple[str, ...] = ()
    seconds: float = 0.0
    saved: int = 0

    @property
    def is_short(self) -> bool:
        """Was the idiom there more often than the pass matched?"""
        return self.expected is not None and self.matched < self.expected


class PassFailed(RuntimeError):
    """In strict mode: a pass raised, left a broken graph, or matched less often than it should."""


class PassManager:
    """Call it with a graph; `reports` then tells about that graph, a report a step, and `stages`
    are copies: the graph before each step that changed it, by the step's name, and at the end.
    `failure` is what it raised, for callers whom it reaches as another error.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        *,
        token_range: TokenRange,
        options: Mapping[str, str],
        sources: Iterable[Path] = (),
        strict: bool = False,
    ) -> None:
        self._steps = steps
        self._strict = strict
        self._facts = {
            "passes": [(step.name, step.off) for step in steps],
            "range": list(token_range),
            "options": dict(options),
            "sources": digest_of([*pass_sources(), *sources]),
        }
        self.reports: list[PassReport] = []
        self.stages: list[tuple[str, fx.Graph]] = []
        self._unmatched: dict[str, fx.Graph] = {}
        self.failure: PassFailed | None = None

    def __call__(self, graph: fx.Graph) -> None:
        self.reports, self.stages, self._unmatched = [], [], {}
        mark(graph)
        for step in self._steps:
            self.reports.append(self._report(step, graph))
        self.stages.append(("", _copy(graph)))

    @property
    def counts(self) -> dict[str, int]:
        """Matches by pass, in the last graph; passes that did not match are left out."""
        return {report.name: report.matched for report in self.reports if report.matched}

    def nearest(self, name: str) -> Miss | None:
        """The nearest miss of a pass that ran over the last graph and did not match, or not often
        enough; None where nothing is alike. Never raises: it only explains.
        """
        (step,) = [step for step in self._steps if step.name == name]
        graph = self._unmatched.get(name)
        if step.nearest is None or graph is None:
            return None
        try:
            return step.nearest(graph)
        except Exception as error:
            logger.warning("no nearest miss can be told of the pass %s: %s", name, error)
            return None

    def uuid(self) -> str:
        """Equal for managers that do the same to every graph."""
        return hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()

    def _report(self, step: Step, graph: fx.Graph) -> PassReport:
        if step.off is not None:
            return PassReport(step.name, off=step.off)
        step.refused.clear()
        before = _copy(graph)
        start = time.perf_counter()
        try:
            expected = step.expected(graph) if step.expected else None
            matched = step.run(graph)
            graph.eliminate_dead_code()
            graph.lint()
        except Exception as error:
            if self._strict:
                self.stages.append((step.name, before))
                raise self._failed(f"the pass {step.name} failed: {error}") from error
            _restore(graph, before)
            logger.warning("the pass %s failed and is skipped: %s", step.name, error)
            return PassReport(step.name, error=f"{type(error).__name__}: {error}")
        seconds = time.perf_counter() - start
        refused = tuple(dict.fromkeys(step.refused))
        saved = self._keep(step, before, graph) if matched else 0
        report = PassReport(step.name, matched, expected, None, None, refused, seconds, saved)
        if report.is_short or not matched:
            self._unmatched[step.name] = _copy(graph) if matched else before
        if report.is_short:
            self._complain(report)
        return report

    def _keep(self, step: Step, before: fx.Graph, graph: fx.Graph) -> int:
        """Keep what the graph was before a step that changed it; the bytes that the step saved."""
        self.stages.append((step.name, before))
        return max(0, traffic(before) - traffic(graph))

    def _complain(self, report: PassReport) -> None:
        reason = "; ".join(report.refused) or "its pattern does not match the graph"
        if not report.refused and (miss := self.nearest(report.name)) is not None:
            reason = str(miss)
        text = f"the pass {report.name} matched {report.matched} of {report.expected}: {reason}"
        if self._strict and not report.refused:
            raise self._failed(text)
        logger.info("%s", text)

    def _failed(self, text: str) -> PassFailed:
        self.failure = PassFailed(text)
        return self.failure


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    _copy_into(copy, graph)
    return copy


def _restore(graph: fx.Graph, copy: fx.Graph) -> None:
    """Make `graph` again what it was when it was copied, whatever it is now."""
    nodes = list(graph.nodes)
    for node in nodes:
        node.args, node.kwargs = (), {}
    for node in nodes:
        graph.erase_node(node)
    _copy_into(graph, copy)


def _copy_into(target: fx.Graph, source: fx.Graph) -> None:
    values: dict[fx.Node, fx.Node] = {}
    results = target.graph_copy(source, values)
    output = target.output(results)
    output.meta.update(source.output_node().meta)


def pass_sources() -> list[Path]:
    """What decides how a graph is rewritten: the sources of the passes and of the kernels."""
    patterns = ("passes/*.py", "kernels/*.py", "kernels/cpu/*")
    return sorted(path for pattern in patterns for path in _PACKAGE.glob(pattern))


def digest_of(sources: Iterable[Path]) -> str:
    """A digest of file names and contents; where the files lie is no part of it."""
    digest = hashlib.sha256()
    for path in sources:
        digest.update(f"{path.parent.name}/{path.name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
