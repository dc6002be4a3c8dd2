"""What a kernel in Gluon says, done on a CPU: its partitions as threads that go on in random order,
memory that is written and read late, and nothing but barriers to keep them in step.

A buffer that is read while it is not filled, or written while it is read, gives NaN; a deadlock and
whatever hardware does not allow fail. Layouts are not modelled: a compiler checks those.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

ADDRESSES = 1 << 63
"""Of elements of two bytes."""


class Crew:
    """One thread runs at a time. Wherever another could go first, chance decides who does; but some
    are a thousand times as fast as others, and so are copies of some matrices.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._speeds: dict[object, float] = defaultdict(lambda: 10 ** self._random.uniform(-3, 0))
        self._copies: dict[int, Callable[[], None]] = {}
        self._ready: dict[int, Callable[[], bool]] = {}
        self._turns: dict[int, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self._errors: list[BaseException] = []
        self._has_failed = False
        self._num_copies = 0

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=self._work, args=(job,)) for job in jobs]
        for each in threads:
            each.start()
            self._back.acquire()
        while self._ready and not self._errors:
            able = [who for who, is_ready in self._ready.items() if is_ready()]
            if not able and not self._copies:
                self._errors.append(AssertionError(f"deadlock of {len(self._ready)} partitions"))
                break
            could = [*able, *self._copies]
            (who,) = self._random.choices(could, [self._speeds[each] for each in could])
            if who in self._copies:
                self._try(self._copies.pop(who))
                continue
            del self._ready[who]
            self._turns[who].release()
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
        self._try(lambda: (self.pause(), job()))
        self._back.release()

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except SystemExit:
            pass
        except BaseException as error:
            self._errors.append(error)

    def copy(self, matrix: object, work: Callable[[], None]) -> None:
        """Do it some time from now."""
        self._num_copies += 1
        who = -self._num_copies  # threads have positive numbers
        self._copies[who] = work
        self._speeds[who] = self._speeds[matrix]

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
    """A buffer in shared memory. `version` counts what happened to it."""

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
