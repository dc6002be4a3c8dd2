"""A real Triton compile reaches the ledger, once for each new type of argument."""

from __future__ import annotations

import pytest
import torch

from tokenspeed import ledger
from tokenspeed.kernels.triton_jit import jit, tl
from tokenspeed.ledger import JitAfterReady

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@jit
def fill(out, value, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, block)
    tl.store(out + index, value, mask=index < size)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(ledger, "_counts", {})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # else the kernel is loaded, not compiled


def test_a_compile_is_reported_with_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    out = torch.zeros(8, device="cuda")
    with ledger.serving(lambda: "step 3", forbid=False):
        fill[(1,)](out, 1.5, 8, block=8)
        fill[(1,)](out, 2.5, 8, block=8)
    assert out.tolist() == [2.5] * 8
    found = ledger.triton_totals()
    assert found is not None and found[0] == 1 and 0 < found[1] < 60
    assert "triton compiled fill" in caplog.text and "out: *fp32" in caplog.text
    assert "step 3" in caplog.text


def test_forbidden_it_raises_before_the_launch_and_later_works() -> None:
    out = torch.zeros(8, device="cuda", dtype=torch.float16)
    with ledger.serving(lambda: "step 4", forbid=True), pytest.raises(JitAfterReady, match="fill"):
        fill[(1,)](out, 1.5, 8, block=8)
    assert ledger.triton_totals() == (0, 0.0) and not out.any()
    fill[(1,)](out, 1.5, 8, block=8)
    assert out.tolist() == [1.5] * 8
    assert ledger.totals()[0].phase == "startup"
