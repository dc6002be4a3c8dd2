"""`--print-config`: each value and why it is so, as a file that a start can be given."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tokenspeed.cli.main import main
from tokenspeed.cli.print_config import listing
from tokenspeed.cli.settings import resolve
from tokenspeed.config import GROUPS, LEVELS, OPTIONS
from tokenspeed.machine_facts import FlashInferFacts, MachineFacts
from tokenspeed.resolve import ModelFacts
from tokenspeed.resolve import resolve as settle

GROUP_HEADS = [f"# {group}" for group in GROUPS]
HOPPER = MachineFacts(
    has_cuda=True,
    capability=(9, 0),
    has_kernels=True,
    flashinfer=FlashInferFacts(is_installed=True, built=("bfloat16",)),
    cache_root="/cache",
)
QWEN = ModelFacts(stored="safetensors", dtype="bfloat16", max_model_len=4096)


def test_a_listing_is_a_settings_file_without_secrets(tmp_path: Path) -> None:
    """Started with, it settles to the same."""
    words = ["m", "--max-model-len", "4k", "--served-model-name", 'a"b', "--ssl-certfile", "c"]
    names = [option.name for option in OPTIONS.values() if option.secret]
    secrets = [word for name in names for word in (f"--{name}", "hunter2")]
    resolved = resolve([*words, *secrets, "--trust-remote-code"], {})
    settled = settle(resolved.config, HOPPER, QWEN)
    text = "\n".join(listing(resolved, settled, None, True))
    assert "hunter2" not in text
    assert all(f"# {name}: 1 not shown  # --{name}" in text for name in names)
    assert yaml.safe_load(text).keys() == OPTIONS.keys() - set(names)
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    again = resolve(["--config", str(file), *secrets], {})
    assert again.config == settled.config
    assert settle(again.config, HOPPER, QWEN).config == settled.config


def test_each_value_says_where_it_comes_from_or_why_it_is_so() -> None:
    resolved = resolve(["m", "--max-model-len", "4k", "--tp", "1"], {"TOKENSPEED_SEED": "3"})
    settled = settle(resolved.config, HOPPER, QWEN)
    lines = list(listing(resolved, settled, None, True))
    assert lines[0].startswith("# --tp 1: ")
    for line in (
        'model: "m"  # command line',
        "max_model_len: 4000  # --max-model-len",
        "seed: 3  # environment TOKENSPEED_SEED",
        'dtype: "bfloat16"  # the checkpoint\'s',
        "block_size: 16  # default",
        "level: 2  # on CUDA",
    ):
        assert line in lines
    few = list(listing(resolved, settled, None, False))
    assert [each for each in lines if "  # default" in each and "open" not in each]
    left_out = [each for each in lines if each not in few]
    assert all(each.endswith("  # default") or each in GROUP_HEADS for each in left_out)
    num_left_out = sum(each not in GROUP_HEADS for each in left_out)
    told = f"# {num_left_out} more are what they are by default: --print-config=all"
    assert [each for each in few if each not in lines] == [told]
    (attention,) = (line for line in lines if line.startswith("attention_backend"))
    assert attention.startswith('attention_backend: "flashinfer"  # head size 128 on sm_90: ')


def test_the_levels_are_listed_and_what_cannot_be_had(
    tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warmup", tiny_model, "--device", "cpu", "-O1", "--print-config"]) == 0
    text = capsys.readouterr().out
    assert 'load_format: "safetensors"  # what the model\'s files are' in text
    assert f"#   -O1 (this start): {LEVELS[1]}" in text
    assert f"#   -O2: {LEVELS[2]}\n#        not here: -O2 replays CUDA graphs" in text
    assert text.count("not here") == len(LEVELS) - 2


def test_without_the_model_the_rest_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "./nowhere", "--device", "cpu", "--print-config"]) == 0
    text = capsys.readouterr().out
    assert "# what hangs on the model stays open: './nowhere': no such folder" in text
    assert "max_model_len: null  # open: the model says" in text
    assert "chunked_prefill_size: 512  # on a CPU: " in text


def test_without_an_engine_what_was_given_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenspeed.engine.settled", None)
    assert main(["serve", "m", "--print-config=all"]) == 0
    text = capsys.readouterr().out
    assert "the engine cannot be imported: ModuleNotFoundError" in text
    assert 'dtype: "auto"  # default' in text


def test_what_a_start_could_not_have_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "./nowhere", "--device", "cpu", "-O2", "--print-config"]) == 2
    assert "serve: -O2 replays CUDA graphs" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["ls", "verify"])
def test_commands_without_a_model_import_no_engine(
    action: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: Any) -> None:
        raise AssertionError("imported")

    monkeypatch.setitem(sys.modules, "tokenspeed.engine.settled", SimpleNamespace(settled=fail))
    assert main(["cache", action, "--print-config=some"]) == 2
    capsys.readouterr()
    assert main(["cache", action, "--print-config=all"]) == 0
    assert "\ncache_dir: " in capsys.readouterr().out
