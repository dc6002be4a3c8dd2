"""OpenAI batch files, on the same functions as the HTTP API: a request a line in, an answer a line
out.

One bad line never stops the file. Answers are appended whole, in the order in which they end. A run
that was cut is taken up where it stopped: what the output holds already is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO

import msgspec
import uvloop
from msgspec import UNSET

from tokenspeed.config import Config
from tokenspeed.engine.attached import EngineDead, EngineRefused
from tokenspeed.engine.client import EngineClient
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.server.api import APIS, Api
from tokenspeed.server.batch_files import (
    BatchError,
    BatchFileError,
    BatchLine,
    BatchOutput,
    BatchResponse,
    count_lines,
    open_input,
    read_lines,
)
from tokenspeed.server.batch_progress import BatchCounts, BatchProgress
from tokenspeed.server.errors import APIError, as_api_error, body_for, shorten, unsupported
from tokenspeed.server.protocol import parse_json
from tokenspeed.server.state import ServerState
from tokenspeed.text.source import ModelError
from tokenspeed.text.text_side import load_text_side
from tokenspeed.wording import counted, type_error

MAX_CUSTOM_ID_CHARS = 512
BUSY_WAIT_S = 0.2
MAX_TOLD = 10
"""Failed lines that are named on the log."""


class _Named(msgspec.Struct):
    """What is read of a line first, so that whatever else is wrong is told under its name."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)]


class BatchRequest(_Named):
    url: str
    body: dict[str, object]
    method: str = "POST"


