"""FlashInfer's part of attention on a CPU: what it is told, what is left to Triton, which builds
are found.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flashinfer_fake import FakePrefill, FakeRagged, replace_kernels
from paged_cases import device_step
from torch import Tensor

from tokenspeed import ledger
from tokenspeed.kernels import flashinfer_builds
from tokenspeed.kernels.attention_flashinfer import (
    MIN_TOKENS,
    FlashInferAttention,
    Prefill,
    leaves_to_triton,
    num_continued,
    paged_rows,
)
from tokenspeed.kernels.attention_step import AttentionStep
from tokenspeed.kernels.attention_triton import TritonAttention
from tokenspeed.kernels.device_step import DeviceStep
from tokenspeed.kv.pool import PagePool
from tokenspeed.kv.specs import CacheGroup, FullAttention

CPU, F32 = torch.device("cpu"), torch.float32
BLOCK = 16


FULL = FullAttention(num_heads=4, num_kv_heads=2, head_dim=128, scale=0.1)
OTHER = FullAttention(num_heads=2, num_kv_heads=2, head_dim=128, scale=0.05)
SMALL = FullAttention(num_heads=2, num_kv_heads=2, head_dim=64, scale=0.125)
WINDOW = FullAttention(num_heads=4, num_kv_heads=2, head_dim=128, scale=0.1, window=40)
GROUPS = [
    CacheGroup(FULL, (0, 3)), CacheGroup(OTHER, (1,)), CacheGroup(SMALL, (2,)),
    CacheGroup(WINDOW, (4,)),
]  # fmt: skip
SPECS = [FULL, OTHER, SMALL, FULL, WINDOW]


def test_rows_are_told_with_their_pages() -> None:
    tables = [
        [torch.tensor([7, 3, 9]), torch.tensor([4, 1])],
        [torch.tensor([5, 6]), torch.tensor([8])],
    ]
    step = AttentionStep([0, 20, 25], [32, 5], tables)
    rows = paged_rows(step, 1, BLOCK, pinned=False)
    assert [each.tolist() for each in rows] == [[0, 20, 25], [0, 2, 3], [5, 6, 8], [16, 5], [32, 5]]
    assert paged_rows(step, 0, BLOCK, pinned=False).pages.tolist() == [7, 3, 4]
    assert all(each.dtype == torch.int32 for each in rows)


@pytest.mark.parametrize(
    ("starts", "lengths", "want"),
    [
        ([0, 20, 25], [20, 5], 0),
        ([0, 20, 25], [21, 5], 1),
        ([0, 20, 25], [20, 6], 2),
        ([0, 20, 25, 29], [20, 6, 4], 2),
    ],
)
def test_rows_with_a_past_are_counted(starts: list[int], lengths: list[int], want: int) -> None:
    assert num_continued(AttentionStep(starts, lengths, [])) == want


class Trial:
    """FlashInfer's attention and Triton's, each with a pool of the same random pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype = F32) -> None:
        self.prefills = replace_kernels(monkeypatch)
        torch.manual_seed(0)
        self.made: list[FakePrefill] = []
        self.ragged: list[FakeRagged] = []
        scales = [(1.0, 1.0)] * 5 if kv_dtype == F32 else [(0.3, 0.7), *[(2.0, 0.3)] * 4]
        pools = [PagePool(GROUPS, 200, BLOCK, kv_dtype, CPU, scales) for _ in range(2)]
        for ours, theirs in zip(*(pool.keys + pool.values for pool in pools), strict=True):
            theirs.copy_(ours.copy_(torch.randn(ours.shape)))
        self.tables = [torch.randperm(200)[:180].int().view(6, 30) for _ in GROUPS]
        self.ours = FlashInferAttention(GROUPS, pools[0], self.tables, self._make, F32)
        self.theirs = TritonAttention(GROUPS, pools[1], self.tables, F32)

    def _make(self) -> Prefill:
        self.made.append(FakePrefill())
        self.ragged.append(FakeRagged())
        return Prefill(self.made[-1], self.ragged[-1])

    def plan(self, query_lens: list[int], context_lens: list[int], num_decodes: int) -> None:
        slots = list(range(len(query_lens)))[::-1]
        step = device_step(slots, query_lens, context_lens, CPU)
        starts = (step.query_starts[num_decodes:] - num_decodes).tolist()
        tables = [[t[slot].long() for slot in slots[num_decodes:]] for t in self.tables]
        host = AttentionStep(starts, context_lens[num_decodes:], tables)
        self.plan_step(replace(step, num_decodes=num_decodes, host=host))

    def plan_step(self, step: DeviceStep) -> None:
        self.num_tokens = step.num_tokens
        self.ours.plan_device(step)
        self.theirs.plan_device(step)

    def agrees(self, layers: Sequence[int], *, pad: int = 0, sinks: Tensor | None = None) -> None:
        for layer in layers:
            spec = SPECS[layer]
            heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
            q, k, v = (torch.randn(self.num_tokens + pad, n, spec.head_dim) for n in heads)
            want = self.theirs.attend(q, k, v, layer, sinks)
            self.prefills.clear()
            torch.testing.assert_close(self.ours.attend(q, k, v, layer, sinks), want)

    @property
    def runs(self) -> list[int]:
        return [each.num_runs for each in self.made]

    @property
    def ragged_runs(self) -> list[int]:
        return [each.num_runs for each in self.ragged]


