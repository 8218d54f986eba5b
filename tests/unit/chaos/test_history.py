"""A history survives the death of its writer, and the judge refuses a file that is no history."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strata_chaos.history import (
    Failure,
    History,
    HistoryError,
    HistoryWriter,
    Outcome,
    Record,
    Where,
    decode,
    encode,
)

ENDED = Record(
    client="c",
    process=7,
    op="barrier",
    t0=1.0,
    t1=2.5,
    outcome=Outcome.FAIL,
    args={"name": "all"},
    result={"é": [1, None]},
    error=Failure(type="BarrierTimeout", message="3 of 4 arrived"),
    id="c.7.1",
)
BEGUN = Record(client="c", process=7, op="barrier", t0=1.0, t1=None, outcome=Outcome.UNKNOWN, id="c.7.1")

KILLED_WHILE_WRITING = """
import os, sys
from pathlib import Path
from strata_chaos.history import HistoryWriter, Outcome, Record
record = Record(client="c", process=os.getpid(), op="o", t0=1.0, t1=1.0, outcome=Outcome.OK)
with HistoryWriter(Path(sys.argv[1])) as writer:
    for _ in range(5):
        writer.write(record)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("record", [ENDED, BEGUN])
def test_an_encoded_record_decodes_to_itself(record: Record) -> None:
    line = encode(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == record


def test_written_records_survive_a_kill_of_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(path)], check=False)
    assert done.returncode == -9
    assert len(list(History(path))) == 5


def test_a_torn_last_line_is_passed_over_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    path.write_bytes(encode(ENDED) + encode(ENDED)[:20])
    history = History(tmp_path)
    assert [record.where for record in history] == [Where("h.jsonl", 1)]
    assert history.torn == {"h.jsonl": "h.jsonl:2: torn after 20 bytes"}


def test_a_writer_refuses_to_append_to_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    path.write_bytes(encode(ENDED)[:20])
    with pytest.raises(HistoryError, match="torn"):
        HistoryWriter(path)


def test_a_bad_line_in_the_middle_of_a_history_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    path.write_bytes(encode(ENDED) + b"{]\n" + encode(ENDED))
    with pytest.raises(HistoryError, match=r"h\.jsonl:2: not JSON"):
        list(History(tmp_path))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"v": 2}, "schema 2"),
        ({"op": 5}, "client and op are texts"),
        ({"args": []}, "args and result are objects"),
        ({"t1": "soon"}, "t0 and t1 are numbers"),
        ({"t1": 0.5}, "ended 0.5 s before it began"),
        ({"t1": None}, "its outcome is unknown"),
        ({"outcome": "maybe"}, "maybe"),
    ],
)
def test_a_line_that_is_not_a_record_is_refused_with_the_reason(change: dict[str, object], why: str) -> None:
    line = json.dumps({**json.loads(encode(ENDED)), **change})
    with pytest.raises(HistoryError, match=why):
        decode(line)


def test_a_missing_field_is_named() -> None:
    body = json.loads(encode(ENDED))
    del body["outcome"]
    with pytest.raises(HistoryError, match="outcome"):
        decode(json.dumps(body))


def test_lines_are_quoted_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    path.write_bytes(encode(BEGUN) + encode(ENDED))
    place = Where("h.jsonl", 2)
    assert History(tmp_path).quote({place}) == {place: encode(ENDED).decode().rstrip()}
