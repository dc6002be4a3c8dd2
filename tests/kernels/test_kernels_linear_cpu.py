"""The `linear` op on a CPU: its kernels agree, a token's result is its own, and tables choose."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tokenspeed.kernels import linear_cpu_tuning, native
from tokenspeed.kernels.linear import linear
from tokenspeed.kernels.linear_cpu import Linear
from tokenspeed.kernels.linear_cpu_choices import install, kernels, onednn, uninstall
from tokenspeed.kernels.linear_cpu_tuning import LinearChoice, LinearEntry, LinearTable
from tokenspeed.kernels.native import BuildError


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Linear:
    target = tmp_path_factory.mktemp("kernel") / "native.so"
    try:
        native.build(target)
    except BuildError as error:
        pytest.skip(f"hardware: {error}")
    assert [path.name for path in target.parent.iterdir()] == ["native.so"]
    return native.load(target).rows


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    uninstall()


def operands(num_tokens: int, num_rows: int = 92, size: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(num_tokens)
    return torch.randn(num_tokens, size), torch.randn(num_rows, size), torch.randn(num_rows)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 5, 7, 8, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_rows_is_a_linear_layer(rows: Linear, num_tokens: int, with_bias: bool) -> None:
    x, w, bias = operands(num_tokens)
    expected = (x.double() @ w.double().t() + (bias.double() if with_bias else 0.0)).float()
    found = rows(x, w, bias if with_bias else None)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_token_is_the_same_in_every_batch(rows: Linear) -> None:
    x, w, bias = operands(11)
    alone = torch.cat([rows(x[i : i + 1], w, bias) for i in range(len(x))])
    for first, last in [(0, 11), (0, 8), (3, 10), (5, 7)]:
        assert torch.equal(rows(x[first:last], w, bias), alone[first:last])


def test_rows_leaves_to_torch_what_it_is_not_made_for(rows: Linear) -> None:
    x, w, bias = operands(3)
    wide = torch.randn(92, 96)
    strange = [
        (x.double(), w.double(), None),
        (x.bfloat16(), w.bfloat16(), None),
        (x, w[:91], None),  # rows not by four
        (x[:, :47].contiguous(), w[:, :47].contiguous(), None),  # size not by a vector
        (x, wide[:, ::2], None),
        (x.t().contiguous().t(), w, None),
        (x, w, torch.randn(184)[::2]),
    ]
    for case in strange:
        assert torch.equal(rows(*case), F.linear(*case))
    assert torch.equal(rows(x, w, bias), rows(x, w, None) + bias)


def test_rows_reads_no_further_than_its_operands(rows: Linear) -> None:
    # NaN behind each operand would show in the sums.
    x, w, bias = operands(5)
    guarded = []
    for each in (x, w, bias):
        room = torch.full((each.numel() + 64,), float("nan"))
        room[: each.numel()] = each.flatten()
        guarded.append(room[: each.numel()].view_as(each))
    assert torch.equal(rows(*guarded), rows(x, w, bias))


def test_onednn_agrees() -> None:
    x, w, bias = operands(6)
    torch.testing.assert_close(onednn(x, w, bias), F.linear(x, w, bias), rtol=1e-5, atol=1e-5)


def test_fake_gives_the_shape_and_refuses_what_does_not_fit() -> None:
    with FakeTensorMode():
        x, w = torch.empty(5, 48), torch.empty(92, 48)
        assert linear(x, w).shape == (5, 92)
        for wrong in [(x[:, :8], w), (x, w, torch.empty(5)), (x, w.double()), (x[0], w)]:
            with pytest.raises(AssertionError):
                linear(*wrong)


def test_the_op_without_a_table_is_torch() -> None:
    x, w, bias = operands(9)
    assert torch.equal(linear(x, w, bias), F.linear(x, w, bias))


@pytest.mark.usefixtures("restored")
def test_a_table_chooses_by_shape_and_tokens() -> None:
    called: list[str] = []

    def named(name: str) -> Linear:
        def kernel(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
            called.append(name)
            return F.linear(x, w, bias)

        return kernel

    entry = LinearEntry(92, 48, (LinearChoice(2, "rows"), LinearChoice(8, "onednn")))
    install(LinearTable({}, (entry,)), {"rows": named("rows"), "onednn": named("onednn")})
    for num_tokens in (1, 2, 3, 8, 9):
        x, w, bias = operands(num_tokens)
        assert torch.equal(linear(x, w, bias), F.linear(x, w, bias))
    assert called == ["rows", "rows", "onednn", "onednn"]
    x, w, bias = operands(1, num_rows=96)
    linear(x, w, bias)
    assert len(called) == 4, "another shape has no entry"
    uninstall()
    install(LinearTable({}, (entry,)), {})
    x, w, bias = operands(1)
    assert torch.equal(linear(x, w, bias), F.linear(x, w, bias)), "a kernel that was not built"


@pytest.mark.usefixtures("restored")
def test_tables_of_several_models_are_joined_and_the_first_stays() -> None:
    def constant(value: float) -> Linear:
        return lambda x, w, bias: x.new_full((x.shape[0], w.shape[0]), value)

    def table(*shapes: tuple[int, int]) -> LinearTable:
        return LinearTable(
            {}, tuple(LinearEntry(*shape, (LinearChoice(8, "rows"),)) for shape in shapes)
        )

    x, w, _ = operands(3)
    install(table((92, 48)), {"rows": constant(1.0)})
    install(table((92, 48), (96, 48)), {"rows": constant(2.0)})
    assert linear(x, w).unique().tolist() == [1.0]
    assert linear(x, operands(3, num_rows=96)[1]).unique().tolist() == [2.0]
    uninstall()
    assert torch.equal(linear(x, w), F.linear(x, w))


def test_kernels_name_what_tables_may_name(rows: Linear) -> None:
    weights = linear_cpu_tuning.linear_weights([torch.randn(92, 48)])
    table = linear_cpu_tuning.tune(weights, kernels(rows), budget_s=0.01)
    named = {choice.kernel for entry in table.entries for choice in entry.choices}
    assert named <= set(kernels(rows))
