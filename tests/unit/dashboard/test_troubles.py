"""What is wrong with a job, on its page, in the list of jobs and among the metrics."""

from __future__ import annotations

from strata.core.ids import AttemptId
from strata.core.records import Latest
from strata.dashboard.exposition import Exposition
from strata.dashboard.job import job_detail
from strata.dashboard.pages import cluster_page, job_page
from strata.dashboard.status import as_json, cluster_status
from strata.v1.members_pb2 import DeviceStatus, MemberDevices, RankProgress, SaveHold
from tests.unit.dashboard.rig import Shown
from tests.unit.dashboard.test_pages import HOSTILE, read


def ailing() -> Shown:
    """Return a replica with a job whose rank 2 hangs in its loader, on a node with a sick device."""
    shown = Shown()
    shown.lead()
    shown.job("job", members=2, slots=2)
    stack = 'Thread 0x1 (most recent call first):\n  File "loader.py", line 7 in fetch'
    ranks = [
        RankProgress(
            rank=rank,
            step=40,
            phase="data" if rank == 2 else "step",
            age_ms=42_000,
            stalled_ms=42_000,
            stack=stack if rank == 2 else "",
            trace_file="/tmp/trace-2" if rank == 2 else "",
            trace_bytes=2048,
            step_us=100_000,
            median_step_us=100_000,
        )
        for rank in range(3)
    ]
    slow = RankProgress(rank=3, step=40, phase="step", step_us=400_000, median_step_us=300_000)
    shown.board.note("job", 1, [*ranks, slow], own=True)
    place = shown.view.get(shown.keys.job("job").worker("w1"))
    assert place is not None
    healthy = DeviceStatus(index=0, name="H200", temperature_c=40, utilization_percent=97, power_mw=650_000)
    sick = DeviceStatus(index=1, name="H200", xids=[13, 79], fault="XID 79: the GPU has fallen off the bus")
    shown.board.note_devices(
        "job",
        MemberDevices(worker_id="w1", incarnation=place.create_revision, devices=[healthy, sick]),
        own=True,
    )
    return shown


def page(shown: Shown) -> str:
    detail = job_detail(shown, "job", 1)
    assert detail is not None
    return job_page(cluster_status(shown, (), with_jobs=False), detail)


async def test_the_page_names_the_rank_that_holds_up_the_others_with_its_stack() -> None:
    words = " ".join(read(page(ailing())).text.split())
    assert (
        "rank 2 on host host stands still at step 40 (data) for 42 s, and 2 more with it: waiting for the data loader"
        in words
    )
    assert (
        'rank 2 of w1, at step 40, data, for 42 s Thread 0x1 (most recent call first): File "loader.py"'
        in words
    )
    assert "/tmp/trace-2 (2.0 KiB)" in words
    assert "held up by others" in words
    assert "3 w1 400 ms 300 ms 3.0 times the median of all ranks" in words


async def test_the_page_shows_devices_the_sick_one_first() -> None:
    words = " ".join(read(page(ailing())).text.split())
    sick = words.index("XID 79: the GPU has fallen off the bus w1 0")
    assert sick < words.index("40 °C 650 W")


async def test_the_list_of_jobs_and_the_json_say_the_same() -> None:
    shown = ailing()
    status = cluster_status(shown, ())
    assert "rank 2 on host host stands still" in " ".join(read(cluster_page(status)).text.split())
    detail = job_detail(shown, "job", 1)
    assert detail is not None
    body = as_json(detail)
    assert body["trouble"]["says"] == body["job"]["trouble"] == status.jobs[0].trouble
    assert [(s["rank"], s["suspect"]) for s in body["trouble"]["stalled"]] == [
        (2, True),
        (0, False),
        (1, False),
    ]
    assert body["trouble"]["devices"][0]["temperature_c"] is None


def holding() -> Shown:
    """Return a replica with a job that has saved step 20, of whose ranks one cannot save step 40."""
    shown = Shown()
    shown.lead()
    shown.job("job", members=2, slots=2)
    shown.put(
        shown.keys.job("job").latest,
        Latest(generation=1, step=20, attempt=AttemptId("a"), record_generation=1),
    )
    hold = SaveHold(step=40, held_ms=238_000, reason=f"disk full {HOSTILE}", host="node-b")
    said = RankProgress(rank=3, step=44, phase="step", age_ms=2_000, save_hold=hold)
    shown.board.note("job", 1, [said, RankProgress(rank=0, step=44, phase="step")], own=True)
    return shown


async def test_held_saves_are_on_the_page_in_the_list_and_among_the_metrics() -> None:
    shown = holding()
    says = "no checkpoint since step 20, 4 min: disk full"
    found = read(page(shown))
    words = " ".join(found.text.split())
    assert says in words
    assert "Saves that are held" in words
    assert "3 w1 node-b 40 4 min disk full" in words
    assert "img" not in {tag for tag, _ in found.tags}
    assert says in " ".join(read(cluster_page(cluster_status(shown, ()))).text.split())
    body, _type = Exposition(shown).answer("")
    lines = body.decode().splitlines()
    assert 'strata_job_saves_held_ranks{job="job"} 1.0' in lines
    (held_s,) = [line.split()[-1] for line in lines if line.startswith("strata_job_saves_held_seconds{")]
    assert 240 <= float(held_s) < 300
    shown.board.note("job", 1, [RankProgress(rank=3, step=48, phase="step")], own=True)
    assert "Saves that are held" not in read(page(shown)).text


async def test_a_healthy_job_shows_no_trouble() -> None:
    shown = Shown()
    shown.lead()
    shown.job("job", members=1)
    shown.say("job", 0, 3, "step")
    text = read(page(shown)).text
    assert "stand still" not in text
    assert "Devices" not in text


async def test_nothing_in_a_stack_becomes_markup() -> None:
    shown = Shown()
    shown.lead()
    shown.job("job", members=1)
    bad = RankProgress(rank=0, step=1, phase=HOSTILE, stalled_ms=9, stack=HOSTILE, trace_file=HOSTILE)
    shown.board.note("job", 1, [bad], own=True)
    found = read(page(shown))
    assert "img" not in {tag for tag, _ in found.tags}
    assert "\x1b" not in found.text


async def test_metrics_count_stalls_and_tell_of_devices() -> None:
    body, _type = Exposition(ailing()).answer("")
    lines = body.decode().splitlines()
    assert 'strata_job_stalled_ranks{job="job"} 3.0' in lines
    assert 'strata_job_slow_ranks{job="job"} 1.0' in lines
    assert 'strata_job_sick_devices{job="job"} 1.0' in lines
    findings = [line.partition("{")[2] for line in lines if line.startswith("strata_job_finding{")]
    assert sorted(findings) == [
        'cause="XID 79: the GPU has fallen off the bus",host="host",job="job",kind="device",rank=""} 1.0',
        'cause="compute",host="host",job="job",kind="slow",rank="3"} 1.0',
        'cause="data",host="host",job="job",kind="stalled",rank="2"} 1.0',
    ]
    assert 'strata_job_step_seconds{job="job"} 0.1' in lines
    assert 'strata_device_temperature_celsius{device="0",job="job",worker="w1"} 40.0' in lines
    assert 'strata_device_fault{device="1",job="job",worker="w1"} 1.0' in lines
    assert not [line for line in lines if line.startswith("strata_device_temp") and 'device="1"' in line]
