"""A scripted engine client and a tokenizer of single bytes: the server without a model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tokenspeed.config import Config, make_config
from tokenspeed.engine.attached import EngineDead, Sink
from tokenspeed.engine.messages import Action, Done, Loading, Profile, Ready, Stats
from tokenspeed.engine.phases import StartupPhases
from tokenspeed.request import FinishReason, GenerateRequest, RequestDelta, TokenLogprob
from tokenspeed.server.app import create_app
from tokenspeed.server.sharing import Shared
from tokenspeed.server.state import ServerState
from tokenspeed.structured.host import GrammarHost, vocabulary_of
from tokenspeed.structured.pool import GrammarPool
from tokenspeed.text.chat import ChatTemplate
from tokenspeed.text.text_side import TextSide
from tokenspeed.text.tokenizer import Tokenizer
from tokenspeed.timeline import Timing

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KIMI_MARKS = ("s_section_begin", "_begin", "_argument_begin", "_end", "s_section_end")
MAX_MODEL_LEN = 256
ANSWER = "Hello, w\u00f6rld \U0001fae0!"


def byte_tokenizer() -> Tokenizer:
    """One token a byte, so that every character beyond ASCII is split; and a few special tokens,
    and one that is a word.
    """
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    backend.add_special_tokens([AddedToken(f"<|tool_call{name}|>") for name in KIMI_MARKS])
    backend.add_tokens([AddedToken("</think>", normalized=False)])
    end = backend.token_to_id("<|im_end|>")
    return Tokenizer(
        backend, special_tokens={"eos_token": "<|im_end|>"}, eos_token_ids=frozenset({end})
    )


TOKENIZER = byte_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size
(EOS,) = TOKENIZER.eos_token_ids
GRAMMARS = GrammarHost(lambda: vocabulary_of(TOKENIZER, VOCAB_SIZE, frozenset({EOS})))
"""One for all servers."""


class FakeCommands:
    """Carries commands out as the scripted engine would: held, its requests get no token. It has
    `num_foreign` jobs of other processes, which an abort finds.
    """

    def __init__(self, client: FakeClient) -> None:
        self._client = client
        self.asked: list[Action] = []
        self.num_foreign = 0

    async def ask(self, action: Action, job_id: str | None = None, num_steps: int = 0) -> Done:
        self.asked.append(action)
        client = self._client
        if action in ("pause", "continue"):
            (client.gate.clear if action == "pause" else client.gate.set)()
            client.stats = msgspec.structs.replace(client.stats, is_paused=action == "pause")
            client.stats_at = time.monotonic()
        if action == "start_profile":
            return Done(0, profile=Profile("/traces/one.json", num_steps))
        if action == "stop_profile":
            return Done(0, refusal="a test says so")
        if action == "abort":
            return Done(0, num_jobs=self.num_foreign)
        return Done(0, 7 if action == "flush_cache" else 0)


class FakeClient:
    """Answers every request with `answer` (and the end token), `chunk` tokens a delta.

    `answers[i]` replaces it for sample i. While `gate` is not set, requests wait without a token;
    `pause_s` is waited before each delta; after `die_after` deltas in all, the engine is dead.
    `timing` comes with the first.
    """

    def __init__(self, answer: str = ANSWER) -> None:
        self.state = "ready"
        self.ready: Ready | None = Ready(
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            num_pages=9,
            block_size=16,
            kv_cache_dtype="fp8_e4m3",
            seconds=0,
            settings=Config(),
            reasons={"dtype": "a test says so"},
        )
        self.progress: Loading | None = None
        self.failure: str | None = None
        self.phases = StartupPhases()
        self.dead: type[EngineDead] = EngineDead
        self.stats, self.stats_at = Stats(), time.monotonic()
        self.on_stats: Any = None
        self.timing: Timing | None = None
        self.answer, self.answers = answer, {}
        self.chunk, self.pause_s, self.die_after = 1, 0.0, -1
        self.gate = asyncio.Event()
        self.gate.set()
        self.commands = FakeCommands(self)
        self.running: set[str] = set()
        self.readers: dict[str, asyncio.Task[None]] = {}
        self.aborted: list[str] = []
        self.requests: list[GenerateRequest] = []
        self.num_closed = 0

    async def start(self) -> None:
        pass

    async def wait_ready(self) -> None:
        while self.state == "loading":
            await asyncio.sleep(0.01)
        if self.state == "dead":
            raise self.dead(self.failure)

    async def close(self) -> None:
        self.num_closed += 1
        self.state = "dead"

    def die(self) -> None:
        self.state, self.failure = "dead", "killed by a test"

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        self.readers[request.id] = asyncio.create_task(self._read(request, sink))

    async def _read(self, request: GenerateRequest, sink: Sink) -> None:
        try:
            async with contextlib.aclosing(self.generate(request)) as deltas:
                async for delta in deltas:
                    if request.id not in self.readers:  # withdrawn while it was told the last one
                        return
                    if delta.finish_reason is not None:
                        del self.readers[request.id]
                    sink.put(delta)
        except Exception as error:
            sink.fail(error)

    def withdraw(self, request_id: str) -> None:
        reader = self.readers.pop(request_id, None)
        if reader is None:
            return
        if reader is not asyncio.current_task():
            reader.cancel()
        if request_id in self.running:
            self.running.discard(request_id)
            self.aborted.append(request_id)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestDelta, None]:
        self.requests.append(request)
        self.running.add(request.id)
        try:
            await self.gate.wait()
            for delta in self._deltas(request):
                await asyncio.sleep(self.pause_s)
                if self.die_after == 0:
                    self.die()
                self.die_after -= 1
                if self.state == "dead":
                    raise EngineDead(self.failure)
                if delta.finish_reason is not None:
                    self.running.discard(request.id)
                yield delta
        finally:
            self.running.discard(request.id)

    def _deltas(self, request: GenerateRequest) -> list[RequestDelta]:
        params = request.params
        text = self.answers.get(request.sample_index, self.answer)
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), EOS]
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        if params.ignore_eos:
            ids = (ids * MAX_MODEL_LEN)[:MAX_MODEL_LEN]
        stop_at = next((i for i, id in enumerate(ids) if id in ends), len(ids))
        ids = ids[: min(stop_at + 1, params.max_tokens)]
        stopped = bool(ids) and ids[-1] in ends
        common: dict[str, Any] = {"request_id": request.id}
        cuts = range(0, len(ids), self.chunk) or [0]
        deltas = [RequestDelta(token_ids=ids[i : i + self.chunk], **common) for i in cuts]
        for delta in deltas:
            if params.logprobs is not None:
                delta.logprobs = [scored(id, params.logprobs) for id in delta.token_ids]
        if params.prompt_logprobs is not None:
            scores = [scored(id, params.prompt_logprobs) for id in request.prompt_ids[1:]]
            deltas[0].prompt_logprobs = [None, *scores]
        deltas[0].num_cached_tokens, deltas[0].timing = 1, self.timing
        deltas[-1].finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        deltas[-1].stop_token = ids[-1] if stopped else None
        return deltas


def scored(id: int, count: int) -> TokenLogprob:
    """A token that is never among the likeliest."""
    return TokenLogprob(id, -5.0, [((id + 1 + k) % 256, -1.0 - k) for k in range(count)])


def make_state(
    client: FakeClient,
    tokenizer: Tokenizer | None = TOKENIZER,
    *,
    template: str = CHATML,
    tool_template: str | None = None,
    model_type: str = "",
    shared: Shared | None = None,
    **options: Any,
) -> Any:
    config: Config = make_config({"served_model_name": ("m", "alias"), **options})
    if client.ready is not None:
        settled = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="half"))
        client.ready = msgspec.structs.replace(client.ready, settings=settled)
    state = ServerState(config, client, shared)  # type: ignore[arg-type]
    special = tokenizer.special_tokens if tokenizer else {}
    chat = ChatTemplate(template if tokenizer else None, special)
    with_tools = ChatTemplate(tool_template, special) if tool_template else None
    state.text = TextSide(tokenizer, chat, model_type=model_type, tool_template=with_tools)
    if tokenizer is TOKENIZER:
        output = config.output
        state.grammars = GrammarPool(GRAMMARS, deadline_s=output.grammar_compile_timeout_secs)
    return state


COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class Asker:
    """Asks the application; after each test a normal request must still be answered."""

    def __init__(self, client: FakeClient, state: Any) -> None:
        self.engine, self.state = client, state
        self.app = create_app(state)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://server")

    async def completion(self, **fields: Any) -> httpx.Response:
        return await self.http.post(COMPLETIONS, json={"prompt": "Hi"} | fields)

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
        return await self.http.post(CHAT, json=body)

    async def check_alive(self) -> None:
        """A normal request works and nothing is left of those before."""
        assert not self.engine.running and not self.state.open
        assert self.state.shared.queue.own == (0, 0)
        assert self.state.idle.is_set()
        self.engine.answers = {}
        answer = await self.completion(max_tokens=100)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == self.engine.answer
        assert (await self.http.get("/health")).status_code == 200


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal, whose shape is checked."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= 600 and "Traceback" not in error["message"]
    return error


def asker(**options: Any) -> Asker:
    """Of an engine that answers, behind a server with these options."""
    client = FakeClient()
    return Asker(client, make_state(client, **options))
