"""The tiny model with a vocabulary: printable ASCII, some longer tokens, and the ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from llguidance import LLMatcher
from tiny_checkpoint import CONFIG
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tokenspeed.constraint import StructuredOutputs
from tokenspeed.request import InvalidRequest
from tokenspeed.structured.grammar import compile_grammar
from tokenspeed.structured.grammar_process import run_deep
from tokenspeed.structured.matcher import GrammarState
from tokenspeed.structured.orders import num_words
from tokenspeed.structured.tokens import TokenTable
from tokenspeed.text.tokenizer import Tokenizer

VOCAB = int(str(CONFIG["vocab_size"]))
EOS, OTHER_EOS, THINK_END, CALL = 7, 8, 9, 10
SPECIAL = {EOS: "</s>", OTHER_EOS: "<|eot|>", THINK_END: "</think>", CALL: "<|call|>"}
WORDS = ['{"', '":', '",', "name", "true", "Ġfalse", "123", "abc", "}}", "[[", "Ċ", "ĠĠ", "Ã", "©"]
EOS_IDS = frozenset({EOS, OTHER_EOS})


def tiny_backend() -> Backend:
    """Ids 0 to 6 and those above 120 or so are padding, which the tokenizer does not know."""
    characters = [chr(code) for code in range(0x21, 0x7F)] + ["Ġ"]
    texts = characters + WORDS
    vocab = {text: 11 + index for index, text in enumerate(texts)} | {
        text: id for id, text in SPECIAL.items()
    }
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text) for text in SPECIAL.values()])
    return backend


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(tiny_backend(), eos_token_ids=EOS_IDS)


_TOKENIZER = tiny_tokenizer()


class Compiler:
    """Compiles in this process, as that of a grammar does."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    def compile(self, asked: StructuredOutputs) -> LLMatcher:
        """Raises InvalidRequest."""
        found: list[LLMatcher | InvalidRequest] = []

        def run() -> None:
            try:
                found.append(compile_grammar(asked, self._table, any_whitespace=_white(asked)))
            except InvalidRequest as error:
                found.append(error)

        run_deep(run)
        if isinstance(found[0], InvalidRequest):
            raise found[0]
        return found[0]


def _white(asked: StructuredOutputs) -> bool:
    return not asked.disable_any_whitespace


def write_model(tiny_model: str, folder: Path) -> str:
    """The tiny checkpoint with this vocabulary."""
    for path in Path(tiny_model).iterdir():
        shutil.copy(path, folder)
    config = CONFIG | {"eos_token_id": sorted(EOS_IDS)}
    (folder / "config.json").write_text(json.dumps(config))
    tiny_backend().save(str(folder / "tokenizer.json"))
    return str(folder)


def allowed(state: GrammarState) -> set[int]:
    """The tokens that may come next."""
    words = np.zeros(num_words(VOCAB), dtype=np.int32)
    state.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert state._is_thinking or not bits[VOCAB:].any()
    return set(np.flatnonzero(bits[:VOCAB]).tolist())


def follows(state: GrammarState, text: str) -> bool:
    """Whether the grammar allows `text` as a whole output, token by token."""
    ids = _TOKENIZER.encode(text, add_special_tokens=False)
    return state.take(ids) is None and state.matcher.is_accepting()
