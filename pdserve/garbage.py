"""Python's garbage collector in a process that is one worker and nothing else. No other tuning lives here."""

from __future__ import annotations

import gc


def keep_what_is_loaded() -> None:
    """What is there once a worker serves stays for the life of its process: the collector need not walk it.

    Else a full collection walks some 200,000 objects of modules alone (0.1 s) between pages and tokens.
    """
    gc.collect()
    gc.freeze()
