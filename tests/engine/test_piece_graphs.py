"""Which steps get piecewise graphs: those whose launches would take longer than their kernels."""

from __future__ import annotations

from tokenspeed.engine.piece_graphs import piece_sizes


def test_a_small_model_is_recorded_up_to_its_budget() -> None:
    sizes = piece_sizes(8192, 28, 600_000_000)
    assert sizes == (256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192)


def test_a_large_model_keeps_the_device_busy_sooner() -> None:
    assert piece_sizes(8192, 36, 8_200_000_000) == (256, 512)
    assert piece_sizes(8192, 80, 70_000_000_000) == ()


def test_no_size_is_above_the_budget() -> None:
    assert piece_sizes(700, 28, 600_000_000) == (256, 512)
    assert piece_sizes(4096, 28, 600_000_000)[-1] == 4096
