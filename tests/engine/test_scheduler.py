"""The scheduler's promises one by one: ends of requests, steps in flight (the state machine next
door mixes them at random).
"""

from __future__ import annotations

import pytest
from fake_worker import EOS, run_alone
from scheduler_bench import Bench

from tokenspeed.engine.record import State
from tokenspeed.request import (
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_one_request_from_prompt_to_length(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.add("a", [1, 2, 3], max_tokens=5)
    bench.run()
    bench.assert_alone("a")
    assert bench.last("a").finish_reason is FinishReason.LENGTH
    assert bench.scheduler.stats.steps == 5, "one prefill, four decodes, no overshoot"
    assert bench.scheduler.stats.prompt_tokens == 3
    assert bench.scheduler.stats.generation_tokens == 5


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_eos_ends_and_the_overshoot_is_dropped(depth: int) -> None:
    bench = Bench(depth=depth)
    seed = next(seed for seed in range(100) if EOS in run_alone(_spec([5, 6], seed), 20)[0][2:-1])
    bench.add("a", [5, 6], seed=seed, max_tokens=20, ignore_eos=False)
    bench.run()
    last = bench.last("a")
    assert (last.finish_reason, last.stop_token) == (FinishReason.STOP, EOS)
    assert bench.tokens("a")[-1] == EOS and EOS not in bench.tokens("a")[:-1]
    assert bench.requests["a"].history[-1] is State.FINISHED


def _spec(prompt: list[int], seed: int) -> GenerateRequest:
    params = SamplingParams(ignore_eos=True)
    return GenerateRequest(id="", prompt_ids=prompt, params=params, seed=seed)


def test_stop_ids_and_min_tokens() -> None:
    bench = Bench()
    bench.add("a", [1], max_tokens=50, stop_token_ids=(1, 2, 3), min_tokens=10)
    bench.run()
    bench.assert_alone("a")
    tokens = bench.tokens("a")
    assert len(tokens) > 10 and tokens[-1] == bench.last("a").stop_token
    assert not {1, 2, 3} & set(tokens[:-1])


def test_max_tokens_zero_scores_the_prompt_only() -> None:
    bench = Bench(token_budget=3)
    bench.add("a", [1, 2, 3, 4, 5], max_tokens=0, prompt_logprobs=0)
    bench.run()
    (delta,) = bench.deltas
    assert delta.finish_reason is FinishReason.LENGTH and delta.token_ids == []
    assert delta.prompt_logprobs is not None and delta.prompt_logprobs[0] is None
    assert [entry.token_id for entry in delta.prompt_logprobs[1:] if entry] == [2, 3, 4, 5]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_error_ends_its_request_alone(depth: int) -> None:
    bench = Bench(depth=depth, fails=lambda row: row.generation == 2 and row.start >= 5)
    for name in "abc":
        bench.add(name, [ord(name) % 5, 1, 2], max_tokens=8)
    bench.run()
    last = bench.last("b")
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "injected")
    bench.assert_alone("a")
    bench.assert_alone("c")
    before = bench.scheduler.stats.prefix_hits
    bench.add("d", [*bench.requests["b"].token_ids(), 1], max_tokens=8)
    bench.run()
    assert bench.scheduler.stats.prefix_hits == before, "KV of a broken request is not trusted"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_abort_in_every_state(depth: int) -> None:
    bench = Bench(max_num_seqs=2, token_budget=4, depth=depth)
    bench.add("decoding", [1], max_tokens=50)
    bench.step()
    bench.step()
    bench.add("prefilling", [1] * 40, max_tokens=5)
    bench.step()
    bench.add("waiting", [3], max_tokens=5)
    for name in ("decoding", "prefilling", "waiting"):
        delta = bench.scheduler.abort(name)
        assert delta is not None and delta.finish_reason is FinishReason.ABORT
        assert bench.scheduler.abort(name) is None, "a second abort says nothing"
        assert bench.requests[name].state is State.ABORTED
        bench.scheduler.check()
    assert bench.scheduler.abort("unknown") is None
    bench.run()
    assert not [delta for delta in bench.deltas if delta.request_id == "prefilling"]


def test_a_step_that_accepts_nothing_is_repeated() -> None:
    rejected = iter([0, 0, 0, 1, 0, 0, *[1] * 100])
    bench = Bench(accept=lambda row: next(rejected))
    bench.add("a", [1, 2, 3, 4], max_tokens=6)
    bench.run()
    bench.assert_alone("a")
    assert [delta.token_ids for delta in bench.deltas if not delta.token_ids] == []
    assert bench.scheduler.stats.steps == 6 + 5


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_several_tokens_a_step(depth: int, accepted: int) -> None:
    bench = Bench(
        num_pages=256,
        block_size=1,
        tokens_per_step=4,
        depth=depth,
        accept=lambda row: min(accepted, row.num_tokens) if row.decode else 1,
    )
    for name in "ab":
        bench.add(name, [ord(name) % 5] * 3, max_tokens=18, logprobs=0)
    bench.run()
    for name in "ab":
        bench.assert_alone(name)
        assert bench.last(name).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_context_can_be_filled_exactly(tokens_per_step: int, depth: int) -> None:
    bench = Bench(max_model_len=16, num_pages=4, depth=depth, tokens_per_step=tokens_per_step)
    bench.add("a", [1] * 7)
    bench.run()
    assert len(bench.tokens("a")) == 9
    with pytest.raises(InvalidRequest, match="maximum context length is 16 tokens") as caught:
        bench.add("b", [1] * 7, max_tokens=10)
    assert caught.value.code == "context_length_exceeded"


def test_empty_prompts_and_ids_in_use_are_refused() -> None:
    bench = Bench()
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        bench.add("a", [])
    bench.add("a", [1], max_tokens=1)
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        bench.add("a", [1], max_tokens=1)
    bench.run()
    bench.add("a", [1], max_tokens=1)
    bench.run()


def test_results_come_in_launch_order() -> None:
    bench = Bench()
    bench.add("a", [1], max_tokens=9)
    bench.launch()
    bench.launch()
    bench.worker.in_flight.rotate()
    with pytest.raises(AssertionError, match="step 1 came before step 0"):
        bench.commit()


def test_prompts_that_come_first_do_not_take_the_pages_of_decodes_for_ever() -> None:
    bench = Bench(
        num_pages=6,
        block_size=1,
        max_num_seqs=2,
        token_budget=16,
        tokens_per_step=2,
        prefill_first=True,
        depth=1,
        cache=False,
        accept=lambda row: 1,
    )
    bench.add("a", [1, 1], max_tokens=4)
    bench.step()
    bench.add("b", [2, 2, 2], max_tokens=2)
    for _ in range(100):
        if bench.scheduler.has_work:
            bench.step()
    assert not bench.scheduler.has_work
