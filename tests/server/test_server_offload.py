"""The threads beside the event loop: results, errors, deadlines, and what is left after them."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tokenspeed.server.offload import MAX_LOST_THREADS, Offload, Overfull, Overrun


def num_threads() -> int:
    return sum(thread.name == "offload" for thread in threading.enumerate())


async def test_results_and_errors_come_back() -> None:
    offload = Offload(threads=2, deadline_s=20.0)
    assert await offload.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await offload.run(divmod, 7, 0)
    many = await asyncio.gather(*(offload.run(pow, 2, power) for power in range(50)))
    assert many == [2**power for power in range(50)]


async def test_an_endless_call_loses_its_thread_and_no_more() -> None:
    before = num_threads()
    offload = Offload(threads=1, deadline_s=0.05)
    release = threading.Event()
    with pytest.raises(Overrun):
        await offload.run(release.wait)
    assert num_threads() == before + 2  # the lost one, and another in its place
    assert await offload.run(divmod, 7, 2) == (3, 1)
    release.set()
    async with asyncio.timeout(2):
        while num_threads() > before + 1:
            await asyncio.sleep(0.01)
    assert await offload.run(divmod, 7, 2) == (3, 1)


async def test_a_caller_that_leaves_takes_no_thread_along() -> None:
    offload = Offload(threads=1, deadline_s=20.0)
    release = threading.Event()
    for _ in range(MAX_LOST_THREADS):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await offload.run(release.wait)
    with pytest.raises(Overfull):
        await offload.run(divmod, 7, 2)
    release.set()
    await asyncio.sleep(0.1)
    assert await offload.run(divmod, 7, 2) == (3, 1)


async def test_a_caller_that_leaves_before_its_call_runs_costs_nothing() -> None:
    before = num_threads()
    offload = Offload(threads=1, deadline_s=20.0)
    release = threading.Event()
    busy = asyncio.create_task(offload.run(release.wait))
    waiting = asyncio.create_task(offload.run(divmod, 7, 2))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() and num_threads() == before + 1
    release.set()
    assert await busy and await offload.run(divmod, 7, 2) == (3, 1)


async def test_lost_threads_are_limited() -> None:
    offload = Offload(threads=1, deadline_s=0.02)
    release = threading.Event()
    for _ in range(MAX_LOST_THREADS):
        with pytest.raises(Overrun):
            await offload.run(release.wait)
    with pytest.raises(Overfull):
        await offload.run(divmod, 7, 2)
    release.set()
    await asyncio.sleep(0.1)
    assert await offload.run(divmod, 7, 2) == (3, 1)


async def test_waiting_calls_are_limited_and_time_out() -> None:
    offload = Offload(threads=1, max_waiting=2, deadline_s=0.2)
    busy = asyncio.create_task(offload.run(time.sleep, 0.3))
    await asyncio.sleep(0.05)
    waiting = [asyncio.create_task(offload.run(divmod, 7, 2)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overfull):
        await offload.run(divmod, 7, 2)
    results = await asyncio.gather(busy, *waiting, return_exceptions=True)
    assert isinstance(results[0], Overrun)
    assert all(result == (3, 1) or isinstance(result, Overfull) for result in results[1:])


async def test_a_cancelled_call_is_never_run() -> None:
    offload = Offload(threads=1, deadline_s=20.0)
    called: list[int] = []
    busy = asyncio.create_task(offload.run(time.sleep, 0.1))
    await asyncio.sleep(0.02)
    waiting = asyncio.create_task(offload.run(called.append, 1))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(busy, waiting, return_exceptions=True)
    assert await offload.run(divmod, 7, 2) == (3, 1) and not called


class Panic(BaseException):
    """As a library's Rust raises it."""


@pytest.mark.parametrize("kind", [ValueError, Panic, SystemExit, KeyboardInterrupt])
async def test_whatever_a_call_raises_is_told_and_ends_no_thread(
    kind: type[BaseException],
) -> None:
    def fail() -> None:
        raise kind("inside")

    before = num_threads()
    offload = Offload(threads=1, deadline_s=20.0)
    for _ in range(MAX_LOST_THREADS + 1):
        async with asyncio.timeout(5):
            with pytest.raises(Exception, match="inside"):
                await offload.run(fail)
    assert num_threads() == before + 1
    assert await offload.run(divmod, 7, 2) == (3, 1)
