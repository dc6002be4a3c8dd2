"""When an HTTP process looks for garbage: it looks at all that its requests hold, and no stream
goes on meanwhile, for 30 ms if there are 256.

Almost everything is freed without a search. Tokens leave nothing to be found, and a step of a
thousand streams has fewer objects under way than start one; requests leave some, and do.
"""

from __future__ import annotations

import gc

THRESHOLDS = (20_000, 5, 2)
"""As `gc.set_threshold` has them. A request makes some 200 objects that are searched, and leaves
60: all are found before a thousand requests have left theirs."""


def collect_rarely() -> None:
    """For a process that does nothing else than serve."""
    gc.set_threshold(*THRESHOLDS)
