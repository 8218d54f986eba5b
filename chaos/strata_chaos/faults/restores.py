"""Faults that lose etcd's data and are healed by a restore command (PROTOCOLS 9).

    backup → more commits → etcd is lost → the duration of the fault → the restore command

Agents and clients run all the time. The fault pauses the coordinators just before the loss, until the observer has
recorded all of etcd's events. Without the pause, the last acknowledged writes might be in no record, and no checker
could require them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from strata.devcluster.local_cluster import LocalCoordinator
from strata.errors import Unavailable
from strata_chaos.faults.base import Effect, NoTarget, Wound
from strata_chaos.run.system import System

MORE: Final = 2
"""How many checkpoints should be committed after the backup."""
MORE_S: Final = 8.0
"""How long the fault waits for those commits; after that it continues with fewer commits."""
COMMAND_S: Final = 60.0
_SETTLE_S: Final = 0.5
"""How long the last requests of paused coordinators may take to reach etcd."""
_POLL_S: Final = 0.1


class Loss(Enum):
    """How etcd's data is lost."""

    WIPED = "every etcd member loses its disk"
    OLDER = "an older snapshot is put under every etcd member"


@dataclass(frozen=True, slots=True)
class _Memory:
    epoch: int
    command: tuple[str, ...]
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFault:
    """The `Fault` that loses etcd's data, and heals it by `command`, with all storage roots."""

    name: str
    summary: str
    loss: Loss
    command: str
    adopts: bool = True
    """Whether the command gets the storage roots. If not, commits are lost on purpose: a checker must report that."""

    def available(self, backend: str) -> str:
        return ""

    async def inject(self, system: System, rng: random.Random) -> Wound:
        names = (*sorted(system.etcd), *sorted(system.coordinators))
        if set(system.whole(names)) != set(names) or len(system.running_etcd()) != len(system.etcd):
            raise NoTarget("an etcd member or a coordinator is not running and unharmed")
        system.claim(*names)
        try:
            return await self._lost(system)
        except BaseException:
            system.release(*names)
            raise

    async def _lost(self, system: System) -> Wound:
        place = system.folder / "backups" / f"{len(list(system.folder.glob('backups/*'))) + 1}"
        revision = 0
        if self.command != "rebuild":
            place.mkdir(parents=True)
            await _strata(system, "backup", "--to", str(place))
            revision = await asyncio.to_thread(_revision_of, system, _snapshot(place))
            await _more(system)
        coordinators = list(system.coordinators.values())
        try:
            await asyncio.gather(*(asyncio.to_thread(each.child.pause) for each in coordinators))
            await asyncio.sleep(_SETTLE_S)
            epoch = system.monitor.epoch()
            system.monitor.detach()
            if wrong := await system.recording.end_life():
                raise Unavailable(wrong)
            system.cluster.etcd.kill()
        finally:
            _go_on(coordinators)
        found = f"etcd held revision {revision} at the backup; " if revision else ""
        if self.loss is Loss.OLDER:
            await asyncio.to_thread(system.cluster.etcd.put_snapshot, _snapshot(place))
        else:
            for member in system.etcd.values():
                await asyncio.to_thread(shutil.rmtree, member.data)
        for member in system.etcd.values():
            member.start()
        await asyncio.to_thread(system.cluster.etcd.wait_healthy)
        older = self.loss is Loss.OLDER
        await system.recording.begin_life(listed_at=revision if older else 0)
        words = [self.command]
        if self.command == "restore":
            words += ["--in-place"] if older else ["--from", str(place)]
        if self.adopts:
            for root in sorted(system.folder.glob("storage-*")):
                words += ["--storage", str(root)]
        return Wound(
            targets=tuple(sorted(system.etcd)),
            memory=_Memory(epoch, (*words, "--yes"), f"{found}{self.loss.value}"),
        )

    async def took_effect(self, system: System, wound: Wound) -> Effect:
        memory: _Memory = wound.memory
        reasons = [str(each.child.poll()) for each in system.coordinators.values()]
        alive = sum(reason == "None" for reason in reasons)
        return Effect(True, f"{memory.evidence}; {alive} coordinators run")

    async def heal(self, system: System, wound: Wound) -> None:
        memory: _Memory = wound.memory
        try:
            output = await _strata(system, *memory.command)
            with (system.folder / "logs" / "restores.log").open("a") as log:
                log.write(f"$ strata controlplane {' '.join(memory.command)}\n{output}\n")
        finally:
            system.monitor.attach()
            system.release(*sorted(system.etcd), *sorted(system.coordinators))


def _go_on(coordinators: Sequence[LocalCoordinator]) -> None:
    for each in coordinators:
        each.child.resume()


def _snapshot(place: Path) -> Path:
    (found,) = place.rglob("*.db")
    return found


def _revision_of(system: System, snapshot: Path) -> int:
    """Return the last revision in a snapshot, as etcdutl reports it."""
    tool = system.cluster.etcd.binary.tool("etcdutl")
    words = [str(tool), "snapshot", "status", str(snapshot), "--write-out=json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    return int(json.loads(done.stdout)["revision"])


async def _more(system: System) -> None:
    """Wait until `MORE` further checkpoints are committed, or `MORE_S` have passed."""
    before = _committed(system)
    for _ in range(int(MORE_S / _POLL_S)):
        if len(_committed(system) - before) >= MORE:
            return
        await asyncio.sleep(_POLL_S)


def _committed(system: System) -> set[str]:
    return {path.parent.name for path in system.folder.glob("storage-*/*/*/COMMIT")}


async def _strata(system: System, *words: str) -> str:
    """Run a command of `strata controlplane` and return its output; raise `Unavailable` if it fails."""
    etcd = ",".join(system.cluster.etcd.endpoints)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "strata", "controlplane", *words, "--etcd", etcd),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "STRATA_INSECURE": "1"},
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise Unavailable(f"strata controlplane {words[0]} took more than {COMMAND_S:g} s") from None
    output = out.decode(errors="replace")
    if process.returncode:
        raise Unavailable(f"strata controlplane {words[0]} ended with {process.returncode}: {output.strip()}")
    return output


FAULTS: Final = (
    RestoreFault(
        name="restore-from-backup",
        summary="every etcd member is wiped after a backup and later commits: `restore --from` at the end",
        loss=Loss.WIPED,
        command="restore",
    ),
    RestoreFault(
        name="restore-in-place",
        summary="a snapshot older than the last commits is put under etcd: `restore --in-place` at the end",
        loss=Loss.OLDER,
        command="restore",
    ),
    RestoreFault(
        name="rebuild-from-storage",
        summary="every etcd member is wiped, and there is no backup: `rebuild` at the end",
        loss=Loss.WIPED,
        command="rebuild",
    ),
    RestoreFault(
        name="restore-without-storage",
        summary="planted harm: as restore-from-backup, but no storage root is named, so that newer commits are lost",
        loss=Loss.WIPED,
        command="restore",
        adopts=False,
    ),
)
