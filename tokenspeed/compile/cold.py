"""Compile a whole model into the files of a cache entry: no weights, in a process of its own."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from torch import fx, nn

from tokenspeed.compile import graph_receipt, inductor_api, pictures, plan, receipt
from tokenspeed.compile.dump import write_stages
from tokenspeed.compile.entry import (
    ARTIFACT,
    CALLS,
    GRAPHS,
    OBJECTS,
    PLAN,
    RECEIPT,
    Contents,
    StoredPiece,
)
from tokenspeed.compile.key import Target
from tokenspeed.compile.lower import lower, token_argument
from tokenspeed.compile.matcher import pass_manager
from tokenspeed.compile.pipeline import plan_graphs
from tokenspeed.compile.ranges import range_name
from tokenspeed.passes import Stage
from tokenspeed.passes.manager import PassManager
from tokenspeed.passes.rewrite import EVERY, TokenRange
from tokenspeed.spans import span

Report = Callable[[str], None]
"""Told what is being done, in a line for people."""


def compile_model(
    make: Callable[[], nn.Module],
    target: Target,
    folder: Path,
    report: Report,
    dump: Path | None = None,
) -> Contents:
    """Capture, rewrite and compile the model that `make` builds, into `folder`. What passes did is
    written to `dump`, as text.
    """
    return _Compilation(target, folder, report, dump).run(make)


class _Compilation:
    def __init__(self, target: Target, folder: Path, report: Report, dump: Path | None) -> None:
        self._target = target
        self._folder = folder
        self._report = report
        self._dump = dump
        self._receipt = receipt.Receipt()
        self._graphs = graph_receipt.GraphReceipt()
        self._ran: list[tuple[str | None, str, PassManager]] = []

    def run(self, make: Callable[[], nn.Module]) -> Contents:
        self._report("capture")
        with self._receipt.spend("capture"):
            planned = plan_graphs(
                make,
                dtype=self._target.dtype,
                device=self._target.device,
                graph_pass=self._graph_passes(),
            )
        work = self._folder / ".work"
        if shlex.quote(str(work)) != str(work):  # Inductor's command lines are split at spaces
            work = Path(tempfile.mkdtemp(prefix="tokenspeed-"))
        (self._folder / "pieces").mkdir()
        is_cpu = self._target.device.type == "cpu"
        with inductor_api.compiling_in(work, is_cpu):
            pieces = {
                key: self._lower(key, piece, f"{number} of {len(planned.pieces)}")
                for number, (key, piece) in enumerate(planned.pieces.items(), 1)
            }
            isa = inductor_api.vector_isa() if is_cpu else None
        with span("compile.receipt"):
            self._keep_objects(work)
            (self._folder / PLAN).write_text(plan.encode(planned.plan))
            self._write_receipts()
        return Contents(pieces, None if isa is None else msgspec.to_builtins(isa))

    def _write_receipts(self) -> None:
        (self._folder / RECEIPT).parent.mkdir()
        with self._receipt.spend("nearest misses"):
            self._graphs.misses = pictures.misses_of(self._ran)
        (self._folder / GRAPHS).write_bytes(graph_receipt.encode(self._graphs))
        (self._folder / RECEIPT).write_bytes(receipt.encode(self._receipt))

    def _lower(self, key: str, piece: fx.GraphModule, which: str) -> StoredPiece:
        tokens = token_argument(piece)
        files: list[tuple[int, int | None, str]] = []
        for token_range in self._target.ranges if tokens else (EVERY,):
            name = range_name(token_range)
            self._report(f"piece {which}" + ("" if name == "all" else f", {name} tokens"))
            manager = self._manager(Stage.PIECE, token_range)
            with (
                self._dumping(f"piece-{key}-{name}", manager),
                self._receipt.spend("inductor"),
                inductor_api.recording_launches() as launches,
            ):
                lowered = lower(piece, self._target.device.type, token_range, manager)
            self._receipt.pieces.setdefault(key, {})[name] = manager.reports
            self._keep_graphs(key, name, manager, None if lowered.is_calls else launches)
            file = f"pieces/{key}-{name}{CALLS if lowered.is_calls else ARTIFACT}"
            (self._folder / file).write_bytes(lowered.data)
            files.append((token_range.first, token_range.last, file))
        return StoredPiece(files, tokens)

    def _graph_passes(self) -> Callable[[fx.Graph], None]:
        def run(graph: fx.Graph) -> None:
            manager = self._manager(Stage.GRAPH, EVERY)
            with self._dumping(f"graph-{len(self._receipt.graph)}", manager):
                manager(graph)
            self._receipt.graph.append(manager.reports)
            self._ran.append((None, range_name(EVERY), manager))

        return run

    @contextlib.contextmanager
    def _dumping(self, name: str, manager: PassManager) -> Iterator[None]:
        """Write what the manager did, also where it failed."""
        try:
            yield
        finally:
            if self._dump is not None:
                write_stages(self._dump, name, manager.stages)

    def _manager(self, stage: Stage, token_range: TokenRange) -> PassManager:
        return pass_manager(
            stage,
            dtype=self._target.dtype,
            device=self._target.device.type,
            token_range=token_range,
            fuses_prologue=self._target.fuses_prologue,
            disabled=self._target.disabled_passes,
            strict=self._target.strict_passes,
        )

    def _keep_graphs(
        self, key: str, name: str, manager: PassManager, launches: list[inductor_api.Launch] | None
    ) -> None:
        """`launches` are Inductor's, None where it had nothing to do."""
        found = graph_receipt.PieceReceipt()
        if manager.stages:  # none where Inductor had compiled an equal graph just before
            before, after = manager.stages[0][1], manager.stages[-1][1]
            calls = pictures.launches_of(after)
            kernels = pictures.kernels_of(calls if launches is None else launches, after)
            found = graph_receipt.PieceReceipt(
                pictures.ops_of(before), pictures.ops_of(after), kernels
            )
        self._graphs.pieces.setdefault(key, {})[name] = found
        self._ran.append((key, name, manager))

    def _keep_objects(self, work: Path) -> None:
        """Only shared objects are needed by a load: those of kernels, of the trial of vector
        instructions, of Triton's driver. The rest is sources, locks and torch's own caches.
        """
        for path in sorted(path for place in OBJECTS for path in (work / place).rglob("*.so")):
            place = self._folder / path.relative_to(work)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, place)
        shutil.rmtree(work)
