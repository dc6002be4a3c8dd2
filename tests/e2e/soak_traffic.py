"""Mixed traffic for a server of SmolLM2: every API, streamed and not, and clients that leave.

    python soak_traffic.py URL SECONDS SEED

prints what came of it as a line of JSON; every answer is looked at, and the first that is not as it
should be ends it with an exit code.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.bench.http_client import Address, HttpClient

KEY = "soak"
LEAVING_SHARE = 0.3
NUM_WORKERS = 12
TIMEOUT_S = 120.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "parameters": SCHEMA}
WORDS = ["a river", "two ships", "the old king", "rain", "an engine", "bread", "seven", "moss"]

Asked = tuple[str, dict[str, Any]]


def say(rng: random.Random, count: int = 6) -> str:
    return "Tell me of " + ", ".join(rng.choice(WORDS) for _ in range(count)) + "."


def golden(rng: random.Random) -> Asked:
    return CHAT, {"messages": CAPITAL, "temperature": 0, "max_tokens": 8}


def chat(rng: random.Random) -> Asked:
    messages = [{"role": "user", "content": say(rng)}]
    extra = rng.choice([{}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["the", " of a"]}])
    limit = rng.randrange(4, 40)
    return CHAT, {"messages": messages, "max_tokens": limit, "n": rng.choice([1, 1, 2, 4])} | extra


def completion(rng: random.Random) -> Asked:
    prompt = rng.choice([say(rng), [say(rng, 2), say(rng, 3)], [rng.randrange(9, 900)] * 20])
    extra = rng.choice([{}, {"echo": True, "logprobs": 2}, {"logit_bias": {"260": 3}}])
    return COMPLETIONS, {"prompt": prompt, "max_tokens": rng.randrange(1, 24)} | extra


def long_prompt(rng: random.Random) -> Asked:
    return COMPLETIONS, {"prompt": say(rng, rng.randrange(60, 160)), "max_tokens": 3}


def response(rng: random.Random) -> Asked:
    return RESPONSES, {"input": say(rng), "max_output_tokens": rng.randrange(16, 40)}


def message(rng: random.Random) -> Asked:
    return MESSAGES, {"messages": [{"role": "user", "content": say(rng)}], "max_tokens": 20}


FORMS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"structured_outputs": {"regex": "[a-c]{2,9}"}},
    {"structured_outputs": {"choice": ["yes", "no", "maybe"]}},
    {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
)
"""Few enough to be kept, each with a process and its files."""


def form(rng: random.Random) -> Asked:
    return CHAT, {"messages": CAPITAL, "max_tokens": 80} | rng.choice(FORMS)


def refused(rng: random.Random) -> Asked:
    bad = [{"temperature": 9}, {"max_tokens": 99999}, {"n": 0}, {"stop": 5}, {"top_logprobs": 3}]
    return CHAT, {"messages": CAPITAL} | rng.choice(bad)


KINDS: tuple[Callable[[random.Random], Asked], ...] = (
    *(golden, chat, chat, chat, completion, completion, long_prompt),
    *(response, message, form, form, refused),
)
ENDS = {
    CHAT: "data: [DONE]",
    COMPLETIONS: "data: [DONE]",
    RESPONSES: "}}",  # of the last event, which carries the response
    MESSAGES: '{"type":"message_stop"}',
}
"""What whole streams end with."""


@dataclass
class Traffic:
    client: HttpClient
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    answers: set[str] = field(default_factory=set)
    """To the one question that is asked again and again: there must be one."""

    async def run(self, until: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_WORKERS):
                tasks.create_task(self._work(until))
            tasks.create_task(self._abort_now_and_then(until))
        # Who leaves may take a grammar along: at the end all are there again.
        for number, each in enumerate(FORMS):
            body = {"messages": CAPITAL, "max_tokens": 80, "stream": False} | each
            await self._ask(f"last form {number}", CHAT, body)

    async def _work(self, until: float) -> None:
        while time.monotonic() < until:
            kind = self.rng.choice(KINDS)
            path, body = kind(self.rng)
            body["stream"] = self.rng.random() < 0.6
            name = f"{kind.__name__} {'streamed' if body['stream'] else 'whole'}"
            await self._ask(name, path, body)

    async def _ask(self, name: str, path: str, body: dict[str, Any]) -> None:
        """Ask, and stay to the end or leave at a random moment before it is likely to come."""
        known, few = self.seconds[name], self.counts["left"] < LEAVING_SHARE * self.counts["asked"]
        leaves = bool(known) and few and self.rng.random() < 0.7
        usual = sum(known[-9:]) / len(known[-9:]) if known else 0.0
        began = time.monotonic()
        self.counts["asked"] += 1
        try:
            async with asyncio.timeout(self.rng.random() * usual if leaves else TIMEOUT_S):
                status, told = await self._exchange(path, body)
        except TimeoutError:
            assert leaves, f"{name}: no answer in {TIMEOUT_S:g} s"
            self.counts["left"] += 1
            return
        known.append(time.monotonic() - began)
        self._look(name, path, body, status, told)
        self.counts[name] += 1

    async def _exchange(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        async with self.client.request("POST", path, json.dumps(body).encode()) as answer:
            return answer.status, (await answer.read()).decode()

    def _look(self, name: str, path: str, body: dict[str, Any], status: int, told: str) -> None:
        """Whether the answer is whole, and is what was asked for."""
        found = f"{name}: {status} {told[:300]} ... {told[-300:]}"
        if name.startswith("refused"):
            assert status == 400, found
            return
        assert status == 200 and '"error":{' not in told, found
        if body["stream"]:
            assert told.rstrip().endswith(ENDS[path]), found
            text = "".join(re.findall(r'"content":"([^"]*)"', told))
        else:
            text = str(json.loads(told).get("choices", [{}])[0].get("message", {}).get("content"))
        if name.startswith("golden"):
            self.answers.add(text)
            assert len(self.answers) == 1, f"not the same answer: {self.answers}"

    async def _abort_now_and_then(self, until: float) -> None:
        """What the operator does: end a request by its id, and forget all prefixes."""
        while time.monotonic() < until:
            body = {"prompt": say(self.rng), "max_tokens": 2000, "ignore_eos": True, "stream": True}
            data, id = b"", b""
            async with self.client.request(
                "POST", COMPLETIONS, json.dumps(body).encode()
            ) as answer:
                async for block in answer.blocks:
                    data += block
                    if not id and (found := re.search(rb'"id":"([^"]+)"', data)):
                        id = found[1]
                        await self._exchange("/abort_request", {"rid": id.decode()})
            assert data.endswith(b"data: [DONE]\n\n") and b'"code":"aborted"' in data, data[-500:]
            self.counts["aborted by id"] += 1
            if self.rng.random() < 0.2:
                status, told = await self._exchange("/flush_cache", {})
                assert status == 200, told
            await asyncio.sleep(self.rng.random())


async def main(url: str, seconds: float, seed: int) -> None:
    client = HttpClient(Address.parse(url), {"authorization": f"Bearer {KEY}"})
    traffic = Traffic(client, random.Random(seed))
    await traffic.run(time.monotonic() + seconds)
    client.close()
    print(json.dumps({"answers": sorted(traffic.answers), "counts": traffic.counts}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
