"""Synthetic histories for the checkers' tests: a small etcd that counts revisions, and clients' recorded lines.

`good_run` gives every rule of every checker something to judge, and violates no rule. A doctored history is a good
run with one change.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

ROOT = "/strata/v1/default/"
JOB = f"{ROOT}jobs/j/"
Line = dict[str, Any]


def number(value: int) -> str:
    return f"{value:012d}"


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Story:
    """The lines of each history file. Each line is 0.1 s later than the one before."""

    files: dict[str, list[Line]] = field(default_factory=dict)
    revision: int = 0
    t: float = 1000.0
    held: dict[str, tuple[int, int]] = field(default_factory=dict)
    life: int = 1

    # -- etcd

    def lose(self) -> None:
        """Etcd loses all keys; a new observer records the events of its next life."""
        self._observed_all()
        self.life += 1
        self.revision, self.held = 0, {}
        self.line("observer", 1, "observer.started", args={"life": self.life})

    def _observed_all(self) -> None:
        self.line("observer", 1, "observer.ended", args={"complete": True, "revision": self.revision})

    @property
    def _observer(self) -> str:
        return "observer" if self.life == 1 else f"observer-{self.life}"

    def txn(self, *operations: tuple[str, Any]) -> int:
        """Commit (key, value) pairs as one transaction; None deletes. Returns the revision."""
        self.revision += 1
        self.t += 0.1
        for key, value in operations:
            before = self.held.get(key)
            result: Line = {"revision": self.revision, "key": key, "type": "put", "lease": 0}
            result["prev"] = before and {"create_revision": before[0], "mod_revision": before[1]}
            if value is None:
                result |= {"type": "delete", "value": None}
                self.held.pop(key, None)
            else:
                created = before[0] if before else self.revision
                self.held[key] = created, self.revision
                text = json.dumps({"v": 1, **value}, separators=(",", ":"))
                result |= {"value": text, "create_revision": created}
            self.line("observer", 1, "etcd.event", result=result, t=self.t)
        return self.revision

    def sample(self) -> None:
        """The observer reads the leader key."""
        self.t += 0.1
        epoch = self.held.get(f"{ROOT}leader", (0, 0))[0]
        result = {"revision": self.revision, "epoch": epoch, "leader": None}
        self.line("observer", 1, "observer.sample", result=result, t=self.t)

    # -- clients

    def line(
        self,
        client: str,
        process: int,
        op: str,
        *,
        args: Line | None = None,
        result: Line | None = None,
        outcome: str = "ok",
        error: str = "",
        t: float | None = None,
        begun: str = "",
        identity: str = "",
    ) -> Line:
        """Write one line; with `begun`, the line announces an operation of that id."""
        if t is None:
            self.t += 0.1
            t = self.t
        line: Line = {"v": 1, "client": client, "process": process, "op": op, "t0": t, "t1": t}
        line |= {"args": args or {}, "result": result or {}, "outcome": outcome}
        if begun:
            line |= {"id": begun, "t1": None, "outcome": "unknown"}
        elif identity:
            line["id"] = identity
        if error:
            line["error"] = {"type": error, "message": f"it ended with {error}"}
        name = self._observer if client == "observer" else f"{client}-{process}"
        self.files.setdefault(name, []).append(line)
        return line

    # -- for doctoring a history

    def lines(self, op: str) -> list[Line]:
        """Return every line of an operation, file by file."""
        return [line for lines in self.files.values() for line in lines if line["op"] == op]

    def events(self, key: str) -> list[Line]:
        """Return the results of all events of a key below the job, or of a cluster's key such as "/leader"."""
        name = ROOT + key[1:] if key.startswith("/") else JOB + key
        return [line["result"] for line in self.lines("etcd.event") if line["result"]["key"] == name]

    def drop(self, wanted: Callable[[Line], bool]) -> None:
        """Remove the lines for which `wanted` returns True."""
        for name, lines in self.files.items():
            self.files[name] = [line for line in lines if not wanted(line)]

    def write(self, folder: Path) -> Path:
        """Write the histories to `folder/run`; return that folder."""
        run = folder / "run"
        run.mkdir(exist_ok=True)
        if "observer" in self.files and len(self.lines("observer.ended")) < self.life:
            self._observed_all()
        for name, lines in self.files.items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (run / f"{name}.jsonl").write_text(text)
        return run


