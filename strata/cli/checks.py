"""What `strata doctor` looks at. Each check returns findings, and raises for none of them."""

from __future__ import annotations

import asyncio
import ctypes
import datetime as dt
import importlib.util
import os
import platform
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from strata.agent.addresses import address_towards
from strata.cli.etcd_access import open_store
from strata.cli.etcd_remedies import Connection, backup_command, corrupt_remedy, no_space_remedy
from strata.client import CoordinatorClient, parse_endpoints
from strata.client.name_lookup import ADVICE, SLOW_S, lookup_s
from strata.config import CoordinatorConfig, Credentials, split_address
from strata.controlplane.record import recorded_backup
from strata.core.backup_record import Backup
from strata.core.etcd_version import EtcdVersion, Fitness, judge
from strata.core.keys import ClusterKeys
from strata.core.txn import Range
from strata.documents.reading import read_config
from strata.errors import ConfigError, StrataError, Unavailable
from strata.etcd import EtcdStore, MemberStatus
from strata.launch.ports import is_free
from strata.observe.words import age, size
from strata.security.dates import validity
from strata.security.tls import read_pem

Level = Literal["OK", "WARN", "FAIL"]

FILES_WANTED: Final = 4096
ROOM_WANTED: Final = 1 << 30
EXPIRES_SOON: Final = dt.timedelta(days=7)
FULL: Final = 0.7
NO_SPACE: Final = "NOSPACE"
CORRUPT: Final = "CORRUPT"
BACKUP_MS: Final = 24 * 3600 * 1000
"""How old the newest backup of the control plane may be."""
_TIME_ERROR: Final = 5
"""What adjtimex returns while nothing keeps the clock in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at; `hint` says what to do about it, `commands` how, in this order."""

    level: Level
    what: str
    says: str
    hint: str = ""
    commands: tuple[str, ...] = ()


def _ok(what: str, says: str) -> Finding:
    return Finding(level="OK", what=what, says=says)


def _warn(what: str, says: str, hint: str) -> Finding:
    return Finding(level="WARN", what=what, says=says, hint=hint)


def _fail(what: str, says: str, hint: str) -> Finding:
    return Finding(level="FAIL", what=what, says=says, hint=hint)


# -- this machine


def machine() -> Iterator[Finding]:
    """Look at Python, gRPC, the system, and how many files may be open."""
    yield _ok("python", platform.python_version())
    yield _ok("grpc", metadata.version("grpcio"))
    if sys.platform != "linux":
        yield _fail("system", platform.platform(), "Strata runs on Linux: it uses pidfd, PDEATHSIG and /proc")
    else:
        yield _ok("system", platform.platform())
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES_WANTED:
        yield _warn(
            "open files",
            f"{soft} at most",
            f"a coordinator has one a member: ulimit -n {FILES_WANTED}, or more",
        )
    else:
        yield _ok("open files", f"{soft} at most")


def clock() -> Finding:
    """Look whether something keeps the wall clock in time. Nothing that must be safe rests on it."""
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.create_string_buffer(512))  # mode 0: only ask
    if state < 0:
        return _warn("clock", os.strerror(ctypes.get_errno()), "it could not be asked; is this a container?")
    if state == _TIME_ERROR:
        return _warn(
            "clock",
            "nothing keeps it in time",
            "run an NTP client: certificates and the times of checkpoints go by it",
        )
    return _ok("clock", "kept in time")


def names(endpoints: str, *, timeout_s: float) -> Iterator[Finding]:
    """Look how long the name service takes for the coordinators' addresses and for the name of ours."""
    try:
        towards = parse_endpoints(endpoints)[0]
    except StrataError:
        return  # `cluster` says what is wrong with it
    told: list[tuple[str, float]] = []

    def look() -> None:
        began = time.monotonic()
        address = address_towards(towards.host or "localhost", towards.port)
        lookup_s(address)
        told.append((address, time.monotonic() - began))

    limit_s = max(timeout_s, 2 * SLOW_S)
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(limit_s)
    if not told:
        yield _warn("names", f"the name service did not answer within {limit_s:g} s", ADVICE)
    elif told[0][1] > SLOW_S:
        yield _warn("names", f"looking up {told[0][0]} took {told[0][1]:.1f} s", ADVICE)
    else:
        yield _ok("names", f"{told[0][0]} was looked up in {1000 * told[0][1]:.0f} ms")


def fork() -> Finding:
    """Look whether DataLoader workers may be forked from a process that holds a session."""
    setting = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "0").lower()
    if setting in {"1", "true", "yes"}:
        return _fail(
            "fork",
            "GRPC_ENABLE_FORK_SUPPORT is on",
            "unset it: with it, forked DataLoader workers crash in grpc",
        )
    if not Path("/proc/self/fd").is_dir():
        return _fail("fork", "/proc is not there", "mount it: forked workers find the sockets to close in it")
    return _ok("fork", "forked workers are safe")


