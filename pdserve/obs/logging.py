"""Log lines on stderr: one JSON object or one plain line a record, with fields, and never a prompt.

Here: the set-up of Python's own logging, which all code uses through `logging.getLogger(__name__)`. Not here:
metrics, and what is worth a line.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from pdserve.errors import ConfigError, PdserveError

PRIVATE_FIELDS = frozenset(
    {"prompt", "messages", "content", "text", "token_ids", "completion", "stop", "ticket"}
)
"""Fields that hold what users wrote or got, or secrets: left out unless prompts are asked for."""
MAX_VALUE_CHARS = 2048
_EXTRA = "pdserve_fields"
_ROOT = "pdserve_handler"


def fields(**values: Any) -> dict[str, Any]:
    """Fields of one record: `log.info("request ended", extra=fields(request_id=..., outcome=...))`."""
    return {_EXTRA: values}


def setup_logging(
    *,
    form: str = "text",
    level: str = "INFO",
    service: str = "",
    stream: TextIO | None = None,
    log_prompts: bool = False,
) -> None:
    """Sends all records at `level` and above to stderr (or `stream`). Calling again replaces the set-up.

    form: "json" or "text". service: name of this process in each line. Raises ConfigError.
    """
    if form not in ("json", "text"):
        raise ConfigError("log_format: must be json or text")
    if not isinstance(logging.getLevelName(level.upper()), int):
        raise ConfigError("log_level: must be DEBUG, INFO, WARNING, ERROR or CRITICAL")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.set_name(_ROOT)
    handler.setFormatter(
        (JsonLines if form == "json" else TextLines)(service=service, log_prompts=log_prompts)
    )
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.get_name() == _ROOT]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


class _Lines(logging.Formatter):
    def __init__(self, *, service: str, log_prompts: bool) -> None:
        super().__init__()
        self._service, self._log_prompts = service, log_prompts

    def parts(self, record: logging.LogRecord) -> dict[str, Any]:
        """The fields of a record, cleaned, and what an exception adds."""
        given: Mapping[str, Any] = getattr(record, _EXTRA, {})
        found = {k: _plain(v) for k, v in given.items() if self._log_prompts or k not in PRIVATE_FIELDS}
        if record.exc_info and (error := record.exc_info[1]) is not None:
            # A user's error is told by its label; only our own failures need their trace.
            found["error"] = error.label if isinstance(error, PdserveError) else type(error).__name__
            if not isinstance(error, PdserveError):
                found["trace"] = self.formatException(record.exc_info)[-4 * MAX_VALUE_CHARS :]
        return found


class JsonLines(_Lines):
    """One JSON object a line: time (seconds since 1970), level, service, logger, message and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        head = {
            "time": round(record.created, 6),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        return json.dumps({**self.parts(record), **head}, ensure_ascii=True, allow_nan=False)


class TextLines(_Lines):
    """One line for people: time (UTC), level, service, message and the fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts = self.parts(record)
        trace = str(parts.pop("trace", ""))
        rest = "".join(f" {k}={_quoted(v)}" for k, v in parts.items())
        name = f" {self._service}" if self._service else ""
        line = (
            f"{at}.{int(record.msecs):03}Z {record.levelname:<7}{name} {_one_line(record.getMessage())}{rest}"
        )
        return f"{line}\n{trace}" if trace else line


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
