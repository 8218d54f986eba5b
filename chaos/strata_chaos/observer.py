"""The observer records the ground truth: every etcd event of the cluster's prefix, in order and without gaps.

    python -m strata_chaos.observer --etcd a:2379,b:2379,c:2379 --history observer.jsonl

The observer watches from a given revision (`--start-revision 1`: from the beginning of a fresh etcd). It records each
event with the key's previous create and mod revisions. After a reconnect it resumes behind the last event seen. If
etcd has compacted events that the observer has not seen, the observer records an `observer.gap`, and the verdict is
unknown. A restarted observer resumes at the end of its history file. On SIGTERM it first catches up with etcd, and
records in `observer.ended` whether it succeeded. Only if it succeeded does a key's absence from the record prove that
the key was absent from etcd.

About twice a second the observer also reads the leader key linearizably and records an `observer.sample`. Samples
bound the commit times of revisions. A revision above the sample's was committed after the read began (`t0`); every
other revision was committed before the read ended (`t1`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tenacity import retry, retry_if_exception_type, wait_fixed

from strata.core.kv.store import Compacted, Store
from strata.core.kv.txn import Event, Range, RangeResult, prefix_end, read_prefix
from strata.errors import StrataError, Unavailable
from strata.etcd import EtcdStore, TlsConfig
from strata_chaos.history import History, HistoryWriter, Outcome, Record

SAMPLE_S: Final = 0.5
RETRY_S: Final = 0.5
CATCH_UP_S: Final = 20.0
"""Limit for catching up at the end. It exceeds the 15 s after which a silent watch is reopened on another member."""
CLIENT: Final = "observer"


@dataclass(slots=True)
class Seen:
    """The last recorded revision, and the keys that exist at it: key -> (create_revision, mod_revision)."""

    revision: int = 0
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    at_revision: set[str] = field(default_factory=set)
    """Keys with a recorded event of `revision`; an observer may die between two events of one revision."""

    def take(self, key: str, mod_revision: int, create_revision: int | None) -> dict[str, int] | None:
        """Note an event; return the key's previous revisions. `create_revision` is None for a deletion."""
        before = self.keys.get(key)
        if mod_revision > self.revision:
            self.revision, self.at_revision = mod_revision, set()
        self.at_revision.add(key)
        if create_revision is None:
            self.keys.pop(key, None)
        else:
            self.keys[key] = (create_revision, mod_revision)
        return None if before is None else {"create_revision": before[0], "mod_revision": before[1]}

    def knows(self, event: Event) -> bool:
        revision = event.kv.mod_revision
        return revision < self.revision or (revision == self.revision and event.kv.key in self.at_revision)