def server_extra() -> Finding:
    """Look whether a coordinator can run here."""
    modules = ("grpc_health", "grpc_reflection", "prometheus_client", "starlette", "uvicorn")
    lacking = [name for name in modules if importlib.util.find_spec(name) is None]
    if lacking:
        return _warn(
            "server",
            f"no coordinator can run here: {', '.join(lacking)} missing",
            "fine for a trainer; else pip install 'strata-control[server]'",
        )
    if importlib.util.find_spec("uvloop") is None:
        return _warn("server", "uvloop is missing", "coordinators take a third more CPU without it")
    return _ok("server", "a coordinator can run here")


def storage(root: Path) -> Finding:
    """Look whether checkpoints can be written below `root`, durably."""
    try:
        with tempfile.TemporaryDirectory(prefix=".strata-doctor-", dir=root) as folder:
            written = Path(folder) / "written"
            with written.open("wb") as file:
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
            written.rename(Path(folder) / "renamed")
        free = shutil.disk_usage(root).free
    except OSError as error:
        return _fail("storage", f"{root}: {error.strerror}", "make it, and let this user write there")
    if free < ROOM_WANTED:
        return _warn("storage", f"{root}: {size(free)} free", "that is little for checkpoints")
    return _ok("storage", f"{root}: writable, {size(free)} free")


# -- who we are


def credentials(given: Credentials) -> Iterator[Finding]:
    """Look at the certificate files and the token, if there are any."""
    now = dt.datetime.now(dt.UTC)
    if given.wants_tls:
        try:
            pem = read_pem(given, now)
        except StrataError as error:
            yield _fail(
                "tls", error.message, error.hint or "name the right file, or make one with strata certs"
            )
        else:
            yield from _certificate(given, pem.cert, now)
    if given.token_file is not None:
        try:
            read_config(given.token_file)
        except ConfigError as error:
            yield _fail("token", error.message, "make one with strata tokens add")
        else:
            yield _ok("token", str(given.token_file))


def _certificate(given: Credentials, cert: bytes | None, now: dt.datetime) -> Iterator[Finding]:
    if cert is None:
        yield _ok("tls", f"{given.ca_file} says whom we believe; we show no certificate")
        return
    end = validity(cert).end
    if end - now < EXPIRES_SOON:
        yield _warn("tls", f"{given.cert_file} expires on {end:%Y-%m-%d %H:%M:%SZ}", "strata certs renew")
    else:
        yield _ok("tls", f"{given.cert_file}, until {end:%Y-%m-%d}")


# -- the cluster


def cluster(endpoints: str, own: Credentials, *, timeout_s: float, alone: bool) -> Iterator[Finding]:
    """Ask a coordinator how the cluster is. `alone`: nothing else tells how etcd is."""
    try:
        with CoordinatorClient.connect(endpoints, timeout_s=timeout_s, credentials=own) as client:
            status = client.status()
    except StrataError as error:
        hint = error.hint or "start coordinators (strata dev, strata coordinator), or set --endpoints"
        if alone or not isinstance(error, Unavailable):
            yield _fail("coordinators", error.message, hint)
        else:
            yield _warn("coordinators", error.message, hint)
        return
    if status.outage:
        yield _fail("writes", status.outage, "")
    ready = [replica for replica in status.replicas if replica.ready]
    if len(ready) < len(status.replicas):
        sick = "; ".join(f"{r.replica}: {r.not_ready_reason}" for r in status.replicas if not r.ready)
        yield _warn("coordinators", f"{len(ready)} of {len(status.replicas)} ready: {sick}", "see their logs")
    else:
        yield _ok("coordinators", f"{len(ready)} of {len(status.replicas)} ready")
    if status.leader:
        yield _ok("leader", f"{status.leader}, epoch {status.leader_epoch}")
    else:
        yield _fail("leader", "nobody leads", "do the coordinators reach a majority of etcd?")
    versions = {replica.version for replica in status.replicas} | {metadata.version("strata-control")}
    if len(versions) > 1:
        yield _warn("versions", ", ".join(sorted(versions)), "update the older ones")
    if alone:
        for member in status.etcd:
            yield _etcd_version(member.endpoint, member.version, member.error)


def etcd(config: CoordinatorConfig, *, file: Path | None, timeout_s: float) -> list[Finding]:
    """Ask every etcd member for its version, its health, and how full it is; `file`: where `config` comes from."""
    connection = Connection(
        endpoints=config.etcd.endpoints, config=file, insecure=config.credentials.insecure
    )
    return asyncio.run(_etcd(config, connection, timeout_s))


