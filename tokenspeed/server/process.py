"""One more HTTP process of a server: `python -m tokenspeed.server.process`, started by `Siblings`.

    stdin    one line of JSON (`coordinator_messages.Orders`); then silence, whose end is the
             parent's end
    sockets  the engine's, the parent's coordinator, and the server's port
    stderr   the log, which is the parent's

It ends when the coordinator says so: what a signal means is for the parent to decide. SIGTERM sent
to it alone lets it drain, and its parent starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
import signal
import sys
from pathlib import Path

import uvloop

from tokenspeed.engine.child import end_with_parent, read_orders
from tokenspeed.log import setup_logging
from tokenspeed.server.coordinator_messages import Orders
from tokenspeed.server.garbage import collect_rarely
from tokenspeed.server.sharing import share_metrics

_RUN = "tokenspeed.server.sibling"
"""Imported when it is known where metrics go: their library looks at once."""


def main() -> int:
    """Run the process; its exit code."""
    os.dup2(2, 1)  # what a library prints belongs to the log
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    orders = read_orders(Orders)
    folder = Path(orders.folder)
    end_with_parent(lambda: _remove(folder))
    setup_logging(orders.config.server.log_level, f"HTTP process {orders.row}")
    share_metrics(folder)
    collect_rarely()
    run = importlib.import_module(_RUN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status: int = runner.run(run.run_sibling(orders))
        return status


def _remove(folder: Path) -> None:
    """The parent is gone: whoever is last leaves nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


if __name__ == "__main__":
    sys.exit(main())
