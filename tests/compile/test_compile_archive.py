"""Archives: one way to write them, and every other one refused by the member's name."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenspeed.compile import archive
from tokenspeed.compile.archive import ArchiveError, Index, Member, read_archive, write_archive

LONG = "v1/" + "m" * 40 + "-0123456789abcdef/inductor/ab/c" + "x" * 60 + ".main.so"
MEMBERS = {"v1/a/READY": b"ready", "native/k.so": b"", LONG: b"z" * 512, "v1/a/b.bin": b"y" * 700}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str]:
    path = tmp_path_factory.mktemp("archive") / "a.tar"
    return (digest := write_archive(path, MEMBERS)) and path.read_bytes(), digest


def refused(path: Path, data: bytes, sha256: str | None = None) -> str:
    path.write_bytes(data)
    with pytest.raises(ArchiveError) as error:
        read_archive(path, sha256)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_text("something older")
    digest = write_archive(path, MEMBERS)
    assert read_archive(path, digest) == read_archive(path, digest.upper()) == MEMBERS
    assert read_archive(path, None) == MEMBERS
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["a.tar"]


def test_the_same_members_give_the_same_bytes(tmp_path: Path) -> None:
    turned = dict(reversed(MEMBERS.items()))
    assert write_archive(tmp_path / "a", MEMBERS) == write_archive(tmp_path / "b", turned)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_others_can_list_and_unpack_it(whole: tuple[bytes, str]) -> None:
    with tarfile.open(fileobj=io.BytesIO(whole[0])) as tar:
        assert [each.name for each in tar][2:] == sorted(MEMBERS)
        for name, data in MEMBERS.items():
            assert tar.extractfile(name).read() == data  # type: ignore[union-attr]


def test_another_archive_is_refused(tmp_path: Path, whole: tuple[bytes, str]) -> None:
    assert f"its SHA-256 is {whole[1]}" in refused(tmp_path / "a", whole[0], "0" * 64)


def member_at(data: bytes, at: int) -> str:
    """The member whose header, contents or padding a byte belongs to, as tar's own reader says."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for each in tar:
            if at < each.offset_data + -(-each.size // 512) * 512:
                return each.name
    return "behind the last member"


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_byte_changed_is_refused_by_the_members_name(
    tmp_path: Path, whole: tuple[bytes, str], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(whole[0]) - 1))
    mask = data.draw(st.integers(1, 255))
    changed = bytearray(whole[0])
    changed[at] ^= mask
    for sha256 in (None, whole[1]):
        assert member_at(whole[0], at) in refused(tmp_path / "a", bytes(changed), sha256)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_length_but_its_own_is_refused(
    tmp_path: Path, whole: tuple[bytes, str], data: st.DataObject
) -> None:
    refused(tmp_path / "a", whole[0][: data.draw(st.integers(0, len(whole[0]) - 1))])
    refused(tmp_path / "a", whole[0] + bytes(data.draw(st.integers(1, 2000))))


