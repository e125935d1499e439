"""Log lines on stderr: one JSON object or one plain line a record, with fields, and never a prompt.

Here: how the records of Python's own logging, which all code uses through `logging.getLogger(__name__)`,
become lines (structlog's processors). Not here: metrics, and what is worth a line.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TextIO

import structlog

from pdserve.config.telemetry import TelemetrySettings
from pdserve.errors import ConfigError, PdserveError

PRIVATE_FIELDS = frozenset(
    {"prompt", "messages", "content", "text", "token_ids", "completion", "stop", "ticket"}
)
"""Fields that hold what users wrote or got, or secrets: left out unless prompts are asked for."""
MAX_VALUE_CHARS = 2048
_EXTRA = "pdserve_fields"
_ROOT = "pdserve_handler"

Event = MutableMapping[str, Any]
Processor = Callable[[Any, str, Event], Any]


def fields(**values: Any) -> dict[str, Any]:
    """Fields of one record: `log.info("request ended", extra=fields(request_id=..., outcome=...))`."""
    return {_EXTRA: values}


def log_as(settings: TelemetrySettings, service: str, **about: object) -> None:
    """Sets a process's logging up as its settings say. service, about: what the process is, in every line,
    such as its worker's name. Raises ConfigError."""
    setup_logging(
        form=settings.log_format,
        level=settings.log_level,
        service=service,
        about=about,
        log_prompts=settings.log_prompts,
    )


def setup_logging(
    *,
    form: str = "text",
    level: str = "INFO",
    service: str = "",
    about: Mapping[str, object] | None = None,
    stream: TextIO | None = None,
    log_prompts: bool = False,
) -> None:
    """Sends all records at `level` and above to stderr (or `stream`). Calling again replaces the set-up.

    form: "json" or "text". service, about: name and further fields of this process, in each line. Raises
    ConfigError.
    """
    if form not in ("json", "text"):
        raise ConfigError("log_format: must be json or text")
    if not isinstance(logging.getLevelName(level.upper()), int):
        raise ConfigError("log_level: must be DEBUG, INFO, WARNING, ERROR or CRITICAL")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.set_name(_ROOT)
    constant = {"service": service, **{k: _plain(v) for k, v in (about or {}).items()}}
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[_told(constant, log_prompts), _json if form == "json" else _text]
        )
    )
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.get_name() == _ROOT or _says_it_too(h)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


def _says_it_too(handler: logging.Handler) -> bool:
    """Whether this is a plain handler to the terminal, such as logging.basicConfig leaves."""
    return type(handler) is logging.StreamHandler and handler.stream is sys.stderr


def _told(constant: Mapping[str, Any], log_prompts: bool) -> Processor:
    """What a line says. The head comes first, and no field of a record can take the place of any of it."""

    def processor(_logger: Any, _name: str, event: Event) -> Event:
        record: logging.LogRecord = event["_record"]
        head = {
            "time": round(record.created, 6),
            "level": record.levelname,
            **constant,
            "logger": record.name,
            "message": event["event"],
        }
        given: Mapping[str, Any] = getattr(record, _EXTRA, {})
        rest = {k: _plain(v) for k, v in given.items() if log_prompts or k not in PRIVATE_FIELDS}
        rest |= _failure(event.get("exc_info"))
        return head | {k: v for k, v in rest.items() if k not in head}

    return processor


def _failure(raised: Any) -> dict[str, str]:
    """A user's error is told by its label; only our own failures need their traceback."""
    if not raised or raised[1] is None:
        return {}
    error = raised[1]
    if isinstance(error, PdserveError):
        return {"error": error.label}
    text = logging.Formatter().formatException(raised)
    return {"error": type(error).__name__, "traceback": text[-4 * MAX_VALUE_CHARS :]}


def _json(_logger: Any, _name: str, event: Event) -> str:
    """One JSON object: time (seconds since 1970), level, service, logger, message and the fields."""
    return json.dumps(event, ensure_ascii=True, allow_nan=False)


def _text(_logger: Any, _name: str, event: Event) -> str:
    """One line for people: time (UTC), level, service, message and the fields as name=value, without
    empty ones."""
    del event["logger"]
    created, level, message = event.pop("time"), event.pop("level"), _one_line(event.pop("message"))
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
    traceback = str(event.pop("traceback", ""))
    service = f" {event.pop('service')}".rstrip()
    rest = "".join(f" {k}={_quoted(v)}" for k, v in event.items() if v not in ("", None))
    line = f"{at}.{int(created % 1 * 1000):03}Z {level:<7}{service} {message}{rest}"
    more = "".join(f"\n  {_one_line(each)}" for each in traceback.splitlines())
    return line + more


def _plain(value: Any) -> Any:
    """A value as JSON takes it, bounded in size."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)[:MAX_VALUE_CHARS]


def _quoted(value: Any) -> str:
    text = _one_line(str(value))
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "=\\') else text


def _one_line(text: str) -> str:
    """Control characters escaped, so that no value can forge a line or drive a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
