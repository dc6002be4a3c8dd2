"""One engine and one table of tokens for all tests of structured output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine_tiny import tiny_engine
from structured_tiny import EOS_IDS, VOCAB, tiny_tokenizer, write_model

from tokenspeed.engine.engine import Engine
from tokenspeed.structured.tokens import TokenTable, token_table

Make = Callable[..., Engine]


@pytest.fixture(scope="session")
def table() -> TokenTable:
    return token_table(tiny_tokenizer(), VOCAB, EOS_IDS)


@pytest.fixture(scope="session")
def structured_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tiny_model, tmp_path_factory.mktemp("structured"))


@pytest.fixture(scope="session")
def make_engine(structured_model: str) -> Make:
    """An engine of the tiny model; those with the same options are one."""
    made: dict[tuple[tuple[str, Any], ...], Engine] = {}

    def make(**options: Any) -> Engine:
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = tiny_engine(structured_model, skip_tokenizer_init=False, **options)
        return made[key]

    return make