async def _etcd(config: CoordinatorConfig, connection: Connection, timeout_s: float) -> list[Finding]:
    try:
        store = await open_store(config.etcd, timeout_s=timeout_s)
    except StrataError as error:
        return [_fail("etcd", error.message, error.hint or "check that it runs, and --etcd")]
    async with store:
        statuses = await store.cluster.statuses()
        answering = {name: found for name, found in statuses.items() if isinstance(found, MemberStatus)}
        found = []
        for endpoint, status in statuses.items():
            if isinstance(status, MemberStatus):
                found.append(_etcd_member(endpoint, status, config.etcd.quota_bytes))
            else:
                found.append(_fail(f"etcd {endpoint}", status.message, "is this member up?"))
        if answering and not any(status.leader_id for status in answering.values()):
            found.append(_leaderless(answering, statuses.keys() - answering.keys()))
            return found
        try:
            alarms = await store.cluster.alarms()
            members = await store.cluster.members() if alarms else ()
        except StrataError as error:
            return [*found, _warn("etcd", f"its alarms are not known: {error.message}", "")]
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
                    hint="run these in this order: the member begins anew from the others' data",
                    commands=corrupt_remedy(connection, names),
                )
            )
        found += await _backup(store, config, connection)
        return found


async def _backup(store: EtcdStore, config: CoordinatorConfig, connection: Connection) -> list[Finding]:
    """Look how old the newest backup is; nothing of an etcd in which no cluster has begun."""
    keys = ClusterKeys(config.cluster)
    try:
        if not (await store.read(Range(key=keys.uid))).kvs:
            return []
        newest = await recorded_backup(store, keys)
    except StrataError as error:
        return [_warn("backup", f"the newest one is not known: {error.message}", error.hint)]
    now_unix_ms = int(time.time() * 1000)
    return [backup_finding(newest, connection, cluster=config.cluster, now_unix_ms=now_unix_ms)]


def backup_finding(
    newest: Backup | None, connection: Connection, *, cluster: str, now_unix_ms: int
) -> Finding:
    """Judge the newest backup of the control plane by its age."""
    if newest is None:
        return Finding(
            level="WARN",
            what="backup",
            says="no backup of the control plane",
            hint="make one, from a timer (deploy/etcd/README.md), to a folder or to s3://bucket/prefix",
            commands=(backup_command(connection, "PLACE", cluster=cluster),),
        )
    age_ms = max(0, now_unix_ms - newest.unix_ms)
    says = f"{age(age_ms)} old, revision {newest.revision}, {size(newest.size_bytes)}, in {newest.where}"
    if age_ms <= BACKUP_MS:
        return _ok("backup", says)
    return Finding(
        level="WARN",
        what="backup",
        says=f"the newest one of the control plane is {says}",
        hint="has its timer stopped? make one now",
        commands=(backup_command(connection, newest.where, cluster=cluster),),
    )


def _leaderless(answering: Collection[str], silent: Collection[str]) -> Finding:
    total = len(answering) + len(silent)
    return _fail(
        "etcd",
        f"it has no leader, so nothing can be written: {len(answering)} of {total} members answer"
        f" ({', '.join(sorted(answering))}), {', '.join(sorted(silent)) or 'none'} did not",
        f"start the members that did not answer: {total // 2 + 1} of {total} must reach each other",
    )


def _etcd_member(endpoint: str, status: MemberStatus, quota_bytes: int) -> Finding:
    if not status.leader_id:
        return _fail(
            f"etcd {endpoint}", f"{status.version}, knows no leader", "it needs a majority of members"
        )
    # an alarm is one finding of its own, with what mends it
    errors = "; ".join(e for e in status.errors if NO_SPACE not in e and CORRUPT not in e)
    verdict = _etcd_version(endpoint, status.version, errors)
    if verdict.level != "OK":
        return verdict
    if status.db_bytes > FULL * quota_bytes:
        return _warn(
            verdict.what,
            f"{size(status.db_bytes)} of {size(quota_bytes)} used",
            "raise --quota-backend-bytes, or defragment",
        )
    return _ok(verdict.what, f"{verdict.says}, {size(status.db_bytes)}")


def _etcd_version(endpoint: str, version: str, error: str) -> Finding:
    what = f"etcd {endpoint}"
    if error or not version:
        return _fail(what, error or "it did not answer", "is this member up?")
    try:
        verdict = judge(EtcdVersion.parse(version))
    except ValueError as trouble:
        return _fail(what, str(trouble), "is it etcd?")
    if verdict.fitness is Fitness.GOOD:
        return _ok(what, version)
    return _fail(what, verdict.reason, "update etcd: these bugs lose data or events")


def ports(config: CoordinatorConfig) -> Iterator[Finding]:
    """Look whether a coordinator could listen where it is told to."""
    for what, address in (("port", config.listen), ("http port", config.http_listen)):
        if not address:
            continue
        host, port = split_address(what, address)
        if port == 0 or is_free(port, host=host):
            yield _ok(what, f"{address} is free")
        else:
            yield _warn(what, f"{address} is taken", "by a coordinator of yours, if the line above says so")
