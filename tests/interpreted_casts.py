"""Casts in Triton's interpreter (3.6) as a GPU makes them: by torch.

Its own lose the carry where rounding to fp8 reaches the next power of two, know no NaN in fp8, and
cut what bfloat16 rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

_DTYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def _convert(data: Any, source: Any, target: Any, rounding: object) -> Any:
    """The bits of `data`, an array of numbers or of their bits, in the dtype `target`."""
    numbers = torch.from_numpy(np.array(data)).view(_DTYPES[source.name])
    found = numbers.to(_DTYPES[target.name])
    return found.view(_BITS[found.dtype.itemsize]).numpy()


@pytest.fixture(autouse=True, scope="module")
def casts_by_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", _convert)
        yield
