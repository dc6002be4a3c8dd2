"""What Gluon's functions do in `gluon_model`, and how a kernel's modules come to use them."""

from __future__ import annotations

import functools
import random
import threading
from collections import defaultdict
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from gluon_model import Barrier, Block, Crew, Descriptor, Memory, Product, Slot, View
from torch import Tensor


class Program:
    """One of the programs of a launch: what `gl`, `mbarrier`, `tma` and so on mean to it."""

    def __init__(self, seed: int) -> None:
        self._crew = Crew(seed)
        self._slots: list[Slot] = []
        self._products: dict[int, list[Product]] = defaultdict(list)
        self._stores: dict[int, list[Slot]] = defaultdict(list)

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Memory:
        memory = Memory(shape, holds_barriers=dtype == torch.int64)
        self._slots += memory.slots
        return memory

    def specialize(self, partitions: Any, warps: list[int], registers: list[int]) -> None:
        self._crew.run([functools.partial(work, *given) for work, given in partitions])

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count

    def expect(self, barrier: Barrier, num_bytes: int) -> None:
        barrier.arrive(1, num_bytes)

    def arrive(self, barrier: Barrier, count: int) -> None:
        self._crew.pause()
        barrier.arrive(count)

    def wait(self, barrier: Barrier, parity: int, pred: bool = True) -> None:
        if pred:
            self._crew.pause(lambda: barrier.phase & 1 != parity)

    def load(self, matrix: Descriptor, corner: Sequence[int], barrier: Barrier, to: View) -> None:
        slot = to.slot
        slot.value, slot.version = None, slot.version + 1

        def copy() -> None:
            slot.value, slot.version = torch.zeros(to.shape, dtype=matrix.dtype), slot.version + 1
            rows = matrix.rows(corner)
            slot.value[0, 0, : len(rows)] = rows
            barrier.arrive(num_bytes=-matrix.block_type.nbytes)

        self._crew.copy(matrix, copy)

    def store(self, matrix: Descriptor, corner: Sequence[int], source: View) -> None:
        slot, mine = source.slot, self._stores[threading.get_ident()]
        assert not slot.unfenced_of, "written by threads, and copied without a fence"
        slot.num_copies += 1
        mine.append(slot)

        def copy() -> None:
            assert slot.value is not None
            rows = matrix.rows(corner)
            rows.copy_(slot.value[: len(rows)])
            slot.num_copies -= 1
            mine.remove(slot)

        self._crew.copy(matrix, copy)
        self._crew.pause()

    def store_wait(self, count: int) -> None:
        mine = self._stores[threading.get_ident()]
        self._crew.pause(lambda: len(mine) <= count)

    def fence(self) -> None:
        for slot in self._slots:
            if slot.unfenced_of == threading.get_ident():
                slot.unfenced_of = 0

    def multiply(
        self, a: Tensor | View, b: View, sums: Tensor, is_async: bool, use_acc: bool = True
    ) -> Product:
        assert is_async
        product = Product(a, b, sums, use_acc)
        self._products[threading.get_ident()].append(product)
        return product

    def finish(self, count: int, values: tuple[Any, ...]) -> Any:
        """All products but the last `count`. What they belong to is in `values`."""
        self._crew.pause()
        mine = self._products[threading.get_ident()]
        while len(mine) > count:
            mine.pop(0).finish()
        found = tuple(each.value if isinstance(each, Product) else each for each in values)
        return found if len(found) > 1 else found[0]


def language(program: Program, index: int, num_programs: int) -> SimpleNamespace:
    """`gl` for program `index`. Layouts are nothing."""

    def where(condition: Any, a: Any, b: Any) -> Any:
        return (
            torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b
        )

    def arange(start: int, end: int, layout: object) -> Tensor:
        return torch.arange(start, end).as_subclass(Block)

    def zeros(shape: tuple[int, ...], dtype: torch.dtype, layout: object) -> Tensor:
        return torch.zeros(shape, dtype=dtype).as_subclass(Block)

    def nothing(*given: Any, **options: Any) -> None:
        return None

    return SimpleNamespace(
        program_id=lambda axis: index, num_programs=lambda axis: num_programs,
        load=lambda place: int(place[0]), where=where, arange=arange, zeros=zeros,
        zeros_like=torch.zeros_like, minimum=min, maximum=torch.maximum, exp2=torch.exp2,
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
        expand_dims=torch.unsqueeze, join=lambda a, b: torch.stack((a, b), -1),
        convert_layout=lambda x, layout, assert_trivial: x,
        NVMMADistributedLayout=nothing, SliceLayout=nothing, DotOperandLayout=nothing,
        float32=torch.float32, int64=torch.int64, static_range=range,
        allocate_shared_memory=program.allocate, warp_specialize=program.specialize,
    )  # fmt: skip


class Place:
    """A pointer into a tensor of integers."""

    def __init__(self, values: Tensor, at: int = 0) -> None:
        self._values, self._at = values, at

    def __add__(self, count: int) -> Place:
        return Place(self._values, self._at + count)

    def __getitem__(self, i: int) -> Tensor:
        return self._values.flatten()[self._at + i]


class Kernel:
    """Launches `body` while what `modules` have of Gluon is modelled."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, modules: Sequence[ModuleType], body: str, seed: int
    ) -> None:
        self._patch, self._modules, self._random = monkeypatch, modules, random.Random(seed)
        for module in modules:
            for name, value in vars(module).copy().items():
                if hasattr(value, "fn") and hasattr(value, "run"):
                    monkeypatch.setattr(module, name, value.fn)
            if hasattr(module, "TensorDescriptor"):
                monkeypatch.setattr(module, "TensorDescriptor", Descriptor)
        self._body = getattr(modules[0], body)

    def run(self, *given: Any, grid: tuple[int], **options: Any) -> None:
        for name in ("num_warps", "maxnreg", "warmup"):
            options.pop(name)
        given = tuple(Place(x) if isinstance(x, Tensor) else x for x in given)
        for index in range(grid[0]):
            self.become(index, grid[0])
            self._body(*given, **options)

    def become(self, index: int, num_programs: int) -> None:
        """Let the module's functions be those of one program."""
        program = Program(self._random.getrandbits(32))
        parts = {
            "gl": language(program, index, num_programs),
            "mbarrier": SimpleNamespace(
                init=program.init, expect=program.expect, arrive=program.arrive,
                wait=program.wait, MBarrierLayout=lambda: None,
            ),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=program.load,
                async_copy_shared_to_global=program.store, store_wait=program.store_wait,
            ),
            "fence_async_shared": program.fence,
            "warpgroup_mma": program.multiply,
            "warpgroup_mma_wait": program.finish,
        }  # fmt: skip
        for module in self._modules:
            for name in parts.keys() & vars(module).keys():
                self._patch.setattr(module, name, parts[name])
