"""`tokenspeed cache` and `warmup` on real entries: nothing compiled twice, and the same tokens."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from code_in_documents import ROOT
from engine_tiny import request, run, tiny_config, tiny_engine
from kernel_cases import flashinfer_build, triton_kernel, triton_module

from tokenspeed.compile import installation
from tokenspeed.compile.cache import CompileCache
from tokenspeed.compile.entry import read_manifest
from tokenspeed.compile.kernel_store import environment_of, store_kernel
from tokenspeed.engine import cache_commands, cache_upkeep, program, warmup
from tokenspeed.engine.compile_job import Compiled, CompileFailed, CompileJob
from tokenspeed.options import ConfigError

Do = Callable[..., tuple[int, str]]


@pytest.fixture
def do(tiny_model: str, tiny_cache: Path, capsys: pytest.CaptureFixture[str]) -> Do:
    """One of the commands: exit code and what was printed. `root` is the cache it is about."""

    def command(
        action: str, root: Path = tiny_cache, model: str = tiny_model, **arguments: Any
    ) -> tuple[int, str]:
        options = arguments.pop("options", {})
        config = tiny_config(model, cache_dir=str(root), **options)
        runner = cache_upkeep if action in cache_upkeep.ACTIONS else cache_commands
        status = runner.run(action, config, **arguments)
        return status, capsys.readouterr().out

    return command


@pytest.fixture
def entry(tiny_cache: Path) -> str:
    (folder,) = CompileCache(tiny_cache).entry_folders()
    return folder.name


def test_an_entry_travels_to_a_fresh_home(
    tiny_model: str,
    tiny_cache: Path,
    tmp_path: Path,
    entry: str,
    do: Do,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, home = tmp_path / "tiny.tar", tmp_path / "home"
    status, text = do("export", output=str(path))
    digest = text.split()[0]
    assert (status, text) == (0, f"{digest}  {path}\n")
    status, text = do("import", root=home, path=str(path), sha256=digest)
    assert (status, text.splitlines()[0]) == (0, f"{entry}: imported")
    again = do("import", root=home, path=str(path), sha256=None)
    assert again == (0, f"{entry}: is there already: nothing to do\n")
    monkeypatch.setattr(program, "CompileChild", None)
    outcomes = []
    for options in ({"require_cache": True, "cache_dir": str(home)}, {"level": 0}):
        engine = tiny_engine(tiny_model, **options)
        assert ("compile cache hit" in engine.ready.summary) == ("cache_dir" in options)
        (outcome,) = run(engine, [request("a", [1, 2, 3, 4, 5])]).values()
        outcomes.append(outcome.token_ids)
    assert outcomes[0] == outcomes[1]


def test_an_entry_is_exported_by_its_name_too(tmp_path: Path, entry: str, do: Do) -> None:
    by_model = do("export", output=str(tmp_path / "a"))[1].split()[0]
    assert do("export", model=entry, output=str(tmp_path / "b"))[1].split()[0] == by_model


def test_what_is_not_there_is_not_exported(tmp_path: Path, do: Do, log: Callable[[], str]) -> None:
    options = {"dtype": "bfloat16"}
    assert do("export", output=str(tmp_path / "a"), options=options) == (1, "")
    assert "compile.dtype 'bfloat16' (there 'float32')" in log()
    command = f"--export {tmp_path / 'a'} makes the entry (with the same options)"
    assert "; tokenspeed warmup " in log() and command in log()
    with pytest.raises(ConfigError, match="no such folder"):
        do("export", model="nobody", output=str(tmp_path / "a"))
    assert not list(tmp_path.iterdir())


def test_a_changed_archive_is_refused_and_writes_nothing(
    tmp_path: Path, do: Do, log: Callable[[], str]
) -> None:
    path = tmp_path / "a.tar"
    do("export", output=str(path))
    data = bytearray(path.read_bytes())
    data[data.rindex(b"READY") + 600] ^= 1
    path.write_bytes(data)
    assert do("import", root=tmp_path / "home", path=str(path), sha256=None)[0] == 1
    assert do("import", root=tmp_path / "home", path=str(tmp_path / "no"), sha256=None)[0] == 1
    assert "No such file" in log()
    assert [each.name for each in tmp_path.iterdir()] == ["a.tar"]


def test_an_entry_of_another_machine_is_taken_and_told(
    tmp_path: Path,
    entry: str,
    do: Do,
    log: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "a.tar"
    digest = do("export", output=str(path))[1].split()[0]
    assert f"to use it: tokenspeed cache import {path} --sha256 {digest}\n" in log()
    assert "machines with capability " in log() and ", threads " in log()
    do("import", root=tmp_path / "here", path=str(path), sha256=None)
    assert "fits this machine" not in log()
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "SVE")
    status, text = do("import", root=tmp_path / "home", path=str(path), sha256=None)
    lines = text.splitlines()
    assert (status, lines[0]) == (0, f"{entry}: imported")
    assert f"{entry} is of no use to this machine as it is:" in lines
    assert f"nothing in {path} fits this machine" in log()
    assert any("machine.capability" in line and "'SVE'" in line for line in lines)
    monkeypatch.setattr(installation, "_cpu_flags", lambda: "sve")
    assert "  no: machine.instructions '" in do("ls", root=tmp_path / "home", as_json=False)[1]


def test_ls_and_verify_tell_of_damage(tiny_cache: Path, tmp_path: Path, entry: str, do: Do) -> None:
    _, text = do("ls", as_json=False)
    head, line = text.splitlines()
    shown = re.findall(
        r"^    (ENTRY .*)$", (ROOT / "docs" / "compile-cache.md").read_text(), re.MULTILINE
    )
    assert [head.split()] == [each.split() for each in shown], "as the document shows it"
    threads = torch.get_num_threads()
    assert line.split()[0] == entry and line.endswith(f"  yes, with {threads} threads")
    row = json.loads(do("ls", as_json=True)[1])["entries"][0]
    assert (row["dtype"], row["device"], row["misfits"]) == ("float32", "cpu", [])
    assert (row["fits"], row["if"]) == (True, {"threads": threads})
    assert do("verify", as_json=False) == (0, f"{entry}: whole\n1 checked, 0 bad\n")
    root = Path(shutil.copytree(tiny_cache, tmp_path / "cache"))
    (root / "v1" / entry / "plan.json").write_text("{}")
    status, text = do("verify", root=root, as_json=True)
    assert status == 1
    assert json.loads(text) == [{"entry": entry, "problem": "plan.json is not what was written"}]
    assert do("why", root=root, as_json=False) == (
        1,
        "miss: the entry cannot be used: plan.json is not what was written\n",
    )
    assert (root / "v1" / entry).is_dir(), "only a start sets it aside"
    assert do("ls", root=tmp_path / "no", as_json=False)[1] == f"no entry in {tmp_path / 'no'}\n"


@pytest.fixture
def with_kernels(tiny_cache: Path, tmp_path: Path, entry: str) -> tuple[Path, str]:
    """The cache with GPU kernels for the environment of its entry, which is returned as well."""
    root = Path(shutil.copytree(tiny_cache, tmp_path / "with-kernels"))
    environment = environment_of(read_manifest(root / "v1" / entry).facts)
    for kernel in (triton_kernel(), triton_module(), flashinfer_build()):
        store_kernel(root, replace(kernel, environment=environment))
    store_kernel(root, triton_kernel(environment="0" * 16))
    return root, environment


def test_gpu_kernels_travel_with_their_entry(
    tmp_path: Path, with_kernels: tuple[Path, str], do: Do
) -> None:
    root, _ = with_kernels
    path, home = tmp_path / "a.tar", tmp_path / "home"
    assert do("export", root=root, output=str(path))[0] == 0
    status, text = do("import", root=home, path=str(path), sha256=None)
    assert status == 0
    assert "triton: 2 compiled kernels imported\nflashinfer: 1 compiled kernels" in text
    assert "compiled kernels" not in do("import", root=home, path=str(path), sha256=None)[1]
    assert do("verify", root=home, as_json=False)[0] == 0
    assert not (home / "triton" / ("0" * 16)).exists()
    first = path.read_bytes()
    assert do("export", root=home, output=str(path))[0] == 0
    assert path.read_bytes() == first


def test_gpu_kernels_are_listed_checked_and_pruned(
    with_kernels: tuple[Path, str], entry: str, do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, environment = with_kernels
    text = do("ls", root=root, as_json=False)[1]
    fit = f"fit this machine, with {torch.get_num_threads()} threads"
    assert f"triton/{environment}: 2 kernels, 0.0 MiB, {fit}\n" in text
    assert f"triton/{'0' * 16}: 1 kernel, 0.0 MiB, for an environment that no entry here" in text
    rows = json.loads(do("ls", root=root, as_json=True)[1])["kernels"]
    assert {(row["set"], row["kernels"], row["fits"]) for row in rows} == {
        (f"triton/{environment}", 2, True),
        (f"triton/{'0' * 16}", 1, None),
        (f"flashinfer/{environment}", 1, True),
    }
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    text = do("ls", root=root, as_json=False)[1]
    assert f"triton/{environment}: 2 kernels, 0.0 MiB, do not fit this machine: settings." in text
    status, text = do("verify", root=root, as_json=False)
    assert status == 0 and f"triton/{environment}: whole\n" in text and "4 checked, 0 bad" in text
    cubin = root / "triton" / environment / triton_kernel().key / "fill.cubin"
    cubin.write_bytes(b"")
    status, text = do("verify", root=root, as_json=False)
    assert status == 1 and "fill.cubin is not what was written" in text
    limits: dict[str, Any] = {"max_age_s": None, "max_bytes": 0}
    dry = do("prune", root=root, is_dry=True, **limits)[1]
    assert dry.count("would be removed") == 4 and cubin.exists()
    assert do("prune", root=root, is_dry=False, **limits)[1].count(": removed") == 4
    assert not [path for path in root.rglob("*") if path.name in ("fill.json", "kernel.so")]


def test_prune_removes_what_it_says(tiny_cache: Path, tmp_path: Path, entry: str, do: Do) -> None:
    root = Path(shutil.copytree(tiny_cache, tmp_path / "cache"))

    def prune(max_age_s: int | None, max_bytes: int | None, is_dry: bool = False) -> str:
        arguments = {"max_age_s": max_age_s, "max_bytes": max_bytes, "is_dry": is_dry}
        return do("prune", root=root, **arguments)[1]

    assert entry not in prune(86400, 1 << 30)
    would = prune(None, 0, is_dry=True)
    assert f"{entry}: would be removed" in would and would.endswith(" MiB would be freed\n")
    assert (root / "v1" / entry).is_dir()
    removed = prune(None, 0)
    assert f"{entry}: removed" in removed and removed.endswith(" MiB freed\n")
    assert not (root / "v1" / entry).exists()


def test_level_0_asks_no_cache(do: Do) -> None:
    with pytest.raises(ConfigError, match="-O0"):
        do("why", as_json=False, options={"level": 0})


@pytest.mark.parametrize("level", [None, 1])
def test_a_required_cache_is_required(tiny_model: str, tiny_cache: Path, level: int | None) -> None:
    with pytest.raises(ConfigError, match=r"compile\.dtype 'bfloat16' \(there") as error:
        tiny_engine(
            tiny_model,
            **{"require_cache": True, "dtype": "bfloat16", "level": level},
            cache_dir=str(tiny_cache),
        )
    assert "tokenspeed warmup" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="-O0 runs none"):
        tiny_engine(tiny_model, require_cache=True, level=0)


def test_pieces_that_do_not_load_are_a_miss_where_none_is_allowed(
    tiny_model: str, tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(entry: object) -> None:
        raise program.Damaged("made for another torch")

    root = shutil.copytree(tiny_cache, tmp_path / "cache")
    monkeypatch.setattr(program, "load_program", fail)
    with pytest.raises(ConfigError, match="--require-cache: made for another torch"):
        tiny_engine(tiny_model, require_cache=True, cache_dir=str(root))


class FakeChild:
    """Stands for the compiler's process: puts there what the test has, and ends."""

    def __init__(self, cache: Path | None) -> None:
        self.cache = cache
        self.jobs: list[CompileJob] = []

    def __call__(self, job: CompileJob) -> FakeChild:
        self.jobs.append(job)
        return self

    def wait(self, progress: Callable[[str], None]) -> Compiled | CompileFailed:
        for detail in ("start", "capture", "piece 1 of 2", "piece 1 of 2", "piece 2 of 2"):
            progress(detail)
        if self.cache is None:
            return CompileFailed("no compiler here")
        shutil.copytree(self.cache, self.jobs[-1].root, dirs_exist_ok=True)
        return Compiled(1.0, "rope 4")

    def close(self) -> None:
        pass


