"""What the HTTP processes of one server have in common, as one of them holds it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.server.key_places import KeyCounts, KeyPlaces
from tokenspeed.server.queue_table import QueueTable
from tokenspeed.server.response_store import Responses, ResponseStore
from tokenspeed.server_config import ServerConfig


@dataclass(frozen=True, kw_only=True)
class Shared:
    """`number` counts the processes that were started: number 0 is the first, whose process id is
    `first_pid`; the engine is its child, and so are the others. `created`: seconds since the epoch.
    """

    number: int
    first_pid: int
    created: int
    queue: QueueTable
    responses: Responses
    places: KeyPlaces
    metrics_folder: Path | None = None
    """Where all of them write their metrics; None: there is one process."""


def share_metrics(folder: Path) -> None:
    """Have this process count in files of `folder`, as prometheus_client does for several. It looks
    when it is imported, which must come later.
    """
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)


def alone(server: ServerConfig) -> Shared:
    """What a process has that is the only one."""
    return Shared(
        number=0,
        first_pid=os.getpid(),
        created=int(time.time()),
        queue=QueueTable.alone(),
        responses=ResponseStore(server.response_store_bytes, server.response_store_ttl),
        places=KeyCounts(),
    )
