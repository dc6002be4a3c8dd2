"""What travels between an HTTP process and the engine process: typed msgpack over ZeroMQ, never
pickle.

The engine binds a ROUTER socket, each HTTP process connects a DEALER: the socket knows who asked,
and a client sees only its own requests. Each message is a tagged struct; the two unions below are
all that either side decodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from tokenspeed.config import Config
from tokenspeed.ledger import JitCount
from tokenspeed.request import GenerateRequest, RequestDelta

MAX_PROFILE_STEPS = 256
"""Of one trace."""
MAX_SCORES = 512
"""Prompt positions of one delta in one message. With 20 tokens at each it decodes in some 5 ms."""


class Launch(msgspec.Struct, frozen=True):
    """How an engine process is told what to be: one line of JSON on its stdin. It ends when that
    pipe closes.
    """

    address: str
    config: Config


class Attach(msgspec.Struct, tag="attach", frozen=True):
    """A client is here: tell it how the start-up goes, and answer to it from now on."""


class Submit(msgspec.Struct, tag="submit", frozen=True):
    request: GenerateRequest


class Unread(msgspec.Struct, frozen=True):
    """What became of a `Submit` that cannot be read: whose it was, and why. It is made where it was
    to be read, and does not travel.
    """

    request_id: str
    why: str


class Abort(msgspec.Struct, tag="abort", frozen=True):
    request_ids: list[str]


Action = Literal[
    "flush_cache", "pause", "continue", "abort", "tell", "start_profile", "stop_profile"
]


class Command(msgspec.Struct, tag="command", frozen=True):
    """What whoever runs the server tells the engine to do now; answered by `Done` with the same
    number, after every client has been told of the new figures. `abort` ends the requests of one
    job, or all, whoever sent them; `tell` does nothing more; a profile is one of `num_steps`.
    """

    number: int
    action: Action
    job_id: str | None = None
    num_steps: int = 0


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Finish nothing more; release everything and exit."""


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """Start-up progress: which phase, and a line for people ("weights 120 of 269 MB")."""

    phase: str
    detail: str = ""


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The engine serves. What the HTTP process has to know about it."""

    max_model_len: int
    vocab_size: int
    num_pages: int
    block_size: int
    kv_cache_dtype: str
    seconds: float
    settings: Config
    """Those of the start, settled."""
    reasons: dict[str, str]
    """Why each of them that was left open is what it is, or stays open."""
    summary: str = ""
    """One line for the log: device, dtype, level, pool."""
    jit: tuple[JitCount, ...] = ()
    """What was compiled for this start."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine could not start or died; `message` is one line: what, why, what to do.
    `is_refusal`: the settings or the model are what cannot be taken.
    """

    message: str
    is_refusal: bool = False


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and totals since start, sent with each step's deltas and once when the engine falls
    idle.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """Share of pages held by running requests, 0 to 1; cached prefixes count as free."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens served from it."""
    preemptions: int = 0
    late_masks: int = 0
    """Times that a request left the batch because its grammar's mask was late."""
    nan_aborted: int = 0
    """Requests ended because a result of theirs was no number."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    """Tokens, of prompts and of output, that steps have been launched for."""
    jit: tuple[JitCount, ...] = ()
    """All compiles so far, those of the start included."""
    graphs_to_come: int = 0
    """CUDA graphs that are still to be recorded, when nobody waits."""
    host_launch_s: float = 0.0
    host_commit_s: float = 0.0
    """Seconds of the engine's thread for its steps (`host_time.HostTime`)."""
    is_paused: bool = False
    """No step is launched until whoever runs the server says so."""


class PromptScores(msgspec.Struct, tag="scores", frozen=True):
    """The next log-probabilities of a prompt that has many; the last come with their delta, which
    follows. `entries` is a list of `TokenLogprob | None`, decoded by whoever reads it.
    """

    request_id: str
    num_entries: int
    entries: msgspec.Raw


class StepOutputs(msgspec.Struct, tag="outputs", frozen=True):
    """All deltas of one step: one message a step and HTTP process, but for long `PromptScores`.

    On the wire, those that are tokens and nothing else stand in two columns: `tokens[i]` is one
    more token of the request `ids[i]`. Most are, and a process that serves hundreds of streams
    reads them in a third of the time.
    """

    deltas: list[RequestDelta]
    stats: Stats
    ids: list[str] = []
    tokens: list[int] = []

    def packed(self) -> StepOutputs:
        """The same as it travels. No delta of a request gets ahead of another one of it."""
        ids, tokens, others = list(self.ids), list(self.tokens), []
        passed: set[str] = set()
        for delta in self.deltas:
            id, token_ids = delta.request_id, delta.token_ids
            is_next = token_ids and id not in passed
            if is_next and delta == RequestDelta(request_id=id, token_ids=token_ids):
                ids += [id] * len(token_ids)
                tokens += token_ids
            else:
                passed.add(id)
                others.append(delta)
        return StepOutputs(others, self.stats, ids, tokens)

    def parts(self) -> Iterator[PromptScores | StepOutputs]:
        """The same as messages that are decoded one by one, with something else in between."""
        deltas = []
        for delta in self.deltas:
            scores = list(delta.prompt_logprobs or ())
            num_ahead = max(len(scores) - 1, 0) // MAX_SCORES * MAX_SCORES
            for start in range(0, num_ahead, MAX_SCORES):
                part = scores[start : start + MAX_SCORES]
                entries = msgspec.Raw(msgspec.msgpack.encode(part))
                yield PromptScores(delta.request_id, len(part), entries)
            if num_ahead:
                delta = msgspec.structs.replace(delta, prompt_logprobs=scores[num_ahead:])
            deltas.append(delta)
        yield msgspec.structs.replace(self, deltas=deltas)


class Profile(msgspec.Struct, frozen=True):
    """A trace of `num_steps` so far, and where it is written when it has ended. `error`: why it is
    not.
    """

    path: str
    num_steps: int
    error: str | None = None


class Done(msgspec.Struct, tag="done", frozen=True):
    """A command has been carried out: it freed `num_pages`, and ended `num_jobs`. Or it was not,
    for the reason `refusal`.
    """

    number: int
    num_pages: int = 0
    num_jobs: int = 0
    profile: Profile | None = None
    refusal: str | None = None


ToEngine = Attach | Submit | Abort | Command | Shutdown
FromEngine = Loading | Ready | Failed | PromptScores | StepOutputs | Done
