"""The cases for a memory checker are right without one."""

from __future__ import annotations

import pytest
import torch
from gpu_engines import GPU_ENGINE_MARKS
from sanitize_cases import CASES

pytestmark = GPU_ENGINE_MARKS


@pytest.mark.parametrize("name", CASES)
def test_a_case(name: str) -> None:
    torch.manual_seed(0)
    CASES[name]()
