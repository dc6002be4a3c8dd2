"""The ledger of compiles, as /metrics shows it."""

from __future__ import annotations

from server_fakes import FakeClient, make_state

from tokenspeed.engine.messages import Stats
from tokenspeed.ledger import JitCount


async def test_compiles_are_shown_by_kind_and_phase() -> None:
    client = FakeClient()
    client.stats = Stats(
        jit=(JitCount("inductor", "startup", 5, 31.5), JitCount("triton", "serving", 1, 0.25))
    )
    text = make_state(client).metrics.render().decode()
    for line in (
        'tokenspeed:jit_compiles_total{kind="inductor",phase="startup"} 5.0',
        'tokenspeed:jit_compile_seconds_total{kind="inductor",phase="startup"} 31.5',
        'tokenspeed:jit_compiles_total{kind="triton",phase="serving"} 1.0',
        'tokenspeed:jit_compile_seconds_total{kind="triton",phase="serving"} 0.25',
    ):
        assert f"\n{line}\n" in text
