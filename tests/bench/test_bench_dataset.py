"""What is asked: lengths, shared beginnings, conversations, files; and when."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tokenspeed.bench.answer import Answer, Record
from tokenspeed.bench.dataset import Session, random_sessions
from tokenspeed.bench.dataset_file import file_sessions
from tokenspeed.bench.load import Requests, arrivals, warm_ups
from tokenspeed.bench.serve_options import DatasetOptions, LoadOptions, ServeOptions, TargetOptions
from tokenspeed.options import ConfigError
from tokenspeed.text.tokenizer import Tokenizer


def byte_tokenizer() -> Tokenizer:
    """A token a byte: ids drawn at random are broken text, which is re-encoded as more tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def options(backend: str = "openai", **dataset: Any) -> ServeOptions:
    return ServeOptions(
        target=TargetOptions(backend=backend), dataset=DatasetOptions(num_prompts=40, **dataset)
    )


def prompts(sessions: list[Session]) -> list[Any]:
    return [turn.prompt for session in sessions for turn in session.turns]


def test_random_lengths_stay_in_their_range_and_come_again() -> None:
    asked = options(random_input_len=20, random_output_len=10, random_range_ratio=0.5, seed=3)
    sessions = random_sessions(asked, None)
    turns = [session.turns[0] for session in sessions]
    lengths = [len(turn.prompt) for turn in turns]
    assert lengths == [turn.input_len for turn in turns]
    assert 10 <= min(lengths) < 13 and 27 < max(lengths) <= 30
    assert {turn.max_tokens for turn in turns} <= set(range(5, 16))
    assert prompts(random_sessions(asked, None)) == prompts(sessions)
    assert all(100 <= token < 32000 for prompt in prompts(sessions) for token in prompt)


def test_a_tiny_vocabulary_is_kept_to() -> None:
    found = prompts(random_sessions(options(vocab_size=5), None))
    assert set(itertools.chain(*found)) == set(range(5))


def test_groups_share_their_beginning_and_no_more() -> None:
    asked = options(
        dataset_name="shared-prefix",
        shared_prefix_groups=4,
        shared_prefix_len=30,
        shared_prefix_own_len=8,
    )
    found = prompts(random_sessions(asked, None))
    assert len({tuple(prompt[:30]) for prompt in found}) == 4
    assert len({tuple(prompt) for prompt in found}) == 40
    assert found[0][:30] == found[4][:30] != found[1][:30]


def test_with_a_tokenizer_prompts_are_text_of_that_length() -> None:
    tokenizer = byte_tokenizer()
    for prompt in prompts(random_sessions(options(random_input_len=16), tokenizer)):
        # A cut character is replaced by one of three bytes.
        assert 16 <= len(tokenizer.encode(prompt, add_special_tokens=False)) <= 16 + 2


def test_chat_without_a_tokenizer_is_words() -> None:
    for prompt in prompts(random_sessions(options("openai-chat", random_input_len=9), None)):
        assert len(prompt.split()) == 9


def answer(text: str, ids: list[int]) -> Answer:
    found = Answer(
        Record(session=0, turn=0, start=0, input_len=1, max_tokens=9, text=text), must_be_full=False
    )
    found.token_ids = ids
    return found


def test_conversations_grow_by_what_was_answered() -> None:
    chosen = {"dataset_name": "multi-turn", "num_turns": 3, "turn_input_len": 2}
    for backend in ("openai", "openai-chat"):
        (first, *_) = random_sessions(options(backend, **chosen), None)
        assert len(first.turns) == len(first.think_s) == 3
        assert first.think_s[0] == 0 < min(first.think_s[1:])
        ask = Requests(
            endpoint="/x",
            is_chat=backend == "openai-chat",
            model="m",
            fields={"top_p": 0.5},
            must_be_full=False,
            timeout_s=1,
        )
        begun = ask.begin(first.turns[0])
        grown = ask.go_on(begun, answer("yes", [7, 8]), first.turns[1])
        body = json.loads(ask.body(grown, first.turns[1]))
        assert (body["stream"], body["top_p"]) == (True, 0.5)
        if ask.is_chat:
            roles = [message["role"] for message in body["messages"]]
            assert roles == ["user", "assistant", "user"]
            assert body["messages"][1]["content"] == "yes"
        else:
            added = first.turns[1].prompt
            assert body["prompt"] == [*first.turns[0].prompt, 7, 8, *added]
            assert first.turns[1].input_len == 1024 + 128 + 2


