"""Text, stop strings, logprobs, echo and usage: streamed and not, however tokens are cut."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from server_fakes import ANSWER, CHAT, COMPLETIONS, EOS, TOKENIZER, Asker, refused

from tokenspeed.server import logprobs, tokens
from tokenspeed.server.logprobs import token_text

COUNT = "1, 2, 3, 4, 5, 6, 7"


def events(answer: httpx.Response) -> list[Any]:
    """The events of a stream, whose frame is checked."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    blocks = answer.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: {") for block in blocks[:-2])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


@pytest.fixture(params=[1, 2, 3, 100])
def chunked(ask: Asker, request: pytest.FixtureRequest) -> Asker:
    ask.engine.chunk = request.param
    return ask


async def test_split_characters_are_whole_in_a_stream(chunked: Asker) -> None:
    for kind in (chunked.completion, chunked.chat):
        chunks = events(await kind(max_tokens=100, stream=True))
        assert text_of(chunks) == ANSWER
        assert not any("\ufffd" in json.dumps(chunk, ensure_ascii=False) for chunk in chunks)


async def test_a_cut_character_is_flushed_at_the_end(chunked: Asker) -> None:
    cut = len("Hello, w\u00f6rld ".encode()) + 2
    whole = (await chunked.completion(max_tokens=cut)).json()["choices"][0]
    chunks = events(await chunked.completion(max_tokens=cut, stream=True))
    assert whole["text"] == text_of(chunks) == "Hello, w\u00f6rld \ufffd"
    assert whole["finish_reason"] == "length"


STOPS: list[tuple[Any, bool, str, Any]] = [
    (", 5", False, "1, 2, 3, 4", ", 5"),
    (["5"], False, "1, 2, 3, 4, ", "5"),
    (["zzz", ", 5, 6"], False, "1, 2, 3, 4", ", 5, 6"),
    ([", 5"], True, "1, 2, 3, 4, 5", ", 5"),
    (["7!"], False, COUNT, None),
    ([], False, COUNT, None),
]


@pytest.mark.parametrize(("stop", "include", "text", "reason"), STOPS)
async def test_stop_strings(
    chunked: Asker, stop: Any, include: bool, text: str, reason: Any
) -> None:
    chunked.engine.answer = COUNT
    fields = {"stop": stop, "include_stop_str_in_output": include, "max_tokens": 100}
    for kind in (chunked.completion, chunked.chat):
        whole = (await kind(**fields)).json()
        choice = whole["choices"][0]
        assert (choice["text"] if "text" in choice else choice["message"]["content"]) == text
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
        chunks = events(await kind(**fields, stream=True, stream_options={"include_usage": True}))
        assert text_of(chunks) == text
        last = chunks[-2]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", reason)
        assert chunks[-1]["usage"] == whole["usage"]
    if reason is not None and chunked.engine.chunk < 3:
        assert len(chunked.engine.aborted) == 4  # the engine was told that it need not go on


async def test_stop_ids(ask: Asker) -> None:
    ask.engine.answer = COUNT
    (comma,) = TOKENIZER.encode(",", add_special_tokens=False)
    choice = (await ask.completion(stop_token_ids=[comma])).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("1", "stop", comma)


async def test_logprobs_of_chat(chunked: Asker) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 100}
    whole = (await chunked.chat(**fields)).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"] == len(ANSWER.encode()) + 1
    joined = b"".join(bytes(entry["bytes"]) for entry in entries[:-1])
    assert joined == ANSWER.encode() and entries[-1]["token"] == "<|im_end|>"
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 3 and entry["token"]
        assert set(entry["top_logprobs"][0]) == {"token", "logprob", "bytes"}
    assert "bytes:\\xc3" in [entry["token"] for entry in entries]
    chunks = events(await chunked.chat(**fields, stream=True))
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for part in streamed for entry in part["content"]] == entries
    bare = (await chunked.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in bare)
    assert (await chunked.chat()).json()["choices"][0]["logprobs"] is None


async def test_logprobs_of_completions(chunked: Asker) -> None:
    whole = (await chunked.completion(logprobs=2, max_tokens=100)).json()["choices"][0]
    shown = whole["logprobs"]
    count = len(ANSWER.encode()) + 1
    assert {len(column) for column in shown.values()} == {count}
    assert all(len(top) == 3 for top in shown["top_logprobs"])  # two, and the chosen one
    assert shown["token_logprobs"] == [-5.0] * count
    starts = [len(ANSWER.encode()[:i].decode(errors="ignore")) for i in range(count)]
    assert shown["text_offset"] == starts
    chunks = events(await chunked.completion(logprobs=2, max_tokens=100, stream=True))
    for column, values in shown.items():
        parts = [chunk["choices"][0]["logprobs"][column] for chunk in chunks]
        assert [value for part in parts for value in part] == values
    zero = (await chunked.completion(logprobs=0, max_tokens=2)).json()["choices"][0]["logprobs"]
    assert zero["top_logprobs"] == [{}, {}] and zero["token_logprobs"] == [-5.0, -5.0]
    assert (await chunked.completion()).json()["choices"][0]["logprobs"] is None


