"""Asking a Prometheus over its HTTP API: queries at one moment and over a time.

What does not live here: which queries (`pdserve.obs.dashboards`), and what becomes of the answers.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from pdserve.errors import ConfigError, PdserveError, Unavailable

TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 64 * 2**20
MAX_POINTS = 11_000
"""Prometheus answers no more points of a series at once."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of an answer. points: (seconds since 1970, value); values may be NaN or infinite."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """One server. Its methods block."""

    def __init__(self, url: str) -> None:
        """url: with http:// or https://. Raises ConfigError."""
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError("prometheus: must be an address that begins with http:// or https://")
        self._url = url.rstrip("/")

    def query(self, promql: str, at_s: float | None = None) -> list[Series]:
        """The series at one moment, now if not told: one point each, a scalar without labels.

        Raises ConfigError for a query that Prometheus does not understand, Unavailable if it is not there.
        """
        moment = {} if at_s is None else {"time": repr(at_s)}
        return _series(self.ask("query", {"query": promql, **moment}))

    def query_range(self, promql: str, begin_s: float, end_s: float, step_s: float) -> list[Series]:
        """The series from `begin_s` to `end_s`, a point each `step_s`. Raises as `query` does."""
        if not (step_s > 0 and begin_s <= end_s and (end_s - begin_s) / step_s < MAX_POINTS):
            raise ConfigError(f"step: gives more than {MAX_POINTS} points, or none; choose another")
        fields = {"query": promql, "start": repr(begin_s), "end": repr(end_s), "step": repr(step_s)}
        return _series(self.ask("query_range", fields))

    def ask(self, path: str, fields: dict[str, str] | None = None) -> Any:
        """What it answers to /api/v1/<path>. Raises as `query` does."""
        text = urllib.parse.urlencode(fields or {})
        request = urllib.request.Request(f"{self._url}/api/v1/{path}?{text}")  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                body = answer.read(MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise _refused(error) from None
        except OSError:
            raise Unavailable("Prometheus does not answer there; is it running?") from None
        if len(body) > MAX_ANSWER_BYTES:
            raise ConfigError("prometheus: its answer is too large; ask for less time or larger steps")
        return _data(body)


def _refused(error: urllib.error.HTTPError) -> PdserveError:
    try:
        why = str(json.loads(error.read(65_536))["error"])[:500]
    except (ValueError, KeyError, TypeError, OSError):
        why = f"status {error.code}"
    if error.code in (400, 422):
        return ConfigError(f"prometheus: refuses the query: {why}")
    return Unavailable(f"Prometheus does not answer the query: {why}")


def _data(body: bytes) -> Any:
    try:
        answer = json.loads(body)
        if answer["status"] == "success":
            return answer["data"]
    except (ValueError, KeyError, TypeError):
        pass
    raise Unavailable("What answers at that address is no Prometheus.")


def _series(data: Any) -> list[Series]:
    try:
        if data["resultType"] == "scalar":
            return [Series({}, (_point(data["result"]),))]
        return [
            Series(
                {str(name): str(value) for name, value in one["metric"].items()},
                tuple(_point(point) for point in one.get("values") or [one["value"]]),
            )
            for one in data["result"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Unavailable("What answers at that address is no Prometheus.") from None


def _point(point: Any) -> tuple[float, float]:
    moment, value = point
    return float(moment), float(value)


def finite(value: float) -> float | None:
    """A value to draw or to write as JSON; None for NaN and infinities, which mean that there is none."""
    return value if math.isfinite(value) else None
