"""An etcd cluster of 1 or 3 members on this machine, for development and tests.

    with EtcdCluster.start(folder, members=3) as cluster:
        print(cluster.endpoints)
        cluster.leader().kill()

The calls block; from asyncio use `asyncio.to_thread`. All queries to etcd here go over its HTTP port: this package
must not import the etcd client, so that no code of a worker can use etcd through it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from strata.devcluster.etcd_binary import EtcdBinary, find_etcd
from strata.devcluster.etcd_http import EtcdTls, MemberStatus
from strata.devcluster.etcd_member import EtcdMember, MemberPlan
from strata.devcluster.placement import HOST, Placement
from strata.devcluster.polling import until
from strata.devcluster.ports import free_ports
from strata.documents.parsing import SMALL_CONFIG, json_object, text
from strata.documents.reading import read_regular
from strata.errors import ConfigError, Unavailable

_PLAN = "cluster.json"
_CLIENT_PORT, _PEER_PORT = 2379, 2380
"""etcd's default ports, for a member that has a network namespace for itself."""
_ATTEMPTS = 3
_CAUSES = {
    "no space left on device": "free some space, or put the data elsewhere (--data)",
    "disk quota exceeded": "the quota is used up; put the data elsewhere (--data)",
    "read-only file system": "put the data elsewhere (--data)",
    "permission denied": "check who owns the folder, or put the data elsewhere (--data)",
}
"""Messages in the log of an etcd that ended, and the hint for each."""


class EtcdCluster:
    """Running members; make a cluster with `EtcdCluster.start`, end it with `stop` or `kill`."""

    def __init__(self, folder: Path, members: Sequence[EtcdMember], binary: EtcdBinary) -> None:
        self.folder = folder
        self.members = tuple(members)
        self.binary = binary

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        members: int = 1,
        binary: EtcdBinary | None = None,
        tls: EtcdTls | None = None,
        extra_args: Sequence[str] = (),
        fsync: bool = True,
        placements: Sequence[Placement] | None = None,
        timeout_s: float = 30.0,
        snapshot: Path | None = None,
    ) -> Self:
        """Return a cluster in which every member is healthy.

        If the folder contains a cluster already, that cluster is started again with its data and ports. Without
        `fsync` a power cut may lose writes that etcd acknowledged: for tests only. `placements` gives the
        address and namespace of each member, by default loopback. A new cluster begins with the contents of `snapshot`.
        """
        if members not in {1, 3}:
            raise ConfigError(f"a local etcd has 1 or 3 members, not {members}")
        found = binary or find_etcd(members=members)
        places = placements or [Placement()] * members
        folder = folder.absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        old = _read_plan(folder, members)
        flags = (*extra_args, *(() if fsync else ("--unsafe-no-fsync",)))
        for attempts_left in reversed(range(1 if old else _ATTEMPTS)):
            plans, token = old or _new_plan(folder, places)
            if snapshot is not None and not old:
                _unpack(found, snapshot, folder, plans, token, tls)
            common = (
                f"--initial-cluster={_peers(plans, tls)}",
                f"--initial-cluster-token={token}",
                *flags,
            )
            each = [
                EtcdMember(plan, folder, found, tls, common, place.enter)
                for plan, place in zip(plans, places, strict=True)
            ]
            cluster = cls(folder, each, found)
            try:
                for member in cluster.members:
                    member.start()
                cluster.wait_healthy(timeout_s)
            except BaseException as error:
                cluster.kill()
                if not attempts_left or not isinstance(error, Unavailable) or not cluster._port_was_taken():
                    raise
                cluster.erase()
            else:
                return cluster
        raise AssertionError("unreachable")

    @classmethod
    def from_snapshot(
        cls, folder: Path, snapshot: Path, *, binary: EtcdBinary | None = None, timeout_s: float = 60.0
    ) -> Self:
        """Return a cluster of one member, in a new folder, with the contents of a snapshot of etcd.

        `ConfigError` if the tools of etcd are not installed, or do not accept the file as a snapshot.
        """
        found = binary or find_etcd()
        folder.mkdir(mode=0o700, parents=True)
        return cls.start(folder, binary=found, fsync=False, timeout_s=timeout_s, snapshot=snapshot)

    def put_snapshot(self, snapshot: Path, *, tls: EtcdTls | None = None) -> None:
        """Replace the data of a stopped cluster's members by the contents of a snapshot."""
        for member in self.members:
            assert not member.running, f"{member.name} runs"
            shutil.rmtree(member.data, ignore_errors=True)
        plan = _read_plan(self.folder, len(self.members))
        assert plan is not None
        _unpack(self.binary, snapshot, self.folder, *plan, tls)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The members' URLs for clients, whether they run or not."""
        return tuple(member.endpoint for member in self.members)

    def wait_healthy(self, timeout_s: float = 30.0) -> None:
        """Return once every member that is not frozen answers linearizable reads.

        `Unavailable`, with the end of the member's log, if a member ended or did not become healthy in time.
        """
        waiting = [member for member in self.members if not member.paused]

        def all_healthy() -> bool:
            while waiting:
                if not waiting[0].running:
                    raise _ended(waiting[0])
                if not waiting[0].healthy():
                    return False
                waiting.pop(0)
            return True

        if not until(all_healthy, timeout_s):
            raise Unavailable(
                f"etcd {waiting[0].name} is not healthy after {timeout_s} s:\n{waiting[0].child.tail()}"
            )

    def leader(self, timeout_s: float = 30.0) -> EtcdMember:
        """Return the leader once there is one; `Unavailable` if there is none in time.

        A frozen member does not count, even while the other members still take it for the leader.
        """
        found = until(self.leader_now, timeout_s)
        if found is None:
            raise Unavailable(f"no etcd member is leader after {timeout_s} s")
        return found

    def followers(self, timeout_s: float = 30.0) -> tuple[EtcdMember, ...]:
        """Return the running members that are not the leader."""
        leader = self.leader(timeout_s)
        return tuple(m for m in self.members if m is not leader and m.running and not m.paused)

    def leader_now(self) -> EtcdMember | None:
        """Return the current leader, or None; frozen members do not count."""
        answers: list[tuple[MemberStatus, EtcdMember]] = []
        for member in self.members:
            if member.running and not member.paused:
                with contextlib.suppress(Unavailable):
                    answers.append((member.status(), member))
        if not answers:
            return None
        status, member = max(answers, key=lambda answer: (answer[0].term, answer[0].leads))
        return member if status.leads else None

    def stop(self, grace_s: float = 5.0) -> None:
        """End all members in order, the leader last.

        If all members ended together, the leader would try for seconds to hand over to a member that is ending.
        """
        deadline = time.monotonic() + grace_s
        leader = self.leader_now()
        for last in (False, True):
            wave = [m.child for m in self.members if m.running and (m is leader) is last]
            for child in wave:
                child.request_stop()
            for child in wave:
                try:
                    child.join(max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    child.kill()
                    child.join()

    def kill(self) -> None:
        """SIGKILL all members and wait until they have ended: fast, and the effect of a power cut."""
        alive = [member for member in self.members if member.running]
        for member in alive:
            member.child.kill()
        for member in alive:
            member.child.join()

    def erase(self) -> None:
        """Remove data, logs and ports of a cluster that does not run."""
        for member in self.members:
            assert not member.running, f"{member.name} runs"
            shutil.rmtree(member.data, ignore_errors=True)
            member.log.unlink(missing_ok=True)
        (self.folder / _PLAN).unlink(missing_ok=True)

    def _port_was_taken(self) -> bool:
        return any("address already in use" in member.child.tail(50) for member in self.members)


def _peers(plans: Sequence[MemberPlan], tls: EtcdTls | None) -> str:
    return ",".join(f"{plan.name}={plan.peer_url(tls)}" for plan in plans)


def _unpack(
    binary: EtcdBinary,
    snapshot: Path,
    folder: Path,
    plans: Sequence[MemberPlan],
    token: str,
    tls: EtcdTls | None,
) -> None:
    """Write the data of these members from a snapshot, with `etcdutl`, or with `etcdctl` if there is no `etcdutl`."""
    try:
        tool = binary.tool("etcdutl")
    except ConfigError:
        tool = binary.tool("etcdctl")
    for plan in plans:
        words = [
            *(str(tool), "snapshot", "restore", str(snapshot), "--data-dir", str(folder / plan.name)),
            *("--name", plan.name, "--initial-cluster", _peers(plans, tls)),
            *("--initial-cluster-token", token, "--initial-advertise-peer-urls", plan.peer_url(tls)),
        ]
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "ETCDCTL_API": "3"},
        )
        if done.returncode:
            last_line = (done.stderr.strip() or done.stdout.strip() or "it gave no reason").splitlines()[-1]
            raise ConfigError(
                f"{tool.name} cannot restore {snapshot}: {last_line}",
                hint=f"is it a snapshot of etcd, no newer than {tool.name} {binary.version}?",
            )


