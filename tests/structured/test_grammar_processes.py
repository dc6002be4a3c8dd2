"""Grammars in processes of their own: whatever one does, only those who follow it notice."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_tiny import Outcome, run
from structured_tiny import EOS_IDS
from test_structured_engine import DIGITS, ask, mixed, tokens

from tokenspeed.constraint import StructuredOutputs
from tokenspeed.engine import grammars
from tokenspeed.engine.engine import Engine
from tokenspeed.request import FinishReason, InvalidRequest
from tokenspeed.structured import pool as pools
from tokenspeed.structured import remote
from tokenspeed.structured.pool import GrammarPool
from tokenspeed.structured.remote import RemoteGrammar

Make = Callable[..., Engine]

AMBIGUOUS = {"grammar": 'start: s\ns: s s | "a" | "b" | s s s'}
"""Its masks take longer with each token: seconds after some hundred."""
LETTERS = {"regex": "[a-d]{30,40}"}
NO_END = dict.fromkeys(EOS_IDS, -50.0)


@pytest.fixture(params=[False, True], ids=["serial", "overlapped"])
def engine(make_engine: Make, request: pytest.FixtureRequest) -> Engine:
    return make_engine(disable_overlap_schedule=not request.param)


def pool_of(engine: Engine) -> GrammarPool:
    assert engine._grammars is not None
    return engine._grammars._pool


def grammar_of(engine: Engine, form: dict[str, Any]) -> RemoteGrammar:
    return pool_of(engine).get(StructuredOutputs(**form))


def children() -> set[int]:
    """The processes of grammars: grandchildren, all of one zygote."""
    found = set()
    for zygote in _children_of(os.getpid()):
        found |= _children_of(zygote)
    return found


def _children_of(process: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{process}/task").iterdir():
        found |= set(map(int, (task / "children").read_text().split()))
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_rows_whose_masks_are_late_lose_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(run(engine, mixed()))
    before = engine.stats
    monkeypatch.setattr(grammars, "MAX_WAIT_S", 0.0)
    assert tokens(run(engine, mixed())) == expected
    assert engine.stats.late_masks > before.late_masks + 8
    assert engine.stats.preemptions == before.preemptions, "no page was lacking"


def test_processes_of_grammars_end_with_their_zygote(make_engine: Make) -> None:
    """Also where it is killed and can end nothing itself."""
    before, engine = children(), make_engine()
    run(engine, [ask("a", 0, DIGITS)])
    (grammar,) = children() - before
    (zygote,) = (each for each in _children_of(os.getpid()) if grammar in _children_of(each))
    os.kill(zygote, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{grammar}").exists())


def test_others_go_on_beside_a_grammar_that_takes_seconds(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it ends by what is left of its budget."""
    expected = tokens(run(engine, mixed()))
    monkeypatch.setattr(remote, "MASK_BUDGET_S", 0.1)
    monkeypatch.setattr(remote, "MASK_SHARE_S", 0.0)
    hostile = [ask(f"h{i}", i, AMBIGUOUS, max_tokens=240, logit_bias=NO_END) for i in range(2)]
    together = run(engine, [hostile[0], *mixed(), hostile[1]])
    for each in hostile:
        ended = together.pop(each.id)
        assert ended.finish_reason is FinishReason.ERROR
        assert "masks took more than 0.1 s" in str(ended.error)
    assert tokens(together) == expected
    assert tokens(run(engine, mixed())) == expected


