"""Doctored histories that violate the rules of relayed watches."""

from __future__ import annotations

from pathlib import Path

from tests.unit.chaos.checkers.doctoring import breaks
from tests.unit.chaos.story import Story


def a_fault(story: Story, begin_t: float, end_t: float) -> None:
    """Write any fault of the nemesis, from `begin_t` to `end_t`."""
    faulty = {"id": 1, "fault": "kill-leader", "targets": ["coordinator-1"]}
    story.line("nemesis", 6, "fault.inject", args=faulty, result={"effective": True}, t=begin_t)
    story.line("nemesis", 6, "fault.heal", args=faulty, t=end_t)


@breaks("watches/exact")
def an_event_is_missing(story: Story, _storage: Path) -> None:
    lost = story.lines("watch.message")[3]
    story.drop(lambda line: line is lost)


@breaks("watches/exact")
def an_event_comes_twice(story: Story, _storage: Path) -> None:
    message = story.lines("watch.message")[3]
    message["result"]["events"] *= 2


@breaks("watches/exact")
def events_swap(story: Story, _storage: Path) -> None:
    several = next(m for m in story.lines("watch.message")[1:] if len(m["result"]["events"]) > 1)
    several["result"]["events"].reverse()


@breaks("watches/exact")
def a_resume_one_too_late(story: Story, _storage: Path) -> None:
    first = story.lines("watch.message")[1]
    story.drop(lambda line: line is first)


@breaks("watches/exact")
def another_value(story: Story, _storage: Path) -> None:
    message = next(m for m in story.lines("watch.message")[1:] if m["result"]["events"][0][3])
    message["result"]["events"][0][3] = "0" * 16


@breaks("watches/resync-state")
def a_key_is_missing_in_the_state(story: Story, _storage: Path) -> None:
    story.lines("watch.message")[0]["result"]["events"].pop()


@breaks("watches/resync-marked")
def no_word_of_a_resync(story: Story, _storage: Path) -> None:
    story.lines("watch.message")[0]["result"]["resync"] = False


@breaks("watches/never-back")
def a_stream_goes_back(story: Story, _storage: Path) -> None:
    story.lines("watch.message")[-1]["result"]["revision"] = 3


@breaks("watches/never-back")
def another_cluster(story: Story, _storage: Path) -> None:
    story.lines("watch.message")[-1]["result"]["uid"] = "other"


@breaks("watches/not-silent")
def a_stream_falls_silent(story: Story, _storage: Path) -> None:
    last = story.lines("watch.message")[-1]
    story.drop(lambda line: line is last)


@breaks("watches/not-silent")
def a_stream_falls_silent_long_after_a_fault(story: Story, _storage: Path) -> None:
    early = story.lines("etcd.event")[0]["t0"] - 60
    a_fault(story, early, early + 5)
    a_stream_falls_silent(story, _storage)


@breaks("watches/not-silent")
def a_stream_says_that_it_lives_and_not_what_it_owes(story: Story, _storage: Path) -> None:
    """As from a replica whose own watch is stuck: it sends progress messages whose revision does not advance."""
    a_stream_falls_silent(story, _storage)
    last = story.lines("watch.message")[-1]
    stuck = {**last["result"], "events": []}
    for later_s in (5, 10):
        story.line("watcher", 30, "watch.message", args=last["args"], result=stuck, t=last["t0"] + later_s)
    story.files["watcher-30"].sort(key=lambda line: line["t0"])


@breaks("watches/not-silent")
def a_stream_falls_silent_and_then_there_is_a_fault(story: Story, _storage: Path) -> None:
    a_stream_falls_silent(story, _storage)
    a_fault(story, story.t - 2, story.t - 1)


@breaks("watches/not-silent")
def a_stream_stays_silent_long_after_a_fault(story: Story, _storage: Path) -> None:
    a_stream_falls_silent(story, _storage)
    a_fault(story, story.t - 25, story.t - 24)


@breaks("watches/not-silent")
def a_stream_falls_silent_twice_and_a_fault_excuses_the_longer(story: Story, _storage: Path) -> None:
    """Stream 2's messages after the first come 12 s later, and its end 40 s later.

    A fault excuses the later silence only.
    """
    a_stream_falls_silent(story, _storage)
    _first, *others = [line for line in story.lines("watch.message") if line["args"]["stream"] == 2]
    for line in others:
        line["t0"] = line["t1"] = line["t0"] + 12
    story.lines("watch")[-1]["t1"] += 40
    a_fault(story, story.t + 5, story.t + 40)


@breaks("watches/not-silent")
def a_stream_never_says_anything(story: Story, _storage: Path) -> None:
    story.drop(lambda line: line["op"] == "watch.message" and line["args"]["stream"] == 2)
