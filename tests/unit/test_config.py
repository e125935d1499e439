"""Settings: precedence, origins, refusals, JSON to a worker and back, and the generated page."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cli.components import COMPONENTS
from pdserve.config import ServeConfig, WorkerConfig, resolve
from pdserve.config.codec import from_mapping
from pdserve.config.document import page
from pdserve.config.fields import field_types, info_of, parse_size, show
from pdserve.errors import ConfigError
from pdserve.types import Role

REPO = Path(__file__).resolve().parents[2]


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "pdserve.toml"
    file.write_text(text, "utf-8")
    return file


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, 'port = 1\nprefill = 2\ndecode = 3\nkv_memory = "2GiB"\n')
    environ = {"PDSERVE_PORT": "2", "PDSERVE_PREFILL": "4", "HOME": "/"}
    result = resolve(ServeConfig, file=file, environ=environ, flags={"port": 3, "host": None})
    config = result.config
    assert (config.port, config.prefill, config.decode, config.kv_memory) == (3, 4, 3, 2**31)
    origins = [result.origins[name] for name in ("port", "prefill", "decode", "host")]
    assert origins == ["--port", "PDSERVE_PREFILL", "file", "default"]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("ports = 1", "ports"),
        ("port = 70000", "port"),
        ("port = true", "port"),
        ('dtype = "float64"', "dtype"),
        ("deterministic = 3", "deterministic"),
        ('kv_memory = "lots"', "kv_memory"),
        ("prefill = -1", "prefill"),
        ("lease_s = nan", "lease_s"),
        ("[unheard]\na = 1", "unheard"),
        ("port = ", "config"),
    ],
)
def test_wrong_file_entry_is_refused_by_name(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}:"):
        resolve(ServeConfig, file=write(tmp_path, text))


def test_missing_file_is_refused_without_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can not be read") as caught:
        resolve(ServeConfig, file=tmp_path / "absent.toml")
    assert str(tmp_path) not in str(caught.value)


def test_unknown_variable_is_refused_and_other_components_are_left_alone() -> None:
    others = {"PDSERVE_FLEET_SECRET": "x", "PDSERVE_ROUTER_PORT": "1", "PDSERVE_CONFIG": "f"}
    assert resolve(ServeConfig, environ=others).config == ServeConfig()
    with pytest.raises(ConfigError, match="PDSERVE_PREFIL:"):
        resolve(ServeConfig, environ={"PDSERVE_PREFIL": "1"})


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        ({}, {Role.PREFILL: 1, Role.DECODE: 1}),
        ({"aggregated": 2}, {Role.AGGREGATED: 2}),
        ({"aggregated": 1, "prefill": 2, "decode": 1}, {Role.PREFILL: 2, Role.DECODE: 1, Role.AGGREGATED: 1}),
    ],
)
def test_auto_worker_counts(flags: dict[str, object], counts: dict[Role, int]) -> None:
    assert resolve(ServeConfig, flags=flags).config.resolved().wanted() == counts


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"prefill": 1, "decode": 0}, "prefill: .*both or neither"),
        ({"prefill": 0, "decode": 0}, "aggregated: no workers"),
        ({"host": "0.0.0.0"}, "host: .*--insecure"),
        ({"host": "router.example"}, "host: .*--insecure"),
    ],
)
def test_settings_that_do_not_go_together(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(ServeConfig, flags=flags).config.resolved()


def test_beyond_loopback_is_possible_when_asked_for() -> None:
    assert ServeConfig(host="0.0.0.0", insecure=True).resolved().host == "0.0.0.0"
    assert ServeConfig(host="127.0.0.9").resolved().host == "127.0.0.9"


@pytest.mark.parametrize(("flag", "port"), [({}, 0), ({"worker_metrics_port": "9465"}, 9465)])
def test_workers_have_a_port_of_metrics_unless_told_otherwise(flag: dict[str, object], port: int) -> None:
    def of_worker(flags: dict[str, object]) -> int | None:
        serve = resolve(ServeConfig, flags=flags).config.resolved()
        config = serve.worker(Role.DECODE, secret="ab" * 32, routers=("127.0.0.1:5",), run_dir="/r")
        return config.metrics_port

    assert of_worker(flag) == port
    assert of_worker({"worker_metrics_port": "auto"}) is None


def test_worker_config_survives_json_and_hides_its_secret() -> None:
    serve = ServeConfig(deterministic=True, transport="tcp", threads=2).resolved()
    config = serve.worker(Role.PREFILL, secret="ab" * 32, routers=("127.0.0.1:5",), run_dir="/r")
    assert WorkerConfig.from_json(config.to_json()) == config
    assert (config.nice, config.transports, config.secret_bytes) == (10, ("tcp",), b"\xab" * 32)
    assert "abab" not in repr(config)


@pytest.mark.parametrize("text", ["[]", "{", '{"worker_id": "a"}', '{"nope": 1}'])
def test_bad_worker_json_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        WorkerConfig.from_json(text)


@given(st.integers(min_value=0, max_value=2**50))
def test_size_as_shown_parses_back(size: int) -> None:
    field = next(f for f in dataclasses.fields(ServeConfig) if f.name == "kv_memory")
    assert parse_size(show(size, info_of(field))) == size


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("1.5GiB", 3 * 2**29), (" 7 MB ", 7 * 10**6), (".5k", 512), ("2.b", 2)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "48Gi", "banana", "1..5", "-1", "1e3", "GiB", "9" * 400])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size"):
        parse_size(text)


@given(st.dictionaries(st.sampled_from(sorted(field_types(ServeConfig))), st.text() | st.integers()))
def test_any_plain_values_give_a_config_or_a_named_refusal(raw: dict[str, object]) -> None:
    refused = ""
    try:
        config = from_mapping(ServeConfig, raw)
    except ConfigError as err:
        refused = str(err).split(":")[0]
    assert refused in raw if refused else isinstance(config, ServeConfig)


def test_every_setting_is_documented_and_the_page_is_up_to_date() -> None:
    fields = [field for _, _, cls in COMPONENTS for field in dataclasses.fields(cls)]
    assert [field.name for field in fields if not info_of(field).help] == []
    assert page(COMPONENTS) == (REPO / "docs" / "configuration.md").read_text("utf-8")
