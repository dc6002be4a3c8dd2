"""A disk that is full, as far as a process can see: no file may grow beyond a limit.

Compiled pieces that cannot be kept are done without, and answers that cannot be written end a
batch, which goes on later without a line lost or answered twice.
"""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path

import httpx
import pytest
from served import limited, served

pytestmark = pytest.mark.long


@pytest.mark.parametrize("limit", [16 << 10, 128 << 10])
def test_a_full_cache_costs_the_compiled_pieces_alone(
    tiny_model: str, tmp_path: Path, limit: int
) -> None:
    """The smaller limit stops the compiler's own files, the larger what is made of them."""
    words = [tiny_model, "--skip-tokenizer-init", "--device", "cpu", "-O1"]
    words += ["--cache-dir", str(tmp_path), "--max-total-tokens", "1024"]
    with served(*words, limits={resource.RLIMIT_FSIZE: limit}) as server:
        server.wait_ready(300)
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0
        assert server.terminate() == 0
        told = [line for line in server.log.splitlines() if "compil" in line]
        assert any("failed" in line or "cannot" in line for line in told), server.log
        assert "Traceback" not in server.log
    assert not list((tmp_path / "v1").glob("[!.]*")), "half an entry was left"


def batch(
    model: str, source: Path, out: Path, limits: dict[int, int]
) -> subprocess.CompletedProcess[str]:
    words = ["batch", model, "--skip-tokenizer-init", "--device", "cpu", "-O0"]
    words += ["--max-total-tokens", "1024", "-i", str(source), "-o", str(out)]
    command = [*limited(limits), "-m", "tokenspeed", *words]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120)


def test_a_batch_goes_on_where_the_disk_was_full(tiny_model: str, tmp_path: Path) -> None:
    ids = [f"line-{number}" for number in range(12)]
    body = {"prompt": [5, 6, 7], "max_tokens": 4}
    lines = [
        json.dumps({"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body})
        for id in ids
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines) + "\n")
    full = batch(tiny_model, source, out, {resource.RLIMIT_FSIZE: 2000})
    assert full.returncode == 1
    (last,) = [line for line in full.stderr.splitlines() if "cannot write" in line]
    assert str(out) in last and "File too large" in last and "Traceback" not in full.stderr
    written = [json.loads(line)["custom_id"] for line in out.read_text().splitlines()]
    assert 0 < len(written) < len(ids)
    assert batch(tiny_model, source, out, {}).returncode == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(ids)
    assert {answer["response"]["status_code"] for answer in answers} == {200}
