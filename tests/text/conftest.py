"""The bundled model's text side, its golden values, and packages that long tests read."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.text.source import ModelError, ModelSource, resolve_model
from tokenspeed.text.tokenizer import Tokenizer, load_tokenizer

GOLDEN = Path(__file__).parent.parent / "data" / "golden_smollm2.json"


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(GOLDEN.read_text())
    return values


@pytest.fixture(scope="session")
def smollm2_source() -> ModelSource:
    try:
        return resolve_model("smollm2")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tokenizer(smollm2_source: ModelSource) -> Tokenizer:
    return load_tokenizer(smollm2_source)


@pytest.fixture(scope="session")
def sdist(request: pytest.FixtureRequest) -> Callable[[str, str], tarfile.TarFile]:
    """Fetch a source distribution with pip, once, and open it; skip if that cannot be done."""
    folder = Path(request.config.cache.mkdir("sdists"))

    def fetch(name: str, version: str) -> tarfile.TarFile:
        pattern = f"{name.replace('-', '_')}-{version}.tar.gz"
        if not any(folder.glob(pattern)):
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary"]
            command += [":all:", "-d", str(folder), f"{name}=={version}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=480)
            if done.returncode:
                pytest.skip(f"{name} {version} cannot be fetched: {done.stderr.strip()[-200:]}")
        archive = tarfile.open(next(folder.glob(pattern)))
        request.addfinalizer(archive.close)
        return archive

    return fetch
