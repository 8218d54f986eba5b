"""Finds out whether etcd takes writes: carries out what `core.leadership.etcd_writable` asks for.

At rest a replica makes one dry run a minute, and asks etcd's members every five seconds how they are, and for
alarms: what only reads waits for no disk. A write of its own that etcd refuses for want of space, and a
silence of etcd, make the next dry run due at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from strata.coordinator.etcd.members import NO_LEADER, AskMembers, EtcdMember
from strata.coordinator.view.mirror import Mirror
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.store import NoSpace, Store
from strata.core.kv.txn import Compare, Op, Put, Target, Txn
from strata.core.leadership.etcd_writable import Writability
from strata.core.leadership.replica_health import ETCD_SILENT_S
from strata.errors import StrataError
from strata.observe import get_logger

log = get_logger()

TURN_S: Final = 1.0
MEMBERS_S: Final = 5.0
"""How often etcd's members are asked how they are."""
ANSWER_S: Final = 2.0
"""How long a dry run is waited for."""


def dry_run(keys: ClusterKeys) -> Txn:
    """Return a transaction that etcd treats as a write and that never writes: no version is below 0."""
    never = Compare(key=keys.dry_run, target=Target.VERSION, op=Op.LESS, operand=0)
    return Txn(compares=(never,), success=(Put(key=keys.dry_run, value=b"never written"),))


class DryRuns:
    """Knows whether etcd takes writes, and how its members are. `run` finds out; `clock` runs through suspends."""

    def __init__(
        self,
        *,
        store: Store,
        mirror: Mirror,
        keys: ClusterKeys,
        ask_members: AskMembers,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._mirror = mirror
        self._txn = dry_run(keys)
        self._ask_members = ask_members
        self._members: Sequence[EtcdMember] = ()
        self._clock = clock
        self._state = Writability(proven_s=clock())
        self._told = ""

    def outage(self) -> str:
        """Return why nothing can be written; an empty string as long as something can."""
        return self._state.outage(self._clock())

    def members(self) -> Sequence[EtcdMember]:
        """Return etcd's members as they last were, or why none was asked; nothing before the first answer."""
        return self._members

    def wrote(self, error: StrataError | None) -> None:
        """Take note how a write of this replica ended."""
        if error is None:
            self._state.proved(self._clock())
        elif isinstance(error, NoSpace):
            self._mirror.note_contact()  # it answers, and members are not to be sent away for a silence
            self._state.suspect()

    async def run(self) -> None:
        """Find out, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_at_members(), name="members of etcd")
            await self._mirror.started()
            while True:
                await asyncio.sleep(TURN_S)
                if self._mirror.silence_s() > ETCD_SILENT_S:
                    self._state.suspect()
                if self._state.is_due(self._clock()):
                    await self._try()
                self._tell()

    async def _try(self) -> None:
        began_s = self._clock()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._store.execute(self._txn)
        except NoSpace:
            self._state.full()
        except (StrataError, TimeoutError) as error:
            self._state.failed(began_s, self._why(error))
        else:
            self._state.proved(self._clock())

    def _why(self, error: Exception) -> str:
        """Return what etcd's members last said of it: a member without a leader still tells its status."""
        answering = [member for member in self._members if member.version]
        if self._members and all(member.error == NO_LEADER for member in answering):
            return f"it has no leader: {len(answering)} of {len(self._members)} members answer"
        return error.message if isinstance(error, StrataError) else "no answer"

    async def _look_at_members(self) -> None:
        while True:
            try:
                self._members = await self._ask_members()
            except StrataError as error:  # a replica that may not ask them learns of alarms by a dry run
                self._members = (EtcdMember(endpoint="etcd", error=error.message),)
            if any(member.full for member in self._members):
                self._state.suspect()
            await asyncio.sleep(MEMBERS_S)

    def _tell(self) -> None:
        outage = self.outage()
        kind = outage.partition(" for ")[0]  # once a trouble, not once a turn
        if kind != self._told:
            self._told = kind
            if outage:
                log.error("etcd_takes_no_writes", reason=outage)
            else:
                log.info("etcd_takes_writes_again")
