"""`.ci/run` with the machine's commands played: no browser, no run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / ".ci" / "run"
REAL = ("bash", "dirname")


class Machine:
    """Commands that note how they were called in `calls`; those of `fails` fail that many times."""

    def __init__(self, folder: Path, user: int, commands: tuple[str, ...]) -> None:
        self._folder, self.calls_file = folder, folder / "calls"
        for name in REAL:
            found = shutil.which(name)
            assert found is not None
            (folder / name).symlink_to(found)
        self.play("id", f"echo {user}")
        self.play("sleep", ":")
        self.play("timeout", 'shift; "$@"')
        for name in commands:
            self.play(name, f'echo "{name} $*" >> {self.calls_file}')

    def play(self, name: str, body: str) -> None:
        path = self._folder / name
        path.write_text(f"#!{self._folder}/bash\n{body}\n")
        path.chmod(0o755)

    def apt_fails(self, times: int) -> None:
        """Installing does, the first times."""
        counter = self._folder / "failed"
        self.play(
            "apt-get",
            f'echo "apt-get $1" >> {self.calls_file}\n'
            f'[ "$1" != install ] && exit 0\n'
            f"echo -n x >> {counter}; read -r seen < {counter} || true\n"
            f"[ ${{#seen}} -gt {times} ]",
        )

    def run(self) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": str(self._folder)}
        return subprocess.run([RUN], env=environ, capture_output=True, text=True, timeout=30)

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


TESTS = ["make test", "make test-long"]


def test_a_browser_that_is_there_is_taken(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1000, ("chromedriver", "apt-get", "make"))
    assert machine.run().returncode == 0
    assert machine.calls == TESTS


@pytest.mark.parametrize("failures", [0, 1])
def test_a_browser_is_installed_at_the_second_attempt_at_last(
    tmp_path: Path, failures: int
) -> None:
    machine = Machine(tmp_path, 0, ("make",))
    machine.apt_fails(failures)
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.calls == ["apt-get update", "apt-get install"] * (failures + 1) + TESTS


def test_no_test_runs_where_no_browser_can_be_installed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0, ("make",))
    machine.apt_fails(2)
    done = machine.run()
    assert done.returncode == 1
    assert "apt-get cannot install chromium and chromium-driver" in done.stderr
    assert machine.calls == ["apt-get update", "apt-get install"] * 2


@pytest.mark.parametrize(("user", "commands"), [(1000, ("apt-get", "make")), (0, ("make",))])
def test_who_may_not_install_is_told_what_is_missing(
    tmp_path: Path, user: int, commands: tuple[str, ...]
) -> None:
    machine = Machine(tmp_path, user, commands)
    done = machine.run()
    assert done.returncode == 1 and machine.calls == []
    assert "no chromedriver: install Chromium" in done.stderr