def test_chunks_go_to_flashinfer_and_decodes_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(monkeypatch)
    assert trial.runs == [1, 0, 1, 0], "a kernel is loaded once a group, before a step needs it"
    trial.plan([1, 1, 200, 1, 90], [17, 300, 200, 33, 400], num_decodes=2)
    trial.agrees([0, 3, 1], pad=5)
    assert not trial.prefills and trial.runs == [1, 2, 1, 1]
    planned = trial.made[1].planned
    assert planned.starts == [0, 200, 201, 291] and planned.lengths == [200, 33, 400]
    assert planned.page_starts == [0, 13, 16, 41] and planned.last == [8, 1, 16]
    rows = [trial.tables[0][2, :13], trial.tables[0][1, :3], trial.tables[0][0, :25]]
    assert planned.pages == torch.cat(rows).tolist()
    assert planned.numbers == (4, 2, 128, BLOCK)
    assert planned.options == {
        "causal": True, "sm_scale": 0.1, "q_data_type": F32, "kv_data_type": F32,
        "max_token_per_sequence": 200, "disable_split_kv": True,
    }  # fmt: skip
    other = trial.made[3].planned
    assert other.numbers == (2, 2, 128, BLOCK) and other.options["sm_scale"] == 0.05
    assert other.pages[:13] == trial.tables[1][2, :13].tolist()


def test_rows_without_a_past_attend_to_their_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(monkeypatch)
    assert trial.runs == trial.ragged_runs == [1, 0, 1, 0]
    trial.plan([1, 60, 200, 90], [17, 100, 200, 90], num_decodes=1)
    trial.agrees([0, 3, 1], pad=5)
    assert not trial.prefills and trial.runs == trial.ragged_runs == [1, 2, 1, 1]
    assert trial.made[1].planned.starts == [0, 60] and trial.ragged[1].starts == [0, 200, 290]
    assert trial.ragged[1].numbers == (4, 2, 128) and trial.ragged[3].scale == 0.05
    trial.plan([1, 200, 90], [17, 200, 90], num_decodes=1)
    trial.agrees([0])
    assert trial.runs == [1, 2, 1, 1] and trial.ragged_runs == [2, 2, 1, 1]
    trial.plan([1, 300], [17, 400], num_decodes=1)
    trial.agrees([0])
    assert trial.runs == [1, 3, 1, 1] and trial.ragged_runs == [2, 2, 1, 1]


