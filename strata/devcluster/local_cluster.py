"""Coordinators over an etcd cluster, all on this machine: for development, the demo and tests.

    with LocalCluster.start(folder, etcd_members=3, coordinators=3) as cluster:
        print(cluster.endpoints)
        cluster.leader().child.kill()

Every process is a child of this process and ends with it, however this process ends. The calls block; from asyncio use
`asyncio.to_thread`.
"""

from __future__ import annotations

import contextlib
import fcntl
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from strata.client import CoordinatorClient
from strata.config import Credentials
from strata.devcluster.etcd_binary import EtcdBinary
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.devcluster.etcd_http import EtcdTls
from strata.devcluster.placement import HOST, Placement
from strata.devcluster.polling import until
from strata.devcluster.ports import free_ports, is_free
from strata.errors import ConfigError, StrataError, Unavailable
from strata.processes.children import Child
from strata.v1.admin_pb2 import GetStatusResponse

_PORT = 50051
"""Strata's default port, for a coordinator that has a network namespace for itself."""
_POLL_S = 0.05

Say = Callable[[str], None]


class LocalCoordinator:
    """One coordinator process. Its log is a file below the cluster's folder."""

    def __init__(
        self,
        name: str,
        address: str,
        http: str,
        arguments: list[str],
        log: Path,
        credentials: Credentials | None = None,
    ) -> None:
        self.name = name
        self._credentials = credentials
        self.address = address
        self.http = http
        """The address of its status page, `host:port`."""
        self.log = log
        self._arguments = arguments
        self.child = self._spawn()

    def restart(self) -> None:
        """Start the coordinator again under the same name and address; kill it first if it runs."""
        self.child.kill()
        self.child.join()
        self.child = self._spawn()

    def wait_ready(self, timeout_s: float) -> GetStatusResponse:
        """Return the coordinator's status once it is ready; after the limit, `Unavailable` with the end of its log."""

        def ready() -> GetStatusResponse | None:
            answer = GetStatusResponse()
            with (
                contextlib.suppress(Unavailable),
                CoordinatorClient.connect(
                    self.address, timeout_s=1.0, credentials=self._credentials
                ) as client,
            ):
                answer = client.status()
            if self.child.poll() is not None:  # this coordinator has ended: another process answered
                raise Unavailable(f"{self.name} {self.child.describe()}:\n{self.child.tail()}", hint="")
            return answer if any(r.replica == self.name and r.ready for r in answer.replicas) else None

        answer = until(ready, timeout_s, every_s=_POLL_S)
        if answer is None:
            raise Unavailable(
                f"{self.name} was not ready within {timeout_s:g} s:\n{self.child.tail()}",
                hint=f"its log is {self.log}",
            )
        return answer

    def _spawn(self) -> Child:
        return Child.start(self._arguments, name=self.name, log=self.log)


