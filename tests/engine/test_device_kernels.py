"""Where Triton and FlashInfer of a start look for kernels: in the cache folder, unless told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_tiny import tiny_config
from kernel_cases import all_kinds, fill_triton, fill_workspace, flashinfer_build, triton_kernel

from tokenspeed.compile.kernel_store import environment_of, folders_of, store_kernel
from tokenspeed.config import Config
from tokenspeed.engine import device_kernels
from tokenspeed.engine.device_kernels import keep_kernels, trying_kernels, use_kept_kernels
from tokenspeed.kernels import flashinfer_builds

FACTS = {"versions": {"torch": "2.13"}}
ENVIRONMENT = environment_of(FACTS)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return tiny_config("any", device="auto", cache_dir=str(tmp_path / "root"))


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing had been compiled in this process, on a machine with a GPU."""
    monkeypatch.setattr(device_kernels, "surroundings", lambda device: FACTS)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(device_kernels, "load_driver", lambda: None)
    for name in ("_home", "_place"):
        monkeypatch.setattr(device_kernels, name, None)
    monkeypatch.setattr(flashinfer_builds, "_kept", None)
    for name in (device_kernels.TRITON_VARIABLE, device_kernels.FLASHINFER_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    yield
    if device_kernels._home is not None:
        device_kernels._home.close()


def triton_folder() -> Path:
    return Path(os.environ["TRITON_CACHE_DIR"])


def workspace() -> Path:
    return Path(os.environ["FLASHINFER_WORKSPACE_BASE"])


def test_a_cpu_has_none(config: Config, tmp_path: Path) -> None:
    use_kept_kernels(replace(config, model=replace(config.model, device="cpu")))
    keep_kernels()
    assert "TRITON_CACHE_DIR" not in os.environ and not list(tmp_path.iterdir())


def test_what_a_start_compiles_the_next_one_finds(
    config: Config, tmp_path: Path, log: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kept_kernels(config)
    fill_triton(triton_folder(), triton_kernel())
    fill_workspace(workspace(), flashinfer_build())
    keep_kernels()
    keep_kernels()
    assert log().count("2 compiled GPU kernels are kept") == 1
    places = [
        at.relative_to(tmp_path / "root") for at in folders_of(tmp_path / "root", ENVIRONMENT)
    ]
    assert list(map(str, places)) == [
        triton_kernel(environment=ENVIRONMENT).place,
        f"flashinfer/{ENVIRONMENT}/{flashinfer_build().key}",
    ]
    before = triton_folder()
    use_kept_kernels(config)
    assert triton_folder() == before, "a process has one home for each cache"
    monkeypatch.setattr(device_kernels, "_place", None)  # as in another process
    use_kept_kernels(config)
    assert triton_folder() != before, "a folder that was set by a start is not the user's"
    assert [at.name for at in triton_folder().iterdir()] == [triton_kernel().key]
    name = flashinfer_build().files["name"].decode()
    assert flashinfer_builds.is_built(name) and not flashinfer_builds.is_built("other")


def test_the_driver_is_loaded_from_there(
    config: Config, monkeypatch: pytest.MonkeyPatch, log: Callable[[], str]
) -> None:
    places: list[Path] = []

    def load() -> None:
        places.append(triton_folder())
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(device_kernels, "load_driver", load)
    use_kept_kernels(config)
    assert places == [triton_folder()] and log() == "", "who launches a kernel will say it"


def test_kernels_that_are_tried_are_not_kept(config: Config, tmp_path: Path) -> None:
    use_kept_kernels(config)
    fill_triton(triton_folder(), triton_kernel("B" * 52))
    with trying_kernels():
        fill_triton(triton_folder(), triton_kernel("C" * 52))
    fill_triton(triton_folder(), triton_kernel("D" * 52))
    keep_kernels()
    places = folders_of(tmp_path / "root", ENVIRONMENT)
    assert [at.name[0] for at in places] == ["B", "D"]


def test_folders_of_the_user_are_used(
    config: Config, tmp_path: Path, log: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernel in all_kinds():
        store_kernel(tmp_path / "root", kernel)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "mine"))
    use_kept_kernels(config)
    fill_triton(triton_folder(), triton_kernel("F" * 52))
    keep_kernels()
    assert triton_folder() == workspace() == tmp_path / "mine"
    assert f"TRITON_CACHE_DIR is set: its kernels stay in {tmp_path / 'mine'}" in log()
    assert "FLASHINFER_WORKSPACE_BASE is set" in log() and "are kept" not in log()
    assert not flashinfer_builds.is_built(flashinfer_build().files["name"].decode())


@pytest.mark.parametrize(
    "value",
    [
        "/tmp/torchinductor_somebody/triton/0",
        "/home/x/.cache/tokenspeed/v1/.load-kernels-a_b1/triton",
        "/tmp/tokenspeed-kernels-ab_1/triton",
    ],
)
def test_what_torch_and_starts_have_set_is_no_users(
    config: Config, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", value)
    use_kept_kernels(config)
    assert triton_folder().parent.parent.parent == Path(str(config.compile.cache_dir))


def test_without_room_nothing_is_set(
    config: Config, log: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**options: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tokenspeed.compile.kernel_home.tempfile.mkdtemp", fail)
    use_kept_kernels(config)
    keep_kernels()
    assert "TRITON_CACHE_DIR" not in os.environ
    assert "are not taken from the cache folder: [Errno 28] No space left" in log()
