"""The `anthropic` client against the real server, with and without asyncio, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_smollm2.json").read_text())
CAPITAL = GOLDEN["prompts"][0]
ANSWER = CAPITAL["runs"]["weights_gguf_fp32_compute_fp32"]["text"]
QUESTION: Any = [each for each in CAPITAL["messages"] if each["role"] == "user"]
FIELDS: Any = {"model": "smollm2", "max_tokens": 32, "extra_body": {"temperature": 0}}


def test_messages(server: str) -> None:
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**FIELDS, messages=QUESTION)
        assert [block.type for block in whole.content] == ["text"]
        assert (whole.content[0].text, whole.stop_reason) == (ANSWER, "end_turn")
        with client.messages.stream(**FIELDS, messages=QUESTION) as stream:
            assert "".join(stream.text_stream) == ANSWER
            final = stream.get_final_message()
        assert final.stop_reason == "end_turn"
        assert final.usage.output_tokens == whole.usage.output_tokens
        kinds = [
            event.type for event in client.messages.create(**FIELDS, messages=QUESTION, stream=True)
        ]
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
        count = client.messages.count_tokens(model="smollm2", messages=QUESTION).input_tokens
        used = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        assert count == used == len(CAPITAL["prompt_ids"])
        with pytest.raises(anthropic.BadRequestError, match="maximum context length is 8192"):
            client.messages.create(**{**FIELDS, "max_tokens": 9000}, messages=QUESTION)


async def test_messages_with_asyncio(server: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=server, api_key="none", max_retries=0) as client:
        whole = await client.messages.create(**FIELDS, messages=QUESTION)
        assert whole.content[0].type == "text" and whole.content[0].text == ANSWER
        async with client.messages.stream(**FIELDS, messages=QUESTION) as stream:
            assert "".join([piece async for piece in stream.text_stream]) == ANSWER
        cut = await client.messages.create(**{**FIELDS, "max_tokens": 3}, messages=QUESTION)
        assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3
        system = await client.messages.create(
            **FIELDS, messages=QUESTION, system="Say BANANA.", stop_sequences=["a"]
        )
        assert system.stop_reason in ("stop_sequence", "end_turn", "max_tokens")
