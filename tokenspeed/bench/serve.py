"""What `tokenspeed bench serve` does: wait for the server, warm it up, load it, print. No torch.

Ctrl-C ends the load and prints what was measured until then; requests that were open count neither
as successes nor as failures.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import h11
import msgspec
import uvloop

from tokenspeed.bench import result_file, serve_report
from tokenspeed.bench.answer import Record
from tokenspeed.bench.http_client import HttpClient
from tokenspeed.bench.load import Load, Requests, arrivals, limit_of, num_requests, warm_ups
from tokenspeed.bench.metrics import summarize
from tokenspeed.bench.progress import progress, tell
from tokenspeed.bench.serve_options import ServeOptions
from tokenspeed.bench.serve_plan import API_KEYS, Plan, make_plan
from tokenspeed.output_file import check_target
from tokenspeed.wording import counted

_POLL_S = 0.5
_MODELS = "/v1/models"


class BenchFailed(RuntimeError):
    """Nothing could be measured; one line: why."""


@dataclass(frozen=True)
class Measured:
    """A run that ended, by itself or by Ctrl-C."""

    model: str
    records: list[Record]
    duration: float
    client_share: float
    """Of one core, that this process used."""
    was_interrupted: bool


def serve(options: ServeOptions, environ: Mapping[str, str] = os.environ) -> int:
    """Measure and print; the exit status. Raises ConfigError."""
    plan = make_plan(options, environ)
    if (expected := serve_report.path(options, "MODEL")) is not None:
        check_target("--output-json" if options.output.output_json else "--save-result", expected)
    try:
        measured = uvloop.run(measure(plan))
    except BenchFailed as error:
        print(f"tokenspeed: error: bench serve: {plan.address.url}: {error}", file=sys.stderr)
        return 1
    records = measured.records
    summary = summarize(
        records, measured.duration, percentiles=plan.percentiles, limits_ms=plan.limits_ms
    )
    print(serve_report.text(summary, options, plan.shown))
    for note in serve_report.notes(summary, records, measured.client_share):
        print(note)
    path = serve_report.path(options, measured.model)
    if path is not None:
        result = serve_report.as_json(summary, options, measured.model, measured.client_share)
        if options.output.save_detailed:
            result |= serve_report.details(records)
        encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
        if not result_file.write("serve", path, encoded + b"\n"):
            return 1
    if measured.was_interrupted:
        return 130
    return 1 if summary.failed or not summary.completed else 0


async def measure(plan: Plan) -> Measured:
    """Wait, warm up, load. Raises BenchFailed if the server never answers."""
    options = plan.options
    client = HttpClient(plan.address, plan.headers)
    try:
        model = await _ready(client, plan)
        requests = Requests(
            endpoint=options.endpoint,
            is_chat=options.is_chat,
            model=model,
            fields=plan.fields,
            must_be_full=options.target.ignore_eos,
            timeout_s=options.target.request_timeout,
        )
        total, is_hidden = num_requests(plan.sessions), options.output.disable_tqdm
        if not is_hidden:
            tell(f"{counted(total, 'request')} to {model} at {plan.address.url}")
        await _warm_up(client, requests, plan)
        load = Load(client, requests, limit_of(options.load.max_concurrency))
        cpu = time.process_time()
        async with progress(load, total, is_hidden=is_hidden):
            was_interrupted = await _run(load, plan)
        duration = time.perf_counter() - load.began
        share = (time.process_time() - cpu) / duration if duration else 0.0
        return Measured(model, load.records, duration, share, was_interrupted)
    finally:
        client.close()


async def _run(load: Load, plan: Plan) -> bool:
    """Run the load; whether Ctrl-C ended it."""
    options = plan.options
    starts = arrivals(len(plan.sessions), options.load, options.dataset.seed)
    task = asyncio.create_task(load.run(plan.sessions, starts))
    loop = asyncio.get_running_loop()
    was_interrupted = False

    def interrupt() -> None:
        nonlocal was_interrupted
        was_interrupted = True
        task.cancel()
        loop.remove_signal_handler(signal.SIGINT)  # the next one ends the program

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        if not was_interrupted:
            raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return was_interrupted


async def _warm_up(client: HttpClient, requests: Requests, plan: Plan) -> None:
    chosen = warm_ups(plan.sessions, plan.options.load.num_warmups)
    load = Load(client, requests, limit_of(plan.options.load.max_concurrency))
    await load.run(chosen, [0.0] * len(chosen))
    failed = [record for record in load.records if record.failure is not None]
    if failed and len(failed) == len(chosen):
        first = failed[0]
        raise BenchFailed(f"the warm-up failed: {first.failure}: {first.detail}")


async def _ready(client: HttpClient, plan: Plan) -> str:
    """The model to ask for, once the server lists its models (or, with --model, answers at all)."""
    options, is_told = plan.options, plan.options.output.disable_tqdm
    deadline = time.monotonic() + options.target.ready_check_timeout_sec
    while True:
        try:
            async with asyncio.timeout(10.0), client.request("GET", _MODELS) as response:
                status, body = response.status, await response.read()
            if options.target.model is not None and status < 500:
                return options.target.model
            if status == 200:
                return first_model(body)
            problem = f"GET {_MODELS} was answered with {status}"
            if 400 <= status < 500:
                raise BenchFailed(f"{problem}; give --model, or a key in {API_KEYS[0]}")
        except (OSError, TimeoutError, h11.RemoteProtocolError) as error:
            problem = str(error) or type(error).__name__
        if time.monotonic() >= deadline:
            raise BenchFailed(f"the server is not ready: {problem}")
        if not is_told:
            seconds = options.target.ready_check_timeout_sec
            tell(f"waiting up to {seconds:g} s for {plan.address.url}: {problem}")
            is_told = True
        await asyncio.sleep(_POLL_S)


def first_model(body: bytes) -> str:
    """Of what /v1/models answers. Raises BenchFailed."""
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        raise BenchFailed(f"GET {_MODELS} lists no model; give --model") from None