@pytest.mark.parametrize("times", [1, 3])
def test_a_process_that_is_gone_ends_those_it_was_at(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The others of its grammar begin again, unless that happens too often. Another grammar's
    notice nothing.
    """
    pool_of(engine).drop(grammar_of(engine, DIGITS))
    run(engine, [ask("warm", 1, LETTERS)])
    spared, ask_for, calls = children(), RemoteGrammar._ask, 0
    assert spared
    requests = [*mixed(), *(ask(f"l{i}", i, LETTERS, max_tokens=24) for i in range(4))]
    expected = tokens(run(engine, requests))

    def kill_some(self: RemoteGrammar, link: Any) -> None:
        nonlocal calls
        ask_for(self, link)
        if not self._asked or self.job.asked.text != DIGITS["regex"]:
            return
        calls += 1
        if calls in [4 * (1 + i) for i in range(times)]:
            for child in children() - spared:
                os.kill(child, signal.SIGKILL)

    monkeypatch.setattr(RemoteGrammar, "_ask", kill_some)
    pool_of(engine).drop(grammar_of(engine, DIGITS))
    together = run(engine, requests)
    broken = {key for key, each in together.items() if each.error is not None}
    digits = {"r1", "r3", "r5", "r7"}
    if times < remote.MAX_ATTEMPTS:
        assert len(broken & digits) <= times and broken <= digits
    else:
        assert broken == digits
    assert all("broke the grammar engine" in str(together[key].error) for key in broken)
    for key in set(together) - broken:
        assert together[key].token_ids == expected[key]
    monkeypatch.undo()
    pool_of(engine).drop(grammar_of(engine, DIGITS))
    assert tokens(run(engine, requests)) == expected


def test_what_is_compiled_for_nobody_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also masks that are made for nobody."""
    run(engine, [ask("warm", 1, DIGITS)])
    monkeypatch.setattr(grammars, "MAX_WAIT_S", 0.0)
    monkeypatch.setattr(RemoteGrammar, "_take", lambda self, link, data: None)  # never heard of
    for form in ({"regex": "[0-9]{7}[a-c]+"}, {"regex": "x[0-9]{7}[a-c]+"}):
        before = children()
        engine.add(ask("gone", 1, form))
        wait_for(lambda before=before: bool(engine.step()) or children() > before)
        engine.abort(["gone"])
        wait_for(lambda before=before: children() <= before)
        assert not engine.has_work
    monkeypatch.undo()
    engine.add(ask("late", 1, AMBIGUOUS, max_tokens=100))
    monkeypatch.setattr(grammars, "MAX_WAIT_S", 0.0)
    while not grammar_of(engine, AMBIGUOUS)._asked:
        engine.step()
    engine.abort(["late"])
    assert not grammar_of(engine, AMBIGUOUS).is_busy
    engine.check()


def test_processes_are_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_PROCESSES", 3)
    pool = pool_of(engine)
    for grammar in [*pool._kept.values()]:
        pool.drop(grammar)
    most = 0
    for index in range(9):
        engine.add(ask(f"r{index}", 1, {"regex": f"[ab]{{{index + 3}}}"}))
    outcomes = {f"r{index}": Outcome() for index in range(9)}
    while engine.has_work:
        for delta in engine.step():
            outcomes[delta.request_id].push(delta)
        most = max(most, sum(each.is_alive for each in pool._kept.values()))
    assert most == 3
    assert all(each.error is None for each in outcomes.values())


def test_a_process_that_is_asked_nothing_ends(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, in an engine that does nothing; and its grammar is compiled again."""
    run(engine, [ask("warm", 1, DIGITS)])
    pool = pool_of(engine)
    for kept in [*pool._kept.values()]:
        pool.drop(kept)
    time.sleep(0.1)
    before = children()
    monkeypatch.setattr(pools, "KEEP_S", 0.1)
    for _ in range(remote.MAX_ATTEMPTS + 2):
        expected = tokens(run(engine, [ask("a", 1, DIGITS)]))
        grammar = grammar_of(engine, DIGITS)
        link = grammar._link
        assert link is not None and children() > before
        wait_for(link.connection.poll)  # it has hung up
        assert grammar._link is link, "nobody has looked"
        assert tokens(run(engine, [ask("a", 1, DIGITS)])) == expected
        assert grammar_of(engine, DIGITS) is grammar and grammar._link is not link
    assert not grammar.is_overdue
    wait_for(lambda: children() <= before)
    pool.drop(grammar)


def test_a_request_outlives_the_process_that_was_asked_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the engine is paused."""
    monkeypatch.setattr(pools, "KEEP_S", 0.2)
    pool_of(engine).drop(grammar_of(engine, DIGITS))
    expected = tokens(run(engine, mixed()))
    outcomes = {each.id: Outcome() for each in mixed()}
    for each in mixed():
        engine.add(each)
    num_steps = 0
    while engine.has_work:
        for delta in engine.step():
            outcomes[delta.request_id].push(delta)
        num_steps += 1
        if num_steps in (4, 9):
            time.sleep(0.5)
    assert tokens(outcomes) == expected
    pool_of(engine).drop(grammar_of(engine, DIGITS))


def test_grammars_are_kept_within_bounds(engine: Engine) -> None:
    pool = pool_of(engine)
    first = grammar_of(engine, {"regex": "a{0}b"})
    assert grammar_of(engine, {"regex": "a{0}b"}) is first
    bare = {"json": True, "disable_any_whitespace": True}
    assert grammar_of(engine, bare) is not grammar_of(engine, {"json": True})
    for index in range(200):
        grammar_of(engine, {"regex": f"a{{{index}}}b"})
    assert len(pool._kept) <= pools.MAX_KEPT + 1
    for index in range(20):
        grammar_of(engine, {"regex": f"{index}" + "a" * 60_000})
    assert sum(len(key[1]) for key in pool._kept) <= pools.MAX_KEPT_CHARS + 61_000


ATTACKS: dict[str, dict[str, Any]] = {
    "nested items": {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
    "nested groups": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "nested Lark": {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
    "nested GBNF": {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    "long rules": {
        "grammar": "start: r0\n"
        + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(2000))
        + 'r2000: "a"'
    },
    "left recursion": {"grammar": 'start: start start | "a" | '},
    "ambiguity": AMBIGUOUS,
    "empty rule in itself": {"grammar": "start: start | start start"},
    "repeated rule": {"grammar": 'start: ("a" | "b" start){1,1000000}'},
    "nested repeats": {"grammar": 'start: (((("a"){1,1000}){1,1000}){1,1000}){1,1000}'},
    "repeated group": {"regex": "(ab|cd){1,1000000}"},
    "nested repeated groups": {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    "optional letters": {"regex": "a?" * 3000 + "a" * 3000},
    "many states": {"regex": "(" + "|".join(f"(.*{c}.*)" for c in "abcdefghij") + ")*x{20}"},
    "classes of Unicode": {"regex": r"(?i)[\w\W\p{Greek}]{1000}(\p{L}|\p{N}|[^\p{L}\p{N}]){500}"},
    "not": {"grammar": "start: A\nA: " + " & ".join(f"~(/(.*x){{{i}}}y/)" for i in range(2, 20))},
    "long choices": {"choice": ["x" * 120_000]},
    "many choices": {"choice": [f"choice number {i}" for i in range(6000)]},
    "large enum": {"json": {"enum": [f"value {i}" for i in range(7000)]}},
    "least items": {"json": {"type": "array", "minItems": 10**9}},
    "least length": {"json": {"type": "string", "minLength": 10**9}},
    "required": {"json": {"type": "object", "required": [f"p{i}" for i in range(9000)]}},
    "optional": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}},
    "round": {"json": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}},
    "doubling": {
        "json": {
            "$ref": "#/$defs/d0",
            "$defs": {
                **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)},
                "d60": {"type": "null"},
            },
        }
    },
    "all of any": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(8)]}
                for i in range(12)
            ]
        }
    },
    "patterns at once": {
        "json": {"type": "string", "allOf": [{"pattern": f".*{c}.{{12}}$"} for c in "abcdefgh"]}
    },
    "multiples": {
        "json": {
            "allOf": [{"$ref": f"#/$defs/m{i}"} for i in range(5)],
            "$defs": {f"m{i}": {"multipleOf": m} for i, m in enumerate((97, 89, 83, 79, 73))},
        }
    },
    "ranges": {
        "json": {
            "anyOf": [{"type": "integer", "minimum": i, "maximum": 10**15 + i} for i in range(1000)]
        }
    },
}


@pytest.fixture(scope="module")
def guarded(make_engine: Make) -> Engine:
    return make_engine(grammar_compile_timeout_secs=3.0)


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_ends_and_harms_nobody(
    guarded: Engine, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    """It is refused, or followed, or ends by its budget: with a reason that is no failure of the
    engine, and the same text for the next.
    """
    monkeypatch.setattr(remote, "MASK_BUDGET_S", 0.5)
    normal = [ask("free", 1), ask("form", 2, DIGITS)]
    expected = tokens(run(guarded, normal))
    try:
        hostile = ask("hostile", 3, ATTACKS[attack], max_tokens=240, logit_bias=NO_END)
    except InvalidRequest:
        return
    together = run(guarded, [hostile, *normal])
    ended = together.pop("hostile")
    if ended.finish_reason is FinishReason.ERROR:
        assert re.search("grammar|cannot be used|JSON schema", str(ended.error)), ended.error
        assert len(str(ended.error)) < 600
    assert tokens(together) == expected
