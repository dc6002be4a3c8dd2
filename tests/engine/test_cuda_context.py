"""The CUDA context that is made ahead: which calls are made, and that no driver can do harm."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed.engine import cuda_context

CALLS = ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain")


class Driver:
    """libcuda.so.1, as far as it is called. The third of several devices has the number 7."""

    def __init__(self, fails: str | None = None) -> None:
        self.called: list[tuple[str, Any]] = []
        self._fails = fails

    def _enter(self, name: str, argument: object) -> int:
        self.called.append((name, argument))
        return 100 if name == self._fails else 0

    def cuInit(self, flags: int) -> int:
        return self._enter("cuInit", flags)

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 7 + ordinal
        return self._enter("cuDeviceGet", ordinal)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        context._obj.value = 1 << 40
        return self._enter("cuDevicePrimaryCtxRetain", device.value)


def test_the_first_visible_device_gets_its_primary_context() -> None:
    driver = Driver()
    cuda_context.make(driver)  # type: ignore[arg-type]
    assert driver.called == list(zip(CALLS, (0, 0, 7), strict=True))


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_nothing_is_called_after_a_refusal(number: int) -> None:
    driver = Driver(fails=CALLS[number])
    cuda_context.make(driver)  # type: ignore[arg-type]
    assert [name for name, _ in driver.called] == list(CALLS[: number + 1])


@pytest.mark.parametrize("name", CALLS)
def test_a_driver_without_a_function_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Driver, name)
    cuda_context.make(Driver())  # type: ignore[arg-type]


def no_driver(name: str) -> object:
    raise OSError(f"{name}: cannot open shared object file")


def other_library(name: str) -> object:
    return ctypes.PyDLL(None)  # this program, which has none of the functions


@pytest.mark.parametrize("load", [no_driver, other_library])
def test_without_a_driver_the_thread_ends_in_silence(
    load: Callable[[str], object],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cuda_context.ctypes, "CDLL", load)
    cuda_context.begin()
    for thread in threading.enumerate():
        if thread.name == "cuda-context":
            thread.join(10)
    assert capfd.readouterr() == ("", "")
