"""Which layers are captured, and what makes two layers one kind."""

from __future__ import annotations

import compile_tiny
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.compile.kinds import kind_of, layers_to_capture, windows


@pytest.mark.parametrize(
    ("kinds", "shown"),
    [
        ("f" * 30, "ffff"),
        ("f" * 64, "ffff"),
        ("d" + "m" * 29, "dmmmm"),
        ("dddf" * 12, "dddfdddf"),
        (("w" * 5 + "f") * 4 + "ww", None),
        ("f", "f"),
        ("ff", "ff"),
        ("abc", "abc"),
        ("", ""),
    ],
)
def test_the_shortest_layers_that_show_every_run_of_four(kinds: str, shown: str | None) -> None:
    chosen = layers_to_capture(kinds)
    sequence = [kinds[i] for i in chosen]
    assert set(windows(sequence)) == set(windows(kinds))
    assert len(sequence) < len(kinds) or chosen == list(range(len(kinds)))
    if shown is not None:
        assert sequence == list(shown)


def test_layers_of_a_kind_are_taken_far_apart() -> None:
    assert layers_to_capture("f" * 30) == [0, 9, 19, 29]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=24))
def test_any_sequence_is_shown_whole(kinds: list[str]) -> None:
    chosen = layers_to_capture(kinds)
    assert len(chosen) <= len(kinds) and len(set(chosen)) == len(chosen)
    assert set(windows([kinds[i] for i in chosen])) == set(windows(kinds))


def test_a_layer_is_known_by_all_but_its_index() -> None:
    a, b = compile_tiny.Tiny("aab").layers[0], compile_tiny.Tiny("aab").layers[1]
    assert kind_of(a, 0) == kind_of(b, 1)
    assert kind_of(a, 0) != kind_of(compile_tiny.Tiny("aab").layers[2], 2)
    assert kind_of(b, 1) != kind_of(b, 5), "a layer that names another one's cache"
    before = kind_of(a, 0)
    a.attention.eps = 1e-5
    assert kind_of(a, 0) != before
    assert kind_of(b, 1) != kind_of(b.to(torch.bfloat16), 1)


def test_a_private_attribute_sets_a_layer_apart_too() -> None:
    layers = compile_tiny.Tiny("aa").layers
    layers[1].attention._scale = 0.25
    assert kind_of(layers[0], 0) != kind_of(layers[1], 1)


def test_what_torch_keeps_in_a_module_does_not_set_a_layer_apart() -> None:
    layers = compile_tiny.Tiny("aa").layers
    layers[1].register_forward_hook(lambda *arguments: None)
    assert kind_of(layers[0], 0) == kind_of(layers[1], 1)
