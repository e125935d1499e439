"""`--kv-dtype`: what it resolves to, and everything it is refused for, in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.plan import pairing_problem
from pdserve.config.serve import ServeConfig
from pdserve.config.worker import WorkerConfig
from pdserve.engine.runner import page_layout
from pdserve.errors import ConfigError
from pdserve.kvcache.layout import PageLayout
from pdserve.models.loader import load_model
from pdserve.types import CapabilityRecord, Role
from tests.support import tiny_models, tiny_moe

WORKER = WorkerConfig(worker_id="w", role=Role.DECODE, model="m")


def record(dtype: str, page_size: int = 16) -> CapabilityRecord:
    layout = PageLayout(
        num_layers=2, num_kv_heads=3, head_dim=64, page_size=page_size, dtype=dtype, inner=f"of {dtype}"
    )
    return CapabilityRecord(
        layout=layout.fingerprint(), numerics="n", model="aa", tokenizer="bb", dtype=dtype,
        page_size=page_size, page_bytes=layout.page_bytes, transports=("shm", "tcp"),
    )  # fmt: skip


class TestSettings:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_pages_are_of_the_models_type_unless_asked_otherwise(self, dtype: str) -> None:
        for given, wanted in ((None, dtype), (dtype, dtype), ("int8", "int8")):
            serve = ServeConfig(dtype=dtype, kv_dtype=given).resolved()
            for role in (Role.PREFILL, Role.DECODE):
                worker = serve.worker(role, secret="", routers=(), run_dir="")
                assert worker.page_dtype == wanted
                assert WorkerConfig.from_json(worker.to_json()).page_dtype == wanted

    def test_other_float_types_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="kv_dtype: a model in bfloat16"):
            ServeConfig(kv_dtype="float32").resolved()
        with pytest.raises(ConfigError, match="kv_dtype: a model in float32"):
            replace(WORKER, dtype="float32", kv_dtype="bfloat16")

    def test_several_ranks_are_refused(self) -> None:
        for ranks in ({"prefill_tp": 2}, {"decode_tp": 2}):
            with pytest.raises(ConfigError, match="kv_dtype: workers of several ranks"):
                ServeConfig(kv_dtype="int8", **ranks).resolved()
        with pytest.raises(ConfigError, match="kv_dtype: workers of several ranks"):
            replace(WORKER, kv_dtype="int8", tp=2)

    def test_unlike_page_sizes_are_refused(self) -> None:
        unlike = ServeConfig(prefill_page_size=32)
        unlike.resolved()
        with pytest.raises(ConfigError, match=r"kv_dtype: .*one page size"):
            replace(unlike, kv_dtype="int8").resolved()


class TestModels:
    def test_latent_pages_are_refused(self, tmp_path: Path) -> None:
        model = load_model(str(tiny_models.save(tiny_moe.deepseek_v2(), tmp_path)), "float32")
        with pytest.raises(ConfigError, match=r"kv_dtype: .*MLA"):
            page_layout(model.config, page_size=16, dtype="int8")

    def test_a_mixture_has_them(self, tmp_path: Path) -> None:
        model = load_model(str(tiny_models.save(tiny_moe.mixtral(), tmp_path)), "float32")
        assert page_layout(model.config, page_size=16, dtype="int8").dtype == "int8"


class TestPairs:
    """A worker with int8 pages registers no layout that could be re-laid."""

    def test_equal_ones_fit(self) -> None:
        assert pairing_problem(record("int8"), record("int8"), "strict") is None

    @pytest.mark.parametrize("mixing", ["strict", "relaxed"])
    def test_unlike_types_do_not(self, mixing: str) -> None:
        for one, other in (("int8", "bfloat16"), ("bfloat16", "int8")):
            problem = pairing_problem(record(one), record(other), mixing)  # type: ignore[arg-type]
            assert problem == f"the KV dtype differs: {one} at prefill, {other} at decode."

    def test_nor_do_unlike_page_sizes(self) -> None:
        problem = pairing_problem(record("int8"), record("int8", 32), "relaxed")
        assert problem == "the page size in tokens differs: 16 at prefill, 32 at decode."