@pytest.mark.parametrize("fused", [False, True])
def test_own_keys_are_read_as_pages_of_fp8_have_them(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """Whether a prompt comes at once or in chunks, attention sees the same numbers."""
    trial = Trial(monkeypatch, torch.float8_e4m3fn)
    trial.plan([1, 60, 200, 90], [17, 100, 200, 90], num_decodes=1)
    for layer in (0, 3, 1):
        q, k, v = (torch.randn(351, n, 128) for n in (SPECS[layer].num_heads, 2, 2))
        if fused:
            angles = torch.rand(351, 1, 64)
            prologue = torch.rand(128), torch.rand(128), angles.cos(), angles.sin(), 1e-6
            want = trial.theirs.attend_fused(q, k, v, layer, None, prologue)
            got = trial.ours.attend_fused(q, k, v, layer, None, prologue)
        else:
            want = trial.theirs.attend(q, k, v, layer, None)
            got = trial.ours.attend(q, k, v, layer, None)
        torch.testing.assert_close(got, want)
    assert trial.runs == trial.ragged_runs == [1, 2, 1, 1]


def test_a_step_is_planned_when_its_attention_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the device has the pieces in front of it to run."""
    trial = Trial(monkeypatch)
    plans: list[list[int]] = []
    for ragged in trial.ragged:
        plan = ragged.plan
        monkeypatch.setattr(
            ragged, "plan", lambda *args, plan=plan, **kw: (plans.append(args), plan(*args, **kw))
        )
    trial.plan([300], [300], num_decodes=0)
    assert not plans
    trial.agrees([0, 3])
    assert len(plans) == 2, "one a cache group"
    trial.plan([400], [400], num_decodes=0)
    trial.agrees([2])
    assert len(plans) == 4, "which layer asks first does not matter"


def test_a_prologue_is_done_before(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(monkeypatch)
    trial.plan([60, 300], [100, 300], num_decodes=0)
    q, k, v = (torch.randn(360, n, 128) for n in (4, 2, 2))
    angles = torch.rand(360, 1, 64)
    prologue = torch.rand(128), torch.rand(128), angles.cos(), angles.sin(), 1e-6
    want = trial.theirs.attend_fused(q, k, v, 0, None, prologue)
    torch.testing.assert_close(trial.ours.attend_fused(q, k, v, 0, None, prologue), want)
    assert trial.runs == trial.ragged_runs == [1, 1, 1, 0]


def test_wrappers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(monkeypatch)
    for _ in range(3):
        trial.plan([300], [310], num_decodes=0)
        trial.agrees([0])
    assert trial.runs == [2, 2, 1, 0]


def test_what_flashinfer_does_not_serve_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    whys = list(map(leaves_to_triton, [*SPECS, replace(FULL, sinks=True)]))
    assert [why is None for why in whys] == [True, True, False, True, False, False]
    trial = Trial(monkeypatch)
    trial.plan([300], [310], num_decodes=0)
    for layer in (2, 4):
        trial.agrees([layer])
        assert trial.prefills == [(300, False)]
    trial.agrees([0], sinks=torch.randn(4))
    assert trial.prefills == [(300, True)] and trial.runs == [1, 0, 1, 0]


@pytest.mark.parametrize("tokens", [MIN_TOKENS - 1, MIN_TOKENS])
def test_few_tokens_are_not_planned(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    trial = Trial(monkeypatch)
    trial.plan([1, 1, tokens], [9, 9, tokens], num_decodes=2)
    trial.agrees([0])
    assert trial.prefills == ([] if tokens >= MIN_TOKENS else [(tokens, False)])


def test_a_step_that_the_host_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(monkeypatch)
    trial.plan([300], [310], num_decodes=0)
    trial.plan_step(device_step([0, 1], [1, 299], [50, 299], CPU))
    trial.agrees([0])
    assert trial.prefills == [(300, False)]
    trial.plan_step(device_step([0, 1], [1, 1], [50, 299], CPU))
    trial.agrees([0])
    assert trial.runs == [1, 0, 1, 0]


@pytest.mark.parametrize(
    "folder", ["flashinfer/data/aot", "flashinfer_jit_cache/jit_cache"], ids=["own", "package"]
)
def test_builds_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str) -> None:
    package = folder.split("/")[0]
    for name in ("flashinfer", "flashinfer_jit_cache"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    name = flashinfer_builds.prefill_name(torch.bfloat16, 128)
    common = (
        "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_"
        "head_dim_qk_128_head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False"
    )
    assert name == common + "_sm90"
    fp8_name = flashinfer_builds.fp8_prefill_name(torch.bfloat16, 128)
    assert fp8_name == common.replace("kv_bf16", "kv_e4m3")
    assert not flashinfer_builds.is_built(name)
    (tmp_path / folder / name).mkdir(parents=True)
    (tmp_path / folder / name / f"{name}.so").touch()
    assert flashinfer_builds.is_built(name)
    if package == "flashinfer":
        assert flashinfer_builds.is_installed()


class Spec:
    """As much of FlashInfer's JitSpec as is watched; ninja writes `content`, if it has to."""

    def __init__(self, folder: Path, content: str | None) -> None:
        self.name = "prefill"
        self.jit_library_path = folder / "prefill.so"
        self.content = content

    def build(self, verbose: bool, need_lock: bool = True) -> None:
        assert (verbose, need_lock) == (True, False)
        if self.content is not None:
            self.jit_library_path.write_text(self.content)


def test_builds_are_counted_and_loads_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_counts", {})

    class Watched(Spec):
        pass

    flashinfer_builds.watch(Watched)
    with (
        ledger.serving(lambda: "3 rows", forbid=True),
        pytest.raises(ledger.JitAfterReady, match="prefill after readiness"),
    ):
        Watched(tmp_path, "a").build(True, need_lock=False)
    assert ledger.totals() == () and not list(tmp_path.iterdir())
    Watched(tmp_path, "a").build(True, need_lock=False)
    (count,) = ledger.totals()
    assert (count.kind, count.phase, count.count) == ("flashinfer", "startup", 1)
    assert 0 < count.seconds < 60
    Watched(tmp_path, None).build(True, need_lock=False)
    assert ledger.totals() == (count,), "ninja had nothing to do"


def test_kept_builds_are_offered_beside_those_that_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, packaged = tmp_path / "kept", tmp_path / "packaged"
    environment = SimpleNamespace(FLASHINFER_AOT_DIR=packaged)
    monkeypatch.setattr(flashinfer_builds, "_kept", None)
    kept.mkdir()
    flashinfer_builds.offer_kept(environment)
    flashinfer_builds.use_kept(kept)
    flashinfer_builds.offer_kept(environment)
    assert environment.FLASHINFER_AOT_DIR == packaged, "nothing is kept"
    for folder, name in ((kept, "a"), (packaged, "b"), (packaged, "c")):
        (folder / name).mkdir(parents=True)
        (folder / name / f"{name}.so").write_text(name)
    assert flashinfer_builds.is_built("a") and not flashinfer_builds.is_built("b")
    for _ in range(2):
        flashinfer_builds.offer_kept(environment)
    assert environment.FLASHINFER_AOT_DIR == kept
    assert {path.stem: path.read_text() for path in kept.glob("*/*.so")} == {
        name: name for name in "abc"
    }
