"""Hub downloads against a small hub of our own on the loopback, each in a fresh process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "c" * 40
FILES = {
    "config.json": b'{"model_type": "llama", "eos_token_id": 5}',
    "generation_config.json": b'{"temperature": 0.5}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "modeling_evil.py": b"raise SystemExit",
    "onnx/model.safetensors": b"another format",
    "consolidated.safetensors": b"a second copy",
}


class Hub(BaseHTTPRequestHandler):
    """Model info, tree and files of owner/model; owner/gated and owner/private are closed."""

    asked: list[str]

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        if path == "/api/models/owner/model/revision/main":
            self.reply(json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/owner/model/tree/{COMMIT}":
            rows = [
                {"type": "file", "path": name, "size": len(raw), "oid": self.digest(raw)}
                for name, raw in FILES.items()
            ]
            self.reply(json.dumps(rows).encode())
        elif path.startswith(f"/owner/model/resolve/{COMMIT}/"):
            raw = FILES[path.removeprefix(f"/owner/model/resolve/{COMMIT}/")]
            self.reply(raw, {"ETag": f'"{self.digest(raw)}"', "X-Repo-Commit": COMMIT})
        elif "owner/gated" in path:
            self.reply(b"{}", {"X-Error-Code": "GatedRepo"}, 403)
        elif "/revision/" in path and "owner/model" in path:
            self.reply(b"{}", {"X-Error-Code": "RevisionNotFound"}, 404)
        else:
            self.reply(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)

    do_HEAD = do_GET

    def reply(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    @staticmethod
    def digest(raw: bytes) -> str:
        return hashlib.sha1(raw).hexdigest()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    handler = type("OneHub", (Hub,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.asked  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


def resolve(endpoint: str, home: Path, model: str, *, offline: str = "", **options: Any) -> Any:
    """resolve_model in a process of its own, since the library reads its environment once."""
    code = (
        "import json, sys\n"
        "from tokenspeed.text.source import ModelError, resolve_model\n"
        "model, options = json.loads(sys.argv[1])\n"
        "try:\n"
        "    source = resolve_model(model, **options)\n"
        "    names = sorted(p.name for p in source.path.iterdir())\n"
        "    configs = [source.config, source.generation_config]\n"
        "    print(json.dumps([str(source.path), names, *configs]))\n"
        "except ModelError as error:\n"
        "    print(json.dumps(str(error)))\n"
    )
    environment = {key: v for key, v in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment |= {offline: "1"} if offline else {}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([model, options])],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_download_takes_safe_files_only_and_serves_offline(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    endpoint, asked = hub
    path, names, config, generation = resolve(endpoint, tmp_path, "owner/model")
    assert path.startswith(str(tmp_path))
    assert names == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert config == {"model_type": "llama", "eos_token_id": 5}
    assert generation == {"temperature": 0.5}
    assert not any(name in path for path in asked for name in (".bin", ".py", "onnx", "consol"))
    before = len(asked)
    again = resolve(endpoint, tmp_path, "owner/model", offline="HF_HUB_OFFLINE")
    assert (again[0], len(asked)) == (path, before)


def test_without_weights_into_a_folder_of_choice(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    chosen = tmp_path / "chosen"
    path, names, *_ = resolve(
        hub[0], tmp_path / "home", "owner/model", need_weights=False, download_dir=str(chosen)
    )
    assert path.startswith(str(chosen))
    assert "config.json" in names and "model.safetensors" not in names


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("owner/absent", {}, "no such model on the hub"),
        ("owner/gated", {}, "HF_TOKEN"),
        ("owner/model", {"revision": "v9"}, "no such revision"),
        *(
            (
                "owner/model",
                {"offline": name},
                f"cache, and {name} forbids to ask the hub; unset it",
            )
            for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        ),
    ],
)
def test_failures_are_one_line(
    hub: tuple[str, list[str]], tmp_path: Path, model: str, options: Any, message: str
) -> None:
    answer = resolve(hub[0], tmp_path, model, **options)
    assert isinstance(answer, str) and message in answer
    assert model in answer and "\n" not in answer and len(answer) < 500


def test_unreachable_hub_is_one_line(tmp_path: Path) -> None:
    answer = resolve("http://127.0.0.1:9", tmp_path, "owner/model")
    assert isinstance(answer, str) and "cache, and the hub cannot be reached" in answer
    assert "check HF_ENDPOINT and the network, or give a local folder" in answer
    assert "OFFLINE" not in answer