class _BadLine(ValueError):
    """A line that is no request. `custom_id` if it has one."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.custom_id = code, message, custom_id

    def key(self, number: int) -> str | int:
        """By which the output knows the answer to line `number`."""
        return number if self.custom_id is None else self.custom_id


def batch(config: Config, in_path: str, out_path: str, *, concurrency: int | None = None) -> int:
    """Start an engine, run the file through it, end it. Exit code 1 if any line failed, also in an
    earlier run. Raises ConfigError for settings, a model or files that cannot be taken. Where the
    output holds every answer, no engine is started.

    `concurrency` is how many lines the engine has at once, of which --max-num-seqs run (default:
    twice as many). "-" stands for stdin and stdout.
    """
    with contextlib.ExitStack() as files:
        try:
            source = files.enter_context(open_input(in_path))
            output = files.enter_context(BatchOutput(out_path))
        except BatchFileError as error:
            raise ConfigError(str(error)) from error
        try:
            counts = _finished(source, output, config.server.max_request_bytes)
            if counts is None:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    counts = runner.run(_batch(config, source, output, concurrency))
        except (EngineRefused, ModelError) as error:
            raise ConfigError(str(error)) from error
        except (BatchFileError, EngineDead, OSError) as error:
            logger.error("%s; %s", error, output.how_to_go_on())
            return 1
        except KeyboardInterrupt:
            logger.warning("batch: stopped; %s", output.how_to_go_on())
            raise
    logger.info(
        "batch: %d answered, %d failed, %d done before (%d of them failed)",
        counts.completed,
        counts.failed,
        counts.skipped,
        counts.failed_before,
    )
    return 1 if counts.failed or counts.failed_before else 0


def _finished(source: BinaryIO, output: BatchOutput, max_bytes: int) -> BatchCounts | None:
    """What earlier runs did, if nothing is left to do; None where something is, or where that
    cannot be known without taking lines off a pipe.
    """
    if not source.seekable():
        return None
    counts, reader, start = BatchCounts(), _Reader(), source.tell()
    for number, line in read_lines(source, max_bytes):
        try:
            key: str | int = reader.request(line).custom_id
        except _BadLine as error:
            key = error.key(number)
        if key not in output.done:
            source.seek(start)
            return None
        counts.skipped += 1
        counts.failed_before += output.done[key]
    return counts


async def _batch(
    config: Config, source: BinaryIO, output: BatchOutput, concurrency: int | None
) -> BatchCounts:
    client = EngineClient(config)
    state = ServerState(config, client)
    try:
        await client.start()
        state.text = await asyncio.to_thread(load_text_side, config.model)
        await client.wait_ready()
        return await run_batch(state, source, output, concurrency=concurrency)
    finally:
        await client.close()


async def run_batch(
    state: ServerState, source: BinaryIO, output: BatchOutput, *, concurrency: int | None = None
) -> BatchCounts:
    """Run a file through a ready engine. Raises BatchFileError, OSError or EngineDead, after which
    a run of the same files goes on where this one stopped.
    """
    server = state.config.server
    limit = concurrency or 2 * state.config.scheduler.max_num_seqs
    total = await asyncio.to_thread(count_lines, source) if source.seekable() else None
    _announce(output, total, min(limit, state.config.scheduler.max_num_seqs))
    counts = BatchCounts()
    progress = BatchProgress(counts, total, lambda: state.client.stats)
    run = _Run(state, read_lines(source, server.max_request_bytes), output, counts, progress)
    with progress.shown(server.log_stats_interval):
        # Each worker takes the next line when it has written its last answer.
        workers = [asyncio.create_task(run.work()) for _ in range(limit)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return counts


def _announce(output: BatchOutput, total: int | None, limit: int) -> None:
    lines = "lines" if total is None else counted(total, "line")
    if not output.num_answers:
        most = limit if total is None else min(limit, total)
        logger.info("batch: %s, up to %d at once", lines, most)
        return
    failed = sum(output.done.values())
    found = counted(output.num_answers, "answer") + (
        f" ({failed} of them failed)" if failed else ""
    )
    logger.info("batch: %s; the output has %s from before, whose lines are skipped", lines, found)


class _Run:
    """One pass over a file, shared by its workers."""

    def __init__(
        self,
        state: ServerState,
        lines: Iterator[tuple[int, bytes | None]],
        output: BatchOutput,
        counts: BatchCounts,
        progress: BatchProgress,
    ) -> None:
        self._state, self._lines, self._output = state, lines, output
        self._counts, self._progress = counts, progress
        self._reader = _Reader()
        self._reading = asyncio.Lock()
        self._told_to_wait = False

    async def work(self) -> None:
        while (numbered := await self._next()) is not None:
            number, line = numbered
            answer = await self._answer(number, line)
            if answer is not None:
                self._output.append(answer)
                if answer.failed:
                    self._counts.failed += 1
                    self._tell(number, answer)
                else:
                    self._counts.completed += 1
            self._progress.update()

    async def _next(self) -> tuple[int, bytes | None] | None:
        async with self._reading:
            return await asyncio.to_thread(next, self._lines, None)

    async def _answer(self, number: int, line: bytes | None) -> BatchLine | None:
        """The line's answer; None if the output has it already."""
        answer_id = f"batch_req_{uuid.uuid4().hex}"
        try:
            request = self._reader.request(line)
        except _BadLine as error:
            if self._skip(error.key(number)):
                return None
            return BatchLine(
                id=answer_id,
                custom_id=error.custom_id,
                error=BatchError(error.code, shorten(f"line {number}: {error.message}")),
                line=number if error.custom_id is None else UNSET,
            )
        if self._skip(request.custom_id):
            return None
        status, body = await self._respond(APIS[request.url], request.body)
        response = BatchResponse(status, f"req_{uuid.uuid4().hex}", msgspec.Raw(body))
        return BatchLine(id=answer_id, custom_id=request.custom_id, response=response)

    async def _respond(self, api: Api[Any, Any], body: dict[str, object]) -> tuple[int, bytes]:
        """Status and JSON body of one request, which waits for as long as there is nothing wrong
        with it but the time. Raises EngineDead: then no line is to blame.
        """
        state = self._state
        while True:
            try:
                request = api.parse(state, body)
                if request.stream:
                    raise unsupported("stream", "a batch file holds whole answers")
                answer = msgspec.json.encode(await api.create(state, request))
                self._told_to_wait = False
                return 200, answer
            except Exception as error:
                if state.phase == "dead":
                    raise EngineDead(state.client.failure or "the engine is gone") from error
                shown = as_api_error(error, "a batch request")
                if "Retry-After" not in shown.headers:
                    return shown.status, body_for(api.path, shown)
                if shown.status != 429 and not self._told_to_wait:
                    logger.warning("batch: waiting; %s", shorten(shown.message, 300))
                    self._told_to_wait = True
                await asyncio.sleep(BUSY_WAIT_S)

    def _skip(self, key: str | int) -> bool:
        """Whether the output has the line's answer already; counts it if so."""
        failed = self._output.done.get(key)
        if failed is None:
            return False
        self._counts.skipped += 1
        self._counts.failed_before += failed
        return True

    def _tell(self, number: int, answer: BatchLine) -> None:
        """Name the first lines that fail; all of them are in the output."""
        if self._counts.failed > MAX_TOLD:
            return
        if answer.error is not None:
            why = answer.error.message.removeprefix(f"line {number}: ")
        else:
            assert answer.response is not None
            error = msgspec.json.decode(answer.response.body)["error"]
            why = f"{answer.response.status_code}: {error['message']}"
        name = "" if answer.custom_id is None else f" ({shorten(answer.custom_id, 100)!r})"
        more = (
            "; what fails from here on is told in the output"
            if self._counts.failed == MAX_TOLD
            else ""
        )
        logger.warning("line %d%s failed: %s%s", number, name, shorten(why, 300), more)


class _Reader:
    """Lines as requests. It knows the custom_ids that stood on earlier ones."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def request(self, line: bytes | None) -> BatchRequest:
        """Raises _BadLine."""
        if line is None:
            raise _BadLine("line_too_long", "the line is too long (--max-request-bytes)")
        custom_id = None
        try:
            value = parse_json(line)
            custom_id = msgspec.convert(value, _Named).custom_id
            self._claim(custom_id)
            request = msgspec.convert(value, BatchRequest)
        except (APIError, msgspec.ValidationError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            why = type_error(why) if isinstance(error, msgspec.ValidationError) else why
            raise _BadLine("invalid_line", f"no batch request: {why}", custom_id) from None
        if request.method != "POST" or request.url not in APIS:
            known = " or ".join(APIS)
            raise _BadLine("invalid_url", f"only POST to {known} can be answered", custom_id)
        return request

    def _claim(self, custom_id: str) -> None:
        """Raises _BadLine without the custom_id, whose answer is that of the line that owns it."""
        if custom_id in self._seen:
            shown = shorten(custom_id, 100)
            raise _BadLine("duplicate_custom_id", f"custom_id {shown!r} stood on an earlier line")
        self._seen.add(custom_id)
