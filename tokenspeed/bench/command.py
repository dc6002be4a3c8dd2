"""What `tokenspeed bench startup` does: measure, print, write the trace."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tokenspeed.bench import result_file
from tokenspeed.bench.child_server import StartFailed
from tokenspeed.bench.startup import Plan, Start, measure
from tokenspeed.bench.startup_report import summarize, text
from tokenspeed.bench.trace import chrome_trace
from tokenspeed.output_file import check_target

_PROMPT = "The capital of France is"
_PROMPT_IDS = [1, 2, 3, 4]


def startup(
    settings: Mapping[str, Any], *, num_runs: int, trace: Path | None, as_json: bool
) -> int:
    """Measure starts with these options (by name); the exit status. Raises ConfigError."""
    if trace is not None:
        check_target("--trace", trace)
    given = {"level": 1, **settings}
    keys = given.get("api_key") or ()
    plan = Plan(
        settings=given,
        num_runs=num_runs,
        has_cold=given["level"] != 0,
        prompt=_PROMPT_IDS if given.get("skip_tokenizer_init") else _PROMPT,
        api_key=keys[0] if keys else None,
    )
    try:
        starts = measure(plan, lambda line: print(line, file=sys.stderr, flush=True))
    except (StartFailed, OSError) as error:
        print(f"tokenspeed: error: bench startup: {error}", file=sys.stderr)
        return 1
    reports = summarize(starts)
    print(msgspec.json.format(msgspec.json.encode(reports)).decode() if as_json else text(reports))
    if trace is not None and not result_file.write("startup", trace, _trace(starts)):
        return 1
    return 0


def _trace(starts: list[Start]) -> bytes:
    names = {pid: name for start in starts for pid, name in start.processes.items()}
    titles = {f"{start.kind} {number}": start.spans for number, start in enumerate(starts, 1)}
    return chrome_trace(titles, names)
