"""The choice of a form of weights by role, CPU and model, as a table; what it is fed; what follows of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.cli.config_show import run
from pdserve.config import Resolved, ServeConfig, WorkerConfig, resolve
from pdserve.config.precision import CpuFacts, ModelFacts, Wish, choose, mixing
from pdserve.errors import ConfigError, ModelError
from pdserve.models.facts import facts_of
from pdserve.types import Role
from pdserve.worker.precision import cpu_facts, settled
from tests.support import tiny_models

P, D, A = Role.PREFILL, Role.DECODE, Role.AGGREGATED
FOUR, EIGHT, PLAIN = ModelFacts(stored_bits=4), ModelFacts(stored_bits=8), ModelFacts()
EXPERTS, LATENT = ModelFacts(experts=True, stored_bits=4), ModelFacts(latent=True)
VNNI, AVX2, NONE = CpuFacts(), CpuFacts(byte_products=False), CpuFacts(kernels=False)
DEFAULT = "smollm2-135m-instruct"


def wish(role: Role, precision: str = "fast", **more: object) -> Wish:
    return Wish(role=role, precision=precision, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "model", "cpu", "weights", "why"),
    [
        (wish(P), FOUR, VNNI, "w8a8", "arithmetic"),
        (wish(A), FOUR, VNNI, "w8a8", "arithmetic"),
        (wish(D), FOUR, VNNI, "w4a8", "has 4-bit codes"),
        (wish(D), EIGHT, VNNI, "w8a8", "no 4-bit codes"),
        (wish(D), PLAIN, VNNI, "w8a8", "no 4-bit codes"),
        (wish(P), FOUR, AVX2, "w8a8", "arithmetic"),
        (wish(D), FOUR, AVX2, "w8a8", "VNNI"),
        (wish(D, kv_mixing="strict"), FOUR, VNNI, "w8a8", "strict"),
        (wish(P), FOUR, NONE, "exact", "kernels"),
        (wish(P), EXPERTS, VNNI, "exact", "experts"),
        (wish(D), EXPERTS, VNNI, "exact", "experts"),
        (wish(D), LATENT, VNNI, "exact", "latent"),
        (wish(D, ranks=2), FOUR, VNNI, "exact", "ranks"),
        (wish(P, "exact"), FOUR, VNNI, "exact", "precision is exact"),
        (wish(D, "exact", weights="w4a8"), PLAIN, AVX2, "w4a8", "asked for"),
        (wish(P, weights="exact"), FOUR, VNNI, "exact", "asked for"),
    ],
)
def test_the_table(asked: Wish, model: ModelFacts, cpu: CpuFacts, weights: str, why: str) -> None:
    choice = choose(asked, model, cpu)
    assert choice.weights == weights
    assert why in choice.why


@pytest.mark.parametrize(
    ("asked", "model", "cpu", "suit"),
    [
        (wish(P), FOUR, VNNI, True),
        (wish(D, weights="exact"), FOUR, VNNI, True),
        (wish(P, "exact"), FOUR, VNNI, False),
        (wish(P), FOUR, AVX2, False),
        (wish(P), LATENT, VNNI, False),
        (wish(P, ranks=2), FOUR, VNNI, False),
        (wish(P), ModelFacts(head_dim=10), VNNI, False),
    ],
)
def test_pages_of_8_bits_by_what_roles_have_in_common(
    asked: Wish, model: ModelFacts, cpu: CpuFacts, suit: bool
) -> None:
    assert choose(asked, model, cpu).int8_pages is suit


@pytest.mark.parametrize(
    ("given", "prefill", "decode", "follows"),
    [
        (None, "exact", "exact", "strict"),
        (None, "w8a8", "w8a8", "strict"),
        (None, "w8a8", "w4a8", "relaxed"),
        (None, None, None, "relaxed"),
        (None, "w8a8", None, "relaxed"),
        ("strict", None, None, "strict"),
        ("relaxed", "exact", "exact", "relaxed"),
    ],
)
def test_mixing_follows_unless_it_is_set(
    given: str | None, prefill: str | None, decode: str | None, follows: str
) -> None:
    assert mixing(given, prefill, decode) == follows


class TestFacts:
    def test_the_default_model_has_4_bit_codes(self) -> None:
        assert facts_of(DEFAULT) == FOUR

    def test_directories_tell_by_their_configuration(self, tmp_path: Path) -> None:
        plain = tiny_models.save(tiny_models.llama(), tmp_path / "plain")
        assert facts_of(str(plain)) == replace(PLAIN, head_dim=16)
        config = json.loads((plain / "config.json").read_text())
        for method, bits in (({"quant_method": "awq", "bits": 4}, 4), ({"quant_method": "fp8"}, 0)):
            (plain / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
            assert facts_of(str(plain)) == ModelFacts(stored_bits=bits, head_dim=16)

    def test_a_model_that_is_not_there_is_named(self) -> None:
        with pytest.raises(ModelError):
            facts_of("nowhere")

    def test_kernels_held_to_avx2_widen_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PDSERVE_KERNEL_ISA", "avx2")
        assert cpu_facts() == AVX2


class TestSettings:
    def test_exact_is_the_default_and_leaves_nothing_open(self) -> None:
        config = ServeConfig().resolved()
        assert (config.precision, config.prefill_weights, config.decode_weights) == ("exact",) * 3
        assert config.kv_mixing == "strict"

    def test_fast_leaves_the_form_to_workers_and_relaxes_mixing(self) -> None:
        config = ServeConfig(precision="fast").resolved()
        assert (config.prefill_weights, config.kv_mixing) == (None, "relaxed")
        made = config.worker(D, secret="", routers=(), run_dir="")
        assert (made.precision, made.weights, made.kv_mixing) == ("fast", None, "relaxed")
        assert ServeConfig(precision="fast", aggregated=1).resolved().kv_mixing == "strict"
        assert ServeConfig(precision="fast", kv_mixing="strict").resolved().kv_mixing == "strict"

    def test_unlike_forms_need_no_second_setting_but_may_not_be_strict(self) -> None:
        unlike = ServeConfig(prefill_weights="w8a8", decode_weights="w4a8")
        assert unlike.resolved().kv_mixing == "relaxed"
        with pytest.raises(ConfigError, match="kv_mixing"):
            replace(unlike, kv_mixing="strict").resolved()
        with pytest.raises(ConfigError, match="kv_mixing"):
            ServeConfig(precision="fast", kv_mixing="strict", prefill_tp=2).resolved()

    def test_several_ranks_may_be_fast_where_they_stay_exact(self) -> None:
        assert ServeConfig(precision="fast", decode_tp=2).resolved().decode_tp == 2
        assert WorkerConfig(worker_id="w", role=D, model="m", precision="fast", tp=2).weights is None

    def test_workers_choose_pages_only_where_all_can_have_the_same(self) -> None:
        assert ServeConfig(precision="fast").resolved().kv_dtype is None
        assert ServeConfig(precision="fast", decode_tp=2).resolved().kv_dtype == "bfloat16"
        assert ServeConfig(precision="fast", decode_page_size=32).resolved().kv_dtype == "bfloat16"
        assert ServeConfig(precision="fast", kv_dtype="bfloat16").resolved().kv_dtype == "bfloat16"

    def test_auto_is_a_value_of_every_source(self) -> None:
        flags = {"precision": "fast", "decode_weights": "auto", "kv_mixing": "auto"}
        config = resolve(ServeConfig, flags=flags).config
        assert (config.decode_weights, config.kv_mixing) == (None, None)
        with pytest.raises(ConfigError, match="decode_weights: must be one of"):
            resolve(ServeConfig, flags={"decode_weights": "w2a8"})

    def test_a_worker_started_alone_chooses_and_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PDSERVE_KERNEL_ISA", "avx2")
        said: list[str] = []
        alone = WorkerConfig(worker_id="w", role=D, model=DEFAULT, precision="fast")
        assert alone.mixing == "relaxed"
        assert settled(WorkerConfig.from_json(alone.to_json()), said.append).weights == "w8a8"
        assert said == [
            "loading the model: w8a8 with KV in bfloat16, without VNNI 4 bits are no faster than 8"
        ]


def test_config_show_tells_what_would_be_chosen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_KERNEL_ISA", "avx2")
    resolved: Resolved[ServeConfig] = resolve(ServeConfig, flags={"precision": "fast"})
    run(resolved, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["prefill_weights"]["value"] == "w8a8 (auto)"
    assert "arithmetic" in shown["prefill_weights"]["why"]
    assert shown["kv_mixing"]["value"] == "relaxed (auto)"
    run(replace(resolved, config=ServeConfig(precision="fast", model="nowhere")), as_json=False)
    assert "decode_weights: the worker chooses; here " in capsys.readouterr().out
