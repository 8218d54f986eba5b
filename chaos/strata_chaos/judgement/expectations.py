"""Expectations of a scenario beyond safety, judged from the histories: no member dies, no new generation, and so on.

They cover the time from the first fault to the end of the run. Only recorded facts count, so a second judgement of a
saved run gives the same result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from strata_chaos.history import History, Record
from strata_chaos.judgement.verdict import Finding
from strata_chaos.scenario import Expectations

CHECKER: Final = "expectation"
SHORT_BARRIER: Final = "short-deadline"
"""The name of barriers whose deadline is too short on purpose (`workloads.barriers`)."""


SAVE_S: Final = 30.0
"""A save that takes longer counts as failed: the library's own limits are shorter."""


def judge(folder: Path, expect: Expectations) -> list[Finding]:
    """Return the violated expectations."""
    checks: list[tuple[bool, str, Callable[[Record], str]]] = [
        (expect.no_member_dies, "no_member_dies", _death),
        (expect.no_new_generation, "no_new_generation", _generation),
        (expect.no_barrier_fails, "no_barrier_fails", _barrier),
        (expect.no_save_fails, "no_save_fails", _save),
    ]
    looks = [(name, look) for active, name, look in checks if active]
    if not looks:
        return []
    history = History(folder)
    begin, end = _window(history)
    found = []
    saves: dict[str, Record] = {}
    for record in history:
        if record.op == "checkpoint.save" and record.begun:
            saves[record.id] = record
        elif record.op == "checkpoint.save" and record.t1 is not None and record.t1 <= end:
            saves.pop(record.id, None)
        if record.t1 is None or not begin <= record.t1 <= end:
            continue
        for name, look in looks:
            if reason := look(record):
                found.append(_finding(name, reason, record))
    if expect.no_save_fails and end < float("inf"):
        found += [
            _finding("no_save_fails", f"{_whose(save)} had not ended after {end - save.t0:.0f} s", save)
            for save in saves.values()
            if end - save.t0 > SAVE_S
        ]
    return found


def _finding(name: str, reason: str, record: Record) -> Finding:
    return Finding(checker=CHECKER, message=f"{name}: {reason}", evidence=(str(record.where),))


def _window(history: History) -> tuple[float, float]:
    """Return when the faults began and when the run's last phase began."""
    begin, end = float("inf"), float("inf")
    for record in _nemesis(history):
        if record.op == "run.phase" and record.args["phase"] == "faults":
            begin = record.t0
        elif record.op == "run.phase" and record.args["phase"] == "end":
            end = record.t0
    return begin, end


def _nemesis(history: History) -> Iterator[Record]:
    for file in history.files:
        if file.name == "nemesis.jsonl":
            yield from history.of(file)


def _parts(record: Record) -> list[str]:
    """Return the components of an event's key below the cluster's root; empty for a record without a key."""
    if record.op != "etcd.event":
        return []
    return str(record.result["key"]).split("/")[4:]


def _death(record: Record) -> str:
    match _parts(record):
        case ["jobs", job, "workers", worker] if record.result["type"] == "delete":
            return f"member {worker} of job {job} was deleted at revision {record.result['revision']}"
    return ""


def _generation(record: Record) -> str:
    match _parts(record):
        case ["jobs", job, "world"] if record.result["type"] == "put":
            head = json.loads(record.result["value"])
            return f"job {job} began generation {head.get('generation')}: {head.get('reason')}"
    return ""


def _barrier(record: Record) -> str:
    match _parts(record):
        case ["jobs", job, "barriers", name, _, _, "outcome"] if record.result["type"] == "put":
            outcome = json.loads(record.result["value"])
            if outcome.get("result") != "released" and name != SHORT_BARRIER:
                return f"barrier {name} of job {job} was not released: {outcome.get('reason')}"
    return ""


def _save(record: Record) -> str:
    """Return why a save failed: it is aborted in etcd, or a member got another result than the commit."""
    if record.op == "checkpoint.save" and record.error is not None:
        return f"{_whose(record)} ended in {record.error.type}: {record.error.message}"
    if record.op == "checkpoint.save" and not record.result.get("committed"):
        return f"{_whose(record)} ended without a commit"
    match _parts(record):
        case ["jobs", job, "checkpoints", step, _] if record.result["type"] == "put":
            slot = json.loads(record.result["value"])
            if slot.get("state") == "aborted":
                return f"the checkpoint of step {int(step)} of job {job} was aborted: {slot.get('reason')}"
    return ""


def _whose(save: Record) -> str:
    job, step, rank = (save.args[name] for name in ("job", "step", "rank"))
    return f"the save of step {step} by rank {rank} of job {job}"
