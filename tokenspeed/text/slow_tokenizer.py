"""Tokenizers that ship no tokenizer.json (sentencepiece models, vocab.json with merges.txt): the
only file that knows transformers, imported when such a folder is met.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Backend

from tokenspeed.text.errors import ModelError

_KNOWN_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def convert_slow_tokenizer(folder: Path) -> Backend:
    """The fast equivalent of a folder's tokenizer, made by transformers without remote code."""
    if not any((folder / name).is_file() for name in _KNOWN_FILES):
        raise ModelError(
            f"{folder}: no tokenizer.json there; give a tokenizer with --tokenizer, or serve token "
            "ids with --skip-tokenizer-init"
        )
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # transformers reports missing packages and bad files in many types
        first = str(error).strip().split("\n")[0][:300]
        raise ModelError(
            f"{folder}: no tokenizer.json, and transformers cannot make one: {first}"
        ) from None
    backend = getattr(slow, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ModelError(
            f"{folder}: its tokenizer exists as Python code only; save it once with transformers "
            "as a fast tokenizer (tokenizer.json)"
        )
    return backend