class Observer:
    """Records the events of one cluster's keys. `clock` is CLOCK_BOOTTIME in seconds."""

    def __init__(
        self, store: Store, writer: HistoryWriter, *, prefix: str, seen: Seen, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._writer = writer
        self._prefix = prefix
        self._clock = clock
        self._pid = os.getpid()
        self._reached = 0
        self._moved = asyncio.Event()
        self.seen = seen

    async def run(
        self, start_revision: int, stop: asyncio.Event, *, life: int = 1, listed_at: int = 0
    ) -> None:
        """Record until `stop` is set; then continue until all earlier writes are recorded.

        `life` counts the times that etcd was lost and came back. If `start_revision` is 0, begin with a list of the
        present keys. If `listed_at` is set, begin with a list of the keys at that revision: etcd was restored from a
        snapshot of it.
        """
        self._note("observer.started", prefix=self._prefix, start_revision=start_revision, life=life)
        if listed_at and not self.seen.revision:
            await self._list("snapshot", listed_at)
            start_revision = listed_at + 1
        elif start_revision == 0 and not self.seen.revision:
            await self._list("start")
        async with asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(self._sample())
            following = tasks.create_task(self._follow(max(start_revision, self.seen.revision, 1)))
            await stop.wait()
            sampling.cancel()
            complete = await self._caught_up()
            following.cancel()
        self._note("observer.ended", complete=complete, revision=self._reached)

    async def _caught_up(self) -> bool:
        """Wait until all events up to etcd's present revision are recorded; return False after `CATCH_UP_S`."""
        try:
            async with asyncio.timeout(CATCH_UP_S):
                target = (await self._read(Range(key=f"{self._prefix}leader"))).revision
                while self._reached < target:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return False
        return True

    async def _follow(self, revision: int) -> None:
        while True:
            try:
                # start at the last revision, not after it: some of its events may not be recorded yet
                watch = self._store.watch(self._prefix, prefix_end(self._prefix), start_revision=revision)
                async with watch as batches:
                    async for batch in batches:
                        self._record([event for event in batch.events if not self.seen.knows(event)])
                        self._reach(batch.revision)
            except Compacted:
                self._note("observer.gap", after=self.seen.revision)
                await self._list("gap")
            except Unavailable:
                await asyncio.sleep(RETRY_S)
            revision = max(1, self.seen.revision)

    def _record(self, events: list[Event]) -> None:
        now = self._clock()
        records = []
        for event in events:
            kv = event.kv
            prev = self.seen.take(kv.key, kv.mod_revision, None if event.deleted else kv.create_revision)
            result: dict[str, Any] = {
                "revision": kv.mod_revision,
                "key": kv.key,
                "type": "delete" if event.deleted else "put",
                "value": None if event.deleted else kv.value.decode(errors="replace"),
                "prev": prev,
                "lease": kv.lease,
            }
            if not event.deleted:
                result |= {"create_revision": kv.create_revision}
            records.append(self._line("etcd.event", now, now, {}, result))
        if records:
            self._writer.write(*records)

    @retry(retry=retry_if_exception_type(Unavailable), wait=wait_fixed(RETRY_S))
    async def _read(self, request: Range) -> RangeResult:
        """Read; retry until etcd answers."""
        return await self._store.read(request)

    async def _list(self, why: str, revision: int = 0) -> None:
        """Record all keys that exist now, or at `revision`, and replace `seen` with them."""
        t0 = self._clock()
        found = await self._read(replace(read_prefix(self._prefix), revision=revision))
        now = self._clock()
        self.seen.revision = revision or found.revision
        self.seen.keys = {kv.key: (kv.create_revision, kv.mod_revision) for kv in found.kvs}
        self.seen.at_revision = set(self.seen.keys)
        listed = [
            self._line(
                "etcd.listed",
                t0,
                now,
                {"why": why},
                {
                    "revision": kv.mod_revision,
                    "create_revision": kv.create_revision,
                    "key": kv.key,
                    "value": kv.value.decode(errors="replace"),
                    "lease": kv.lease,
                },
            )
            for kv in found.kvs
        ]
        end = self._line("observer.listed", t0, now, {"why": why}, {"revision": self.seen.revision})
        self._writer.write(*listed, end)
        self._reach(self.seen.revision)

    def _reach(self, revision: int) -> None:
        """Note that all events up to `revision` are recorded."""
        self._reached = max(self._reached, revision)
        self._moved.set()

    async def _sample(self) -> None:
        key = f"{self._prefix}leader"
        while True:
            t0 = self._clock()
            try:
                found = await self._store.read(Range(key=key))
            except StrataError as error:
                self._note("observer.unreachable", error=error.message)
            else:
                kv = found.kvs[0] if found.kvs else None
                result = {
                    "revision": found.revision,
                    "epoch": kv.create_revision if kv is not None else 0,
                    "leader": kv.value.decode(errors="replace") if kv is not None else None,
                }
                self._writer.write(self._line("observer.sample", t0, self._clock(), {}, result))
            await asyncio.sleep(SAMPLE_S)

    def _note(self, op: str, **args: Any) -> None:
        now = self._clock()
        self._writer.write(self._line(op, now, now, args, {}))

    def _line(self, op: str, t0: float, t1: float, args: dict[str, Any], result: dict[str, Any]) -> Record:
        return Record(
            client=CLIENT,
            process=self._pid,
            op=op,
            t0=t0,
            t1=t1,
            args=args,
            outcome=Outcome.OK,
            result=result,
        )


def seen_in(path: Path) -> Seen:
    """Return the `Seen` of the record in a file; an empty `Seen` if the file does not exist."""
    seen = Seen()
    if not path.exists():
        return seen
    for record in History(path):
        result = record.result
        if record.op == "observer.listed":
            seen.revision = max(seen.revision, result["revision"])
        elif record.op == "etcd.listed":
            seen.take(result["key"], result["revision"], result["create_revision"])
        elif record.op == "etcd.event":
            seen.take(result["key"], result["revision"], result.get("create_revision"))
    return seen


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="strata_chaos.observer")
    parser.add_argument("--etcd", required=True, help="etcd's endpoints: a:2379,b:2379")
    parser.add_argument("--cluster", default="default")
    for name in ("ca", "cert", "key"):
        parser.add_argument(f"--etcd-{name}-file", type=Path, help="if etcd demands certificates")
    parser.add_argument("--history", required=True, type=Path)
    parser.add_argument(
        "--start-revision", type=int, default=1, help="0: begin with a list of the existing keys"
    )
    parser.add_argument("--life", type=int, default=1, help="the number of etcd's life, from 1")
    parser.add_argument("--listed-at", type=int, default=0, help="begin with a list of this revision")
    return parser.parse_args(argv)


async def connected(options: argparse.Namespace, stop: asyncio.Event) -> EtcdStore:
    """Return a store once etcd answers; raise `Unavailable` if `stop` is set before."""
    tls = TlsConfig(
        ca_file=options.etcd_ca_file, cert_file=options.etcd_cert_file, key_file=options.etcd_key_file
    )
    while True:
        try:
            return await EtcdStore.connect(
                options.etcd.split(","), tls=tls if tls.ca_file is not None else None
            )
        except Unavailable:
            if stop.is_set():
                raise
            await asyncio.sleep(RETRY_S)


async def observe(options: argparse.Namespace) -> None:
    """Record until SIGTERM."""
    path: Path = options.history
    seen = seen_in(path)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with HistoryWriter(path) as writer:
        async with await connected(options, stop) as store:
            observer = Observer(
                store,
                writer,
                prefix=f"/strata/v1/{options.cluster}/",
                seen=seen,
                clock=lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
            )
            await observer.run(options.start_revision, stop, life=options.life, listed_at=options.listed_at)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the observer; return 0 on SIGTERM, 3 if it cannot go on."""
    options = parse(sys.argv[1:] if argv is None else argv)
    code = 0
    try:
        asyncio.run(observe(options))
    except* StrataError as errors:
        sys.stderr.write(f"the observer ends: {errors.exceptions[0]}\n")
        code = 3
    return code


if __name__ == "__main__":
    sys.exit(main())
