"""Output under a grammar, from the engine with the tiny model: whatever is sampled, it holds, and
nobody else notices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from engine_tiny import Outcome, request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_cases import SCHEMAS, holds
from structured_tiny import EOS, EOS_IDS, THINK_END, VOCAB, Compiler, allowed, tiny_tokenizer

from tokenspeed.constraint import StructuredOutputs
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.worker import Step, Worker
from tokenspeed.request import FinishReason, GenerateRequest, InvalidRequest, RequestDelta
from tokenspeed.structured.matcher import GrammarState
from tokenspeed.structured.remote import Follower
from tokenspeed.structured.tokens import TokenTable

TOKENIZER = tiny_tokenizer()
(WORD_123,) = (token for token in range(VOCAB) if TOKENIZER.token_bytes(token) == b"123")
Make = Callable[..., Engine]
Form = dict[str, Any]

VALUES = [{"a": [1, None]}, "b", 2.5]
REGEX = r"[a-f]{3,9}-\d+x"
FORMS: dict[str, tuple[Form, Callable[[str], bool]]] = {
    "regex": ({"regex": REGEX}, lambda text: bool(re.fullmatch(REGEX, text))),
    "choice": ({"choice": ["name", "nabc", "true é"]}, ["name", "nabc", "true é"].__contains__),
    "grammar": (
        {"grammar": 'start: "(" (start | "x"){0,2} ")"'},
        lambda text: text.count("(") == text.count(")") > 0,
    ),
    "gbnf": (
        {"grammar": 'root ::= "a" ("b" | "c")* digit\ndigit ::= [0-9]'},
        lambda text: bool(re.fullmatch("a[bc]*[0-9]", text)),
    ),
    "json": ({"json": {"enum": VALUES}}, lambda text: json.loads(text) in VALUES),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
}
DIGITS = {"regex": r"(\d\d[ab]){4,20}"}


def ask(name: str, seed: int = 0, form: Form | None = None, **params: Any) -> GenerateRequest:
    asked = None if form is None else StructuredOutputs(**form)
    values = {"temperature": 1.0, "max_tokens": 60, "structured_outputs": asked} | params
    return request(name, [20, 30 + seed % 50, 40], seed=seed, **values)


def text_of(outcome: Outcome) -> str:
    return TOKENIZER.decode(outcome.token_ids)


def tokens(outcomes: dict[str, Outcome]) -> dict[str, list[int]]:
    return {key: outcome.token_ids for key, outcome in outcomes.items()}


@pytest.mark.parametrize("form", FORMS)
def test_every_output_has_the_form(make_engine: Make, form: str) -> None:
    structured, holds = FORMS[form]
    bias = {17: 2.0} if form == "json_object" else {}
    requests = [ask(f"{form}{i}", i, structured, logit_bias=bias) for i in range(12)]
    outcomes = run(make_engine(), requests)
    ended = [each for each in outcomes.values() if each.finish_reason is FinishReason.STOP]
    assert len(ended) > (0 if form == "json_object" else 5)
    for outcome in ended:
        assert holds(text_of(outcome)), text_of(outcome)
        assert outcome.token_ids[-1] == outcome.stop_token
        assert outcome.stop_token in EOS_IDS


def test_a_cut_output_says_so(make_engine: Make) -> None:
    outcome = run(make_engine(), [ask("cut", 1, {"regex": "[ab]{30}"}, max_tokens=7)])["cut"]
    assert outcome.finish_reason is FinishReason.LENGTH
    assert re.fullmatch("[ab]{1,29}", text_of(outcome))


def test_greedy_takes_the_best_of_what_is_allowed(make_engine: Make, table: TokenTable) -> None:
    """The oracle bans by bias, one token a request."""
    engine = make_engine()
    found = run(engine, [ask("masked", 3, DIGITS, temperature=0.0, max_tokens=20)])["masked"]
    compiled = Compiler(table).compile(StructuredOutputs(**DIGITS))
    state = GrammarState(compiled, EOS_IDS)
    prompt = ask("x", 3).prompt_ids
    for index, token in enumerate(found.token_ids):
        banned = dict.fromkeys(set(range(VOCAB)) - allowed(state), -100.0)
        assert 0 < len(banned) < VOCAB
        one = request("one", prompt + found.token_ids[:index], max_tokens=1, logit_bias=banned)
        assert run(engine, [one])["one"].token_ids == [token]
        assert state.take([token]) is None
    assert text_of(found)[:20].isalnum()


def mixed() -> list[GenerateRequest]:
    """Rows with a grammar and free ones, greedy and sampled."""
    return [
        ask(f"r{i}", i, DIGITS if i % 2 else None, temperature=i % 3 / 2, max_tokens=24)
        for i in range(8)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disable_overlap_schedule": False},
        {"disable_overlap_schedule": False, "max_total_tokens": 64},
        {"chunked_prefill_size": 5, "disable_overlap_schedule": False},
    ],
    ids=["serial", "overlapped", "preempted", "chunked"],
)
def test_alone_or_in_any_company(make_engine: Make, options: dict[str, Any]) -> None:
    alone = {each.id: run(make_engine(), [each])[each.id] for each in mixed()}
    engine = make_engine(**options)
    before = engine.stats.preemptions
    assert tokens(run(engine, mixed())) == tokens(alone)
    assert (engine.stats.preemptions > before) == ("max_total_tokens" in options)


def test_free_rows_are_what_they_are_without_the_others(make_engine: Make) -> None:
    engine = make_engine(disable_overlap_schedule=False)
    free = [each for each in mixed() if each.params.structured_outputs is None]
    without, together = run(engine, free), run(engine, mixed())
    for each in free:
        assert together[each.id].token_ids == without[each.id].token_ids


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_grammar_that_breaks_ends_its_request_alone(make_engine: Make, overlapped: bool) -> None:
    """Three thousand ways to go on are more than can be followed, but not at the beginning."""
    ways = " | ".join(f'"x{i}" start' for i in range(3000))
    bad = {"grammar": f"start: /[0-9]{{40}}/ rest\nrest: {ways.replace('start', 'rest')}"}
    engine = make_engine(disable_overlap_schedule=not overlapped)
    alone = tokens(run(engine, mixed()))
    together = run(engine, [*mixed()[:3], ask("bad", 1, bad), *mixed()[3:]])
    broken = together.pop("bad")
    assert broken.finish_reason is FinishReason.ERROR
    assert "the grammar cannot be followed: " in str(broken.error)
    assert "start:" not in str(broken.error)
    assert tokens(together) == alone


@pytest.mark.parametrize("raises", [False, True])
def test_a_mask_that_fails_ends_its_request_alone(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    """Also in a step that raises for another reason, whose rows then run one by one."""
    engine = make_engine(disable_overlap_schedule=False)
    alone = tokens(run(engine, mixed()))
    want, sample, calls, is_due = Follower.want, Step.sample, 0, raises

    def break_one(self: Follower, output_ids: Sequence[int]) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            self.error = "injected"
        want(self, output_ids)

    def fail_once(self: Step, masks: Any = None) -> None:
        nonlocal is_due
        if is_due and calls == 8:
            is_due = False
            raise RuntimeError("injected")
        sample(self, masks)

    monkeypatch.setattr(Follower, "want", break_one)
    monkeypatch.setattr(Step, "sample", fail_once)
    together = run(engine, mixed())
    (broken,) = [key for key, outcome in together.items() if outcome.error is not None]
    assert "cannot be followed" in str(together[broken].error)
    assert not is_due
    for key in set(together) - {broken}:
        assert together[key].token_ids == alone[key]


@pytest.mark.parametrize(
    "against",
    [
        {"allowed_token_ids": TOKENIZER.encode("abc")},
        {"bad_token_ids": [[token] for token in [*TOKENIZER.encode("0123456789"), WORD_123]]},
    ],
    ids=["allowed", "banned"],
)
def test_what_contradicts_the_form_is_refused(make_engine: Make, against: dict[str, Any]) -> None:
    """At once, or as soon as the output comes to where it does."""
    engine = make_engine(disable_overlap_schedule=False)
    alone = tokens(run(engine, mixed()))
    at_once = ask("at once", 1, {"regex": "[0-9]{9}"}, **against)
    later = ask("later", 1, {"regex": "[abc]{3}[0-9]{9}"}, **against)
    deltas: dict[str, RequestDelta] = {}
    for each in [at_once, later, *mixed()]:
        engine.add(each)
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id] = delta
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
    for name in ("at once", "later"):
        assert deltas[name].is_refusal and "leave one of these out" in str(deltas[name].error)
        del outputs[name]
    assert outputs == alone


def test_the_grammar_begins_behind_the_reasoning(make_engine: Make) -> None:
    form = {"regex": "[ab]{4}", "reasoning_end": [THINK_END, 50]}
    bias = {THINK_END: 20.0, 50: 20.0, EOS: 60.0}
    requests = [ask(f"t{i}", i, form, logit_bias=bias, max_tokens=200) for i in range(6)]
    outcomes = run(make_engine(disable_overlap_schedule=False), requests)
    for outcome in outcomes.values():
        ids = outcome.token_ids
        (end,) = [i for i in range(len(ids)) if ids[i - 1 : i + 1] == [THINK_END, 50] and i][:1]
        assert re.fullmatch("[ab]{4}", TOKENIZER.decode(ids[end + 1 :]))
        assert not EOS_IDS & set(ids[:-1])
        assert ids[-1] in EOS_IDS


def test_only_steps_with_a_grammar_wait(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of a step is launched before the tokens of the step before are known; but with a
    grammar in it, it is sampled after that.
    """
    engine = make_engine(disable_overlap_schedule=False)
    events: list[tuple[str, int]] = []

    def noted(owner: type, name: str, number: Callable[[Any, Any], int]) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any) -> Any:
            events.append((name, number(self, args)))
            return original(self, *args)

        monkeypatch.setattr(owner, name, call)

    noted(Worker, "launch", lambda worker, args: args[0].step)
    noted(Step, "sample", lambda step, args: step.batch.step)
    noted(Step, "result", lambda step, args: step.batch.step)
    for form, waits in ((None, False), (DIGITS, True)):
        events.clear()
        run(engine, [ask("one", 1, form, max_tokens=4)])
        first = events[0][1]
        for step in range(first + 1, first + 4):
            launch, sample, before = (
                events.index((name, number))
                for name, number in (("launch", step), ("sample", step), ("result", step - 1))
            )
            assert launch < sample and launch < before
            assert (before < sample) == waits


