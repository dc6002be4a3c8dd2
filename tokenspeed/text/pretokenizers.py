"""What `tokenizer.ggml.pre` means: how byte-level BPE cuts a text before it merges.

A GGUF names its cutting rule and does not contain it. Assuming GPT-2's where another was trained
gives other ids without a word, so a name that is not in PRETOKENIZERS is refused. Each row is a
sequence of patterns (Oniguruma), applied one after the other to the pieces left by those before.
The patterns are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from dataclasses import dataclass

_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", _DIGIT)


@dataclass(frozen=True)
class Pretokenizer:
    """`ignore_merges`: a piece that is a token as it stands is not built from merges. `add_bos`:
    the default where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_PLAIN = Pretokenizer((_GPT2,))
_SINGLE_DIGITS = Pretokenizer((_DIGIT, _GPT2))
_LLAMA_BPE = Pretokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN = Pretokenizer((_QWEN2,), nfc=True)

PRETOKENIZERS: dict[str, Pretokenizer] = {
    "gpt-2": _PLAIN,
    "mpt": _PLAIN,
    "olmo": _PLAIN,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "command-r": Pretokenizer((_DIGIT, _GPT2), nfc=True),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "dbrx": Pretokenizer((_LLAMA3,)),
    "smaug-bpe": Pretokenizer((_LLAMA3,)),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "stablelm2": _QWEN,
    "tekken": Pretokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-coder": Pretokenizer(_DEEPSEEK_CODER),
    "falcon": Pretokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "default": Pretokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
