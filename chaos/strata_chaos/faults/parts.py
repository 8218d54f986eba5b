"""The processes that a fault may kill or freeze: a coordinator, an etcd member, a process of a workload.

The methods block until the kernel has acted; faults call them in threads.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import Protocol

from strata.devcluster.etcd_member import EtcdMember
from strata.devcluster.local_cluster import LocalCoordinator
from strata.devcluster.polling import until
from strata.processes.children import Child
from strata_chaos.run.roster import Target, stat_of

_END_S = 5.0
_POLL_S = 0.01


class Part(Protocol):
    """A process that a fault kills or freezes."""

    @property
    def name(self) -> str: ...

    def kill(self) -> None:
        """Send SIGKILL, and return once the process has ended."""
        ...

    def freeze(self) -> None:
        """Send SIGSTOP, and return once the process is stopped."""
        ...

    def thaw(self) -> None:
        """Send SIGCONT."""
        ...

    def revive(self) -> None:
        """Restart the process after a kill, unless its workload restarts it."""
        ...

    def killed(self) -> tuple[bool, str]:
        """Return whether SIGKILL ended the process, and the evidence."""
        ...

    def frozen(self) -> tuple[bool, str]:
        """Return whether the process is stopped, and the evidence."""
        ...


class CoordinatorPart:
    """A coordinator. `revive` restarts it, as a service manager would."""

    def __init__(self, coordinator: LocalCoordinator) -> None:
        self.name = coordinator.name
        self._coordinator = coordinator
        self._hit = coordinator.child

    def kill(self) -> None:
        self._hit.kill()
        self._hit.join(_END_S)

    def freeze(self) -> None:
        self._hit.pause()

    def thaw(self) -> None:
        self._hit.resume()

    def revive(self) -> None:
        self._coordinator.restart()

    def killed(self) -> tuple[bool, str]:
        return _killed(self.name, self._hit)

    def frozen(self) -> tuple[bool, str]:
        return _stands(self.name, self._hit.pid)


class EtcdPart:
    """An etcd member. `revive` restarts it on its data."""

    def __init__(self, member: EtcdMember) -> None:
        self.name = member.name
        self._member = member
        self._hit = member.child

    def kill(self) -> None:
        self._member.kill()

    def freeze(self) -> None:
        self._member.pause()

    def thaw(self) -> None:
        self._member.resume()

    def revive(self) -> None:
        self._member.restart()

    def killed(self) -> tuple[bool, str]:
        return _killed(self.name, self._hit)

    def frozen(self) -> tuple[bool, str]:
        return _stands(self.name, self._hit.pid)


class WorkloadPart:
    """A process of a workload, which restarts such processes itself."""

    def __init__(self, target: Target) -> None:
        self.name = target.name
        self._target = target
        self._killed_by_us = False

    def kill(self) -> None:
        self._killed_by_us = self._signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(self._target.pid)
            try:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                poll.poll(_END_S * 1000)
            finally:
                os.close(fd)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        until(lambda: not self._target.alive or self.frozen()[0], _END_S, every_s=_POLL_S)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def revive(self) -> None:
        """Do nothing: the workload restarts it."""

    def killed(self) -> tuple[bool, str]:
        if self._target.alive:
            return False, f"{self.name} lives"
        fate = "was sent SIGKILL while it lived, and has ended" if self._killed_by_us else "had ended before"
        return self._killed_by_us, f"{self.name} {fate}"

    def frozen(self) -> tuple[bool, str]:
        return _stands(self.name, self._target.pid)

    def _signal(self, number: int) -> bool:
        """Send a signal to exactly this process; False if it has ended."""
        try:
            fd = os.pidfd_open(self._target.pid)
        except ProcessLookupError:
            return False
        try:
            if not self._target.alive:  # another process has this pid by now
                return False
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True


def _killed(name: str, child: Child) -> tuple[bool, str]:
    return child.poll() == -signal.SIGKILL, f"{name} (pid {child.pid}) {child.describe()}"


def _stands(name: str, pid: int) -> tuple[bool, str]:
    found = stat_of(pid)
    state = "ended" if found is None else found.state
    return state == "T", f"{name} (pid {pid}) is in state {state}"
