"""What tests of the engine share beside the engine itself."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """What has been logged so far, a line a record; debugging is left out."""
    caplog.set_level(logging.INFO, logger="tokenspeed")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)
