"""The state of an agent relative to the newest world that it received."""

from __future__ import annotations

import pytest

from strata.agent.agent_state import is_over, lacks_members, waits_because
from strata.agent.notices import notice_for_member
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import (
    JOB_PHASE_DONE,
    JOB_PHASE_FAILED,
    JOB_PHASE_PAUSED,
    STOP_ACTION_DRAIN,
    STOP_ACTION_PAUSE,
    STOP_ACTION_PREEMPT,
    STOP_ACTION_SCALE,
    StopNotice,
)
from tests.unit.integrations.torchrun.places import place, update


@pytest.mark.parametrize(
    ("reported", "over"),
    [
        (None, False),
        (update(3), False),
        (update(3, phase=JOB_PHASE_DONE), False),  # its own workers are done then, and end together
        (update(3, phase=JOB_PHASE_FAILED), True),
        (update(4), True),
        (update(4, members=0, place=False), True),
    ],
)
def test_a_newer_generation_or_a_failed_job_ends_the_generation(
    reported: WorldUpdate | None, over: bool
) -> None:
    assert is_over(reported, place(3)) is over
    assert is_over(reported, None), "without a place nothing goes on"


@pytest.mark.parametrize(
    ("reported", "why"),
    [
        (update(4), None),
        (update(4, members=0, place=False), "1 of at least 2 members are left"),
        (update(4, place=False), "the job has the 2 members it takes; this one stands by"),
        (
            WorldUpdate(world=update(4).world, waits="1 of at least 2 members are here"),
            "waits: 1 of at least 2 members are here",
        ),
    ],
)
def test_a_member_joins_a_world_that_has_a_place_for_it(reported: WorldUpdate, why: str | None) -> None:
    assert waits_because(reported) == why


@pytest.mark.parametrize(
    ("reported", "lacking"),
    [
        (None, True),
        (
            update(3),
            True,
        ),  # the agent has just ended its own generation, and the leader has not formed the next one yet
        (update(4, members=0, place=False), True),
        (update(4, place=False), False),
        (update(4, members=0, place=False, phase=JOB_PHASE_PAUSED), False),
    ],
)
def test_only_a_wait_for_other_members_counts_as_lacking_members(
    reported: WorldUpdate | None, lacking: bool
) -> None:
    assert lacks_members(reported, handled=3) is lacking


@pytest.mark.parametrize(
    ("notice", "requests"),
    [
        (None, False),
        (StopNotice(generation=3, action=STOP_ACTION_PREEMPT), True),
        (StopNotice(generation=3, action=STOP_ACTION_PAUSE), False),
        (StopNotice(generation=3, action=STOP_ACTION_DRAIN, worker_ids=["b"]), False),
        (StopNotice(generation=3, action=STOP_ACTION_DRAIN, worker_ids=["b", "a"]), True),
        (StopNotice(generation=3, action=STOP_ACTION_SCALE), False),
        (StopNotice(generation=2, action=STOP_ACTION_PREEMPT), False),
    ],
)
def test_an_agent_leaves_on_a_preemption_or_a_drain_that_names_it(
    notice: StopNotice | None, requests: bool
) -> None:
    received = update(3)
    if notice is not None:
        received.notice.CopyFrom(notice)
    assert (notice_for_member(received, "a") is not None) is requests
    assert notice_for_member(None, "a") is None