def edit(event: Line, **fields: Any) -> None:
    """Change fields of an event's value."""
    value = json.loads(event["value"])
    event["value"] = json.dumps({**value, **fields}, separators=(",", ":"))


# -- a good run -------------------------------------------------------------------------------


def worker(boot: str, served_by: str, pid: int) -> Line:
    return {"boot": boot, "served_by": served_by, "host": "h", "slots": 1, "pid": pid}


def world(story: Story, generation: int, epoch: int, members: list[tuple[str, int]], **more: Any) -> None:
    chunk = f"{JOB}worlds/{number(generation)}/{number(epoch)}/members/{number(0)}"
    rows = [
        {"worker": name, "incarnation": born, "group_rank": i, "slots": 1, "first_rank": i}
        for i, (name, born) in enumerate(members)
    ]
    head = {"generation": generation, "epoch": epoch, "members": len(rows), "size": len(rows), "chunks": 1}
    restore = more.get("restore")
    beside: list[tuple[str, Any]] = []
    if restore is not None:
        latest = {"generation": generation, **restore}
        beside = [
            (f"{JOB}latest", latest),
            (f"{JOB}worlds/{number(generation)}/restored", {"step": restore["step"]}),
        ]
    story.txn(
        (chunk, {"members": rows}), (f"{JOB}world", {**head, "reason": "r", "restore": restore}), *beside
    )


def join(
    story: Story, op: str, name: str, pid: int, incarnation: int, generation: int, rank: int, uid: str = "u"
) -> None:
    story.line(
        f"c.{name}",
        pid,
        op,
        args={"worker": name, "job": "j", "pid": pid},
        result={
            "incarnation": incarnation,
            "generation": generation,
            "rank": rank,
            "world_size": 2,
            "uid": uid,
        },
    )


def barrier(story: Story, name: str, round_: int, *, released: bool) -> None:
    """Write a round of generation 1: both members arrive and it is released, or it times out without rank 1."""
    payloads = {str(rank): b64(f"1/{name}/{round_}/{rank}") for rank in (0, 1)}
    args = [
        {
            "job": "j",
            "worker": f"w{rank}",
            "generation": 1,
            "rank": rank,
            "name": name,
            "ranks": [0, 1],
            "payload": payloads[str(rank)],
        }
        for rank in (0, 1)
    ]
    ids = [f"{name}-{round_}-{rank}" for rank in (0, 1)]
    for rank in (0, 1):
        story.line(f"c.w{rank}", 10 + rank, "barrier", args=args[rank], begun=ids[rank])
    base = f"{JOB}barriers/{name}/{number(1)}/"
    value: Line = {
        "generation": 1,
        "round": round_,
        "digest": "d",
        "reason": "r",
        "missing": [],
        "payloads": {},
    }
    if released:
        outcome = {**value, "result": "released", "payloads": payloads}
        story.txn((f"{base}{number(round_)}/outcome", outcome), (f"{base}floor", {"round": round_}))
    else:
        story.txn((f"{base}{number(round_)}/outcome", {**value, "result": "timed_out", "missing": [1]}))
    for rank in (0, 1):
        story.line(
            f"c.w{rank}",
            10 + rank,
            "barrier",
            args=args[rank],
            identity=ids[rank],
            outcome="ok" if released else "fail",
            error="" if released else "BarrierTimeout",
            result={"payloads": payloads} if released else {},
        )


def images(folder: Path, ranks: int) -> str:
    """Write a checkpoint's files; return the digest of its manifest."""
    folder.mkdir(parents=True)
    parts = []
    for rank in range(ranks):
        header, data = b'{"x":1}', f"weights of {rank}".encode()
        (folder / f"rank-{rank}.safetensors").write_bytes(header + data)
        manifest = {
            "image": {
                "file": f"rank-{rank}.safetensors",
                "size_bytes": len(header + data),
                "header_bytes": len(header),
                "header_digest": xxhash.xxh3_128_hexdigest(header),
            },
            "tensors": {
                "x": {
                    "range": [len(header), len(header + data)],
                    "chunks": [xxhash.xxh3_128_hexdigest(data)],
                }
            },
        }
        text = json.dumps(manifest).encode()
        (folder / f"rank-{rank}.json").write_bytes(text)
        parts.append(
            {"manifest": f"rank-{rank}.json", "digest": f"xxh3-128:{xxhash.xxh3_128_hexdigest(text)}"}
        )
    text = json.dumps({"ranks": parts}).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "COMMIT").write_text("{}")
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(text)}"


