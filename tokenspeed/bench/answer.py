"""One streamed answer, read as it comes, and the record of its request. No input or output here.

Times are seconds after the request was sent:

    TTFT   the first chunk with content: text, reasoning, a tool call, or token ids
    ITL    each gap between chunks with content (so it depends on how many tokens a chunk has)
    E2EL   the last chunk with a choice
    TPOT   (E2EL - TTFT) / (output tokens - 1)

Output tokens are those of `usage`; a server that sends none has its chunks counted, and the record
says so. An answer is a failure unless it is whole: it has a finish_reason and [DONE], no event of
it is an error, and it has the tokens that usage says (if the chunks carry ids) and, where the end
of sequence is ignored, those that were asked for.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import msgspec

from tokenspeed.bench.sse import EventReader, EventTooLarge

MAX_DETAIL = 300
MAX_TOKENS = 1 << 40
"""What a usage may say: more is no number of tokens."""
MAX_BYTES = 1 << 20
MAX_TOKEN_BYTES = 16 << 10
"""An answer may have MAX_BYTES, and these for each token that was asked for: twenty alternatives
with their log-probabilities take 2,000.
"""

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class Record(msgspec.Struct, kw_only=True):
    """One request and what came of it. `failure` is the kind of failure; None: it succeeded."""

    session: int
    turn: int
    start: float
    """When it was sent, in seconds since the run began."""
    input_len: int
    """Prompt tokens: by usage, else as planned."""
    max_tokens: int
    response_id: str = ""
    latency: float = 0.0
    chunk_times: list[float] = []
    """Of the chunks with content."""
    chunk_tokens: list[int] = []
    """Token ids in each of them; 0 if it carries none."""
    output_len: int = 0
    is_counted_by_usage: bool = False
    finish_reason: str | None = None
    failure: str | None = None
    detail: str = ""
    text: str = ""

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] if self.chunk_times else self.latency

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token."""
        if self.output_len < 2:
            return None
        return (self.latency - self.ttft) / (self.output_len - 1)

    @property
    def itls(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.chunk_times)]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Chunk(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


class Answer:
    """Feed it the blocks of a stream with the seconds at which they came; `finish` judges it."""

    def __init__(self, record: Record, *, must_be_full: bool) -> None:
        self.record = record
        self.token_ids: list[int] = []
        self.reasoning = ""
        self._must_be_full = must_be_full
        self._events = EventReader()
        self._texts: list[str] = []
        self._usage: _Usage | None = None
        self._is_done = False
        self._room = MAX_BYTES + MAX_TOKEN_BYTES * record.max_tokens

    def feed(self, block: bytes, at: float) -> None:
        """Take a block; what is wrong with it is kept for the record."""
        self._room -= len(block)
        if self._room < 0:
            self.fail("endless answer", f"too many bytes for {self.record.max_tokens} tokens")
            return
        try:
            for data in self._events.feed(block):
                if data == b"[DONE]":
                    self._is_done = True
                else:
                    self._take(_DECODER.decode(data), at)
        except RecursionError:
            self.fail("malformed event", "its JSON is nested too deeply")
        except (msgspec.DecodeError, EventTooLarge, UnicodeDecodeError) as error:
            self.fail("malformed event", str(error))

    def fail(self, kind: str, detail: str) -> None:
        """The first failure is the one that counts."""
        if self.record.failure is None:
            self.record.failure = kind
            self.record.detail = _shown(detail[:MAX_DETAIL])

    def finish(self) -> Record:
        """The stream has ended, however it did."""
        record, usage = self.record, self._usage
        record.text = "".join(self._texts)
        if usage is not None and usage.completion_tokens is not None:
            record.output_len, record.is_counted_by_usage = usage.completion_tokens, True
            record.input_len = usage.prompt_tokens or record.input_len
        else:
            record.output_len = len(self.token_ids) or len(record.chunk_times)
        if record.failure is None:
            self._judge()
        return record

    def _judge(self) -> None:
        record = self.record
        if record.finish_reason is None or not self._is_done:
            missing = "finish_reason" if record.finish_reason is None else "[DONE]"
            self.fail("cut stream", f"it ended without {missing}")
        elif not record.chunk_times:
            self.fail("no content", f"usage says {record.output_len} tokens, none came")
        elif all(record.chunk_tokens) and len(self.token_ids) < record.output_len:
            detail = f"{len(self.token_ids)} of the {record.output_len} tokens that usage says came"
            self.fail("fewer tokens than usage", detail)
        elif self._must_be_full and (
            record.is_counted_by_usage and record.output_len < record.max_tokens
        ):
            detail = f"{record.output_len} of {record.max_tokens} tokens, end of sequence ignored"
            self.fail("fewer tokens than asked", detail)

    def _take(self, chunk: _Chunk, at: float) -> None:
        record = self.record
        record.response_id = record.response_id or chunk.id or ""
        if chunk.error is not None:
            self.fail("error event", msgspec.json.encode(chunk.error).decode())
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices or ():
            record.latency = at
            record.finish_reason = choice.finish_reason or record.finish_reason
            ids = choice.token_ids or []
            text, has_content = self._content(choice)
            if has_content or ids:
                record.chunk_times.append(at)
                record.chunk_tokens.append(len(ids))
                self.token_ids += ids
                self._texts.append(text)

    def _content(self, choice: _Choice) -> tuple[str, bool]:
        """(text of the answer, whether the choice shows anything at all)."""
        delta = choice.delta
        if delta is None:
            return choice.text or "", bool(choice.text)
        thought = delta.reasoning_content or delta.reasoning
        self.reasoning += thought or ""
        return delta.content or "", bool(delta.content or thought or delta.tool_calls)


def _shown(text: str) -> str:
    """Without what a terminal would obey: the text may be a stranger's."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
