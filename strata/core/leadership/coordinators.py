"""The list of coordinators, and which of them are unreachable (PROTOCOLS 4.9).

`P/replicas/<replica>` is attached to the replica's lease and deleted with it. The leader keeps a second key of the same
name, `P/coordinators/<replica>`, without a lease. A coordinator that has only the second key is *unreachable*.
No decision about members or leadership reads the second key. Only an operator's `forget` deletes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from strata.core.ids import is_id
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import PoisonRecord, Replica, encode
from strata.core.kv.txn import Decision, Delete, Plan, Put, Txn, absent, created_at, unchanged
from strata.core.kv.view import View
from strata.errors import NotFound, Refused, StrataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinator:
    """The part of a coordinator's registration that outlives its lease.

    `unreachable_since_unix_ms`: when a leader saw that the registration was deleted; 0 while the registration exists.
    """

    address: str = ""
    epoch: int = 0
    unreachable_since_unix_ms: int = 0


MAX_LISTED = 100
"""The maximum number of names on the list: more names would mean that some process makes them up."""


def unreachable(view: View, keys: ClusterKeys) -> Mapping[str, Coordinator]:
    """Return, by name, the coordinators on the list whose registration was deleted."""
    return {
        name: _listed(view, keys, name) or Coordinator()
        for name in view.names(keys.coordinators)
        if is_id(name) and view.get(keys.replica(name)) is None
    }


def plan_list(view: View, keys: ClusterKeys, *, epoch: int, now_unix_ms: int) -> Plan:
    """Plan writes that make the list match the registrations, each coordinator in its own transaction."""
    txns = [
        Txn(
            compares=(
                created_at(keys.leader, epoch),
                unchanged(keys.replica(name), view.mod_revision(keys.replica(name))),
                unchanged(keys.coordinator(name), view.mod_revision(keys.coordinator(name))),
            ),
            success=(Put(key=keys.coordinator(name), value=encode(record)),),
        )
        for name, record in _due(view, keys, epoch, now_unix_ms)
    ]
    return Plan(reason=f"{len(txns)} coordinators registered or were removed", txns=tuple(txns))


def is_known(view: View, keys: ClusterKeys, name: str) -> bool:
    """Return whether a coordinator of this name is registered or on the list."""
    return any(view.get(key) is not None for key in (keys.replica(name), keys.coordinator(name)))


def decide_forget(view: View, keys: ClusterKeys, name: str, *, known: bool) -> Decision:
    """Remove an unreachable coordinator from the list; refuse if it is registered.

    `known`: the coordinator was known when the request came. If it is no longer on the list, this request or
    another one removed it.
    """
    replica, listed = view.entry(keys.replica(name), Replica), view.get(keys.coordinator(name))
    if replica is not None:
        refusal: StrataError = Refused(
            f"coordinator {name} runs at {replica.record.address}",
            hint="stop it first, and wait until strata status shows it as unreachable",
        )
        return Decision(reason=f"{name} is registered", refusal=refusal)
    if listed is None:
        unknown = NotFound(f"no coordinator is called {name}", hint="strata status shows their names")
        return Decision(reason=f"{name} is not on the list", refusal=None if known else unknown)
    return Decision(
        reason=f"{name} is forgotten",
        txn=Txn(
            compares=(absent(keys.replica(name)), unchanged(listed.key, listed.mod_revision)),
            success=(Delete(key=listed.key),),
        ),
    )


def _due(view: View, keys: ClusterKeys, epoch: int, now_unix_ms: int) -> Iterator[tuple[str, Coordinator]]:
    """Yield the records that must be written."""
    free = MAX_LISTED - view.count(keys.coordinators)
    for entry in view.entries(keys.replicas, Replica):
        listed = _listed(view, keys, entry.name)
        if listed is None and view.get(keys.coordinator(entry.name)) is None:
            free -= 1
            if free < 0:
                continue
        if listed is None or (listed.address, listed.unreachable_since_unix_ms) != (entry.record.address, 0):
            yield entry.name, Coordinator(address=entry.record.address, epoch=epoch)
    for name, record in unreachable(view, keys).items():
        if not record.unreachable_since_unix_ms:
            yield (
                name,
                Coordinator(address=record.address, epoch=epoch, unreachable_since_unix_ms=now_unix_ms),
            )


def _listed(view: View, keys: ClusterKeys, name: str) -> Coordinator | None:
    """Return the list's record of a coordinator, or None; None also if it does not decode: the leader replaces it."""
    try:
        return view.record(keys.coordinator(name), Coordinator)
    except PoisonRecord:
        return None