def write(path: Path, entries: list[Any], as_lines: bool) -> str:
    lines = "\n".join(json.dumps(entry) for entry in entries) + "\n"
    path.write_text(lines if as_lines else json.dumps(entries))
    return str(path)


@pytest.mark.parametrize("as_lines", [True, False])
def test_files_of_prompts_and_conversations(tmp_path: Path, as_lines: bool) -> None:
    usual = [{"from": "human", "value": "a b c d e f"}, {"from": "gpt", "value": "one " * 6}]
    entries = [
        {"prompt": "a b c", "output_tokens": 5},
        {"prompt": [1, 2, 3, 4]},
        {"conversations": usual, "id": "x"},
    ]
    path = write(tmp_path / "file", entries, as_lines)
    sessions = file_sessions(options(dataset_name="custom", dataset_path=path), None)
    assert len(sessions) == 40
    turns = [session.turns[0] for session in sessions[:4]]
    assert [turn.prompt for turn in turns] == ["a b c", [1, 2, 3, 4], "a b c d e f", "a b c"]
    assert [(turn.input_len, turn.max_tokens) for turn in turns] == [
        *((4, 5), (4, 128), (8, 8), (4, 5)),
    ]


def test_sharegpt_leaves_out_what_is_unusual(tmp_path: Path) -> None:
    def said(question: int, reply: int) -> dict[str, Any]:
        return {"conversations": [{"value": "w " * question}, {"value": "w " * reply}]}

    entries = [said(6, 6), said(1, 9), said(9, 1), said(900, 9), said(700, 900), {"id": "none"}]
    path = write(tmp_path / "file", entries, False)
    sessions = file_sessions(options(dataset_name="sharegpt", dataset_path=path), None)
    assert {session.turns[0].prompt for session in sessions} == {"w " * 6}


@pytest.mark.parametrize("text", ["", "[", "{}", '{"prompt": 5}', "[[]]", '{"prompt": null}'])
def test_a_file_that_is_none_is_an_error_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        file_sessions(options(dataset_name="custom", dataset_path=str(path)), None)
    assert "\n" not in str(error.value)


def test_arrivals_have_their_rate_and_shape() -> None:
    def gaps(burstiness: float) -> list[float]:
        load = LoadOptions(request_rate=4.0, burstiness=burstiness)
        times = list(arrivals(4001, load, seed=1))
        assert times[0] == 0.0
        return [after - before for before, after in itertools.pairwise(times)]

    assert set(gaps(math.inf)) == {0.25}
    for burstiness in (0.5, 1.0, 4.0):
        found = gaps(burstiness)
        mean = statistics.mean(found)
        assert mean == pytest.approx(0.25, rel=0.1)
        # A gamma distribution of that shape: variance = mean**2 / shape.
        assert statistics.pstdev(found) / mean == pytest.approx(burstiness**-0.5, rel=0.1)
    assert list(arrivals(3, LoadOptions(), seed=1)) == [0.0, 0.0, 0.0]


def test_warm_ups_are_first_turns_in_a_circle() -> None:
    sessions = random_sessions(options(dataset_name="multi-turn"), None)[:2]
    chosen = warm_ups(sessions, 3)
    assert [len(session.turns) for session in chosen] == [1, 1, 1]
    assert chosen[2].turns[0] is sessions[0].turns[0]
