"""Checks of etcd's members for `strata doctor`: versions, alarms, disk use, restores, backups."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from strata.cli.checks.finding import Finding, fail, ok, warn
from strata.cli.etcd.access import open_store
from strata.cli.etcd.remedies import (
    Connection,
    backup_command,
    corrupt_remedy,
    no_space_remedy,
    restore_commands,
)
from strata.client import event_loop
from strata.config import CoordinatorConfig, split_address
from strata.controlplane.record import recorded_backup
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import PoisonRecord, decode
from strata.core.kv.txn import Range
from strata.core.leadership.etcd_version import EtcdVersion, Fitness, judge
from strata.core.restore.lineage import RESTORING
from strata.core.restore.records import Backup, Restoring
from strata.devcluster.ports import is_free
from strata.errors import StrataError
from strata.etcd import EtcdStore, MemberStatus
from strata.observe.words import age, size

FULL: Final = 0.7
NO_SPACE: Final = "NOSPACE"
CORRUPT: Final = "CORRUPT"
BACKUP_MS: Final = 24 * 3600 * 1000
"""The greatest accepted age of the newest backup of the control plane."""
RESTORE_AGAIN: Final = "no coordinator serves until it is done; if that process is gone, run its command again, which takes it over"


def etcd(
    config: CoordinatorConfig, *, file: Path | None, timeout_s: float, roots: Sequence[str] = ()
) -> list[Finding]:
    """Check every etcd member's version, health, and use of its quota.

    `file` is the file that `config` was loaded from; `roots` are options of the printed restore command.
    """
    # Use the loop of the coordinators' client: gRPC reports an error if a loop ends while gRPC has events for that
    # loop.
    return event_loop.shared().call(_etcd(config, Connection.of(config, file), timeout_s, roots))


async def _etcd(
    config: CoordinatorConfig, connection: Connection, timeout_s: float, roots: Sequence[str]
) -> list[Finding]:
    try:
        store = await open_store(config.etcd, timeout_s=timeout_s)
    except StrataError as error:
        return [fail("etcd", error.message, error.hint or "check that it runs, and --etcd")]
    async with store:
        statuses = await store.cluster.statuses()
        answering = {name: found for name, found in statuses.items() if isinstance(found, MemberStatus)}
        found = []
        for endpoint, status in statuses.items():
            if isinstance(status, MemberStatus):
                found.append(_etcd_member(endpoint, status, config.etcd.quota_bytes))
            else:
                found.append(fail(f"etcd {endpoint}", status.message, "is this member up?"))
        if answering and not any(status.leader_id for status in answering.values()):
            found.append(_leaderless(answering, statuses.keys() - answering.keys()))
            return found
        try:
            alarms = await store.cluster.alarms()
            members = await store.cluster.members() if alarms else ()
        except StrataError as error:
            return [*found, warn("etcd", f"its alarms are not known: {error.message}", "")]
        if any(alarm.kind == NO_SPACE for alarm in alarms):
            found.append(
                Finding(
                    level="FAIL",
                    what="etcd",
                    says="it takes no writes: its quota is used up, and the alarm NOSPACE is on",
                    hint="run these in this order, and raise --quota-backend-bytes if it fills up again",
                    commands=no_space_remedy(connection, voters=sum(not m.learner for m in members)),
                )
            )
        if corrupt := {alarm.member_id for alarm in alarms if alarm.kind == CORRUPT}:
            names = [member.name or f"{member.id:x}" for member in members if member.id in corrupt]
            found.append(
                Finding(
                    level="FAIL",
                    what="etcd",
                    says=f"the data of {', '.join(names) or 'a former member'} differs from the others': alarm CORRUPT",
                    hint="run these in this order: the member begins again, from the others' data",
                    commands=corrupt_remedy(connection, names),
                )
            )
        found += await _restoring(store, config, connection, roots)
        found += await _backup(store, config, connection)
        return found


async def _restoring(
    store: EtcdStore, config: CoordinatorConfig, connection: Connection, roots: Sequence[str]
) -> list[Finding]:
    """Report a restore of the control plane that is in progress or was interrupted."""
    keys = ClusterKeys(config.cluster)
    try:
        held = (await store.read(Range(key=keys.restoring))).kvs
        if not held:
            return []
        restoring, newest = decode(Restoring, held[0].value), await recorded_backup(store, keys)
    except (StrataError, PoisonRecord) as error:
        return [warn("restore", f"whether one is going on is not known: {error}", "")]
    return [restore_finding(restoring, newest, connection, roots, now_unix_ms=int(time.time() * 1000))]


def restore_finding(
    restoring: Restoring,
    newest: Backup | None,
    connection: Connection,
    roots: Sequence[str],
    *,
    now_unix_ms: int,
) -> Finding:
    """Return the finding for a restore: the operator, the age, and the command that completes the restore."""
    since = age(max(0, now_unix_ms - restoring.since_unix_ms))
    reason = f"{RESTORING}: {restoring}, {since} ago"
    place = newest.where if newest is not None else "PLACE"
    return Finding(
        level="FAIL",
        what="restore",
        says=reason,
        hint=RESTORE_AGAIN,
        commands=restore_commands(reason, connection, roots=roots, place=place),
    )


async def _backup(store: EtcdStore, config: CoordinatorConfig, connection: Connection) -> list[Finding]:
    """Judge the newest backup's age; return no finding if no cluster was created in this etcd yet."""
    keys = ClusterKeys(config.cluster)
    try:
        if not (await store.read(Range(key=keys.uid))).kvs:
            return []
        newest = await recorded_backup(store, keys)
    except StrataError as error:
        return [warn("backup", f"the newest one is not known: {error.message}", error.hint)]
    return [backup_finding(newest, connection, now_unix_ms=int(time.time() * 1000))]


