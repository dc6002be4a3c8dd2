"""Tokenizers of model folders: tokenizer.json with its settings, templates, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tokenspeed.request import InvalidRequest
from tokenspeed.text.source import ModelError, ModelSource, eos_token_ids, resolve_model
from tokenspeed.text.template_file import read_template_file
from tokenspeed.text.tokenizer import Tokenizer, load_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def backend() -> Backend:
    vocabulary = {character: id for id, character in enumerate(ALPHABET)}
    vocabulary |= {"<s>": 256, "<end>": 257, "ab": 258}
    made = Backend(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<s>", normalized=False)])
    made.add_tokens([AddedToken("<end>", normalized=False)])
    return made


def write(folder: Path, *, config: dict[str, Any] | None = None, **files: Any) -> ModelSource:
    """A model folder; keyword names are file names with "__" for the dot."""
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if "tokenizer__json" not in files:
        backend().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return resolve_model(str(folder))


def test_settings_name_the_special_tokens(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "<end>"}
    source = write(tmp_path, tokenizer_config__json=settings)
    tokenizer = load_tokenizer(source)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<end>"}
    assert eos_token_ids(source) == {257}  # no config names one, so the tokenizer's own
    assert tokenizer.is_special(257)  # plain in tokenizer.json, but its role makes it special
    assert tokenizer.vocab_size == 259
    ids = tokenizer.encode("ab<end>é")
    assert ids[:2] == [258, 257]
    assert tokenizer.decode(ids) == "abé"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<end>é"


def test_ends_come_from_the_configs_first(tmp_path: Path) -> None:
    source = write(
        tmp_path,
        config={"model_type": "llama", "eos_token_id": 7},
        generation_config__json={"eos_token_id": [8, 9]},
        tokenizer_config__json={"eos_token": "<end>"},
    )
    assert eos_token_ids(source) == {7, 8, 9}


@pytest.mark.parametrize(
    "files",
    [
        {"vocab__json": {"<end>": 9, "a": 1}},
        {"tokenizer__json": {"added_tokens": [5, {"id": 8}, {"id": 9, "content": "<end>"}]}},
        {"special_tokens_map__json": {"eos_token": {"content": "<end>"}}},
    ],
)
def test_the_tokenizers_own_end(tmp_path: Path, files: dict[str, Any]) -> None:
    """Wherever a folder says it; a folder that does not say it has none."""
    settings: dict[str, Any] = {"eos_token": "<end>"}
    if "special_tokens_map__json" in files:
        settings = {"added_tokens_decoder": {"x": {}, "9": {"content": "<end>"}}}
    files = {"tokenizer__json": {}, "tokenizer_config__json": settings} | files
    assert eos_token_ids(write(tmp_path, **files)) == {9}
    named = {"tokenizer_config__json": {"eos_token": "<other>"}, "special_tokens_map__json": {}}
    assert eos_token_ids(write(tmp_path, **files | named)) == set()
    named = {"tokenizer_config__json": {}, "special_tokens_map__json": {}}
    assert eos_token_ids(write(tmp_path, **files | named)) == set()


@pytest.mark.parametrize("bad", [-1, "9", True, 1 << 40, None, 9.0])
def test_an_end_without_a_usable_id_is_none(tmp_path: Path, bad: Any) -> None:
    source = write(
        tmp_path,
        tokenizer_config__json={"eos_token": "<end>", "added_tokens_decoder": [1]},
        vocab__json={"<end>": bad},
        tokenizer__json={"added_tokens": {"id": 9, "content": "<end>"}},
    )
    assert eos_token_ids(source) == set()


def test_special_token_with_id_zero(tmp_path: Path) -> None:
    settings = {"pad_token": ALPHABET[0]}
    tokenizer = load_tokenizer(write(tmp_path, tokenizer_config__json=settings))
    assert tokenizer.is_special(0)


def test_tokens_that_only_the_settings_know(tmp_path: Path) -> None:
    listed = {"259": {"content": "<x>", "special": True}, "260": {"content": "<y>"}}
    tokenizer = load_tokenizer(
        write(tmp_path, tokenizer_config__json={"added_tokens_decoder": listed})
    )
    assert tokenizer.encode("<x><y>") == [259, 260]
    assert (tokenizer.is_special(259), tokenizer.is_special(260)) == (True, False)
    with pytest.raises(ModelError, match="'<z>' cannot stand at id 400"):
        load_tokenizer(
            write(
                tmp_path,
                tokenizer_config__json={"added_tokens_decoder": {"400": {"content": "<z>"}}},
            )
        )


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    made = backend()
    made.enable_truncation(2)
    made.enable_padding(length=8)
    tokenizer = load_tokenizer(write(tmp_path, tokenizer__json=made.to_str()))
    assert len(tokenizer.encode("xyzxyz")) == 6
    assert len(tokenizer.encode("x")) == 1


def test_template_places_in_order(tmp_path: Path) -> None:
    def template(**files: Any) -> str | None:
        return load_tokenizer(write(tmp_path, **files)).chat_template

    assert template() is None
    assert template(tokenizer_config__json={"chat_template": "one"}) == "one"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "two"}]
    assert template(tokenizer_config__json={"chat_template": named}) == "two"
    assert template(tokenizer_config__json={"chat_template": named[:1]}) is None
    assert template(chat_template__json={"chat_template": "three"}) == "three"
    assert template(chat_template__jinja="four") == "four"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").unlink()
    with pytest.raises(ModelError, match="must be text"):
        template(tokenizer_config__json={"chat_template": 3})


def test_template_file_of_the_operator(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    with pytest.raises(ModelError, match="cannot be read"):
        read_template_file(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="UTF-8"):
        read_template_file(file)
    file.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ModelError, match="at most 1 MiB"):
        read_template_file(file)


def test_override_takes_another_tokenizer(tmp_path: Path, smollm2_source: ModelSource) -> None:
    source = write(tmp_path, config={"model_type": "llama", "eos_token_id": 7})
    tokenizer = load_tokenizer(source, override="smollm2")
    assert tokenizer.vocab_size == 49152
    (tmp_path / "config.json").unlink()  # a folder with a tokenizer alone will do
    assert load_tokenizer(smollm2_source, override=str(tmp_path)).vocab_size == 259


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer__json": "{}"}, "not a usable tokenizer"),
        ({"tokenizer__json": "not json"}, "not a usable tokenizer"),
        ({"tokenizer_config__json": "[1]"}, "must hold a JSON object"),
        ({"tokenizer_config__json": "{"}, "not valid JSON"),
        ({"tokenizer_config__json": "[" * 100_000}, "not valid JSON"),
        ({"tokenizer_config__json": {"added_tokens_decoder": [1]}}, "no object"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"300": 1}}}, "has no text"),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(write(tmp_path, **files))
    assert "\n" not in str(caught.value)


def test_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    source = write(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="--skip-tokenizer-init"):
        load_tokenizer(source)


def test_slow_tokenizer_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    source = write(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"not a sentencepiece model")
    with pytest.raises(ModelError, match="transformers cannot make one") as caught:
        load_tokenizer(source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_vocabulary_and_merges_files_are_converted(tmp_path: Path) -> None:
    """Without tokenizer.json transformers makes the tokenizer (GPT-2's two files)."""
    source = write(tmp_path, config={"model_type": "gpt2"})
    (tmp_path / "tokenizer.json").unlink()
    vocabulary = {character: id for id, character in enumerate(ALPHABET)}
    vocabulary |= {"ab": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    settings = {"tokenizer_class": "GPT2Tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(source)
    assert tokenizer.encode("ab") == [256]
    assert tokenizer.decode(tokenizer.encode("é ab")) == "é ab"


def test_lone_surrogates_are_the_request_s_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_added_tokens_are_plain_utf8(tmp_path: Path) -> None:
    made = backend()
    made.add_tokens([AddedToken("<é▁>", normalized=False)])
    tokenizer = load_tokenizer(write(tmp_path, tokenizer__json=made.to_str()))
    [id] = tokenizer.encode("<é▁>")
    assert tokenizer.token_bytes(id) == "<é▁>".encode()
