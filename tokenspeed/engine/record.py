"""The engine's own record of one sequence: what is asked, what is committed, where it stands."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tokenspeed.constraint import Constraint
from tokenspeed.request import (
    MAX_TOKENS,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
)
from tokenspeed.timeline import Timeline


class State(enum.StrEnum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"


_MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILLING, State.FINISHED, State.ABORTED}),
    State.PREFILLING: frozenset({State.DECODING, State.PREEMPTED, State.FINISHED, State.ABORTED}),
    State.DECODING: frozenset({State.PREEMPTED, State.FINISHED, State.ABORTED}),
    State.PREEMPTED: frozenset({State.PREFILLING, State.FINISHED, State.ABORTED}),
    State.FINISHED: frozenset(),
    State.ABORTED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one sequence: what is asked, what is committed, where it stands.

    What belongs to one stay in a worker slot (pages, planned lengths) is the scheduler's
    `Admission`; a preempted request has several of them.
    """

    spec: GenerateRequest
    eos_ids: frozenset[int] = frozenset()
    max_tokens: int = MAX_TOKENS
    """Settled by `Scheduler.add`."""
    order: int = 0
    """Place in the order of arrival, set by `Scheduler.add`."""
    output_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Entries so far, one a prompt token, the first None; None if not asked for."""
    state: State = State.WAITING
    history: list[State] = field(default_factory=lambda: [State.WAITING])
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    constraint: Constraint | None = None
    """The grammar that the output is to follow."""
    is_reported: bool = False
    """Whether a delta has been sent; the first one carries the facts about the prompt."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    is_refusal: bool = False
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def rank(self) -> tuple[int, int]:
        """Who has the smaller one is served first: by priority, then in order of arrival."""
        return self.spec.priority, self.order

    @property
    def prompt_ids(self) -> list[int]:
        return self.spec.prompt_ids

    @property
    def params(self) -> SamplingParams:
        return self.spec.params

    @property
    def num_prompt(self) -> int:
        return len(self.spec.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known on the host: the prompt and all committed output."""
        return len(self.spec.prompt_ids) + len(self.output_ids)

    def token_ids(self) -> list[int]:
        return self.spec.prompt_ids + self.output_ids

    def move(self, state: State) -> None:
        """Change state; an illegal move is a bug in the scheduler and names the whole history."""
        assert state in _MOVES[self.state], f"request {self.id}: {self.history} -> {state}"
        self.state = state
        self.history.append(state)
