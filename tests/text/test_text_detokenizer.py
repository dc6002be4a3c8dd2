"""Incremental decoding: characters as soon as they are whole, and the same text as at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tokenspeed.text.detokenizer import Detokenizer
from tokenspeed.text.tokenizer import Tokenizer
from tokenspeed.text.vocabulary import Spelling

TEXTS = ["A🫠B 龜 C", "日本語 テスト 42", "é café naïve", "🥹🫠🤷🏽‍♀️", "plain", "\n\n  x\t3", ""]


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.push(id) for id in ids), detokenizer.finish()]


def in_parts(
    tokenizer: Tokenizer, ids: list[int], prompt: list[int], skip: bool, size: int
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip, kept_ids={1})
    parts = [ids[at : at + size] for at in range(0, len(ids), size)]
    return [text for part in parts for text in detokenizer.push_all(part)]


def metaspace(drops_space: bool = True) -> Tokenizer:
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hi", "Hi", "é"]
    backend = Backend(
        models.BPE(
            vocab={piece: id for id, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.add_special_tokens(["<s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * drops_space)
    return Tokenizer(backend)


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "play", "##ing", "##s", "hello", ",", "world"]
    backend = Backend(
        models.WordPiece({piece: id for id, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(backend)


@pytest.mark.parametrize("text", TEXTS)
def test_split_characters_never_show_as_replacements(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids, [])
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans())
def test_stream_equals_whole_and_the_rust_decoder(
    tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    whole = tokenizer.decode(ids, skip)
    assert "".join(stream(tokenizer, ids, [], skip)) == whole
    assert tokenizer._backend.decode(ids, skip_special_tokens=skip) == whole


sizes = st.sampled_from([2, 3, 99])
some_words = st.lists(st.sampled_from([0, 1, 2, 905, 30, 198, 49151]), max_size=12)
any_ids = st.lists(st.integers(-1, 49153), max_size=4)


@settings(max_examples=200, deadline=None)
@given(ids=some_words | any_ids, prompt=any_ids, skip=st.booleans(), size=sizes)
def test_tokens_together_have_the_texts_that_each_has(
    tokenizer: Tokenizer, ids: list[int], prompt: list[int], skip: bool, size: int
) -> None:
    together = in_parts(tokenizer, ids, prompt, skip, size)
    assert together == in_parts(tokenizer, ids, prompt, skip, 1)
    detokenizer = Detokenizer(tokenizer, prompt, skip, kept_ids={1})
    assert together == [detokenizer.push(id) for id in ids]


@given(
    ids=st.lists(st.sampled_from([1, 67, 197, 258, 259, 261]), max_size=9),
    prompt=st.lists(st.sampled_from([1, 197, 260]), max_size=2),
    drops_space=st.booleans(),
    size=sizes,
)
def test_so_have_those_of_other_spellings(
    ids: list[int], prompt: list[int], drops_space: bool, size: int
) -> None:
    for tokenizer in (metaspace(drops_space), word_piece()):
        detokenizer = Detokenizer(tokenizer, prompt, kept_ids={1})
        alone = [detokenizer.push(id) for id in ids]
        assert in_parts(tokenizer, ids, prompt, True, size) == alone


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40))
def test_any_bytes(data: bytes) -> None:
    """Each byte a token: replacements exactly where Python's own decoder puts them."""
    tokenizer = metaspace(drops_space=False)
    pieces = stream(tokenizer, [2 + byte for byte in data], [])
    assert "".join(pieces) == data.decode("utf-8", errors="replace")


def test_invalid_bytes_do_not_delay_what_follows(tokenizer: Tokenizer) -> None:
    lead = next(i for i in range(49152) if tokenizer.token_bytes(i) == b"\xf0")
    letter = tokenizer.encode("A", False)[0]
    assert stream(tokenizer, [lead, letter, letter], []) == ["", "\ufffdA", "A", ""]
    assert stream(tokenizer, [lead], []) == ["", "\ufffd"]


def test_special_tokens_and_unknown_ids(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, [1, 905, 2], []) == ["", " world", "", ""]
    assert "".join(stream(tokenizer, [1, 905, 2], [], False)) == "<|im_start|> world<|im_end|>"
    assert stream(tokenizer, [49152, 1 << 30, -1], []) == ["", "", "", ""]
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(49152) == b""


def test_a_character_begun_in_the_prompt_is_finished(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" 🫠!", add_special_tokens=False)
    assert [tokenizer.token_bytes(id) for id in ids[:3]] == [b" \xf0\x9f", b"\xab", b"\xa0"]
    for cut in (1, 2):
        assert "".join(stream(tokenizer, ids[cut:], ids[:cut])) == "🫠!"
    letter = tokenizer.encode("A", False)
    assert "".join(stream(tokenizer, letter, ids[:1])) == "A"
    assert "".join(stream(tokenizer, [], ids[:1])) == ""


def test_leading_space_is_dropped_only_at_the_very_start() -> None:
    tokenizer = metaspace()
    assert tokenizer.spelling is Spelling.METASPACE
    hi, space = 259, 258
    assert tokenizer.token_bytes(hi) == b" Hi"
    assert "".join(stream(tokenizer, [hi, hi], [])) == "Hi Hi" == tokenizer.decode([hi, hi])
    assert "".join(stream(tokenizer, [1, hi], [1])) == "Hi"
    assert "".join(stream(tokenizer, [hi, hi], [1, 260])) == " Hi Hi"
    assert "".join(stream(tokenizer, [space, hi], [])) == " Hi" == tokenizer.decode([space, hi])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([1, 67, 258, 259, 260, 261]), max_size=12))
def test_metaspace_agrees_with_the_rust_decoder(ids: list[int]) -> None:
    tokenizer = metaspace()
    whole = tokenizer.decode(ids)
    assert "".join(stream(tokenizer, ids, [])) == whole
    assert tokenizer._backend.decode(ids) == whole


def test_byte_fallback_joins_over_tokens() -> None:
    tokenizer = metaspace()
    ids = [2 + byte for byte in "€".encode()]
    assert stream(tokenizer, ids, []) == ["", "", "€", ""]


@given(st.lists(st.integers(1, 6), max_size=20), st.lists(st.integers(1, 6), max_size=4))
def test_other_vocabularies_decode_a_window(ids: list[int], prompt: list[int]) -> None:
    tokenizer = word_piece()
    assert tokenizer.spelling is Spelling.OTHER
    together = tokenizer.decode(prompt) + "".join(stream(tokenizer, ids, prompt))
    assert together == tokenizer.decode(prompt + ids)


def test_logprob_entries_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "“curly” 🫠 and  space"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert any("\ufffd" in tokenizer.decode([id]) for id in ids)
