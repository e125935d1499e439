"""Imports beyond import-linter: what pure modules name, package roots, and what the client needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import PRODUCT, ROOT, Source, imports, sources, within

IMPURE = frozenset({"asyncio", "time", "random", "threading", "socket", "torch", "grpc", "ray"})
PURE_FILES = (
    "kvtransfer/verdict.py",
    *(
        f"router/{name}.py"
        for name in ("admission", "clocks", "explain", "ledger", "membership", "policy", "lifecycle", "room")
    ),
    *(f"prefill_worker/{name}.py" for name in ("loop", "entry", "digests", "holds", "replies")),
    *(f"decode_worker/{name}.py" for name in ("loop", "entry", "pulls", "replies", "reserve", "sequences")),
    *("kvtransfer/stamps.py", "pdserve/worker/core.py", "pdserve/fleet/supervise.py"),
    *(f"pdserve/parallel/expert_{part}.py" for part in ("loads", "snapshot")),
    *(f"pdserve/parallel/{name}.py" for name in ("coverage", "rebalance", "rebalance_events")),
    *(f"pdserve/parallel/placement{part}.py" for part in ("", "_bound", "_pack", "_table")),
    *("pdserve/parallel/shards.py", "pdserve/ranks/plans.py"),
)
PURE_FOLDERS = ("pdserve/kvcache/", "pdserve/sched/", "kvtransfer/session/", "kvtransfer/plan/")
IMPURE_FILES = frozenset({"pdserve/kvcache/pool.py"})
TOP = frozenset({"planner", "benchmarks", "tests", "pdserve.cli"})
PROBE = """
import json, sys, time
before = time.process_time()
import pdserve.client
spent = time.process_time() - before
files = {n: getattr(m, "__file__", None) or "" for n, m in sys.modules.items()}
packaged = sorted({n.partition(".")[0] for n, f in files.items() if "site-packages" in f})
print(json.dumps({"spent": spent, "packaged": packaged, "modules": sorted(sys.modules)}))
"""


def pure_sources() -> list[Source]:
    return [
        source
        for source in sources(*PRODUCT)
        if source.name in PURE_FILES or source.name.startswith(PURE_FOLDERS)
        if source.name not in IMPURE_FILES
    ]


def test_pure_modules_import_nothing_impure() -> None:
    found = [
        f"{source.name}:{line}: {module}"
        for source in pure_sources()
        for line, module in imports(source.tree)
        if within(module, IMPURE)
    ]
    assert found == []


def test_all_pure_modules_are_there() -> None:
    names = {source.name for source in pure_sources()}
    assert names >= set(PURE_FILES)
    assert all(any(name.startswith(folder) for name in names) for folder in PURE_FOLDERS)


def test_only_the_pool_of_kvcache_knows_torch_and_no_package_root_imports_it() -> None:
    for source in sources("pdserve"):
        if source.name.startswith("pdserve/kvcache/") and source.name not in IMPURE_FILES:
            assert not any(within(module, ("torch",)) for _, module in imports(source.tree)), source.name
        if source.name == "pdserve/kvcache/__init__.py":
            assert "pool" not in {m.rpartition(".")[2] for _, m in imports(source.tree)}


def test_nothing_imports_the_top_of_the_tree() -> None:
    found = [
        f"{source.name}:{line}: {module}"
        for source in sources("pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer")
        if not source.name.startswith("pdserve/cli/")
        for line, module in imports(source.tree)
        if within(module, TOP)
    ]
    assert found == []


def probe() -> dict[str, object]:
    """What a fresh process has loaded after `import pdserve.client`."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    told: dict[str, object] = json.loads(done.stdout)
    return told


def test_the_client_needs_grpc_and_protobuf_only() -> None:
    told = probe()
    modules = told["modules"]
    assert isinstance(modules, list)
    assert not {"torch", "ray", "numpy", "tokenizers", "jinja2", "prometheus_client", "typer"} & set(modules)
    packaged = told["packaged"]
    assert isinstance(packaged, list)
    # Generated code and grpc bring these; a .pth file's own loader may start with an underscore.
    extra = {p for p in packaged if not p.startswith("_")} - {
        "grpc",
        "google",
        "typing_extensions",
        "pdserve",
    }
    assert extra == set()


def test_importing_the_client_is_cheap() -> None:
    # CPU seconds, and the best of a few: other work on the machine must not decide.
    best = min(float(str(probe()["spent"])) for _ in range(4))
    assert best < 0.3, f"import pdserve.client took {best:.3f} s of CPU; it may take 0.3"


@pytest.mark.parametrize("service", ["router", "prefill_worker", "decode_worker", "kvtransfer"])
def test_services_are_imported_from_this_tree(service: str) -> None:
    module = __import__(service)
    assert module.__file__ is not None
    assert Path(module.__file__).is_relative_to(ROOT)


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
