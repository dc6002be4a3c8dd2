"""The size of the KV pool that is given: too small for any request, or for those asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tokenspeed.config import make_config
from tokenspeed.machine_facts import MachineFacts
from tokenspeed.options import ConfigError
from tokenspeed.resolve import ModelFacts, resolve

LAPTOP = MachineFacts(has_cuda=False)
SMALL = ModelFacts(stored="gguf", dtype=None, max_model_len=2048)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_total_tokens": 10}, "fewer than 16 tokens, the least that works with --block-size"),
        ({"max_total_tokens": 31, "block_size": 32}, "in fewer than 32 tokens, the least"),
        ({"max_total_tokens": 64, "max_model_len": 65}, "has room for 64 tokens, not for one req"),
        ({"max_total_tokens": 65, "max_model_len": 81}, "lower that to 80, or raise this to 81"),
    ],
)
def test_a_pool_that_serves_nothing_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(make_config(options), LAPTOP, None)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("block_size", [1, 3, 16, 1024])
def test_the_least_pool_that_is_named_works(block_size: int) -> None:
    least = 2
    try:
        resolve(make_config({"max_total_tokens": least, "block_size": block_size}), LAPTOP, SMALL)
        assert block_size <= least
    except ConfigError as error:
        least = int(re.findall(r"fewer than (\d+) tokens", str(error))[0])
        assert least == block_size
    options = {"max_total_tokens": least, "block_size": block_size}
    settled = resolve(make_config(options), LAPTOP, SMALL)
    assert settled.config.model.max_model_len == least + (-least) % block_size
    assert settled.reasons["max_model_len"] == "what --max-total-tokens has room for"
