"""Dry runs: checks whether etcd accepts writes, on the schedule of `core.leadership.etcd_writable`.

While etcd works, a replica makes one dry run a minute. Every five seconds it requests the status and the alarms of
etcd's members: these requests only read, and so wait for no disk. If etcd refuses a write of this replica for lack of
space, or is silent, the next dry run is due immediately.
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
"""Interval between two requests for the status of etcd's members."""
ANSWER_S: Final = 2.0
"""Timeout of a dry run."""


def dry_run(keys: ClusterKeys) -> Txn:
    """Return a transaction that etcd handles as a write, but whose compare is never true: no version is below 0."""
    never = Compare(key=keys.dry_run, target=Target.VERSION, op=Op.LESS, operand=0)
    return Txn(compares=(never,), success=(Put(key=keys.dry_run, value=b"never written"),))


class DryRuns:
    """Tracks whether etcd accepts writes, and its members' status. `run` checks; `clock` counts suspend too."""

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
        self._logged_kind = ""

    def outage(self) -> str:
        """Return why no replica can write; an empty string while writes are possible."""
        return self._state.outage(self._clock())

    def members(self) -> Sequence[EtcdMember]:
        """Return the last status of etcd's members, or the error of requesting it; empty before the first answer."""
        return self._members

    def wrote(self, error: StrataError | None) -> None:
        """Record the result of a write of this replica."""
        if error is None:
            self._state.proved(self._clock())
        elif isinstance(error, NoSpace):
            self._mirror.note_contact()  # etcd did answer: no reason to send members to another replica
            self._state.suspect()

    async def run(self) -> None:
        """Check until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll_members(), name="members of etcd")
            await self._mirror.started()
            while True:
                await asyncio.sleep(TURN_S)
                if self._mirror.silence_s() > ETCD_SILENT_S:
                    self._state.suspect()
                if self._state.is_due(self._clock()):
                    await self._try()
                self._log_change()

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
        """Return why a dry run failed, by the last status of etcd's members; they report their status even
        without a leader.
        """
        answering = [member for member in self._members if member.version]
        if self._members and all(member.error == NO_LEADER for member in answering):
            return f"it has no leader: {len(answering)} of {len(self._members)} members answer"
        return error.message if isinstance(error, StrataError) else "no answer"

    async def _poll_members(self) -> None:
        while True:
            try:
                self._members = await self._ask_members()
            except StrataError as error:  # without permission to list alarms, a dry run shows them
                self._members = (EtcdMember(endpoint="etcd", error=error.message),)
            if any(member.full for member in self._members):
                self._state.suspect()
            await asyncio.sleep(MEMBERS_S)

    def _log_change(self) -> None:
        outage = self.outage()
        kind = outage.partition(" for ")[0]  # log once an outage, not once a turn
        if kind != self._logged_kind:
            self._logged_kind = kind
            if outage:
                log.error("etcd_takes_no_writes", reason=outage)
            else:
                log.info("etcd_takes_writes_again")