async def test_echo(chunked: Asker) -> None:
    fields: dict[str, Any] = {"prompt": "Yes: \u00e9", "echo": True}
    for prompt in ("Yes: \u00e9", TOKENIZER.encode("Yes: \u00e9", add_special_tokens=False)):
        whole = (await chunked.completion(**fields | {"prompt": prompt}, max_tokens=3)).json()
        assert whole["choices"][0]["text"] == "Yes: \u00e9Hel"
    chunks = events(await chunked.completion(**fields, max_tokens=3, n=2, stream=True))
    assert text_of(chunks) == text_of(chunks, 1) == "Yes: \u00e9Hel"
    whole = (await chunked.completion(**fields, max_tokens=3, logprobs=1)).json()["choices"][0]
    shown = whole["logprobs"]
    assert {len(column) for column in shown.values()} == {7 + 3}
    assert shown["token_logprobs"][:2] == [None, -5.0] and shown["top_logprobs"][0] is None
    assert shown["text_offset"] == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8]
    chunks = events(await chunked.completion(**fields, max_tokens=3, logprobs=1, stream=True))
    parts = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert [offset for part in parts for offset in part] == shown["text_offset"]


async def test_echo_without_new_tokens(ask: Asker) -> None:
    fields = {"prompt": "Answer: yes", "echo": True, "max_tokens": 0}
    for extra in ({}, {"logprobs": 1}):
        whole = (await ask.completion(**fields, **extra)).json()
        choice = whole["choices"][0]
        assert choice["text"] == "Answer: yes" and choice["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == 0
        assert (
            text_of(events(await ask.completion(**fields, **extra, stream=True))) == choice["text"]
        )
    assert len(choice["logprobs"]["tokens"]) == 11
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == list(range(11))
    assert refused(await ask.completion(max_tokens=0))["param"] == "max_tokens"


async def test_prompt_logprobs_and_token_ids(ask: Asker) -> None:
    fields = {"prompt_logprobs": 2, "return_token_ids": True, "max_tokens": 2}
    choice = (await ask.completion(**fields)).json()["choices"][0]
    assert choice["token_ids"] == TOKENIZER.encode("He", add_special_tokens=False)
    assert choice["prompt_token_ids"] == TOKENIZER.encode("Hi", add_special_tokens=False)
    first, second = choice["prompt_logprobs"]
    assert first is None and len(second) == 3
    own = second[str(choice["prompt_token_ids"][1])]
    assert own == {"logprob": -5.0, "rank": None, "decoded_token": "i"}
    assert sorted(entry["rank"] for entry in second.values() if entry["rank"]) == [1, 2]
    chat = (await ask.chat(**fields)).json()
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
    assert chat["choices"][0]["token_ids"] == choice["token_ids"]
    assert refused(await ask.chat(**fields, stream=True))["param"] == "prompt_logprobs"
    chunks = events(await ask.chat(return_token_ids=True, max_tokens=100, stream=True))
    ids = [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", [])]
    assert [*TOKENIZER.encode(ANSWER, add_special_tokens=False), EOS] == ids


USAGE: list[tuple[Any, str]] = [
    (None, "none"),
    ({}, "none"),
    ({"include_usage": False}, "none"),
    ({"include_usage": True}, "last"),
    ({"include_usage": True, "continuous_usage_stats": True}, "all"),
    ({"continuous_usage_stats": True}, "refused"),
]


@pytest.mark.parametrize(("options", "where"), USAGE)
async def test_usage_in_streams(chunked: Asker, options: Any, where: str) -> None:
    for kind in (chunked.completion, chunked.chat):
        whole = (await kind(max_tokens=100)).json()["usage"]
        answer = await kind(max_tokens=100, stream=True, stream_options=options)
        if where == "refused":
            assert refused(answer)["param"] == "stream_options"
            continue
        chunks = events(answer)
        *early, last = chunks
        if where == "none":
            assert all(chunk.get("usage") is None for chunk in chunks) and last["choices"]
            continue
        assert last["choices"] == [] and last["usage"] == whole
        assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]
        assert whole["prompt_tokens_details"] == {"cached_tokens": 1}
        counts = [(chunk["usage"] or {}).get("completion_tokens") for chunk in early]
        assert counts == sorted(counts) if where == "all" else set(counts) == {None}


async def test_order_of_chat_chunks(ask: Asker) -> None:
    ask.engine.answer = "ab"
    chunks = events(await ask.chat(stream=True))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {(c["id"], c["object"], c["model"], c["created"]) for c in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", "m", chunks[0]["created"])
    }
    assert chunks[0]["id"].startswith("chatcmpl-")
    completion = events(await ask.completion(stream=True))
    assert {chunk["object"] for chunk in completion} == {"text_completion"}
    assert completion[-1]["choices"][0]["finish_reason"] == "stop"


async def test_samples_are_kept_apart(chunked: Asker) -> None:
    chunked.engine.answers = {0: "zero", 1: "one, stop here", 2: "two", 3: ""}
    fields = {"n": 4, "seed": 7, "stop": " here", "max_tokens": 100}
    texts = ["zero", "one, stop", "two", ""]
    whole = (await chunked.chat(**fields)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [choice["message"]["content"] for choice in whole["choices"]] == texts
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"stop"}
    single = (await chunked.chat()).json()["usage"]["prompt_tokens"]
    assert whole["usage"]["prompt_tokens"] == single
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    chunks = events(
        await chunked.chat(**fields, stream=True, stream_options={"include_usage": True})
    )
    assert chunks.pop()["usage"] == whole["usage"]
    for index, text in enumerate(texts):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == "stop"
        assert sum(choice["finish_reason"] is not None for choice in own) == 1
        assert text_of(chunks, index) == text
    samples = chunked.engine.requests[:4]
    assert [request.sample_index for request in samples] == [0, 1, 2, 3]
    assert len({request.id for request in samples}) == 4 and {r.seed for r in samples} == {7}


async def test_lists_of_prompts_are_numbered_by_prompt_then_sample(ask: Asker) -> None:
    ask.engine.answers = {0: "first", 1: "second"}
    answer = await ask.completion(prompt=["a", "bcd"], n=2, echo=True)
    whole = answer.json()
    assert [choice["text"] for choice in whole["choices"]] == [
        "afirst",
        "asecond",
        "bcdfirst",
        "bcdsecond",
    ]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["prompt_tokens"] == 4
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_prompt_is_scored_once_for_all_its_samples(
    ask: Asker, late: int, streams: bool
) -> None:
    """Whichever sample comes last, each shows the prompt's log-probabilities first."""
    ask.engine.answer, generate = "abc", ask.engine.generate

    async def delayed(request: Any) -> Any:
        if request.sample_index == late:
            await asyncio.sleep(0.02)
        async for delta in generate(request):
            yield delta

    ask.engine.generate = delayed
    fields = {"prompt": ["Hi", "you"], "n": 3, "echo": True, "logprobs": 1, "max_tokens": 3}
    answer = await ask.completion(**fields, stream=streams)
    chunks = events(answer) if streams else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(6):
        own = [choice["logprobs"] for choice in choices if choice["index"] == index]
        tokens = [token for part in own for token in part["tokens"]]
        assert "".join(tokens) == ["Hi", "you"][index // 3] + "abc"
        scores = [score for part in own for score in part["token_logprobs"]]
        assert scores == [None, *[-5.0] * (len(tokens) - 1)]

    def scorers() -> list[int | None]:
        """What each sample was asked for, in order of prompts and samples."""
        sent = sorted(ask.engine.requests, key=lambda each: int(each.id.rpartition("-")[2]))
        return [each.params.prompt_logprobs for each in sent]

    assert scorers() == [1, None, None] * 2
    if not streams:
        ask.engine.requests.clear()
        del fields["echo"], fields["logprobs"]
        whole = (await ask.completion(**fields, prompt_logprobs=2)).json()
        assert [len(choice["prompt_logprobs"]) for choice in whole["choices"]] == [2] * 3 + [3] * 3
        assert scorers() == [2, None, None] * 2
        ask.engine.requests.clear()
        await ask.chat(n=3, prompt_logprobs=0)
        assert scorers() == [0, None, None]
    ask.engine.generate = generate


async def test_log_probabilities_are_written_down_beside_the_event_loop(
    ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts and of whole answers, as are the texts of tokens: there may be millions."""
    where: set[str] = set()

    def watched(*given: Any) -> Any:
        where.add(threading.current_thread().name)
        return token_text(*given)

    for module in (logprobs, tokens):
        monkeypatch.setattr(module, "token_text", watched)
    ask.engine.chunk = 100
    for path, fields in (
        (COMPLETIONS, {"logprobs": 2}),
        (COMPLETIONS, {"logprobs": 2, "echo": True}),
        (COMPLETIONS, {"logprobs": 2, "echo": True, "stream": True, "max_tokens": 0}),
        (COMPLETIONS, {"prompt_logprobs": 2}),
        (CHAT, {"prompt_logprobs": 2}),
        (CHAT, {"logprobs": True, "top_logprobs": 2}),
        ("/tokenize", {"return_token_strs": True}),
    ):
        body: dict[str, Any] = {"prompt": "Hi"}
        if path == CHAT:
            body = {"messages": [{"role": "user", "content": "Hi"}]}
        answer = await ask.http.post(path, json=body | fields)
        assert answer.status_code == 200, answer.text
        assert where == {"offload"}, (path, fields)
        where.clear()
