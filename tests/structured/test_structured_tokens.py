"""Vocabularies as tables of bytes: byte level and sentencepiece, padded, with tokens that end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structured_tiny import CALL, EOS_IDS, VOCAB, Compiler, allowed, tiny_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from tokenspeed.constraint import StructuredOutputs
from tokenspeed.engine.masks import unpack
from tokenspeed.request import InvalidRequest
from tokenspeed.structured.matcher import GrammarState
from tokenspeed.structured.orders import num_words
from tokenspeed.structured.tokens import TokenTable, _Vocabulary, token_table
from tokenspeed.text.tokenizer import Tokenizer


def sentencepiece() -> Tokenizer:
    """Pieces with a metaspace, all bytes as a fallback, and a token that ends."""
    bytes_ = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    pieces = ["\u2581", "\u2581{", "{", '"', "a", "b", "\u2581a", "ab", "1", "\u00e9", "aba"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | bytes_
    vocab |= {piece: 259 + index for index, piece in enumerate(pieces)}
    merges = [("\u2581", "{"), ("\u2581", "a"), ("a", "b")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            *(decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(backend, special_tokens=special)


PIECES = sentencepiece()
TOKENIZERS = {"bytes": (tiny_tokenizer(), EOS_IDS), "pieces": (PIECES, frozenset({2}))}


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=80, deadline=None)
@given(text=st.text('ab{}" \u00e9\U0001f600\n<|cal>/s', max_size=12))
def test_forced_text_keeps_its_bytes(kind: str, text: str) -> None:
    """Also where it reads like a special token; what the vocabulary cannot spell ends it."""
    tokenizer, ends = TOKENIZERS[kind]
    vocabulary = _Vocabulary(tokenizer, tokenizer.vocab_size + 5, sorted(ends))
    ids = vocabulary(text)
    spelled = b"".join(tokenizer.token_bytes(id) for id in ids)
    assert not any(tokenizer.is_special(id) for id in ids)
    if kind == "pieces":
        assert spelled == text.encode()
    else:
        assert text.encode().startswith(spelled)


def test_forced_text_has_the_tokens_that_the_model_knows() -> None:
    vocabulary = _Vocabulary(PIECES, PIECES.vocab_size, [2])
    assert [PIECES.token_bytes(id) for id in vocabulary("ab a")] == [b"ab", b" a"]
    assert [PIECES.token_bytes(id) for id in vocabulary("{aba")] == [b"{", b"ab", b"a"]


@pytest.mark.parametrize("padding", [0, 1, 40])
def test_bytes_fall_back_and_padding_is_never_allowed(padding: int) -> None:
    size = PIECES.vocab_size + padding
    compiler = Compiler(token_table(PIECES, size, frozenset({2})))
    state = GrammarState(compiler.compile(StructuredOutputs(regex=".{0,2}")), frozenset({2}))
    words = np.zeros(num_words(size), dtype=np.int32)
    state.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert bits[2] and not bits[[0, 1]].any() and not bits[PIECES.vocab_size :].any()
    assert bits[3 + 0xF0] and not bits[3 + 0x80]  # a character begins with its first byte
    assert bits[3 + ord("a")] and bits[PIECES.encode("a")[0]]
    ids = [3 + byte for byte in "\U0001f600".encode()]
    assert state.take(ids) is None and state.matcher.is_accepting()


def test_text_like_a_special_token_is_text(table: TokenTable) -> None:
    compiler = Compiler(table)
    text = GrammarState(compiler.compile(StructuredOutputs(choice=("<|call|>",))), EOS_IDS)
    assert CALL not in allowed(text) and len(allowed(text)) == 1
    named = StructuredOutputs(grammar='start: <|call|> "a"')
    assert allowed(GrammarState(compiler.compile(named), EOS_IDS)) == {CALL}


def test_what_has_no_table() -> None:
    plain = Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    cases: list[tuple[Any, str]] = [
        ((Tokenizer(plain), 9, frozenset({1})), "no fixed bytes"),
        ((PIECES, 280, frozenset()), "no end-of-sequence token"),
        ((PIECES, 280, frozenset({999})), "no end-of-sequence token"),
    ]
    for arguments, reason in cases:
        with pytest.raises(InvalidRequest, match=reason):
            token_table(*arguments)


@pytest.mark.parametrize("pieces", [1, 2, 9])
def test_tokens_in_pieces_lead_to_one_mask(table: TokenTable, pieces: int) -> None:
    """Thoughts, whose end may be cut anywhere; the form; its end, behind which only that is."""
    asked = StructuredOutputs(regex="[ab]{2}[0-9]{3}", reasoning_end=(9, 50))
    tokenizer = tiny_tokenizer()
    a, digit = tokenizer.encode("a")[0], tokenizer.encode("7")[0]
    state = GrammarState(Compiler(table).compile(asked), EOS_IDS, asked.reasoning_end)
    whole = set(range(VOCAB)) - EOS_IDS
    letters = {tokenizer.encode(letter)[0] for letter in "ab"}
    output = [60, 9, 9, 50, a, a, digit, digit, digit, 7]
    masks = {1: whole, 2: whole, 3: whole, 4: letters, 5: letters, 9: EOS_IDS, 10: EOS_IDS}
    for start in range(0, len(output), pieces):
        assert state.take(output[start : start + pieces]) is None
        end = min(start + pieces, len(output))
        assert end not in masks or allowed(state) == masks[end]
    assert state.take([a]) is not None


def test_masks_are_unpacked_beside_logits() -> None:
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (5, 7), dtype=np.int32)
    expected = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    for vocab in (193, 199, 224):
        found = unpack(torch.from_numpy(words), torch.zeros(5, vocab))
        assert found.dtype == torch.bool
        assert np.array_equal(found.numpy(), expected[:, :vocab])


def test_long_chains_do_not_end_the_process(table: TokenTable) -> None:
    """They need some 50 MB of stack."""
    chain = "".join(f"r{i}: r{i + 1}\n" for i in range(4000))
    compiler = Compiler(table)
    compiler.compile(StructuredOutputs(grammar=f'start: r0\n{chain}r4000: "a"'))
    terms = "".join(f'R{i}: ~("b" R{i + 1})\n' for i in range(2500))
    compiler.compile(StructuredOutputs(grammar=f'start: R0\n{terms}R2500: "a"'))
