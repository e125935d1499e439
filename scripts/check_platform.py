"""Says in one sentence why pdserve can not be installed here; silent where it can. Needs only some Python 3.

Run by `make install` before anything is downloaded, with the interpreter the virtual environment will use.
"""

import importlib.util
import platform
import shutil
import sys

MACHINES = ("x86_64", "aarch64")


def problem(system: str, machine: str, version: "tuple[int, int]", has_compiler: bool, has_venv: bool) -> str:
    """One sentence, or an empty string. Annotations are text so that old interpreters get this far."""
    if system != "Linux" or machine not in MACHINES:
        return f"pdserve runs on Linux on x86_64 or aarch64; this is {system} on {machine}."
    if not (3, 11) <= version < (3, 13):
        found = f"{version[0]}.{version[1]}"
        return (
            f"pdserve needs Python 3.11 or 3.12 and this is {found}; name one: make install PYTHON=python3.12"
        )
    if not has_compiler:
        return "pdserve compiles small C++ kernels and finds no compiler; install g++ or clang++."
    if not has_venv:
        return "this Python has no venv module; install it (on Debian and Ubuntu: the python3-venv package)."
    return ""


def main() -> int:
    """Exit code 1 with the sentence on stderr if something is missing."""
    compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
    text = problem(platform.system(), platform.machine(), sys.version_info[:2], compiler, venv)
    if text:
        print(text, file=sys.stderr)
    return 1 if text else 0


if __name__ == "__main__":
    sys.exit(main())
