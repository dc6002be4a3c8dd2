"""Mistakes are told in one line, and alike: by every command, at a start, and where settings are
only printed.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from tokenspeed.cli.main import main
from tokenspeed.config import Config
from tokenspeed.engine import program
from tokenspeed.engine.attached import EngineRefused
from tokenspeed.engine.messages import Stats
from tokenspeed.engine.model import resolve_served
from tokenspeed.options import ConfigError
from tokenspeed.text.errors import ModelError

MISTAKES = {
    "a model that is nowhere": ("./nowhere", "'./nowhere': no such folder or .gguf file"),
    "a level that cannot be": ("{model} -O2", "-O2 replays CUDA graphs"),
    "a device that is not there": ("{model} --device cuda", "torch sees no CUDA device here"),
    "a backend that cannot run": ("{model} --attention-backend flashinfer", "it needs CUDA"),
    "an option that there is not": ("{model} --prot 1", "unknown flag --prot"),
    "a value out of bounds": ("{model} --max-num-seqs 0", "--max-num-seqs must be from 1"),
    "a pass that there is not": ("{model} --disable-pass nope", "there is no such pass"),
}
"""What -> words after the command, and a part of the line that answers them."""

COMMANDS_OF_A_MODEL = (
    *("serve --port 0", "batch -i {file} -o {folder}/out", "warmup", "explain", "explain --verify"),
    *("cache why", "cache export --output {folder}/a.tar"),
)

PRINTED = ("serve", "batch", "warmup", "explain", "cache why", "bench latency")

MISTAKES_OF_SETTINGS = {
    **{name: row for name, row in MISTAKES.items() if "nowhere" not in name},
    "two that contradict": ("{model} -O0 --require-cache", "and -O0 runs none"),
    "graphs of nothing": ("{model} -O0 --dump-passes {folder}/d", "is about passes, and -O0 runs"),
    "a pool too small": ("{model} --max-total-tokens 3", "no request has room in fewer than 16"),
}

MISTAKES_OF_TEXT = {
    "a template": (
        "{model} --tokenizer {folder}/text --chat-template {folder}/no",
        "{folder}/no: cannot be read: No such file",
    ),
    "a tokenizer": ("{model} --tokenizer ./no/such/place", "'./no/such/place': no such folder"),
    "no tokenizer": ("{model}", "no tokenizer.json"),
}

MISTAKES_OF_SERVERS = {
    "keys": ("{model} --api-key-file {folder}/no", "--api-key-file {folder}/no cannot be read"),
    "a certificate": ("{model} --ssl-certfile {folder}/no", "--ssl-certfile"),
}
"""As `MISTAKES`: files that only a server reads."""


@pytest.fixture
def engine_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of `serve` and `batch` finds its model in this process."""

    class Client:
        progress = ready = failure = None

        def __init__(self, config: Config, restarts: object = None) -> None:
            self.config = config
            self.state, self.stats = "loading", Stats()

        async def start(self) -> None: ...

        async def close(self) -> None: ...

        async def wait_ready(self) -> None:
            try:
                program.obtain_program(resolve_served(self.config), self.config)
            except (ModelError, ConfigError) as error:
                raise EngineRefused(str(error)) from error

    for module in ("serve", "batch"):
        path = f"tokenspeed.server.{module}"
        monkeypatch.setattr(importlib.import_module(path), "EngineClient", Client)


@pytest.mark.parametrize("command", COMMANDS_OF_A_MODEL)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_alike_by_every_command(
    command: str,
    mistake: str,
    engine_here: None,
    tiny_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 2, and the same line."""
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TOKENSPEED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENSPEED_SKIP_TOKENIZER_INIT", "1")
    (tmp_path / "in.jsonl").write_text("{}\n")
    words, says = MISTAKES[mistake]
    places = {"model": tiny_model, "file": str(tmp_path / "in.jsonl"), "folder": str(tmp_path)}
    assert main(f"{command} {words}".format(**places).split()) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(lines) == 1 and lines[0].startswith(f"tokenspeed: error: {command.split()[0]}: ")
    assert says in lines[0]


@pytest.mark.parametrize("command", PRINTED)
@pytest.mark.parametrize("mistake", MISTAKES_OF_SETTINGS)
def test_settings_that_are_only_printed_are_refused_alike(
    command: str,
    mistake: str,
    tiny_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words, says = MISTAKES_OF_SETTINGS[mistake]
    words = f"{command} --print-config {words}".format(model=tiny_model, folder=tmp_path)
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["--print-config", "--port 0"])
@pytest.mark.parametrize("mistake", MISTAKES_OF_TEXT | MISTAKES_OF_SERVERS)
def test_files_of_a_server_are_refused_alike(
    how: str,
    mistake: str,
    engine_here: None,
    tiny_model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whether it is started, or its settings are printed."""
    (tmp_path / "text").mkdir()
    Tokenizer(BPE()).save(str(tmp_path / "text" / "tokenizer.json"))
    words, says = (MISTAKES_OF_TEXT | MISTAKES_OF_SERVERS)[mistake]
    words = f"serve {how} {words}".format(model=tiny_model, folder=tmp_path)
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    (line,) = (line for line in captured.err.splitlines() if "error: " in line)
    assert line.startswith("tokenspeed: error: serve: ")
    assert says.format(folder=tmp_path) in line
    assert not captured.out


@pytest.mark.parametrize("mistake", MISTAKES_OF_TEXT)
def test_a_command_without_text_prints_its_settings(
    mistake: str, tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, _ = MISTAKES_OF_TEXT[mistake]
    words = f"warmup --print-config {words}".format(model=tiny_model, folder=tmp_path)
    assert main(words.split()) == 0
    assert f'model: "{tiny_model}"' in capsys.readouterr().out