def _ended(member: EtcdMember) -> Unavailable:
    """Return an error that says why a member ended; etcd itself reports a full disk with a page of Go stacks."""
    tail = member.child.tail(200)
    what = f"etcd {member.name} {member.child.describe()}"
    for sign, hint in _CAUSES.items():
        if sign in tail:
            return Unavailable(f"{what}: {sign}", hint=f"{hint}; its log is {member.log}")
    return Unavailable(f"{what}:\n{member.child.tail(40)}", hint=f"its log is {member.log}")


def _read_plan(folder: Path, members: int) -> tuple[list[MemberPlan], str] | None:
    try:
        data = read_regular(folder / _PLAN, most_bytes=SMALL_CONFIG.size_bytes)
        stored = json_object(data, SMALL_CONFIG)
        plans = [MemberPlan(**plan) for plan in stored["members"]]
        token = text(stored["token"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder / _PLAN} cannot be read: {error}", hint="use another folder") from error
    if len(plans) != members:
        raise ConfigError(
            f"{folder} holds a cluster of {len(plans)} members, not {members}",
            hint="ask for that number, or use another folder",
        )
    return plans, token


def _new_plan(folder: Path, places: Sequence[Placement]) -> tuple[list[MemberPlan], str]:
    ports = iter(free_ports(2 * sum(not place.enter for place in places), host=HOST))
    plans = [
        MemberPlan(
            name=f"etcd-{number}",
            client_port=_CLIENT_PORT if place.enter else next(ports),
            peer_port=_PEER_PORT if place.enter else next(ports),
            host=place.host,
        )
        for number, place in enumerate(places, 1)
    ]
    token = secrets.token_hex(8)  # so that members of an earlier cluster with these ports cannot join
    stored = {"members": [asdict(plan) for plan in plans], "token": token}
    (folder / _PLAN).write_text(json.dumps(stored, indent=1))
    return plans, token
