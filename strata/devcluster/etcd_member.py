"""One member of a local etcd cluster, which `strata.devcluster.etcd_cluster` makes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.devcluster.etcd_binary import EtcdBinary
from strata.devcluster.etcd_http import EtcdHttp, EtcdTls, MemberStatus
from strata.devcluster.placement import HOST
from strata.devcluster.ports import listens
from strata.errors import Refused, Unavailable
from strata.processes.children import Child


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlan:
    """Name and addresses of one member; they stay the same over restarts of the member and of the cluster."""

    name: str
    client_port: int
    peer_port: int
    host: str = HOST

    def client_url(self, tls: EtcdTls | None) -> str:
        """Return the URL for clients."""
        return _url(self.host, self.client_port, tls)

    def peer_url(self, tls: EtcdTls | None) -> str:
        """Return the URL for the other members."""
        return _url(self.host, self.peer_port, tls)


def _url(host: str, port: int, tls: EtcdTls | None) -> str:
    return f"{'https' if tls else 'http'}://{host}:{port}"


class EtcdMember:
    """One etcd process, which may be killed, frozen and started again.

    `cluster_flags` are the flags that all members of the cluster share. `enter` is a command that enters the network
    namespace of the member's address.
    """

    def __init__(
        self,
        plan: MemberPlan,
        folder: Path,
        binary: EtcdBinary,
        tls: EtcdTls | None,
        cluster_flags: Sequence[str],
        enter: Sequence[str] = (),
    ) -> None:
        self.name = plan.name
        self.log = folder / f"{plan.name}.log"
        self.data = folder / plan.name
        self._argv = (
            *enter,
            str(binary.path),
            f"--name={plan.name}",
            f"--data-dir={self.data}",
            f"--listen-client-urls={plan.client_url(tls)}",
            f"--advertise-client-urls={plan.client_url(tls)}",
            f"--listen-peer-urls={plan.peer_url(tls)}",
            f"--initial-advertise-peer-urls={plan.peer_url(tls)}",
            "--logger=zap",
            *(tls.flags() if tls else ()),
            *cluster_flags,
        )
        self._peer_url = plan.peer_url(tls)
        self._port = plan.client_port
        self._http = EtcdHttp(plan.client_url(tls), tls)
        self._child: Child | None = None
        self._paused = False
        self._recognised = False

    def __repr__(self) -> str:
        return f"<EtcdMember {self.name} {self.endpoint}>"

    @property
    def endpoint(self) -> str:
        """The URL for clients."""
        return self._http.url

    @property
    def child(self) -> Child:
        """The process; the last one if it has ended."""
        assert self._child is not None, f"{self.name} was never started"
        return self._child

    @property
    def pid(self) -> int:
        """The process id; that of the last process if it has ended."""
        return self.child.pid

    @property
    def running(self) -> bool:
        """Whether the process lives; a frozen process does."""
        return self._child is not None and self._child.poll() is None

    @property
    def paused(self) -> bool:
        """Whether the process lives but is frozen."""
        return self.running and self._paused

    def start(self) -> None:
        """Start the process on its existing data; does not wait until it serves."""
        assert not self.running, f"{self.name} runs"
        # A user's ETCD_* variables would reconfigure the member.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        self._child = Child.start(self._argv, name=self.name, env=environment, log=self.log)
        self._paused = self._recognised = False

    def kill(self) -> None:
        """SIGKILL the process and wait until it has ended."""
        self.child.kill()
        self.child.join()

    def stop(self, grace_s: float = 5.0) -> None:
        """End the process in order; a leader transfers leadership first."""
        self.child.stop(grace_s)

    def pause(self) -> None:
        """Freeze the process (SIGSTOP): its connections stay open, but it does not answer."""
        self.child.pause()
        self._paused = True

    def resume(self) -> None:
        """Let a frozen process run again."""
        self.child.resume()
        self._paused = False

    def restart(self) -> None:
        """Start the process again on its data, after a kill if it runs; does not wait until it serves."""
        if self.running:
            self.kill()
        self.start()

    def healthy(self) -> bool:
        """Tell whether the member answers a linearizable read: then it serves, and the cluster has a leader."""
        if not self.running or self._paused or not self._http.healthy():
            return False
        if not self._recognised:
            # Another etcd may answer: it may have got our port although our process has not ended yet.
            try:
                self._recognised = self._peer_url in self._http.peer_urls()
            except Refused:  # etcd lists members for its users only; the kernel's tables are public
                self._recognised = listens(self.pid, self._port)
            except Unavailable:
                return False
        return self._recognised

    def status(self) -> MemberStatus:
        """Return the member's report about itself; `Unavailable` if it does not answer."""
        return self._http.status()

    def hand_over(self, to: EtcdMember) -> None:
        """Transfer leadership from this member, the leader, to another; `Unavailable` if that fails."""
        self._http.move_leader(to.status().member_id)
