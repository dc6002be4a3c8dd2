"""The C++ kernels of a start: kept whole or not at all, built if missing, never in the way."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from tokenspeed.config import Config, make_config
from tokenspeed.engine.native import obtain_native
from tokenspeed.kernels import native
from tokenspeed.kernels.native import BuildError, Native
from tokenspeed.options import ConfigError


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    target = tmp_path_factory.mktemp("native") / "native.so"
    try:
        native.build(target)
    except BuildError as error:
        pytest.skip(f"hardware: {error}")
    return target.read_bytes()


@pytest.fixture
def builds(built: bytes, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where something was built; at no cost."""
    places: list[Path] = []

    def build(target: Path) -> None:
        places.append(target)
        target.write_bytes(built)

    monkeypatch.setattr(native, "build", build)
    return places


def config(root: Path, **options: str | bool) -> Config:
    return make_config({"device": "cpu", "cache_dir": str(root)} | options)


def obtained(root: Path) -> Native:
    found = obtain_native(config(root))
    assert found is not None
    x, w = torch.randn(3, 32), torch.randn(8, 32)
    torch.testing.assert_close(found.rows(x, w, None), linear(x, w))
    return found


def test_its_root_is_made_for_this_user_alone(tmp_path: Path, builds: list[Path]) -> None:
    before = os.umask(0)
    try:
        obtained(tmp_path / "root")
        obtained(tmp_path / "root")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "root").stat().st_mode) == 0o700 and len(builds) == 1
    (tmp_path / "root").chmod(0o777)
    obtained(tmp_path / "root")
    assert len(builds) == 2, "what others could have put there is not run"


def test_objects_that_were_not_used_for_long_go(
    tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        monkeypatch.setattr(native, "file_name", lambda number=number: f"native-{number}.so")
        obtained(tmp_path)
        for path in (tmp_path / "native").glob(f"native-{number}.*"):
            os.utime(path, (100.0 + number, 100.0 + number))
        monkeypatch.setattr(native, "file_name", lambda: "native-0.so")
        obtained(tmp_path)
    (left := tmp_path / "native" / ".load-x").mkdir()
    os.utime(left, (1.0, 1.0))
    monkeypatch.setattr(native, "file_name", lambda: "native-5.so")
    obtained(tmp_path)
    kept = {f"native-{number}.so" for number in (0, 3, 4, 5)}
    names = {path.name for path in (tmp_path / "native").iterdir()}
    assert names == kept | {f"{name}.sha256" for name in kept}
    assert len(builds) == 6


def test_it_is_built_once_and_kept(tmp_path: Path, builds: list[Path]) -> None:
    for _ in range(2):
        obtained(tmp_path / "new")
    folder, name = tmp_path / "new" / "native", native.file_name()
    assert len(builds) == 1
    assert {path.name for path in folder.iterdir()} == {name, f"{name}.sha256"}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a byte is another": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!"),
    "gone": lambda path: path.unlink(),
    "no digest": lambda path: path.with_name(f"{path.name}.sha256").unlink(),
    "no object": lambda path: (
        path.write_bytes(b"x"),
        path.with_name(f"{path.name}.sha256").write_text(
            "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
        ),
    ),
    "others may write it": lambda path: path.chmod(0o666),
    "a link": lambda path: (path.rename(f"{path}.x"), path.symlink_to(f"{path}.x")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_built_again(tmp_path: Path, builds: list[Path], damage: str) -> None:
    obtained(tmp_path)
    DAMAGES[damage](tmp_path / "native" / native.file_name())
    for _ in range(2):
        obtained(tmp_path)
    assert len(builds) == 2, "built again, once"


def test_what_is_loaded_may_be_overwritten(tmp_path: Path, builds: list[Path]) -> None:
    """Also in place: a mapped file that shrinks would end the process."""
    first = obtained(tmp_path)
    second = obtained(tmp_path)
    os.truncate(tmp_path / "native" / native.file_name(), 0)
    for each in (first, second):
        assert each.rows(torch.ones(1, 16), torch.ones(4, 16), None).tolist() == [[16.0] * 4]


@pytest.mark.parametrize("barred", ["others may write", "a file", "a link"])
def test_a_folder_that_cannot_be_trusted_is_left_alone(
    tmp_path: Path, builds: list[Path], log: Callable[[], str], barred: str
) -> None:
    place = tmp_path / "native"
    (tmp_path / "mine").mkdir()
    if barred == "a file":
        place.write_text("")
    elif barred == "a link":
        place.symlink_to("mine")
    else:
        place.mkdir()
        place.chmod(0o777)
    for _ in range(2):
        obtained(tmp_path)
    assert len(builds) == 2
    assert not any(path.exists() for path in builds)
    assert not list((tmp_path / "mine").iterdir())
    assert place.is_file() or not list(place.iterdir())
    assert "kept for this start only: " in log()


def test_without_a_compiler_torch_does_the_work(
    tmp_path: Path, log: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert obtain_native(config(tmp_path / "new")) is None
    assert "torch's kernels alone are used on this CPU: no C++ compiler" in log()
    assert not list((tmp_path / "new" / "native").iterdir())
    with pytest.raises(
        ConfigError, match=r"^--strict-backends: the CPU kernels cannot be built: no C"
    ):
        obtain_native(config(tmp_path / "new", strict_backends=True))
    strict = config(tmp_path / "new", strict_backends=True, weight_layout="plain")
    assert obtain_native(strict) is None


def test_without_a_compiler_what_is_kept_serves(
    tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    obtained(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    obtained(tmp_path)


def test_another_cpu_is_said_so(
    tmp_path: Path, log: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    assert obtain_native(config(tmp_path / "new")) is None
    assert "not for SVE256" in log()


def test_nothing_is_looked_for_where_nothing_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Callable[[], str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    root = tmp_path / "new"
    for options in [{"weight_layout": "plain"}, {"device": "cuda"}, {"device": "auto"}]:
        assert obtain_native(config(root, **options)) is None
    assert not root.exists() and not log()
