"""Logs are JSON lines, or text on a terminal, and never show a local variable."""

from __future__ import annotations

import errno
import io
import json
import re
import sys
from collections.abc import Iterator

import pytest
import structlog

from strata.observe import configure, get_logger


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def fail() -> None:
    password = "open sesame"
    raise ValueError(f"a text of {len(password)} characters")


def test_an_event_is_one_line_of_json_with_its_fields() -> None:
    out = io.StringIO()
    log = get_logger()
    configure(stream=out)
    with structlog.contextvars.bound_contextvars(replica="r1"):
        log.info("leadership_taken", epoch=7)
        log.debug("not shown")
    line = json.loads(out.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "leadership_taken", "epoch": 7, "level": "info", "replica": "r1"}


def test_a_person_at_a_terminal_gets_plain_text() -> None:
    out = Terminal()
    configure(stream=out)
    get_logger().info("leadership_taken", epoch=7)
    assert "leadership_taken" in out.getvalue()
    assert "{" not in out.getvalue()


@pytest.mark.parametrize("fmt", ["json", "plain"])
def test_a_traceback_shows_code_and_no_values(fmt: str) -> None:
    out = io.StringIO()
    configure(fmt=fmt, stream=out)
    try:
        fail()
    except ValueError as error:
        get_logger().error("failed", exc_info=error)
    assert "a text of 11 characters" in out.getvalue()
    assert out.getvalue().count("open sesame") == out.getvalue().count('password = "open sesame"')


def test_events_below_the_log_level_are_dropped() -> None:
    out = io.StringIO()
    configure(level="warning", stream=out)
    get_logger().info("quiet")
    get_logger().warning("loud")
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["loud"]


def test_a_line_that_cannot_be_written_is_dropped_without_an_error() -> None:
    """Otherwise a coordinator whose log has no reader does not stop at SIGTERM, because logging the signal fails first."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, f"no room for {len(text)} characters")

    for out in (Full(), io.StringIO()):
        configure(stream=out)
        if not isinstance(out, Full):
            out.close()
        get_logger().info("leadership_taken", epoch=7)


def test_logging_without_a_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    configure()
    get_logger().info("leadership_taken", epoch=7)


def test_rank_output_is_indented_in_plain_text_and_a_list_in_json() -> None:
    fields = {"rank": 1, "code": 9, "stderr": ["Traceback:", "  File x", "token=http://u:secret@h"]}
    plain, body = io.StringIO(), io.StringIO()
    configure(fmt="plain", stream=plain)
    get_logger().info("rank.ended", **fields)
    configure(fmt="json", stream=body)
    get_logger().info("rank.ended", **fields)
    first, *below = plain.getvalue().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \[info\] rank\.ended rank=1 code=9", first)
    assert below[:2] == ["    Traceback:", "      File x"]
    assert "secret" not in plain.getvalue()
    assert json.loads(body.getvalue())["stderr"][:2] == ["Traceback:", "  File x"]