def test_a_step_that_raises_loses_no_token_of_a_grammar(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(disable_overlap_schedule=False)
    expected = tokens(run(engine, mixed()))
    for name in ("launch", "sample"):
        owner, count = (Worker, 0) if name == "launch" else (Step, 0)
        original = getattr(owner, name)

        def call(self: Any, *args: Any, original: Any = original) -> Any:
            nonlocal count
            count += 1
            if count % 5 == 3:
                raise RuntimeError("injected")
            return original(self, *args)

        monkeypatch.setattr(owner, name, call)
        found = run(engine, mixed())
        monkeypatch.undo()
        whole = [key for key, outcome in found.items() if outcome.error is None]
        assert len(whole) > 2
        assert all(found[key].token_ids == expected[key] for key in whole)


@settings(max_examples=6, deadline=None)
@given(schemas=st.lists(SCHEMAS, min_size=3, max_size=5))
def test_schemas_hold_for_what_the_model_writes(make_engine: Make, schemas: list[Any]) -> None:
    requests = [ask(f"s{i}", i, {"json": schema}) for i, schema in enumerate(schemas)]
    for schema, outcome in zip(schemas, run(make_engine(), requests).values(), strict=True):
        assert outcome.error is None
        if outcome.finish_reason is FinishReason.STOP:
            assert holds(schema, json.loads(text_of(outcome))), (schema, text_of(outcome))


def test_abort_in_every_state(make_engine: Make) -> None:
    engine = make_engine(disable_overlap_schedule=False)
    engine.add(ask("early", 1, {"regex": "[0-9]{7}[a-c]+"}))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add(ask("early", 1))
    assert engine.has_work and engine.stats.num_waiting == 1
    (delta,) = engine.abort(["early"])
    assert delta.finish_reason is FinishReason.ABORT and not engine.has_work
    for steps in range(5):
        engine.add(ask("late", 1, DIGITS))
        engine.add(ask("other", 2, DIGITS, max_tokens=5))
        for _ in range(steps):
            engine.step()
        engine.abort(["late"])
        while engine.has_work:
            assert all(delta.request_id == "other" for delta in engine.step())
        engine.check()


def test_what_cannot_be_asked(make_engine: Make, tiny_model: str) -> None:
    for params in ({"ignore_eos": True}, {"min_tokens": 3}):
        with pytest.raises(InvalidRequest, match="grammar says when"):
            ask("x", form=DIGITS, **params)
    with pytest.raises(InvalidRequest, match="look-around"):
        make_engine().check_grammar(StructuredOutputs(regex="(?=a)b"))
    outcome = run(make_engine(), [ask("bad", form={"regex": "(?=a)b"})])["bad"]
    assert outcome.finish_reason is FinishReason.ERROR and "look-around" in str(outcome.error)
    with pytest.raises(InvalidRequest, match="maximum context length"):
        make_engine().add(ask("long", form=DIGITS, max_tokens=1000))


def test_who_waits_for_a_grammar_in_a_pause_is_counted(make_engine: Make) -> None:
    engine = make_engine()
    engine.pause()
    engine.add(ask("held", form=DIGITS))
    engine.add(ask("free", max_tokens=2))
    assert engine.stats.num_waiting == 2 and not engine.has_work
    engine.abort(["held"])
    assert engine.stats.num_waiting == 1
    engine.resume()
    engine.abort(["free"])
    assert not engine.has_work
