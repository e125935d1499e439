"""A signal while Ray is imported: `pdserve up` ends as at any other moment, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys

class Interrupted:
    '''The signal comes in the midst of Ray's import, when some of its modules are there already.'''

    def find_spec(self, name, path=None, target=None):
        if name == "ray._private.worker":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt
        return None

sys.meta_path.insert(0, Interrupted())
from pdserve.fleet.cluster import local_ray
try:
    with local_ray():
        raise SystemExit("it started")
except KeyboardInterrupt:
    print("interrupted", "ray" in sys.modules)
"""


def test_an_import_that_is_interrupted_is_not_begun_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["interrupted", "False"]
