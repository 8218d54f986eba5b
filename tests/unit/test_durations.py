"""Durations of tests: their recording, the refusals of slow tests, and the tracked file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.durations import Duration, Recorder, read, refused, slowness, there, updated, write

QUICK = ("tests/unit/test_a.py::test_quick", "-")
LONG = ("tests/unit/test_a.py::test_long", "-")
MARKED = ("tests/unit/test_a.py::test_marked", "slow")


def took(*seconds: float) -> Duration:
    return Duration(max(seconds), sum(seconds))


def test_a_run_records_the_total_and_slowest_case_of_each_test_function(
    tmp_path: Path,
) -> None:
    path = tmp_path / "record.tsv"
    write({QUICK: took(7.0), MARKED: took(1.0)}, path)
    recorder = Recorder(path)
    for nodeid, seconds, keywords in (
        ("tests/unit/test_a.py::test_quick[1]", (0.5, 1.0), {}),
        ("tests/unit/test_a.py::test_quick[2]", (0.25, 2.0), {}),
        ("tests/unit/test_b.py::test_other", (12.0,), {"slow": 1}),
    ):
        for phase in seconds:
            recorder.pytest_runtest_logreport(
                SimpleNamespace(nodeid=nodeid, duration=phase, keywords=keywords)
            )
    recorder.pytest_sessionfinish()
    assert read(path) == {
        QUICK: Duration(2.2, 3.8),  # 2.25 and 3.75, written with one decimal
        ("tests/unit/test_b.py::test_other", "slow"): took(12.0),
    }


def test_a_test_that_takes_long_needs_a_marker() -> None:
    assert list(refused({}, {QUICK: took(9.0, 9.0), MARKED: took(60.0)})) == []
    (problem,) = refused({}, {LONG: took(11.0)})
    assert problem.startswith(f"{LONG[0]} takes 11 s, more than 10 s: make it faster, or mark it slow")
    (problem,) = refused({LONG: took(11.0)}, {})
    assert "measured here" not in problem


def test_a_new_test_on_a_slow_machine_is_judged_by_its_scaled_duration() -> None:
    tracked = {(f"tests/unit/test_{n}.py::test", "-"): took(2.0) for n in range(30)}
    record = {key: took(5.0) for key in tracked}
    assert slowness(tracked, record) == 2.5
    assert list(refused(tracked, {**record, QUICK: took(24.0)})) == []
    assert len(list(refused(tracked, {**record, LONG: took(26.0)}))) == 1
    assert slowness(tracked, {key: took(1.0) for key in tracked}) == 1.0, "a fast machine refuses no more"


def test_a_known_test_is_not_refused_for_one_slow_run() -> None:
    assert list(refused({QUICK: took(8.0)}, {QUICK: took(30.0)})) == []


def test_a_few_tests_are_too_few_to_judge_the_machine() -> None:
    assert slowness({QUICK: took(2.0)}, {QUICK: took(9.0)}) == 1.0


def test_the_tracked_file_adds_new_tests_and_keeps_the_known_ones() -> None:
    usual = {(f"tests/unit/test_{n}.py::test", "-"): took(2.0) for n in range(30)}
    slower = {key: took(4.0) for key in usual}
    other = ("tests/unit/test_a.py::test_other", "-")
    tiny = ("tests/unit/test_a.py::test_tiny", "-")
    tracked = {**usual, QUICK: took(4.0), other: took(2.0)}
    record = {**slower, QUICK: took(30.0), LONG: took(18.0), MARKED: took(40.0), tiny: took(0.2)}
    assert updated(tracked, record) == {
        **usual,
        QUICK: took(4.0),  # unchanged: it took longer only because other tests ran beside it
        LONG: took(9.0),
        other: took(2.0),  # kept: it did not run
        MARKED: took(20.0),
    }


def test_a_function_whose_marker_changed_has_one_line() -> None:
    name = LONG[0]
    assert updated({(name, "-"): took(3.0)}, {(name, "slow"): took(3.0)}) == {(name, "slow"): took(3.0)}


def test_a_partial_run_of_a_function_keeps_its_other_line() -> None:
    both = {(LONG[0], "-"): took(3.0), (LONG[0], "slow"): took(20.0)}
    assert updated(both, {(LONG[0], "-"): took(3.5)}) == both
    slow = {(LONG[0], "slow"): took(20.0)}
    assert updated(slow, {(LONG[0], "-"): took(0.2)}) == slow


def test_entries_of_deleted_tests_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_here() -> None: ...\n")
    names = ("test_a.py::test_here", "test_a.py::test_gone", "test_gone.py::test_here")
    assert there({(name, "-"): took(1.0) for name in names}, tmp_path) == {(names[0], "-"): took(1.0)}


def test_the_tracked_file_can_be_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "durations.tsv"
    durations = {QUICK: took(1.0, 2.0), MARKED: took(33.3)}
    write(durations, path)
    assert read(path) == durations
