"""A pytest plugin: where CI is set, a test may be skipped only if tests/skips.txt says so.

A skip that nobody wrote down is a test that silently stopped running. The file's lines are
`pattern  # reason`, the pattern in fnmatch form over test ids; a skip outside it fails the run.
"""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path

import pytest

ALLOWED = Path(__file__).with_name("skips.txt")


def read_patterns(text: str) -> list[str]:
    """The patterns of a skips.txt. A line without a reason is an error."""
    patterns = []
    for line in text.splitlines():
        pattern, _, reason = line.partition("#")
        if pattern.strip():
            if not reason.strip():
                raise ValueError(f"tests/skips.txt: {line.strip()!r} has no reason after #")
            patterns.append(pattern.strip())
    return patterns


class SkipPolicy:
    """Collects skips that the file does not name."""

    def __init__(self, patterns: list[str]) -> None:
        self.patterns = patterns
        self.unlisted: list[str] = []

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        is_skip = report.skipped and not hasattr(report, "wasxfail")
        if is_skip and not any(fnmatch.fnmatch(report.nodeid, each) for each in self.patterns):
            self.unlisted.append(f"{report.nodeid}: {_reason(report)}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unlisted and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.unlisted:
            terminalreporter.write_line(f"skipped, but not in tests/skips.txt: {line}", red=True)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    found = report.longrepr
    return str(found[2] if isinstance(found, tuple) else found)[:200]


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI"):
        config.pluginmanager.register(SkipPolicy(read_patterns(ALLOWED.read_text())))