def test_a_warmup_needs_no_weights_and_compiles_once(
    tiny_model: str,
    tiny_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    log: Callable[[], str],
) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(Path(tiny_model) / "config.json", tmp_path / "bare")
    config = tiny_config(str(tmp_path / "bare"), level=1, cache_dir=str(tmp_path / "cache"))
    child = FakeChild(tiny_cache)
    monkeypatch.setattr(warmup, "CompileChild", child)
    archive = str(tmp_path / "a.tar")
    assert warmup.warmup([config], archive) == 0
    assert log().count("piece 1 of 2") == 1 and "compiled in 1.0 s: rope 4" in log()
    first = capsys.readouterr().out
    assert warmup.warmup([config, config], archive) == 0
    assert capsys.readouterr().out == first and first.endswith(f"  {archive}\n")
    assert len(child.jobs) == 1 and "in the cache already" in log()
    eager = tiny_config(tiny_model, level=0, cache_dir=str(tmp_path / "cache"))
    assert warmup.warmup([eager]) == 0 and len(child.jobs) == 1


def test_a_warmup_that_fails_says_so(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Callable[[], str]
) -> None:
    monkeypatch.setattr(warmup, "CompileChild", FakeChild(None))
    config = tiny_config(tiny_model, level=1, cache_dir=str(tmp_path / "cache"))
    assert warmup.warmup([config]) == 1
    assert "compiling failed: no compiler here" in log()
    (tmp_path / "file").write_text("")
    config = tiny_config(tiny_model, level=1, cache_dir=str(tmp_path / "file" / "cache"))
    assert warmup.warmup([config]) == 1
    assert "nothing can be stored: " in log()
    with pytest.raises(ConfigError, match="no such folder"):
        warmup.warmup([tiny_config("nobody", level=1)])