def tar_of(*members: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    """A tar with a correct index of what it says to hold, as an attacker would make it."""
    contents = dict(each for each in members if isinstance(each, tuple))
    index = {name: Member(len(data), archive._sha256(data)) for name, data in contents.items()}
    text = archive._encode(Index(archive.FORMAT, dict(sorted(index.items()))))
    return plain_tar(
        (archive.INDEX, text),
        (archive.INDEX_DIGEST, archive._sha256(text).encode()),
        *members,
    )


def plain_tar(*members: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for each in members:
            if isinstance(each, tuple):
                info = tarfile.TarInfo(each[0])
                info.size, info.mode = len(each[1]), 0o600
                tar.addfile(info, io.BytesIO(each[1]))
            else:
                tar.addfile(each)
    return out.getvalue()


def special(kind: bytes, target: str = "/etc/passwd") -> tarfile.TarInfo:
    info = tarfile.TarInfo("v1/a")
    info.type, info.linkname = kind, target
    return info


def tar_with_index(text: bytes) -> bytes:
    return plain_tar((archive.INDEX, text), (archive.INDEX_DIGEST, archive._sha256(text).encode()))


def declaring(*members: tuple[str, int]) -> bytes:
    """A tar with nothing in it but an index that declares these members."""
    index = Index(archive.FORMAT, {name: Member(size, "0" * 64) for name, size in members})
    return tar_with_index(archive._encode(index))


def huge_index() -> bytes:
    info = tarfile.TarInfo(archive.INDEX)
    info.size = 7 << 30
    return info.tobuf(tarfile.USTAR_FORMAT)


CRAFTED: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "it has no archive.json"),
    "no archive": (lambda: b"#!/bin/sh\n" * 999, "it has no archive.json"),
    "no index": (lambda: plain_tar(("v1/a", b"x")), "v1/a stands where archive.json should"),
    "up": (lambda: tar_of(("v1/../../x", b"x")), "'v1/../../x' cannot be the name"),
    "up at once": (lambda: tar_of(("../x", b"x")), "'../x' cannot be the name"),
    "absolute": (lambda: tar_of(("/tmp/x", b"x")), "'/tmp/x' cannot be the name"),
    "backslash": (lambda: tar_of(("v1\\x/y", b"x")), "cannot be the name"),
    "hidden": (lambda: tar_of(("v1/.x", b"x")), "cannot be the name"),
    "newline": (lambda: tar_of(("v1/x\ny", b"x")), "cannot be the name"),
    "no folder": (lambda: tar_of(("x", b"x")), "cannot be the name"),
    "folder and file": (lambda: tar_of(("v1/a", b"x"), ("v1/a/b", b"x")), "cannot be the name"),
    "symlink": (lambda: tar_of(special(tarfile.SYMTYPE), ("v1/b", b"")), "v1/a is a symbolic link"),
    "hard link": (lambda: tar_of(special(tarfile.LNKTYPE), ("v1/b", b"")), "v1/a is a hard link"),
    "device": (lambda: tar_of(special(tarfile.CHRTYPE), ("v1/b", b"")), "v1/a is a device"),
    "disk": (lambda: tar_of(special(tarfile.BLKTYPE), ("v1/b", b"")), "v1/a is a device"),
    "pipe": (lambda: tar_of(special(tarfile.FIFOTYPE), ("v1/b", b"")), "v1/a is a pipe"),
    "folder": (lambda: tar_of(special(tarfile.DIRTYPE), ("v1/b", b"")), "v1/a/ is a folder"),
    "link behind": (lambda: tar_of(special(tarfile.SYMTYPE)), "v1/a stands behind the last"),
    "sparse": (lambda: tar_of(special(b"S"), ("v1/a", b"")), "the header of v1/a is not what"),
    "long name": (lambda: tar_of(special(b"L"), ("v1/a", b"")), "the header of v1/a is not what"),
    "huge": (lambda: declaring(("v1/a", 8 << 30)), "v1/a has 8589934592 bytes"),
    "huge index": (huge_index, "it has no archive.json"),
    "more than there is": (lambda: declaring(("v1/a", 1 << 29)), "declares 536874496 bytes"),
    "compressed": (lambda: gzip.compress(bytes(1 << 24)), "it has no archive.json"),
    "twice": (
        lambda: tar_of(("v1/a", b"x"), ("v1/a", b"x")),
        "v1/a stands behind the last member",
    ),
    "missing": (lambda: tar_with_index(b'{"format":1,"members":{}}'), "not in the form"),
    "undeclared": (lambda: plain_tar(*_with_one_more()), "v1/z stands behind the last member"),
    "other format": (
        lambda: tar_with_index(archive._encode(Index(2, {}))),
        "its format is 2, this version reads 1",
    ),
    "no JSON": (lambda: tar_with_index(b"{"), "archive.json cannot be read"),
    "unknown field": (
        lambda: tar_with_index(b'{"format":1,"members":{},"run":"x"}'),
        "archive.json cannot be read",
    ),
    "negative": (
        lambda: declaring(("v1/a", -512)),
        "v1/a has -512 bytes",
    ),
    "out of order": (
        lambda: declaring(("v1/b", 0), ("v1/a", 0)),
        "not declare its members in order",
    ),
    "too many": (
        lambda: declaring(*((f"v1/{i:06}", 0) for i in range(20000))),
        "declares 20000 members",
    ),
    "too much": (
        lambda: declaring(*((f"v1/{i}", 1 << 29) for i in range(3))),
        "together have more than",
    ),
}


def _with_one_more() -> list[tuple[str, bytes]]:
    text = archive._encode(Index(1, {"v1/a": Member(1, archive._sha256(b"x"))}))
    digest = archive._sha256(text).encode()
    return [(archive.INDEX, text), (archive.INDEX_DIGEST, digest), ("v1/a", b"x"), ("v1/z", b"x")]


@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_archives_are_refused(tmp_path: Path, kind: str) -> None:
    make, reason = CRAFTED[kind]
    assert reason in refused(tmp_path / "a.tar", make())
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


@pytest.mark.parametrize(
    "change",
    [{"mode": 0o755}, {"uid": 1}, {"mtime": 5}, {"uname": "root"}, {"gid": 7}],
    ids=lambda change: next(iter(change)),
)
def test_a_header_says_nothing_else(tmp_path: Path, change: dict[str, object]) -> None:
    info = tarfile.TarInfo("v1/a")
    info.mode = 0o600
    for name, value in change.items():
        setattr(info, name, value)
    text = archive._encode(Index(1, {"v1/a": Member(0, archive._sha256(b""))}))
    digest = archive._sha256(text).encode()
    data = plain_tar((archive.INDEX, text), (archive.INDEX_DIGEST, digest), info)
    assert "the header of v1/a is not what was written" in refused(tmp_path / "a", data)


def test_a_pipe_or_a_folder_is_no_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArchiveError, match="is not a file"):
        read_archive(tmp_path / "pipe", None)
    with pytest.raises(OSError):
        read_archive(tmp_path / "none", None)


@pytest.mark.parametrize("name", ["x", "../x", "/x/y", "v1/" + "x" * 300, "v1/ä", "v1/a b"])
def test_what_no_reader_would_take_is_not_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArchiveError):
        write_archive(tmp_path / "a", {name: b""})
    assert not list(tmp_path.iterdir())


def test_an_index_is_json(whole: tuple[bytes, str]) -> None:
    with tarfile.open(fileobj=io.BytesIO(whole[0])) as tar:
        index = msgspec.json.decode(tar.extractfile(archive.INDEX).read())  # type: ignore[union-attr]
    assert index["members"]["v1/a/READY"] == {"bytes": 5, "sha256": archive._sha256(b"ready")}
