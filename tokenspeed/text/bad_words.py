"""Words that must not be generated, as the token sequences that spell them."""

from __future__ import annotations

import msgspec

from tokenspeed.request import InvalidRequest, SamplingParams
from tokenspeed.text.tokenizer import Tokenizer


def with_bad_tokens(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """`params` whose `bad_words` also stand among `bad_token_ids`, each as the tokenizer writes it
    at a beginning and after a space. A word that is spelled in other tokens is not found. Raises
    InvalidRequest where there is no tokenizer.
    """
    if not params.bad_words:
        return params
    if tokenizer is None:
        raise InvalidRequest("bad_words need a tokenizer: use logit_bias", "bad_words")
    words = [word.strip() for word in params.bad_words]
    spelled = [
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for word in words
        for text in (word, " " + word)
    ]
    sequences = dict.fromkeys([*params.bad_token_ids, *spelled])
    return msgspec.structs.replace(params, bad_words=(), bad_token_ids=tuple(sequences))
