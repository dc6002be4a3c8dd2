"""The CUDA context, made while Python imports torch: half a second that a start need not wait for.

It is the device's *primary* context, the one that torch takes, and a process has one of each device
and keeps it. Python's interpreter is free meanwhile: the driver works in C. Whatever goes wrong
here is left to torch, which then makes the context itself, and can say what is wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading

from tokenspeed.log import logger

_DRIVER = "libcuda.so.1"
_FIRST = 0
"""The device that torch takes, of those that CUDA_VISIBLE_DEVICES leaves."""


def begin() -> None:
    """Begin, if there is a driver, and return at once."""
    threading.Thread(target=_load_and_make, name="cuda-context", daemon=True).start()


def _load_and_make() -> None:
    with contextlib.suppress(OSError):  # no driver, no GPU
        make(ctypes.CDLL(_DRIVER))


def make(driver: ctypes.CDLL) -> None:
    """Have the driver's primary context of the first device made, for as long as the process lives.
    A driver that refuses, or lacks a function, changes nothing.
    """
    device, context = ctypes.c_int(), ctypes.c_void_p()
    try:
        for function, *arguments in (
            (driver.cuInit, 0),
            (driver.cuDeviceGet, ctypes.byref(device), _FIRST),
            (driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), device),
        ):
            if code := function(*arguments):
                logger.debug("%s: CUDA error %d", function, code)
                return
    except AttributeError as error:
        logger.debug("no CUDA context is made ahead: %s", error)
