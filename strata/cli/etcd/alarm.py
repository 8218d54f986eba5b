"""`strata etcd alarm --disarm`: switches etcd's alarms off once their cause is removed."""

from __future__ import annotations

from dataclasses import dataclass

from strata.cli.etcd.remedies import Connection, replacement_command
from strata.cli.etcd.view import CORRUPT, NO_SPACE, ClusterState
from strata.core.leadership.etcd_quorum import may_disarm_no_space
from strata.errors import Refused, StrataError
from strata.etcd import Alarm, EtcdStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Disarmed:
    """An alarm that was switched off."""

    member: str
    id: str
    alarm: str


async def disarm(
    store: EtcdStore, state: ClusterState, connection: Connection, *, quota_bytes: int
) -> tuple[list[Disarmed], list[StrataError]]:
    """Switch off the alarms whose cause is removed; return them, and the reasons why the others stay on."""
    disarmed, refusals = list[Disarmed](), list[StrataError]()
    for alarm in state.alarms:
        if (refusal := _refusal(alarm, state, connection, quota_bytes)) is not None:
            refusals.append(refusal)
            continue
        await store.cluster.disarm(alarm)
        label = state.label(alarm.member_id)
        disarmed.append(Disarmed(member=label, id=f"{alarm.member_id:x}", alarm=alarm.kind))
    return disarmed, refusals


def _refusal(alarm: Alarm, state: ClusterState, connection: Connection, quota_bytes: int) -> Refused | None:
    label = state.label(alarm.member_id)
    if alarm.kind == CORRUPT:
        if all(peer.id != alarm.member_id for peer in state.peers):
            return None  # the member was replaced
        return Refused(
            f"alarm CORRUPT of {label} stays on: its data differs from the others'",
            hint=f"replace it: {replacement_command(connection, label)}",
        )
    if alarm.kind != NO_SPACE:
        return Refused(f"alarm {alarm.kind} of {label} stays on: its cause is not known here")
    used = {
        peer.label: state.statuses[peer.id].db_bytes if peer.id in state.statuses else None
        for peer in state.peers
    }
    judgement = may_disarm_no_space(used, quota_bytes)
    if judgement.allowed:
        return None
    return Refused(
        f"alarm NOSPACE stays on: {judgement.reason}",
        hint=f"first {connection.command('defrag', '--compact')}",
    )
