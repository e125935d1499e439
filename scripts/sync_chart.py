"""Brings into the Helm chart what is written elsewhere: dashboards, rules, and the schema of settings.

A chart has to be whole by itself, so it holds copies; `--check` only says whether they are up to date.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from pdserve.config import ServeConfig
from pdserve.config.fields import SIZE_PATTERN, FieldInfo, field_types, info_of
from router.config import RouterConfig

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "pdserve"
SCHEMA = CHART / "values.schema.json"
COPIES = {
    "dashboards": (ROOT / "deploy" / "grafana" / "dashboards", "*.json"),
    "rules": (ROOT / "deploy" / "prometheus" / "rules", "*.yml"),
}
_TELEMETRY = {"otlp_endpoint", "log_format", "log_level"}
_TLS = {"insecure", "tls_ca", "tls_cert", "tls_key", "tls_server_name"}
_BOTH = {"host", "port", "metrics_port", "http_port", "served_model_name", "secret_file", "drain_timeout_s"}
_BOTH |= {"api_key", "api_key_file"} | _TELEMETRY | _TLS
SET_BY_CHART = {
    "engine": _BOTH
    | {"model", "prefill", "decode", "aggregated", "aggregated_tp", "aggregated_experts"}
    | {"aggregated_weights", "http", "max_model_len", "ray_address", "routers", "threads", "fleet_name"}
    | {"exclusive_nodes", "fleet_port", "worker_metrics_port", "start_timeout_s", "vllm_port"},
    "routerSettings": _BOTH | {"metrics", "jwt_jwks_file"},
}
"""Settings that other values of the chart stand for, or that have no meaning there."""


def settings_schema(cls: type[Any], left_out: set[str]) -> dict[str, Any]:
    """A JSON schema of the settings of a component that an operator may give, all optional."""
    kinds = field_types(cls)
    fields = [field for field in dataclasses.fields(cls) if field.name not in left_out]
    shown = [field for field in fields if not (info_of(field).hidden or info_of(field).secret)]
    properties = {field.name: _value(kinds[field.name], info_of(field)) for field in shown}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _value(kind: Any, info: FieldInfo) -> dict[str, Any]:
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    schema: dict[str, Any] = {"description": info.help + (f" Unit: {info.unit}." if info.unit else "")}
    if typing.get_origin(kind) is tuple:
        items = {"type": "string"} | ({"enum": list(info.choices)} if info.choices else {})
        return schema | {"type": "array", "items": items}
    if kind is int and info.unit == "bytes":
        schema["type"] = ["integer", "string"]
        schema["pattern"] = SIZE_PATTERN
    else:
        schema["type"] = {bool: "boolean", int: "integer", float: "number"}.get(kind, "string")
    if info.choices:
        schema["enum"] = list(info.choices)
    limits = {"minimum": info.minimum, "maximum": info.maximum}
    return schema | {name: limit for name, limit in limits.items() if limit is not None}


def wanted() -> dict[Path, str]:
    """What the generated files should hold, by path."""
    schema = json.loads(SCHEMA.read_text("utf-8"))
    for name, cls in (("engine", ServeConfig), ("routerSettings", RouterConfig)):
        schema["properties"][name] = settings_schema(cls, SET_BY_CHART[name])
    files = {SCHEMA: json.dumps(schema, indent=2) + "\n"}
    for folder, (source, pattern) in COPIES.items():
        for path in sorted(source.glob(pattern)):
            files[CHART / "files" / folder / path.name] = path.read_text("utf-8")
    return files


def stale(files: dict[Path, str]) -> list[Path]:
    """Copies of what is no longer there."""
    present = [path for folder in COPIES for path in (CHART / "files" / folder).glob("*") if path.is_file()]
    return sorted(path for path in present if path not in files)


def main(argv: list[str]) -> int:
    """Exit code 1 when --check finds a difference."""
    files = wanted()
    different = [path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
    gone = stale(files)
    for path in (*different, *gone):
        print(path.relative_to(ROOT))
    if "--check" in argv:
        return 1 if different or gone else 0
    for path in different:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path], "utf-8")
    for path in gone:
        path.unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
