"""The CUDA context that is made ahead: which calls are made, and that no driver can do harm."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
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


PROCESS = """
import io, json, os, sys
from types import SimpleNamespace
from tokenspeed.config import Config, ModelConfig
from tokenspeed.engine import cuda_context, process
from tokenspeed.engine.messages import Launch
seen = []
config = Config(model=ModelConfig(device=sys.argv[1]))
process.read_orders = lambda kind: Launch("ipc:///nowhere", config)
process.end_with_parent = lambda tidy: None
process.EngineLink = lambda address: SimpleNamespace(wait_for_client=list, close=list)
cuda_context.begin = lambda: seen.append("torch" in sys.modules)
process.importlib.import_module = lambda name: SimpleNamespace(load_and_serve=lambda *args: 0)
assert process.main() == 0
os.write(2, json.dumps(seen).encode())
"""


@pytest.mark.parametrize(("device", "seen"), [("cpu", []), ("cuda", [False]), ("auto", [False])])
def test_it_begins_before_torch_and_not_for_a_cpu(device: str, seen: list[bool]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, device], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, json.loads(done.stderr.splitlines()[-1])) == (0, seen), done.stderr