def save(story: Story, storage: Path, step: int, attempt: str, born: list[int]) -> None:
    """Write a committed save of `step` by both members in generation 1."""
    folder = storage / attempt
    digest = images(folder, 2)
    slot = f"{JOB}checkpoints/{number(step)}/{number(1)}"
    record: Line = {"attempt": attempt, "step": step, "generation": 1, "type": "full", "ranks": 2}
    record |= {"path": folder.as_uri(), "manifest_digest": "", "state": "open"}
    begun = []
    for rank in (0, 1):
        args = {"job": "j", "worker": f"w{rank}", "generation": 1, "rank": rank, "step": step}
        args["digest"] = sha(f"{step}/{rank}".encode())
        begun.append(args)
        story.line(f"c.w{rank}", 10 + rank, "checkpoint.save", args=args, begun=f"save-{step}-{rank}")
    story.txn((slot, record))
    for rank in (0, 1):
        ack = {"digest": f"d{rank}", "size_bytes": 1, "worker": f"w{rank}", "incarnation": born[rank]}
        story.txn((f"{slot}/{attempt}/acks/{number(rank)}", ack))
    seal = {"digest": digest, "size_bytes": 2, "worker": "w0", "incarnation": born[0]}
    story.txn((f"{slot}/{attempt}/acks/seal", seal))
    latest = {"generation": 1, "step": step, "attempt": attempt, "record_generation": 1}
    story.txn((slot, {**record, "state": "committed", "manifest_digest": digest}), (f"{JOB}latest", latest))
    for rank in (0, 1):
        story.line(
            f"c.w{rank}",
            10 + rank,
            "checkpoint.save",
            args=begun[rank],
            identity=f"save-{step}-{rank}",
            result={"committed": True, "attempt": attempt},
        )
    newest = {"step": step, "generation": 1, "attempt": attempt}
    story.line("reader", 20, "checkpoint.latest", args={"job": "j"}, result=newest)


def remove(story: Story, storage: Path, step: int, attempt: str) -> None:
    """Write the tombstone of a committed checkpoint, and its removal."""
    slot = f"{JOB}checkpoints/{number(step)}/{number(1)}"
    record = {"attempt": attempt, "step": step, "generation": 1, "state": "deleting", "ranks": 2}
    story.txn((slot, record))
    acks = [f"{slot}/{attempt}/acks/{name}" for name in (number(0), number(1), "seal")]
    story.txn((slot, None), *((ack, None) for ack in acks))


