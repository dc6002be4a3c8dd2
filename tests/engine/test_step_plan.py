"""Who is in a step, and how its budget of tokens is shared. (Pages: test_scheduler_pages.py.)"""

from __future__ import annotations

import pytest
from scheduler_bench import Bench

from tokenspeed.batch import Batch
from tokenspeed.engine.record import State


def sizes(batch: Batch | None) -> list[int]:
    return [] if batch is None else [row.num_tokens for row in batch.rows]


def test_prompts_come_first_where_they_shall_and_decodes_take_what_is_left() -> None:
    bench = Bench(token_budget=4, prefill_first=True)
    bench.add("a", [1], max_tokens=30)
    bench.step()
    bench.add("b", [2] * 6, max_tokens=30)
    bench.add("c", [3, 4, 3], max_tokens=30)
    batches = [bench.step() for _ in range(4)]
    assert [sizes(batch) for batch in batches] == [[4], [2, 2], [1, 1, 1], [1, 1, 1]]
    bench.run()
    for name in "abc":
        bench.assert_alone(name)


def test_decodes_come_first_and_a_long_prefill_progresses_beside_them() -> None:
    bench = Bench(token_budget=4)
    bench.add("a", [1], max_tokens=30)
    bench.add("b", [2], max_tokens=30)
    bench.step()
    bench.add("c", list(range(1, 7)) * 4, max_tokens=2)
    batches = [bench.step() for _ in range(12)]
    assert all(sizes(batch) == [1, 1, 2] for batch in batches)
    bench.run()
    for name in "abc":
        bench.assert_alone(name)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("budget", "width"), [(2, 2), (4, 4), (8, 7)])
def test_decodes_and_a_prefill_take_turns_where_the_budget_holds_one_of_them(
    budget: int, width: int, depth: int
) -> None:
    bench = Bench(token_budget=budget, tokens_per_step=width, depth=depth, accept=lambda row: 1)
    bench.add("a", [1], max_tokens=60)
    bench.add("b", [2, 3] * 60, max_tokens=60)
    while bench.requests["a"].state is not State.DECODING:
        bench.step()
    rows = [row for _ in range(16) if (batch := bench.step()) for row in batch.rows]
    assert bench.requests["b"].state is State.PREFILLING
    assert sum(row.decode for row in rows) == 8
    assert sum(not row.decode for row in rows) >= 8
    bench.run()
    for name in "ab":
        bench.assert_alone(name)


@pytest.mark.parametrize("token_budget", [4, 5, 8, 11])
def test_more_decodes_than_budget_take_turns(token_budget: int) -> None:
    bench = Bench(token_budget=token_budget, tokens_per_step=4, accept=lambda row: 1)
    for name in "abcd":
        bench.add(name, [ord(name) % 7], max_tokens=20)
    bench.step()
    assert all(request.state is State.DECODING for request in bench.requests.values())
    for _ in range(20):
        bench.step()
        lengths = [len(bench.tokens(name)) for name in "abcd"]
        assert max(lengths) - min(lengths) <= 1
    bench.run()


def test_a_running_prefill_keeps_its_share_of_a_full_budget() -> None:
    bench = Bench(token_budget=8, tokens_per_step=2, accept=lambda row: 1)
    for name in "abc":
        bench.add(name, [1], max_tokens=40)
    bench.add("d", [1] * 20, max_tokens=2)
    assert sizes(bench.step()) == [1, 1, 1, 5]
    batches = [bench.step() for _ in range(7)]
    assert all(sizes(batch) == [2, 2, 2, 2] for batch in batches)
    bench.add("e", [1] * 20, max_tokens=2)
    bench.run()
    bench.assert_alone("d")