def backup_finding(newest: Backup | None, connection: Connection, *, now_unix_ms: int) -> Finding:
    """Judge the newest backup of the control plane by its age."""
    if newest is None:
        return Finding(
            level="WARN",
            what="backup",
            says="no backup of the control plane",
            hint="make one, from a timer (deploy/etcd/README.md), to a folder or to s3://bucket/prefix",
            commands=(backup_command(connection, "PLACE"),),
        )
    age_ms = max(0, now_unix_ms - newest.unix_ms)
    says = f"{age(age_ms)} old, revision {newest.revision}, {size(newest.size_bytes)}, in {newest.where}"
    if age_ms <= BACKUP_MS:
        return ok("backup", says)
    return Finding(
        level="WARN",
        what="backup",
        says=f"the newest one of the control plane is {says}",
        hint="has its timer stopped? make one now",
        commands=(backup_command(connection, newest.where),),
    )


def _leaderless(answering: Collection[str], silent: Collection[str]) -> Finding:
    total = len(answering) + len(silent)
    return fail(
        "etcd",
        f"it has no leader, so nothing can be written: {len(answering)} of {total} members answer"
        f" ({', '.join(sorted(answering))}), {', '.join(sorted(silent)) or 'none'} did not",
        f"start the members that did not answer: {total // 2 + 1} of {total} must reach each other",
    )


def _etcd_member(endpoint: str, status: MemberStatus, quota_bytes: int) -> Finding:
    if not status.leader_id:
        return fail(
            f"etcd {endpoint}", f"{status.version}, knows no leader", "it needs a majority of members"
        )
    # An alarm has a separate finding, with its own remedy.
    errors = "; ".join(e for e in status.errors if NO_SPACE not in e and CORRUPT not in e)
    verdict = etcd_version(endpoint, status.version, errors)
    if verdict.level != "OK":
        return verdict
    if status.db_bytes > FULL * quota_bytes:
        return warn(
            verdict.what,
            f"{size(status.db_bytes)} of {size(quota_bytes)} used",
            "raise --quota-backend-bytes, or defragment",
        )
    return ok(verdict.what, f"{verdict.says}, {size(status.db_bytes)}")


def etcd_version(endpoint: str, version: str, error: str) -> Finding:
    what = f"etcd {endpoint}"
    if error or not version:
        return fail(what, error or "it did not answer", "is this member up?")
    try:
        verdict = judge(EtcdVersion.parse(version))
    except ValueError as invalid:
        return fail(what, str(invalid), "is it etcd?")
    if verdict.fitness is Fitness.GOOD:
        return ok(what, version)
    return fail(what, verdict.reason, "update etcd: these bugs lose data or events")


def ports(config: CoordinatorConfig) -> Iterator[Finding]:
    """Check that a coordinator could listen on its configured ports."""
    for what, address in (("port", config.listen), ("http port", config.http_listen)):
        if not address:
            continue
        host, port = split_address(what, address)
        if port == 0 or is_free(port, host=host):
            yield ok(what, f"{address} is free")
        else:
            yield warn(what, f"{address} is taken", "by your own coordinator, if the line above says so")
