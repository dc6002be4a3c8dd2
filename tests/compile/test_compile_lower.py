"""Lowering: bytes out of a piece and back, on the torch that is installed; token ranges."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from tokenspeed.compile import inductor_api, torch_api
from tokenspeed.compile.capture import UnsupportedGraph, capture
from tokenspeed.compile.lower import lower, token_argument
from tokenspeed.compile.matcher import InductorPass
from tokenspeed.compile.plan import TokenArgument
from tokenspeed.compile.ranges import by_tokens, range_name, token_ranges
from tokenspeed.compile.split import split
from tokenspeed.passes.manager import PassManager, Step
from tokenspeed.passes.rewrite import EVERY, FEW, MANY, TokenRange
from tokenspeed.resolve import RANGES

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # inside Inductor

SMALL, LARGE = FEW, MANY


class Two(nn.Module):
    """One piece with a product and a loop, and two results."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.new_ones(16, 16)).sin() * 3 + x


def piece_of(module: nn.Module) -> fx.GraphModule:
    (piece,) = split(capture(module.forward, (torch.zeros(8, 16),)))[1].values()
    return piece


def inductor_folders() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in inductor_api._FOLDERS}


class Lowered:
    """A piece compiled for two ranges by a manager that notes what it saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.piece = piece_of(Two())
        self.seen: list[str] = []
        self.before = inductor_folders()
        with inductor_api.compiling_in(folder):
            self.isa = inductor_api.vector_isa()
            self.data = {
                each: lower(self.piece, "cpu", each, self.manager(each)).data
                for each in (SMALL, LARGE)
            }

    def manager(self, token_range: TokenRange) -> PassManager:
        def note(graph: fx.Graph) -> int:
            self.seen += [f"{range_name(token_range)} {node.target}" for node in graph.nodes]
            return 1

        steps = [Step("note", note)]
        return PassManager(steps, token_range=token_range, options={})


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    return Lowered(tmp_path_factory.mktemp("lowered"))


def objects(folder: Path) -> set[Path]:
    return set(folder.rglob("*.so"))


def test_passes_see_functional_aten_before_sums_are_folded(lowered: Lowered) -> None:
    for name in ("0-32", "33-"):
        assert f"{name} aten.mm.default" in lowered.seen
        assert f"{name} aten.add.Tensor" in lowered.seen


def test_nothing_is_left_outside_the_folder(lowered: Lowered) -> None:
    assert objects(lowered.folder)
    assert inductor_folders() == lowered.before


@pytest.mark.parametrize("size", [1, 2, 32, 33, 1000])
def test_bytes_become_the_piece_again(lowered: Lowered, size: int) -> None:
    before = objects(lowered.folder)
    with inductor_api.loading_from(lowered.folder, lowered.isa):
        pieces = {each: inductor_api.load(data) for each, data in lowered.data.items()}
    piece = by_tokens(pieces, token_argument(lowered.piece))  # type: ignore[arg-type]
    x = torch.randn(size, 16)
    (expected,) = lowered.piece(x)
    torch.testing.assert_close(piece(x)[0], expected)
    assert objects(lowered.folder) == before, "loading compiled something"


def test_wrong_strides_are_an_error_not_a_wrong_number(lowered: Lowered) -> None:
    with inductor_api.loading_from(lowered.folder, lowered.isa):
        piece = inductor_api.load(lowered.data[LARGE])
    with pytest.raises(AssertionError, match="stride"):
        piece(torch.randn(16, 9).t())


def test_the_isa_is_probed_once_and_recorded(
    lowered: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lowered.isa.bits, "Inductor found no vector instructions on this CPU"

    def probe(*args: object) -> bool:
        raise AssertionError("probed again")

    monkeypatch.setattr(inductor_api.cpu_vec_isa.VecISA, "check_build", probe)
    recorded = inductor_api._RecordedIsa(lowered.isa)
    assert recorded and str(recorded) == lowered.isa.name
    assert (recorded.bit_width(), recorded.build_macro(), recorded.build_arch_flags()) == (
        *(lowered.isa.bits, lowered.isa.macros, lowered.isa.flags),
    )
    known = list(inductor_api.cpu_vec_isa.supported_vec_isa_list)
    with inductor_api.loading_from(lowered.folder, lowered.isa):
        assert str(inductor_api.codecache.pick_vec_isa()) == lowered.isa.name
    assert inductor_api.cpu_vec_isa.supported_vec_isa_list == known


def test_no_isa_is_recorded_as_well(lowered: Lowered, monkeypatch: pytest.MonkeyPatch) -> None:
    none = inductor_api.cpu_vec_isa.invalid_vec_isa
    monkeypatch.setattr(inductor_api.cpu_vec_isa, "pick_vec_isa", lambda: none)
    isa = inductor_api.vector_isa()
    with inductor_api.loading_from(lowered.folder, isa):
        assert inductor_api.codecache.pick_vec_isa() is none


def test_bytes_that_are_no_artifact_raise(lowered: Lowered) -> None:
    with inductor_api.loading_from(lowered.folder, lowered.isa), pytest.raises(Exception):  # noqa: B017
        inductor_api.load(lowered.data[SMALL][:1000])


def test_folders_are_let_go_after_an_error(tmp_path: Path) -> None:
    before = inductor_folders()
    for context in (
        inductor_api.compiling_in(tmp_path),
        inductor_api.loading_from(tmp_path, None),
    ):
        with pytest.raises(ZeroDivisionError), context:
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
            raise ZeroDivisionError
        assert inductor_folders() == before


def test_ranges_hold_every_count_once() -> None:
    assert token_ranges(RANGES["cpu"]) == (EVERY,)
    both = token_ranges(RANGES["cuda"])
    assert both == (SMALL, LARGE) == (TokenRange(0, 32), TokenRange(33, None))
    assert [range_name(each) for each in (EVERY, SMALL, LARGE)] == ["all", "0-32", "33-"]
    three = token_ranges((8, 64))
    assert three == (TokenRange(0, 8), TokenRange(9, 64), TokenRange(65, None))


@given(st.sets(st.integers(1, 1 << 20), max_size=7), st.integers(0, 1 << 21))
def test_any_count_is_in_one_range_and_its_piece_is_called(ends: set[int], count: int) -> None:
    ranges = token_ranges(sorted(ends))
    (found,) = [each for each in ranges if each.contains(TokenRange(count, count))]
    pieces = {each: lambda count, at=each: (at,) for each in ranges}
    assert by_tokens(pieces, TokenArgument(0, is_count=True))(count) == (found,)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", [TokenArgument(1, is_count=False), TokenArgument(0, True)])
def test_the_real_count_picks(where: TokenArgument) -> None:
    called: list[str] = []

    def piece(name: str) -> Any:
        return lambda count, x: (called.append(name), count)

    pick = by_tokens({LARGE: piece("large"), SMALL: piece("small")}, where)
    for size in (0, 1, 32, 33, 8192):
        assert pick(size, torch.empty(size, 3))[1] == size
    assert called == ["small", "small", "small", "large", "large"]


def test_one_range_is_called_without_a_dispatcher() -> None:
    piece = object()
    assert by_tokens({EVERY: piece}, TokenArgument(0, False)) is piece  # type: ignore[dict-item]
    assert by_tokens({EVERY: piece}, None) is piece  # type: ignore[dict-item]


def placeholders(*values: object) -> fx.GraphModule:
    graph = fx.Graph()
    for i, value in enumerate(values):
        graph.placeholder(f"a{i}").meta["example_value"] = value
    graph.output(())
    return fx.GraphModule(nn.Module(), graph)


@pytest.fixture(scope="module")
def values() -> Iterator[list[Any]]:
    """x [T, 16] and T."""
    piece = piece_of(Two())
    (x,) = (node.meta["example_value"] for node in piece.graph.find_nodes(op="placeholder"))
    yield [x, x.shape[0]]


def test_where_a_piece_finds_the_count(values: list[Any]) -> None:
    x, count = values
    weight = torch.zeros(3, 16)
    assert token_argument(placeholders(weight, x, x)) == TokenArgument(1, is_count=False)
    assert token_argument(placeholders(weight, x, count)) == TokenArgument(2, is_count=True)
    assert token_argument(placeholders(weight)) is None
    with pytest.raises(UnsupportedGraph, match="first dimension"):
        token_argument(placeholders(x.t()))


def test_a_failing_pass_does_not_fail_the_piece(
    lowered: Lowered, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(graph: fx.Graph) -> int:
        raise ZeroDivisionError

    manager = PassManager([Step("bad", fail)], token_range=EVERY, options={})
    caplog.set_level(logging.WARNING, logger="tokenspeed")
    with inductor_api.compiling_in(lowered.folder):
        assert not lower(lowered.piece, "cpu", EVERY, manager).is_calls
    assert "the pass bad failed" in caplog.text


def test_launches_are_recorded_with_the_nodes_in_them(tmp_path: Path) -> None:
    """On the torch that is installed: private interfaces that a later one may take away."""
    piece = piece_of(Two())
    seen: list[str] = []
    note = Step("note", lambda graph: seen.extend(node.name for node in graph.nodes) or 0)
    manager = PassManager([note], token_range=EVERY, options={})
    with inductor_api.compiling_in(tmp_path), inductor_api.recording_launches() as launches:
        lower(piece, "cpu", EVERY, manager)
    assert [launch.kernel.split("_")[0] for launch in launches] == ["cpp", "extern", "cpp"]
    product = launches[1]
    assert "mm" in product.kernel and set(product.nodes) <= set(seen)
    loop = launches[2]
    assert any("sin" in node for node in loop.nodes)
    assert any("test_compile_lower.py" in trace for trace in loop.traces)


def test_a_visit_of_the_slot_ends_there(tmp_path: Path) -> None:
    piece = piece_of(Two())
    inputs = [torch_api.example_value(node) for node in piece.graph.find_nodes(op="placeholder")]
    seen: list[str] = []
    note = Step("note", lambda graph: seen.extend(node.name for node in graph.nodes) or 0)
    manager = PassManager([note], token_range=EVERY, options={})
    with inductor_api.recording_launches() as launches:
        inductor_api.visit_slot(piece, inputs, InductorPass(manager))
    assert any("sin" in name for name in seen)
    assert not launches, "nothing was compiled"


def test_what_fails_before_the_slot_is_not_kept_quiet() -> None:
    piece = piece_of(Two())
    with pytest.raises(Exception, match=r"."):
        inductor_api.visit_slot(
            piece, [], InductorPass(PassManager([], token_range=EVERY, options={}))
        )
