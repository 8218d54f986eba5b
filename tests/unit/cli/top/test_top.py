"""`strata top`: the pages it draws, its keys, and the resources it requests."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata.cli.top import reading
from strata.cli.top.reading import Reader, look
from strata.cli.top.screen import Size, View, after_key, frame, snapshot
from strata.cli.top.seen import Seen
from strata.dashboard.api import model
from strata.errors import NotFound, PermissionDenied, QuotaExceeded, Unavailable
from tests.unit.cli import looked
from tests.unit.cli.looked import NOW_MS, job_seen, jobs_seen, plain

SMALL, LARGE = Size(width=80, height=24), Size(width=120, height=40)


def drawn(view: View, seen: Seen, size: Size = SMALL, *, now_s: float = 100.2) -> list[str]:
    lines = frame(view, seen, size, now_s=now_s, now_ms=NOW_MS).lines
    assert len(lines) == size.height
    assert max(each.cell_len for each in lines) <= size.width
    return [each.plain.rstrip() for each in lines]


def test_a_job_in_80_columns() -> None:
    assert drawn(View(job="gpt"), job_seen()) == [
        "gpt  running  generation 4  8 ranks  3 members (1 standby)     via coordinator-2",
        "! rank 3 stands still at step 1207 (data) for 42 s",
        "! rank 6 cannot save step 1200: disk full on host gpu-host-001.rack-7",
        "step      1,204 of 10,000  epoch 2 ━━───────────────────  12.0 %  ETA 2 h 31 min",
        "rate      3.42 steps/s  876 samples/s ▆█▅▁▁▅█▇▂▁▄█▇▃▁▃██▄▁  last step 240 ms ago",
        "reported  loss 2.32 █▆▅▄▃▂▂▂▁▁▁▁▁▁▁  grad_norm 1.31  lr 0.0003",
        "goodput   87.2 % of 1 h 11 min ███████████████████████████████████████████▓▓▓▒░▚",
        "          █ step 87.2  ▓ start 5.9  ▒ save 3.1  ░ lost 2.1  ▚ 2 others 1.7",
        "barrier   epoch  7 of 8, 41 s  missing 3 (node-0)",
        "saved     step 1,200  4.2 GiB  100 s ago  latest",
        "          step 1,210  being saved: 6 of 8 ranks, missing 3, 6, begun 90 s ago",
        "began     4, 10 min ago from step 1,000: rank 5 exited with 1: CUDA error: an i…",
        "RANK▲  WORKER     STEP  PHASE     SEEN   COMPUTE   PEERS    SELF    STUCK",
        "    0  node-0    1,204  step       now    280 ms    0.97    0.99        -",
        "    1  node-0    1,205  step       now    343 ms    0.97    0.99        -",
        "    2  node-0    1,206  step       now    334 ms    0.97    0.99        -",
        "    3  node-0    1,207  data      42 s    325 ms    0.43    0.99     42 s",
        "    4  node-1    1,204  step       now    316 ms    0.97    0.99        -",
        "    5  node-1    1,205  step         -    307 ms    0.97    0.99        -",
        "    6  node-1    1,206  step       now    298 ms    0.97    0.99        -",
        "    7  node-1    1,207  step       now    289 ms    0.97    0.99        -",
        "",
        "",
        "Enter open  Esc jobs  s sort: RANK ▲  r reverse  ? help  q quit         1-8 of 8",
    ]


def test_a_job_in_120_columns_has_a_bar_for_each_cause_and_the_hosts() -> None:
    lines = drawn(View(job="gpt"), job_seen(), LARGE)
    assert (
        "          ▓ start              5.9 %  ━━──────────────────────────────────────  4 min 11 s" in lines
    )
    assert "          step 1,100  4.2 GiB  3 min ago  pinned best" in lines
    assert "          3, 20 min ago from step 750: node-2 was lost: no sign of life for 8 s" in lines
    assert any("gpu-host-001.rack-7" in each for each in lines)


def test_jobs_in_80_columns() -> None:
    lines = drawn(View(cursor=3), jobs_seen())
    assert lines[:6] == [
        "cluster default  4 jobs  leader coordinator-1  replicas 3/3    via coordinator-2",
        "JOB                   PHASE            STEP         ETA  STEPS/S  GOODPUT  SAVED",
        "! gpt                 running  1,204/10,000  2 h 31 min     3.42   87.2 %  1,200",
        "vision-transformer-…  running            88           -     3.42   87.2 %  1,200",
        "old                   done                -           -        -   87.2 %  1,200",
        "bert                  failed              -           -        -   87.2 %  1,200",
    ]
    assert lines[-2:] == [
        "! bert: 3 generations in a row without a checkpoint",
        "Enter open  j/k move  ? help  q quit                                    1-4 of 4",
    ]


def test_jobs_in_120_columns_have_a_bar() -> None:
    lines = drawn(View(), jobs_seen(), LARGE)
    assert "━─────── 12 %" in re.sub(" +", " ", lines[2])


@pytest.mark.parametrize("size", [(40, 10), (60, 12), (80, 24), (100, 30), (200, 60), (30, 5), (20, 3)])
@pytest.mark.parametrize("ranks", [0, 1, 8, 1000])
def test_top_fits_into_every_terminal_size(size: tuple[int, int], ranks: int) -> None:
    small = Size(width=size[0], height=size[1])
    for view in (View(job="gpt"), View(job="gpt", help=True), View(job="gpt", scroll=10**6)):
        drawn(view, job_seen(ranks=looked.ranks(ranks)), small)
    drawn(View(), jobs_seen(), small)
    drawn(View(cursor=10), replace(jobs_seen(), error="no coordinator answered"), small)


def test_the_ledger_sums_to_100_percent() -> None:
    spent = {"step": 100.0, **{f"cause-{at}": 33.333 for at in range(9)}}
    wall = sum(spent.values())
    goodput = model.Goodput(
        wall_s=wall,
        ratio=100 / wall,
        parts=tuple(model.GoodputPart(cause=c, seconds=s, ratio=s / wall) for c, s in spent.items()),
    )
    for size in (SMALL, LARGE):
        lines = drawn(View(job="gpt"), job_seen(detail=looked.job(goodput=goodput)), size)
        at = next(number for number, each in enumerate(lines) if each.startswith("goodput"))
        legend = lines[at + 1 : at + 7] if size is LARGE else lines[at + 1 : at + 2]
        shares = [float(share) for each in legend for share in re.findall(r"\d+\.\d", each)]
        assert sum(shares) == pytest.approx(100.0)
        assert "others" in "".join(legend)


def test_missing_reports_are_shown_as_missing() -> None:
    nothing = looked.job(
        summary=looked.summary(phase="waiting", progress=None, reason="1 of at least 2 members are here"),
        findings=(),
        goodput=None,
        reported={},
    )
    lines = drawn(
        View(job="gpt"),
        job_seen(
            detail=replace(nothing, findings=()),
            ranks=looked.ranks(0),
            barriers=model.Barriers(open=(), ended=(), latency=()),
            checkpoints=model.Checkpoints(checkpoints=(), total=0, next_page_token=""),
            history=None,
        ),
    )
    assert lines[1] == "why       1 of at least 2 members are here"
    assert "step      nothing was reported yet" in lines
    assert "saved     nothing yet" in lines
    assert "no rank: the job has no generation that runs" in lines


def test_old_data_is_shown_with_its_age() -> None:
    assert drawn(View(job="gpt"), job_seen(), now_s=107.0)[0].endswith(" 7 s old")
    lines = drawn(View(job="gpt"), replace(job_seen(), error="no coordinator answered"), now_s=101.0)
    assert lines[0].endswith("1 s old")
    assert lines[-1].startswith("no coordinator answered")


def test_a_newly_opened_job_does_not_show_the_page_of_another_job() -> None:
    lines = drawn(View(job="bert"), job_seen())
    assert lines[0] == "bert"
    assert "reading …" in lines
    assert not any("stands still" in each for each in lines)


def test_control_characters_in_a_finding_are_replaced() -> None:
    finding = model.Finding(kind="stalled", text="rank 3 \x1b[2J\n stands")
    assert drawn(View(job="gpt"), job_seen(detail=looked.job(finding)))[1] == "! rank 3 ?[2J? stands"


def test_scores_are_a_column_only_if_there_are_any() -> None:
    without_scores = drawn(View(job="gpt"), job_seen(ranks=looked.ranks(scores=False)))
    assert not any("PEERS" in each for each in without_scores)


# -- keys


def pressed(keys: list[str], view: View, seen: Seen) -> View | None:
    at: View | None = view
    for key in keys:
        assert at is not None
        room = frame(at, seen, SMALL, now_s=100.0, now_ms=NOW_MS).rows
        at = after_key(at, key, seen, room)
    return at


def replace_fields(one: model.Rank, **fields: Any) -> model.Rank:
    return replace(one, **fields)


def rank_rows(view: View, seen: Seen) -> list[int]:
    return [int(found[1]) for each in drawn(view, seen) if (found := re.match(r" *(\d+)  node-", each))]


def test_enter_opens_the_job_under_the_cursor_and_esc_goes_back() -> None:
    opened = pressed(["j", "down", "k", "enter"], View(), jobs_seen())
    assert opened is not None
    assert opened.job == "vision-transformer-large-384"
    back = pressed(["s", "esc"], replace(opened, job="gpt"), job_seen())
    assert back is not None
    assert (back.job, back.cursor) == (None, 1)


def test_the_cursor_stays_on_the_list() -> None:
    for keys, cursor in ((["k"], 0), (["G"], 3), (["G", "j"], 3), (["G", "g"], 0), (["pgdn"], 3)):
        found = pressed(keys, View(), jobs_seen())
        assert found is not None
        assert found.cursor == cursor


def test_sorting_goes_through_the_columns_that_are_there() -> None:
    seen = job_seen()
    view: View | None = View(job="gpt")
    names = []
    for _ in range(11):
        assert view is not None
        view = pressed(["s"], view, seen)
        assert view is not None
        names.append(view.order.by)
    columns = ["WORKER", "HOST", "STEP", "PHASE", "SEEN", "COMPUTE", "PEERS", "SELF", "STUCK", "RANK"]
    assert names == [*columns, "WORKER"]
    without = job_seen(ranks=looked.ranks(scores=False))
    at = pressed(["s"] * 7, View(job="gpt"), without)
    assert at is not None
    assert at.order.by == "STUCK"
    back = pressed(["<"], View(job="gpt"), without)
    assert back is not None
    assert back.order.by == "STUCK"


def test_ranks_with_the_worst_values_come_first_and_silent_ranks_last() -> None:
    seen = job_seen()
    # sorted by the score, which compares a rank with the other ranks
    worst = pressed([">"] * 7, View(job="gpt"), seen)
    assert worst is not None
    assert worst.order.by == "PEERS"
    assert rank_rows(worst, seen)[0] == 3
    resorted = pressed([">"] * 5, View(job="gpt"), seen)
    assert resorted is not None
    assert rank_rows(resorted, seen) == [3, 0, 1, 2, 4, 6, 7, 5]
    backward = pressed(["r"], View(job="gpt"), seen)
    assert backward is not None
    assert rank_rows(backward, seen) == [7, 6, 5, 4, 3, 2, 1, 0]


def test_ranks_scroll_to_the_last_and_no_further() -> None:
    seen = job_seen(ranks=looked.ranks(1000))
    assert rank_rows(View(job="gpt"), seen)[0] == 0
    down = pressed(["j", "j", " "], View(job="gpt"), seen)
    assert down is not None
    assert (rank_rows(down, seen)[0], down.on) == (10, 12)
    last = pressed(["G", "j", "down"], View(job="gpt"), seen)
    assert last is not None
    assert (rank_rows(last, seen)[-1], last.on) == (999, 999)
    assert len(rank_rows(last, seen)) == 10


def test_enter_opens_the_rank_under_the_cursor_and_esc_goes_back_to_its_place() -> None:
    seen = job_seen()
    opened = pressed(["r", "j", "j", "enter"], View(job="gpt"), seen)
    assert opened is not None
    assert (opened.rank, opened.on) == (5, 5)
    assert drawn(opened, seen)[1] == "reading …"
    assert drawn(opened, job_seen(rank=4, one=looked.rank(4)))[1] == "reading …", "that is another rank"
    back = pressed(["s", "esc"], opened, seen)
    assert back == replace(opened, rank=None), "ranks are not sorted where they are not seen"
    assert pressed(["esc"], replace(opened, rank=None), seen) == View(order=opened.order)
    assert pressed(["enter"], View(job="gpt"), job_seen(ranks=None)) == View(job="gpt")


def test_the_cursor_stays_on_its_rank_when_the_rows_are_resorted() -> None:
    def sorted_by_time(compute_us: tuple[int, ...]) -> Seen:
        return job_seen(ranks=replace(looked.ranks(8), compute_us=compute_us))

    view = pressed([">"] * 6, View(job="gpt"), job_seen())
    assert view is not None
    assert view.order.by == "COMPUTE"
    before, after = sorted_by_time((8, 7, 6, 5, 4, 3, 2, 1)), sorted_by_time((1, 2, 3, 4, 5, 6, 7, 8))
    moved = pressed(["j", "j"], view, before)
    assert moved is not None
    assert (moved.on, rank_rows(moved, after)) == (2, [7, 6, 5, 4, 3, 2, 1, 0])
    opened, below = pressed(["enter"], moved, after), pressed(["j", "enter"], moved, after)
    assert opened is not None
    assert below is not None
    assert (opened.rank, below.rank) == (2, 1)
    fewer = pressed(["enter"], moved, job_seen(ranks=looked.ranks(2)))
    assert fewer is not None
    assert fewer.rank == 1, "the job has no rank 2 any more"
    top, back = pressed(["enter"], view, after), pressed(["k", "k", "enter"], moved, before)
    assert top is not None
    assert back is not None
    assert (top.rank, back.rank) == (7, 0), "at the top it is on whichever comes first"


def test_the_page_of_a_rank_shows_its_step_stack_and_last_output() -> None:
    seen = job_seen(rank=3, one=looked.rank(3))
    assert drawn(View(job="gpt", rank=3), seen) == [
        "gpt  rank 3                                                    via coordinator-2",
        "! rank 3 stands still at step 1207 (data) for 42 s",
        "on        node-0  gpu-host-000.rack-7",
        "step      1,207  data, reported 42 s ago  stuck for 42 s",
        "compute   325 ms, median 300 ms  0.43 to the fastest  0.99 to its own best",
        "device    3 NVIDIA H100  0 % busy  Xid 79",
        "stack",
        "  Thread 0x00007f01 (most recent call first):",
        '    File "loader.py", line 212 in __next__',
        '    File "train.py", line 61 in main',
        "wrote     began in generation 4",
        "  step 1206 loss 2.3187",
        "  step 1207 loss 2.3180",
        "before    began in generation 3, exited with 1: CUDA error",
        "  RuntimeError: CUDA error",
        *[""] * 8,
        "Esc ranks  j/k scroll  ? help  q quit",
    ]
    nothing = replace_fields(
        looked.rank(3), finding="", stack="", log_file="", log=(), log_before=None, devices=(), step=None
    )
    lines = drawn(View(job="gpt", rank=3), job_seen(rank=3, one=nothing))
    assert "stack     none: only a stuck rank has one" in lines
    assert "wrote     its agent keeps no output: strata run --log-dir" in lines
    lines = drawn(View(job="gpt", rank=3), job_seen(rank=3, one=replace(nothing, log_file=None)))
    assert "wrote     not known (yet): its agent has not answered" in lines


def test_the_page_of_a_rank_scrolls_to_its_last_line_and_back() -> None:
    one = replace_fields(looked.rank(3), stack="\n".join(f"frame {at}" for at in range(100)))
    seen = job_seen(rank=3, one=one)
    view = pressed(["G"], View(job="gpt", rank=3), seen)
    assert view is not None
    shown = frame(view, seen, SMALL, now_s=100.2, now_ms=NOW_MS)
    assert shown.lines[-2].plain.rstrip() == "  RuntimeError: CUDA error"
    up = pressed(["k"], shown.view, seen)
    assert up is not None
    assert drawn(up, seen)[-2] == "before    began in generation 3, exited with 1: CUDA error"


def test_any_key_closes_the_help_and_q_quits() -> None:
    helped = pressed(["?"], View(job="gpt"), job_seen())
    assert helped is not None
    assert "quit" in "".join(drawn(helped, job_seen()))
    assert pressed(["j"], helped, job_seen()) == View(job="gpt")
    assert pressed(["q"], helped, job_seen()) is None


# -- a snapshot, without a screen


def test_a_snapshot_has_every_rank() -> None:
    lines = [each.plain for each in snapshot(job_seen(ranks=looked.ranks(1000)), 120, now_ms=NOW_MS)]
    assert sum("node-" in each and "gpu-host" in each for each in lines) >= 1000
    assert "! rank 3 stands still at step 1207 (data) for 42 s" in lines
    listed = [each.plain for each in snapshot(jobs_seen(), 120, now_ms=NOW_MS)]
    assert listed[-1] == "! gpt: rank 3 stands still at step 1207 (data) for 42 s"


# -- reading resources


class Answers:
    """A client that answers with the given resources, and records the requested paths."""

    def __init__(self, **more: Any) -> None:
        self.requests: list[str] = []
        self.more = more

    def resource(self, path: str) -> Any:
        self.requests.append(path)
        answer = self.more.get(path.partition("?")[0].strip("/").replace("/", "_"), {"path": path})
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_page_is_read_with_all_its_parts_and_the_slow_ones_rarely() -> None:
    client = Answers(jobs_gpt_history=plain(looked.history(100)))
    seen = look(client.resource, "gpt")
    assert {each.rpartition("/")[2] for each in client.requests} >= {
        "gpt",
        "ranks",
        "barriers",
        "generations",
    }
    client.requests.clear()
    again = look(client.resource, "gpt", seen, all_of_it=False)
    since = NOW_MS - reading.AGAIN_MS
    assert client.requests == [
        "/jobs/gpt",
        "/jobs/gpt/ranks",
        "/jobs/gpt/barriers",
        f"/jobs/gpt/history?since_unix_ms={since}",
    ]
    assert again.checkpoints is seen.checkpoints


def test_the_page_of_a_rank_is_read_alone_and_the_job_is_kept() -> None:
    client = Answers(jobs_gpt_history=plain(looked.history(100)), jobs_gpt_ranks_3=plain(looked.rank(3)))
    seen = look(client.resource, "gpt")
    client.requests.clear()
    opened = look(client.resource, "gpt", seen, rank=3, all_of_it=False)
    assert client.requests == ["/jobs/gpt/ranks/3"]
    assert (opened.one, opened.rank) == (plain(looked.rank(3)), 3)
    assert (opened.detail, opened.ranks) == (seen.detail, seen.ranks)
    back = look(client.resource, "gpt", opened, all_of_it=False)
    assert (back.one, back.rank, back.checkpoints) == (None, None, seen.checkpoints)


def test_a_removed_rank_is_shown_with_the_error() -> None:
    news = threading.Event()
    client = Answers(jobs_gpt_ranks_9=NotFound("no rank 9"))
    reader = Reader(client, job_seen(), on_news=news.set)
    reader.start()
    reader.show("gpt", 9)
    while reader.seen.rank != 9:
        news.clear()
        assert news.wait(10)
    assert (reader.seen.error, reader.seen.one) == ("no rank 9", None)
    reader.end()


def test_all_pages_of_the_list_are_read() -> None:
    pages: dict[str, Any] = {"": ([{"name": "a"}, {"name": "b"}], "1/b"), "1%2Fb": ([{"name": "c"}], "")}

    def read(path: str) -> Any:
        if path == "/cluster":
            raise PermissionDenied("not for you")
        found, token = pages[path.partition("page_token=")[2]]
        return {"jobs": found, "total": 3, "next_page_token": token}

    seen = look(read, None)
    assert [each["name"] for each in seen.jobs] == ["a", "b", "c"]
    assert (seen.total, seen.cluster) == (3, None)


def test_a_job_name_stays_within_its_part_of_the_path() -> None:
    client = Answers()
    client.more["jobs_a%2Fb_history"] = plain(looked.history(2))
    look(client.resource, "a/b")
    assert client.requests[0] == "/jobs/a%2Fb"


@pytest.mark.parametrize(("how", "style"), [("done", "dim"), ("lost", "bold red"), ("standby", "")])
def test_a_member_that_has_ended_is_grey_and_one_that_was_lost_red(how: str, style: str) -> None:
    whole = plain(looked.ranks(4))
    whole["workers"][0][how] = True
    seen = replace(job_seen(), ranks=whole)
    lines = frame(View(job="gpt"), seen, LARGE, now_s=100.2, now_ms=NOW_MS).lines
    row = next(each for each in lines if each.plain.startswith("    0"))
    at = row.plain.index("node-0")
    assert [str(span.style) for span in row.spans if span.start == at] == ([style] if style else [])


def test_a_failed_read_keeps_the_last_page_and_shows_the_error() -> None:
    news = threading.Event()
    client = Answers(jobs_gpt=Unavailable("no coordinator answered within 2 s"))
    first = job_seen()
    reader = Reader(client, first, on_news=news.set)
    reader.start()
    assert news.wait(10)
    assert (reader.seen.error, reader.seen.detail) == ("no coordinator answered within 2 s", first.detail)
    client.more["jobs_bert"] = NotFound("no job bert exists")
    news.clear()
    reader.show("bert")
    assert news.wait(10)
    while reader.seen.job != "bert":
        news.clear()
        assert news.wait(10)
    assert (reader.seen.error, reader.seen.detail) == ("no job bert exists", None)
    reader.end()


TOO_LARGE = "/jobs/gpt/ranks has 301000 bytes, and an answer at most 262080"


def test_a_part_too_large_for_an_answer_is_left_out_and_the_page_is_shown() -> None:
    client = Answers(
        jobs_gpt=plain(looked.job()),
        jobs_gpt_ranks=QuotaExceeded(TOO_LARGE, hint="ask for it over HTTP"),
        jobs_gpt_barriers=plain(looked.barriers()),
        jobs_gpt_checkpoints=plain(looked.checkpoints()),
        jobs_gpt_generations=plain(looked.generations()),
        jobs_gpt_history=plain(looked.history(100)),
        cluster=plain(looked.cluster()),
    )
    seen = look(client.resource, "gpt")
    assert seen.not_shown == {"ranks": TOO_LARGE}
    assert seen.as_json()["not_shown"] == {"ranks": TOO_LARGE}
    for size in (SMALL, LARGE):
        lines = drawn(View(job="gpt"), seen, size)
        assert "not shown ranks: /jobs/gpt/ranks has 301000 bytes, and an answer at most" in " ".join(lines)
        assert "the ranks are not shown: see above" in lines
        assert any(each.startswith("goodput   87.2 %") for each in lines)
        assert any(each.startswith("saved     step 1,200") for each in lines)
    assert any("301000 bytes" in each.plain for each in snapshot(seen, 120, now_ms=NOW_MS))
    # the refused resource is requested again together with the slowly changing ones, not every second
    client.requests.clear()
    again = look(client.resource, "gpt", seen, all_of_it=False)
    assert (again.not_shown, "/jobs/gpt/ranks" in client.requests) == (seen.not_shown, False)
    client.more["jobs_gpt_ranks"] = plain(looked.ranks())
    whole = look(client.resource, "gpt", again)
    assert (whole.not_shown, whole.ranks) == ({}, plain(looked.ranks()))
    assert "not_shown" not in whole.as_json()


def test_the_documented_screen_is_the_one_that_top_draws() -> None:
    page = Path(__file__).resolve().parents[4] / "docs" / "cli.md"
    assert "\n".join(["```text", *drawn(View(job="gpt"), job_seen()), "```"]) in page.read_text()
