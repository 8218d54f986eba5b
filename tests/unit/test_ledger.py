"""The ledger of soak runs: its rows, and the seed from which the next run continues."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.sim.seeds import fresh, revisions
from tests.soak.ledger import LEDGER, Ledger, Open, Span, change


def span(first: int, last: int, commit: str = "abc", **more: object) -> Span:
    return Span(campaign="simulation", first=first, last=last, commit=commit, **more)  # type: ignore[arg-type]


def broken(seed: int, why: str = "a head without a fence") -> Open:
    return Open(campaign="simulation", seed=seed, commit="abc", why=why)


def test_a_written_ledger_round_trips(tmp_path: Path) -> None:
    ledger = Ledger(
        (span(1, 100, effective=12, seconds=5400, failed=(7, 9)), span(101, 101)), (broken(7), broken(9))
    )
    path = tmp_path / "ledger.tsv"
    ledger.write(path)
    assert Ledger.read(path) == ledger
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.tsv"], "nothing else is left"
    assert Ledger.read(tmp_path / "none.tsv") == Ledger()


def test_the_next_seed_follows_the_highest_seed_of_all_commits() -> None:
    ledger = Ledger((span(1, 100, "abc"), span(301, 400, "def"), span(101, 300, "ghi")))
    assert ledger.next_seed("simulation", 1) == 401
    assert ledger.next_seed("chaos", 62) == 62


def test_contiguous_spans_on_one_commit_are_one_line() -> None:
    ledger = Ledger().with_span(span(1, 100, effective=3, seconds=10, failed=(5,)))
    ledger = ledger.with_span(span(101, 200, effective=4, seconds=5, failed=(150,)))
    assert ledger.spans == (span(1, 200, effective=7, seconds=15, failed=(5, 150)),)
    assert len(ledger.with_span(span(201, 300, "def")).spans) == 2
    assert len(ledger.with_span(span(202, 300)).spans) == 2


def test_a_failure_is_open_once_and_until_it_is_mended() -> None:
    ledger = Ledger().with_open([broken(7)]).with_open([broken(7, "again"), broken(8)])
    assert ledger.open == (broken(7), broken(8))
    assert ledger.without_open("simulation", 7).open == (broken(8),)


def test_changes_of_many_at_once_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "ledger.tsv"
    with ThreadPoolExecutor(8) as threads:
        for seed in range(40):
            threads.submit(change, partial(Ledger.with_open, failures=[broken(seed)]), path)
    assert len(Ledger.read(path).open) == 40


def test_a_reason_of_many_lines_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.tsv"
    Ledger((), (broken(7, "first\n\tsecond " + "x " * 1000),)).write(path)
    (only,) = Ledger.read(path).open
    assert only.why.startswith("first second x x x")
    assert Ledger.read(path).text() == path.read_text()


def test_a_line_that_is_not_understood_is_named() -> None:
    with pytest.raises(ValueError, match=r"line 2 of the ledger is no span and no open failure: 'span\\tx'"):
        Ledger.parse("# head\nspan\tx\n")


def test_the_tracked_ledger_is_normalized_and_no_commit_repeats_a_seed() -> None:
    ledger = Ledger.read()
    assert LEDGER.read_text() == ledger.text()
    for one in ledger.spans:
        assert one.first <= one.last
        others = [
            s for s in ledger.spans if (s.campaign, s.commit) == (one.campaign, one.commit) and s is not one
        ]
        assert not any(s.first <= one.last and one.first <= s.last for s in others), one


def test_each_commit_draws_seeds_of_its_own_and_changes_to_it_draw_the_same() -> None:
    seeds = fresh.drawn("75622b82802118344fbca3db0e29e7baf92b1c10")
    assert len(seeds) == fresh.COUNT
    assert seeds == fresh.drawn("75622b82802118344fbca3db0e29e7baf92b1c10-dirty")
    assert not set(seeds) & set(fresh.drawn("7ab455c6c121784fcdc6d1f2bfeeb7646b13b25f"))
    assert min(seeds) >= fresh.BEGIN > Ledger.read().next_seed("simulation", 0)
    assert fresh.drawn("") == range(fresh.BEGIN, fresh.BEGIN + fresh.COUNT)


def test_ledger_changes_keep_a_tree_clean_and_its_parent_is_the_previous_commit(
    tmp_path: Path,
) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "strata").mkdir()
    (tmp_path / "tests" / "soak").mkdir(parents=True)
    code, ledger = tmp_path / "strata" / "code.py", tmp_path / "tests" / "soak" / "ledger.tsv"
    git("init", "--quiet")
    commits = []
    for text in ("first", "second"):
        code.write_text(text)
        ledger.write_text(text)
        git("add", "--all")
        git("commit", "--quiet", "--message", text)
        commits.append(revisions.head(tmp_path))
    ledger.write_text("an open line")
    assert revisions.head(tmp_path) == commits[1]
    assert revisions.parent(commits[1], tmp_path) == commits[0]
    assert revisions.parent(commits[0], tmp_path) == ""
    code.write_text("third")
    assert revisions.head(tmp_path) == f"{commits[1]}-dirty"
    assert revisions.parent(revisions.head(tmp_path), tmp_path) == commits[1]
    assert revisions.head(tmp_path / "strata" / "..") == f"{commits[1]}-dirty"


def test_a_failing_seed_blocks_only_the_commit_that_broke_it() -> None:
    assert fresh.judge(7, "two leaders", True).blocks
    assert fresh.judge(7, "two leaders", None).blocks
    broken_as_a_whole = fresh.judge(7, "two leaders", None, older=fresh.MANY)
    assert not broken_as_a_whole.blocks
    assert "not tried on the parent, where 3 failed" in broken_as_a_whole.reason
    verdict = fresh.judge(7, "two leaders", False)
    assert not verdict.blocks
    assert verdict.reason == (
        "seed 7: two leaders; it fails on the parent commit, too; again: python -m tests.sim --seed 7 --trace"
    )