class LocalCluster:
    """The processes that `start` started; `stop` ends them in order, `kill` all together by SIGKILL."""

    def __init__(
        self,
        etcd: EtcdCluster,
        coordinators: list[LocalCoordinator],
        logs: Path,
        lock: TextIO,
        credentials: Credentials | None = None,
    ) -> None:
        self.etcd = etcd
        self._credentials = credentials
        self.coordinators = coordinators
        self.logs = logs
        self._lock = lock

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        etcd_members: int = 3,
        coordinators: int = 3,
        binary: EtcdBinary | None = None,
        ports: list[int] | None = None,
        http_ports: list[int] | None = None,
        cluster: str = "default",
        detect_s: float = 5.0,
        fsync: bool = True,
        etcd_placements: Sequence[Placement] | None = None,
        placements: Sequence[Placement] | None = None,
        say: Say = lambda _line: None,
        timeout_s: float = 60.0,
        etcd_tls: EtcdTls | None = None,
        options: Callable[[str], Sequence[str]] = lambda _name: (),
        credentials: Credentials | None = None,
    ) -> Self:
        """Return a cluster in which every process is ready.

        `ports` are the coordinators' gRPC ports, `http_ports` those of their pages; None means free ones.
        `etcd_placements` and `placements` give the address and namespace of each etcd member and each coordinator, by
        default loopback. `say` is called with a line for each step. `options` returns more flags for a coordinator,
        by its name. `credentials` are used to check whether the coordinators are ready.
        `ConfigError` if there is no suitable etcd, `Unavailable` if a process does not become ready; no process is
        left running then.
        """
        if coordinators < 1:
            raise ConfigError("a cluster has at least one coordinator")
        places = placements or [Placement()] * coordinators
        if len(places) != coordinators:
            raise ConfigError(f"{coordinators} coordinators need as many places, not {len(places)}")
        for given in (ports, http_ports):
            if given is not None and len(given) != coordinators:
                raise ConfigError(f"{coordinators} coordinators need as many ports, not {len(given)}")
        here = [port for port, place in zip(ports or (), places, strict=False) if not place.enter]
        if taken := [str(port) for port in (*here, *(http_ports or ())) if not is_free(port, host=HOST)]:
            raise ConfigError(
                f"port {', '.join(taken)} of {HOST} is taken",
                hint="end the process that listens there, or use other ports",
            )
        lock = _lock(folder)
        started: list[LocalCoordinator] = []
        etcd: EtcdCluster | None = None
        try:
            etcd = EtcdCluster.start(
                folder / "etcd",
                members=etcd_members,
                binary=binary,
                tls=etcd_tls,
                fsync=fsync,
                placements=etcd_placements,
                timeout_s=timeout_s,
            )
            say(f"etcd {etcd.binary.version}: {etcd_members} members at {','.join(etcd.endpoints)}")
            free = free_ports(
                2 * coordinators
            )  # chosen after etcd has started: etcd could take some of these ports
            usual = [_PORT if place.enter else port for place, port in zip(places, free, strict=False)]
            chosen = ports if ports is not None else usual
            pages = http_ports if http_ports is not None else free[coordinators:]
            for number, (port, page, place) in enumerate(zip(chosen, pages, places, strict=True), 1):
                name = f"coordinator-{number}"
                started.append(
                    LocalCoordinator(
                        name,
                        f"{place.host}:{port}",
                        f"{HOST}:{page}",
                        [
                            *_coordinator_command(
                                name,
                                place,
                                port=port,
                                http_port=page,
                                etcd=",".join(etcd.endpoints),
                                cluster=cluster,
                                detect_s=detect_s,
                            ),
                            *options(name),
                        ],
                        folder / "logs" / f"{name}.log",
                        credentials,
                    )
                )
            for coordinator in started:
                coordinator.wait_ready(timeout_s)
                say(f"{coordinator.name} serves at {coordinator.address}")
        except BaseException:
            for coordinator in started:
                coordinator.child.kill()
            if etcd is not None:
                etcd.kill()
            lock.close()
            raise
        return cls(etcd, started, folder / "logs", lock, credentials)

    @property
    def endpoints(self) -> str:
        """The coordinators' addresses, as clients and `--endpoints` take them."""
        return ",".join(c.address for c in self.coordinators)

    def status(self, *, timeout_s: float = 5.0) -> GetStatusResponse:
        """Return the status as seen by any coordinator that answers."""
        with CoordinatorClient.connect(
            self.endpoints, timeout_s=timeout_s, credentials=self._credentials
        ) as client:
            return client.status()

    def leader(self, *, timeout_s: float = 30.0) -> LocalCoordinator:
        """Return the leading coordinator once there is one; `Unavailable` after the limit."""
        found = until(self._leader_now, timeout_s, every_s=_POLL_S)
        if found is None:
            raise Unavailable(f"no coordinator became leader within {timeout_s:g} s")
        return found

    def _leader_now(self) -> LocalCoordinator | None:
        with contextlib.suppress(Unavailable):
            name = self.status(timeout_s=2.0).leader
            return next((c for c in self.coordinators if c.name == name and c.child.poll() is None), None)
        return None

    def stop(self) -> None:
        """End every process in order: coordinators first, so that the leader can resign."""
        for coordinator in self.coordinators:
            coordinator.child.request_stop()
        for coordinator in self.coordinators:
            coordinator.child.stop()
        self.etcd.stop()
        self._lock.close()

    def kill(self) -> None:
        """End every process with SIGKILL."""
        for coordinator in self.coordinators:
            coordinator.child.kill()
        self.etcd.kill()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, StrataError | KeyboardInterrupt):
            self.stop()
        else:
            self.kill()


def _lock(folder: Path) -> TextIO:
    """Lock the folder against a second cluster, while this process lives and the returned file is open.

    Otherwise the second cluster's etcd members would use the ports of the first cluster's members.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"cannot keep data in {folder}: {error.strerror}", hint="use another folder (--data)"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(
            f"another cluster runs on the data in {folder}", hint="end it, or use another folder (--data)"
        ) from None
    return file


def _coordinator_command(
    name: str, place: Placement, *, port: int, http_port: int, etcd: str, cluster: str, detect_s: float
) -> list[str]:
    return [
        *place.enter,
        sys.executable,
        "-m",
        "strata",
        "coordinator",
        f"--replica={name}",
        f"--listen={place.host}:{port}",
        f"--http={HOST}:{http_port}",
        f"--etcd={etcd}",
        f"--cluster={cluster}",
        f"--detect-s={detect_s:g}",
    ]
