"""Log lines, read back by the parsers their readers use; what `obs` imports."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdserve.errors import ConfigError, Overloaded
from pdserve.obs.logging import MAX_VALUE_CHARS, fields, setup_logging


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    root.handlers[:], root.level = before


def lines(form: str, *, log_prompts: bool = False) -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    setup_logging(form=form, level="info", service="router", stream=stream, log_prompts=log_prompts)
    return logging.getLogger("pdserve.test"), stream


def test_json_lines_are_objects_with_fields() -> None:
    log, stream = lines("json")
    log.info("request %s ended", "r1", extra=fields(outcome="stop", tokens=3, rate=float("nan"), peer=None))
    log.debug("not shown")
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert told["message"] == "request r1 ended"
    assert (told["level"], told["service"], told["logger"]) == ("INFO", "router", "pdserve.test")
    assert (told["outcome"], told["tokens"], told["rate"], told["peer"]) == ("stop", 3, "nan", None)


def test_fields_can_not_pass_for_the_record_itself() -> None:
    log, stream = lines("json")
    log.info("real", extra=fields(message="forged", level="DEBUG"))
    assert json.loads(stream.getvalue())["message"] == "real"


@pytest.mark.parametrize("form", ["json", "text"])
def test_prompts_stay_out_unless_asked_for(form: str) -> None:
    log, stream = lines(form)
    log.info("x", extra=fields(prompt="secret words", token_ids=[1, 2], messages="secret words"))
    assert "secret" not in stream.getvalue()
    assert "token_ids" not in stream.getvalue()
    log, stream = lines(form, log_prompts=True)
    log.info("x", extra=fields(prompt="secret words"))
    assert "secret words" in stream.getvalue()


def test_text_lines_can_not_be_forged() -> None:
    log, stream = lines("text")
    log.warning("a\nb\x1b[2J", extra=fields(who='x" y=1\n2026 ERROR'))
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()
    assert " WARNING router a\\nb" in stream.getvalue()


def test_a_failures_own_words_can_not_pass_for_lines() -> None:
    log, stream = lines("text")
    try:
        raise ValueError("x\n2026-01-01 ERROR router forged\x1b[2J")
    except ValueError:
        log.exception("failed")
    first, *more = stream.getvalue().splitlines()
    assert first.endswith("failed error=ValueError")
    assert all(line.startswith("  ") for line in more)
    assert "\x1b" not in stream.getvalue()


def test_every_line_says_what_its_process_is() -> None:
    stream = io.StringIO()
    setup_logging(form="json", service="rank", about={"worker": "d", "rank": 1}, stream=stream)
    logging.getLogger("x").warning("late", extra=fields(worker="forged", peer="p"))
    told = json.loads(stream.getvalue())
    assert (told["service"], told["worker"], told["rank"], told["peer"]) == ("rank", "d", 1, "p")


def test_what_is_empty_is_left_out_for_people() -> None:
    log, stream = lines("text")
    log.info("x", extra=fields(trace_id="", peer=None, pages=0))
    assert stream.getvalue().endswith(" INFO    router x pages=0\n")


def test_errors_are_told_by_label_and_long_values_are_cut() -> None:
    log, stream = lines("json")
    try:
        raise Overloaded("later")
    except Overloaded:
        log.exception("refused", extra=fields(big="x" * 10_000))
    told = json.loads(stream.getvalue())
    assert told["error"] == "overloaded"
    assert "traceback" not in told
    assert len(told["big"]) == MAX_VALUE_CHARS


def test_failures_of_our_own_keep_their_trace() -> None:
    log, stream = lines("json")
    try:
        raise KeyError("k")
    except KeyError:
        log.exception("failed")
    told = json.loads(stream.getvalue())
    assert told["error"] == "KeyError"
    assert "Traceback" in told["traceback"]


def test_setting_up_again_replaces_the_handler() -> None:
    _, first = lines("text")
    log, second = lines("text")
    log.info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


@pytest.mark.parametrize("wrong", [{"form": "xml"}, {"level": "LOUD"}])
def test_wrong_settings_name_the_field(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="log_"):
        setup_logging(**wrong)  # type: ignore[arg-type]


def test_obs_needs_no_torch_ray_or_grpc() -> None:
    code = (
        "import sys, pdserve.obs.logging, pdserve.obs.metrics, pdserve.obs.port\n"
        "print([m for m in ('torch', 'ray', 'grpc', 'numpy', 'google.protobuf') if m in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
