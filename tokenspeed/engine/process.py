"""The engine process: `python -m tokenspeed.engine.process`, started by an `EngineClient`.

    stdin    one line of JSON (`messages.Launch`); then silence, and its end is the parent's end
    socket   messages in, one message a step and client out
    stderr   the log, and last words

Nothing here imports torch: importing it takes seconds, so what can go on beside it begins before.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path

from tokenspeed.engine import cuda_context
from tokenspeed.engine.child import end_with_parent, read_orders
from tokenspeed.engine.link import EngineLink
from tokenspeed.engine.messages import Launch
from tokenspeed.log import setup_logging
from tokenspeed.spans import process_import, span

_SERVING = "tokenspeed.engine.serving"


def main() -> int:
    """Run the process; its exit code."""
    os.dup2(2, 1)  # what a library prints belongs to the log
    launch = read_orders(Launch)
    end_with_parent(lambda: _remove_socket(launch.address))
    setup_logging(launch.config.server.log_level)
    if launch.config.model.device != "cpu":
        cuda_context.begin()
    gc.disable()  # nearly all that a start makes stays, so looking for garbage only costs time
    serving = importlib.import_module(_SERVING)
    process_import()
    link = EngineLink(launch.address)
    try:
        with span("engine.connect"):
            link.wait_for_client()
        status: int = serving.load_and_serve(launch, link)
        return status
    finally:
        link.close()


def _remove_socket(address: str) -> None:
    path = Path(address.removeprefix("ipc://"))
    path.unlink(missing_ok=True)
    if path.parent.exists() and not any(path.parent.iterdir()):
        path.parent.rmdir()


if __name__ == "__main__":
    sys.exit(main())