def follow(story: Story) -> None:
    """Write a watcher's two streams of the job's events: one without a resume revision, then a resumed one."""
    log = [line["result"] for line in story.lines("etcd.event") if line["result"]["key"].startswith(JOB)]
    middle = log[len(log) // 2]["revision"]

    def as_received(events: list[Line]) -> list[list[Any]]:
        return [
            [
                e["key"][len(JOB) :],
                e["revision"],
                e.get("create_revision", 0),
                None if e["value"] is None else sha(e["value"].encode())[:16],
            ]
            for e in events
        ]

    def message(stream: int, revision: int, events: list[Line], *, resync: bool = False) -> None:
        result = {"resync": resync, "events": as_received(events), "revision": revision, "uid": "u"}
        story.line("watcher", 30, "watch.message", args={"stream": stream}, result=result)

    def begin(stream: int, resume: int | None) -> None:
        args = {"job": "j", "prefix": "", "stream": stream, "resume": resume, "uid": "u" if resume else ""}
        story.line("watcher", 30, "watch", args=args, begun=f"watch-{stream}")

    state: dict[str, Line] = {}
    for event in log:
        if event["revision"] <= middle:
            state[event["key"]] = event
    begin(1, None)
    message(1, middle, [e for e in state.values() if e["type"] == "put"], resync=True)
    begin(2, middle)
    for revision in range(middle + 1, story.revision + 1):
        events = [e for e in log if e["revision"] == revision]
        if events:
            message(2, revision, events)
    story.t += 15  # a stream without events to send may be silent
    args = {"job": "j", "prefix": "", "stream": 2, "resume": middle, "uid": "u"}
    story.line("watcher", 30, "watch", args=args, identity="watch-2")


def good_run(storage: Path) -> Story:
    """Return a run that gives every rule something to judge, and violates none."""
    story = Story()
    story.txn((f"{ROOT}uid", {"uid": "u"}))
    epoch = story.txn((f"{ROOT}leader", {"instance": "A", "replica": "c1", "address": "a"}))
    story.txn((f"{ROOT}replicas/c1", {"instance": "A", "address": "a"}))
    w0 = w1 = story.txn(  # one joined transaction: both members have the same incarnation number
        (f"{JOB}spec", {"min_workers": 2}),
        (f"{JOB}workers/w0", worker("b0", "A", 10)),
        (f"{JOB}workers/w1", worker("b1", "A", 11)),
    )
    world(story, 1, epoch, [("w0", w0), ("w1", w1)])
    join(story, "member.join", "w0", 10, w0, 1, 0)
    join(story, "member.join", "w1", 11, w1, 1, 1)
    for round_ in (1, 2):
        barrier(story, "all", round_, released=True)
    barrier(story, "short-deadline", 1, released=False)
    save(story, storage, 10, "a1", [w0, w1])
    save(story, storage, 20, "a2", [w0, w1])
    remove(story, storage, 10, "a1")
    story.sample()
    story.txn((f"{ROOT}leader", None))
    epoch = story.txn((f"{ROOT}leader", {"instance": "B", "replica": "c2", "address": "b"}))
    story.txn((f"{ROOT}replicas/c2", {"instance": "B", "address": "b"}))
    story.txn((f"{ROOT}coordinators/c2", {"address": "b", "epoch": epoch}))
    story.sample()
    story.txn((f"{JOB}workers/w0", worker("b0", "B", 10)))
    story.line("fleet", 5, "process.kill", args={"pid": 11, "worker": "w1"})
    story.txn((f"{JOB}workers/w1", None))
    again = story.txn((f"{JOB}workers/w1", worker("b2", "B", 12)))
    point = {"step": 20, "attempt": "a2", "record_generation": 1}
    world(story, 2, epoch, [("w0", w0), ("w1", again)], restore=point)
    join(story, "member.rejoin", "w0", 10, w0, 2, 0)
    join(story, "member.join", "w1", 12, again, 2, 1)
    for rank, pid in ((0, 10), (1, 12)):
        args = {"job": "j", "worker": f"w{rank}", "generation": 2, "rank": rank, "point": point}
        result = {"step": 20, "digest": sha(f"20/{rank}".encode())}
        story.line(f"c.w{rank}", pid, "checkpoint.restore", args=args, result=result)
    story.txn((f"{JOB}phase", {"phase": "failed", "reason": "r", "epoch": epoch}))
    story.txn((f"{JOB}phase", {"phase": "running", "reason": "resumed", "epoch": 0}))
    story.txn((f"{JOB}worlds/{number(1)}/{number(2)}/members/{number(0)}", None))
    story.line("c.w0", 10, "member.leave", args={"worker": "w0", "job": "j", "pid": 10})
    story.txn((f"{JOB}workers/w0", None))
    story.line("c.w0", 10, "process.ending", args={"pid": 10})
    story.line("c.w1", 12, "member.alive", args={"worker": "w1"})
    train(story, 1, (10, 11), range(1, 9))
    train(story, 2, (10, 12), range(7, 12))
    story.sample()
    follow(story)
    return story


SLOT_20 = f"{JOB}checkpoints/{number(20)}/{number(1)}"


def train(story: Story, generation: int, pids: tuple[int, int], steps: range, uid: str = "u") -> None:
    """Each member takes one sample a step, different from the other's; an epoch has four samples."""
    for step in steps:
        for rank, pid in enumerate(pids):
            args = {"job": "j", "uid": uid, "generation": generation, "rank": rank, "step": step, "length": 4}
            args |= {"epoch": (step - 1) // 2, "samples": [(step - 1) % 2 * 2 + rank]}
            story.line(f"c.w{rank}", pid, "training.step", args=args)


def restored_run(storage: Path) -> Story:
    """Return a good run and then a loss and a restore of etcd; the job continues from step 20."""
    story = good_run(storage)
    committed = json.loads([e["value"] for e in story.events(SLOT_20.removeprefix(JOB))][-1])
    acks = {
        e["key"]: json.loads(e["value"])
        for line in story.lines("etcd.event")
        if (e := line["result"])["key"].startswith(f"{SLOT_20}/a2/acks/") and e["value"]
    }
    point = {"step": 20, "attempt": "a2", "record_generation": 1}
    faulty = {"id": 1, "fault": "restore-from-backup", "targets": ["etcd-1"]}
    story.line("nemesis", 6, "fault.inject", args=faulty, result={"effective": True, "evidence": ""})
    story.lose()
    story.txn((f"{ROOT}restoring", {"who": "ada", "source": "the backup", "uid": "u", "replaced": []}))
    forming = {"generation": 3, "epoch": 0, "members": 0, "size": 0, "chunks": 0, "reason": "restored"}
    story.txn(
        (f"{JOB}spec", {"min_workers": 2}),
        (SLOT_20, committed),
        *acks.items(),
        (f"{JOB}latest", {"generation": 2, **point}),
        (f"{JOB}phase", {"phase": "running", "reason": "restored", "epoch": 0}),
        (f"{JOB}world", forming),
    )
    story.txn((f"{ROOT}uid", {"uid": "u.1"}), (f"{ROOT}restoring", None))
    story.line("nemesis", 6, "fault.heal", args=faulty, result={"effective": True, "evidence": ""})
    epoch = story.txn((f"{ROOT}leader", {"instance": "C", "replica": "c1", "address": "a"}))
    story.txn((f"{ROOT}replicas/c1", {"instance": "C", "address": "a"}))
    story.sample()
    for rank, pid in ((0, 14), (1, 12)):
        args = {"worker": f"w{rank}", "job": "j", "after": 2}
        story.line(f"c.w{rank}", pid, "member.rejoin", args=args, outcome="unknown", error="ClusterRestored")
    born = [story.txn((f"{JOB}workers/w{rank}", worker(f"b{rank}", "C", 14 - 2 * rank))) for rank in (0, 1)]
    world(story, 4, epoch, [("w0", born[0]), ("w1", born[1])], restore=point)
    for rank, pid in ((0, 14), (1, 12)):
        join(story, "member.join", f"w{rank}", pid, born[rank], 4, rank, uid="u.1")
        args = {"job": "j", "worker": f"w{rank}", "generation": 4, "rank": rank, "point": point, "uid": "u.1"}
        result = {"step": 20, "digest": sha(f"20/{rank}".encode())}
        story.line(f"c.w{rank}", pid, "checkpoint.restore", args=args, result=result)
    train(story, 4, (14, 12), range(9, 13), uid="u.1")
    story.line("reader", 20, "checkpoint.latest", args={"job": "j"}, result={**point, "generation": 1})
    story.sample()
    return story


def long_run(folder: Path, *, rounds: int) -> int:
    """Write a run of two members with `rounds` barrier rounds; return its number of lines."""
    story = Story()
    epoch = story.txn((f"{ROOT}leader", {"instance": "A"}))
    born = [story.txn((f"{JOB}workers/w{i}", worker(f"b{i}", "A", 10 + i))) for i in (0, 1)]
    world(story, 1, epoch, [("w0", born[0]), ("w1", born[1])])
    last: str | None = None
    with ExitStack() as files:
        open_files: dict[str, Any] = {}
        count = 0
        for round_ in range(1, rounds + 1):
            barrier(story, "all", round_, released=True)
            outcome = f"{JOB}barriers/all/{number(1)}/{number(round_)}/outcome"
            story.held.pop(outcome, None)
            if last is not None:
                story.txn((last, None))
            last = outcome
            for name, lines in story.files.items():
                if name not in open_files:
                    open_files[name] = files.enter_context((folder / f"{name}.jsonl").open("w"))
                open_files[name].writelines(json.dumps(line) + "\n" for line in lines)
                count += len(lines)
            story.files = {}
        story.line("observer", 1, "observer.ended", args={"complete": True, "revision": story.revision})
        open_files["observer"].write(json.dumps(story.files["observer"][0]) + "\n")
    return count + 1
