"""A GGUF's vocabulary as a `tokenizers.Tokenizer`: byte-level BPE ("gpt2") and sentencepiece BPE
("llama"). Anything else, and an unknown pre-tokenizer, is refused by name.
"""

from __future__ import annotations

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tokenspeed.text.errors import ModelError
from tokenspeed.text.gguf import Gguf
from tokenspeed.text.pretokenizers import PRETOKENIZERS

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"
MAX_TOKEN_LEN = 1024
"""Characters. Real ones have some hundreds at most (runs of spaces); finding the merges of a
sentencepiece token takes the square of its length.
"""
_REMEDY = "give the model's own tokenizer with --tokenizer"


def build_tokenizer(gguf: Gguf) -> Tokenizer:
    """The tokenizer that a GGUF describes, its special tokens and its begin-of-sequence rule."""
    kind = gguf.text("tokenizer.ggml.model")
    tokens = gguf.array("tokenizer.ggml.tokens", str)
    if not tokens or len(set(tokens)) != len(tokens):
        raise ModelError(f"{gguf.path}: the vocabulary is empty or names a token twice; {_REMEDY}")
    if max(map(len, tokens)) > MAX_TOKEN_LEN:
        raise ModelError(f"{gguf.path}: a token has over {MAX_TOKEN_LEN} characters; {_REMEDY}")
    kinds = gguf.array("tokenizer.ggml.token_type", int) or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"{gguf.path}: {len(tokens)} tokens but {len(kinds)} token types")
    try:
        if kind == "gpt2":
            tokenizer, add_bos = _byte_level(gguf, tokens)
        elif kind == "llama":
            tokenizer, add_bos = _sentencepiece(gguf, tokens, kinds), True
        else:
            raise ModelError(
                f"{gguf.path}: tokenizer.ggml.model {kind!r} is not known (known: gpt2, llama); "
                f"{_REMEDY}"
            )
    except ModelError:
        raise
    except Exception as error:  # the Rust side raises bare Exception for a merge it cannot use
        raise ModelError(f"{gguf.path}: the vocabulary cannot be used: {error}") from None
    _add_tokens(tokenizer, tokens, kinds)
    _add_template(tokenizer, gguf, tokens, add_bos)
    return tokenizer


def special_token_ids(gguf: Gguf) -> dict[str, int]:
    """Ids by the names that templates use ("bos_token", ...), where the file has them."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: f"tokenizer.ggml.{key}_token_id" for name, key in keys.items()}
    return {name: gguf.integer(key) for name, key in found.items() if key in gguf.metadata}


def _byte_level(gguf: Gguf, tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = gguf.text("tokenizer.ggml.pre", "")
    pre = PRETOKENIZERS.get(name)
    if pre is None:
        raise ModelError(
            f"{gguf.path}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known, and guessing "
            f"would give wrong ids; {_REMEDY} (known: {', '.join(sorted(PRETOKENIZERS))})"
        )
    vocabulary = {token: id for id, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocabulary,
        merges=[_merge(gguf, line) for line in gguf.array("tokenizer.ggml.merges", str)],
        ignore_merges=pre.ignore_merges,
    )
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(line), "isolated") for line in pre.patterns]
    bytes_to_unicode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_to_unicode])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _merge(gguf: Gguf, line: str) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not left or not space or not right or " " in right:
        raise ModelError(f"{gguf.path}: merge {line[:40]!r} is not two tokens")
    return left, right


def _sentencepiece(gguf: Gguf, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """Sentencepiece merges the pair whose joined piece has the highest score; as BPE ranks that is
    every split of every piece, ordered by the piece's score.
    """
    scores = gguf.array("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelError(f"{gguf.path}: {len(tokens)} tokens but {len(scores)} scores")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    unknown = gguf.integer("tokenizer.ggml.unknown_token_id", 0, high=len(tokens) - 1)
    model = models.BPE(
        vocab=vocabulary,
        merges=_scored_merges(tokens, kinds, scores),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefixed = gguf.flag("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(undo + [decoders.Strip(" ", 1, 0)] * prefixed)
    return tokenizer


def _scored_merges(
    tokens: list[str], kinds: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] == _NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[i], ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are special; user-defined ones are matched whole but are plain text."""
    for wanted, special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in wanted and token
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _add_template(tokenizer: Tokenizer, gguf: Gguf, tokens: list[str], add_bos: bool) -> None:
    """What `add_special_tokens=True` puts around a text."""
    around = {"bos": add_bos, "eos": False}
    marks: dict[str, list[tuple[str, int]]] = {}
    for name, default in around.items():
        wanted = gguf.flag(f"tokenizer.ggml.add_{name}_token", default)
        id = gguf.integer(f"tokenizer.ggml.{name}_token_id", 0, high=len(tokens) - 1)
        marks[name] = [(tokens[id], id)] if wanted else []
    both = [*marks["bos"], *marks["eos"]]
    if both:
        single = [token for token, _ in marks["bos"]] + ["$A"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single + [token for token, _ in marks["eos"]], special_tokens=both
        )
