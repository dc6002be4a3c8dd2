"""Traces of the engine's steps, recorded while it serves, for chrome://tracing and Perfetto.

What a recording may become is bounded: in steps, in what it takes of memory while it runs (the file
is about as large; putting it together takes several times that), and in traces in the folder. A
recording that fails is told of and ends no request.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tokenspeed.engine.messages import MAX_PROFILE_STEPS, Profile
from tokenspeed.log import logger

MAX_BYTES = 64 << 20
"""Of memory for what has been recorded: some hundred thousand operations."""
MAX_TRACES = 64


class ProfileRefused(RuntimeError):
    """Nothing is recorded; the message says why."""


class Profiler:
    """At most one recording at a time. `count_steps` says how many the engine has launched."""

    def __init__(self, folder: str | None, count_steps: Callable[[], int]) -> None:
        self._folder = None if folder is None else Path(folder).absolute()
        self._count_steps = count_steps
        self._numbers = itertools.count(1)
        self._recording: _Recording | None = None
        self._last: Profile | None = None

    def start(self, num_steps: int) -> Profile:
        """Record the steps from now on: `num_steps`, or up to a limit, or to `stop`. Raises
        ProfileRefused.
        """
        if self._folder is None:
            raise ProfileRefused("this server records no profile: start it with --profile-dir")
        if self._recording is not None:
            raise ProfileRefused("a profile is being recorded already")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            num_traces = len(list(self._folder.glob("*.json")))
        except OSError as error:
            raise ProfileRefused(f"--profile-dir cannot be used: {error}") from error
        if num_traces >= MAX_TRACES:
            raise ProfileRefused(
                f"{self._folder} holds {num_traces} traces: remove some, {MAX_TRACES} are kept"
            )
        when = time.strftime("%Y%m%d-%H%M%S")
        path = self._folder / f"tokenspeed-{when}-{os.getpid()}-{next(self._numbers)}.json"
        try:
            self._recording = _Recording(
                path, self._count_steps(), min(num_steps, MAX_PROFILE_STEPS)
            )
        except Exception as error:
            logger.exception("no profile could be started")
            raise ProfileRefused(f"{type(error).__name__}: {error}") from error
        return Profile(str(path), 0)

    def stop(self) -> Profile:
        """The trace as it has been written, by now at the latest. Raises ProfileRefused."""
        self._end()
        if self._last is None:
            raise ProfileRefused("no profile has been recorded")
        if self._last.error is not None:
            raise ProfileRefused(f"the trace could not be written: {self._last.error}")
        return self._last

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around each step."""
        recording = self._recording
        if recording is None:
            yield
            return
        with record_function("engine.step"):
            yield
        if recording.is_over(self._count_steps()):
            self._end()

    def _end(self) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        num_steps, error = self._count_steps() - recording.first_step, None
        try:
            recording.write()
        except Exception as failure:
            logger.exception("a profile could not be written")
            error = f"{type(failure).__name__}: {failure}"
        else:
            logger.info("profile: %d steps in %s", num_steps, recording.path)
        self._last = Profile(str(recording.path), num_steps, error)


class _Recording:
    """Of the steps from `first_step` on."""

    def __init__(self, path: Path, first_step: int, num_steps: int) -> None:
        self.path, self.first_step = path, first_step
        self._last_step = first_step + num_steps
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
            # Behind CUDA graphs the tracing library must not be taken down, nor started late: torch
            # does the same where its own compiler records graphs.
            os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
        self._profile = profile(activities=activities)
        self._profile.start()
        self._most_bytes = _resident_bytes() + MAX_BYTES  # behind the start, which loads libraries

    def is_over(self, num_steps: int) -> bool:
        return num_steps >= self._last_step or _resident_bytes() > self._most_bytes

    def write(self) -> None:
        """End it. Raises OSError."""
        self._profile.stop()
        part = self.path.with_suffix(".part")
        self._profile.export_chrome_trace(str(part))  # a failure to write is logged there, no more
        part.replace(self.path)


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()
