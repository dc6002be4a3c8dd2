"""Numbers of the cache in another dtype: rounded, saturated, read back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.kernels.kv_dtype import limit_of, raw, restored, stored

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NARROW = [E4M3, E5M2, torch.float16, torch.bfloat16]


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=20),
    st.sampled_from(NARROW),
    st.floats(2**-20, 2**20, width=32),
)
def test_any_number_stays_finite_or_nan(
    values: list[float], dtype: torch.dtype, scale: float
) -> None:
    x = torch.tensor(values)
    kept = stored(x, scale, dtype)
    assert kept.dtype == dtype
    read = restored(kept, torch.float32)
    assert torch.equal(read.isnan(), x.isnan()) and not read.isinf().any()
    there = ~x.isnan()
    exact, limit = (x / scale)[there], limit_of(dtype)
    step = torch.finfo(dtype).eps / 2 + 1e-6
    smallest = torch.finfo(dtype).smallest_normal * step
    bound = exact.clamp(-limit, limit)
    assert ((read[there] - bound).abs() <= bound.abs() * step + smallest).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_every_byte_is_read_as_torch_reads_it(dtype: torch.dtype, target: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(16, 2, 8).view(dtype)
    want = every.to(target)
    torch.testing.assert_close(restored(every, target), want, rtol=0, atol=0, equal_nan=True)
    finite = want.isfinite()
    again = stored(restored(every, target), 1.0, dtype)
    assert torch.equal(raw(again)[finite], raw(every)[finite]), "what is read is stored again"


def test_the_same_dtype_is_left_alone() -> None:
    x = torch.randn(3)
    assert stored(x, 1.0, torch.float32) is x and restored(x, torch.float32) is x
    assert raw(x) is x
    with pytest.raises(AssertionError, match="not divided"):
        stored(x, 0.5, torch.float32)


def test_limits() -> None:
    assert (limit_of(E4M3), limit_of(E5M2)) == (448.0, 57344.0)
