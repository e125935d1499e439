"""`pdserve` as a process of its own that Ctrl-C reaches, wherever the tests run.

A shell starts what runs in its background with SIGINT ignored, and children inherit that: tests that send it
would wait for ever.
"""

from __future__ import annotations

import sys

_START = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from pdserve.cli.main import main
main()
"""
INTERRUPTIBLE = (sys.executable, "-c", _START)
"""Arguments before those of `pdserve`."""
