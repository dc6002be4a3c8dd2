"""What a kernel in Gluon says, done on a CPU: its partitions as threads that go on in random order,
memory that is written and read late, and nothing but barriers to keep them in step.

A buffer that is read while it is not filled, or written while it is read, gives NaN; a deadlock and
whatever hardware does not allow fail. Layouts are not modelled: a compiler checks those.
"""

from __future__ import annotations

import functools
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

ADDRESSES = 1 << 63
"""Of elements of two bytes."""


class Crew:
    """One thread runs at a time. Wherever another could go first, chance decides who does."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.copies: list[Callable[[], None]] = []
        self._ready: dict[int, Callable[[], bool]] = {}
        self._turns: dict[int, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self._errors: list[BaseException] = []
        self._has_failed = False

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=self._work, args=(job,)) for job in jobs]
        for each in threads:
            each.start()
            self._back.acquire()
        while self._ready and not self._errors:
            able = [who for who, is_ready in self._ready.items() if is_ready()]
            if not able and not self.copies:
                self._errors.append(AssertionError(f"deadlock of {len(self._ready)} partitions"))
                break
            index = self.random.randrange(len(able) + len(self.copies))
            if index >= len(able):
                self.copies.pop(index - len(able))()
                continue
            del self._ready[able[index]]
            self._turns[able[index]].release()
            self._back.acquire()
        self._has_failed = bool(self._errors)
        for turn in self._turns.values():
            turn.release()
        for each in threads:
            each.join()
        if self._errors:
            raise self._errors[0]

    def _work(self, job: Callable[[], None]) -> None:
        self._turns[threading.get_ident()] = threading.Semaphore(0)
        try:
            self.pause()
            job()
        except SystemExit:
            pass
        except BaseException as error:
            self._errors.append(error)
        self._back.release()

    def pause(self, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Go on some time after `is_ready`."""
        me = threading.get_ident()
        self._ready[me] = is_ready
        self._back.release()
        self._turns[me].acquire()
        if self._has_failed:
            raise SystemExit


class Barrier:
    def __init__(self) -> None:
        self.count = self.missing = self.num_bytes = self.phase = 0

    def arrive(self, count: int = 0, num_bytes: int = 0) -> None:
        self.missing -= count
        self.num_bytes += num_bytes
        assert self.missing >= 0, "more have arrived at a barrier than it waits for"
        if self.missing == self.num_bytes == 0:
            self.missing, self.phase = self.count, self.phase + 1


class Slot:
    """A buffer in shared memory. `version` counts what was put there."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self.version = self.num_copies = 0
        self.unfenced_of = 0


class View(NamedTuple):
    slot: Slot
    shape: list[int]
    read: Callable[[Tensor], Tensor]

    def reshape(self, shape: list[int]) -> View:
        return View(self.slot, shape, lambda x: self.read(x).reshape(shape))

    def slice(self, start: int, count: int) -> View:
        assert start + count <= self.shape[0]
        shape = [count, *self.shape[1:]]
        return View(self.slot, shape, lambda x: self.read(x)[start : start + count])

    def permute(self, order: tuple[int, ...]) -> View:
        shape = [self.shape[i] for i in order]
        return View(self.slot, shape, lambda x: self.read(x).permute(order))

    def store(self, value: Tensor) -> None:
        assert not self.slot.num_copies, "a buffer is written while it is copied"
        assert list(value.shape) == self.shape
        self.slot.value, self.slot.unfenced_of = value, threading.get_ident()
        self.slot.version += 1


class Memory:
    def __init__(self, shape: list[int], holds_barriers: bool) -> None:
        self.type = SimpleNamespace(shape=shape)
        self._barriers = [Barrier() for _ in range(shape[0] if holds_barriers else 0)]
        self.slots = [Slot() for _ in range(0 if holds_barriers else shape[0])]

    def index(self, i: int) -> Any:
        if self._barriers:
            return self._barriers[i]
        return View(self.slots[i], self.type.shape[1:], lambda x: x)


class Block(torch.Tensor):
    """In registers."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


class Product:
    """Under way. Only what comes out of a wait can be read."""

    def __init__(self, a: Tensor | View, b: View, sums: Tensor, use_acc: bool) -> None:
        assert isinstance(sums, Tensor), "a product is added to while it is under way"
        self._operands = [(each, self._version(each)) for each in (a, b)]
        self._sums = sums if use_acc else torch.zeros_like(sums)
        self.value: Tensor | None = None

    @staticmethod
    def _version(operand: Tensor | View) -> int:
        return operand.slot.version if isinstance(operand, View) else 0

    def finish(self) -> None:
        values = []
        for operand, version in self._operands:
            if isinstance(operand, View):
                held = operand.slot.value
                if held is None or operand.slot.version != version:
                    self.value = torch.full_like(self._sums, torch.nan)
                    return
                values.append(operand.read(held).float())
            else:
                values.append(operand.float())
        self.value = self._sums + values[0] @ values[1]


class Descriptor:
    """As TensorDescriptor, for elements of two bytes."""

    def __init__(
        self, base: Tensor, shape: list[int], strides: list[int], block: list[int], layout: object
    ) -> None:
        self.base, self.shape, self.strides, self.dtype = base, shape, strides, base.dtype
        self.layout = layout
        self.block_type = SimpleNamespace(shape=block, nbytes=2 * block[2] * block[3])

    def rows(self, corner: Sequence[int]) -> Tensor:
        """Those of the block at `corner` that are within bounds, all others being single ones."""
        assert all(0 <= at < 1 << 31 for at in corner), "coordinates are 32 bits wide"
        bounds = zip(corner, self.shape, strict=True)
        assert all(at < size for i, (at, size) in enumerate(bounds) if i != 2)
        count = max(0, min(self.block_type.shape[2], self.shape[2] - corner[2]))
        start = sum(at * step for at, step in zip(corner, self.strides, strict=True)) % ADDRESSES
        size = (count, self.block_type.shape[3])
        assert corner[3] + size[1] <= self.shape[3], "a block of two heads"
        place = self.base.storage_offset() + start if count else 0
        return self.base.as_strided(size, (self.strides[2], 1), place)


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
            slot.value = torch.zeros(to.shape, dtype=matrix.dtype)
            rows = matrix.rows(corner)
            slot.value[0, 0, : len(rows)] = rows
            barrier.arrive(num_bytes=-matrix.block_type.nbytes)

        self._crew.copies.append(copy)

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

        self._crew.copies.append(copy)
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
    """Launches `body` as its module's `gl` and what belongs to it are modelled."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, body: str, seed: int
    ) -> None:
        self._patch, self._module, self._random = monkeypatch, module, random.Random(seed)
        for name, value in vars(module).copy().items():
            if hasattr(value, "fn") and hasattr(value, "run"):
                monkeypatch.setattr(module, name, value.fn)
        self._body = getattr(module, body)
        monkeypatch.setattr(module, "TensorDescriptor", Descriptor)

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
        for name, value in parts.items():
            self._patch.setattr(self._module, name, value)
