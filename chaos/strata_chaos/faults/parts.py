"""What a fault may kill or freeze: a coordinator, an etcd member, a process of a workload.

The methods block for as long as the kernel takes; faults call them in threads.
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

_GONE_S = 5.0
_POLL_S = 0.01


class Part(Protocol):
    """Something that a fault holds."""

    @property
    def name(self) -> str: ...

    def kill(self) -> None:
        """SIGKILL it, and return once it is gone."""
        ...

    def freeze(self) -> None:
        """SIGSTOP it, and return once it stands."""
        ...

    def thaw(self) -> None:
        """SIGCONT it."""
        ...

    def revive(self) -> None:
        """Start it again after a kill, if that is ours to do."""
        ...

    def killed(self) -> tuple[bool, str]:
        """Say whether SIGKILL ended it, and what shows it."""
        ...

    def frozen(self) -> tuple[bool, str]:
        """Say whether it stands, and what shows it."""
        ...


class CoordinatorPart:
    """A coordinator; as a service manager would, `revive` starts it again."""

    def __init__(self, coordinator: LocalCoordinator) -> None:
        self.name = coordinator.name
        self._coordinator = coordinator
        self._hit = coordinator.child

    def kill(self) -> None:
        self._hit.kill()
        self._hit.join(_GONE_S)

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
    """An etcd member; `revive` starts it on the data it has."""

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
    """A process of a workload, which starts another one itself."""

    def __init__(self, target: Target) -> None:
        self.name = target.name
        self._target = target
        self._was_ours = False

    def kill(self) -> None:
        self._was_ours = self._signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(self._target.pid)
            try:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                poll.poll(_GONE_S * 1000)
            finally:
                os.close(fd)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        until(lambda: not self._target.alive or self.frozen()[0], _GONE_S, every_s=_POLL_S)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def revive(self) -> None:
        """Nothing: its workload does that."""

    def killed(self) -> tuple[bool, str]:
        if self._target.alive:
            return False, f"{self.name} lives"
        said = "was sent SIGKILL while it lived, and is gone" if self._was_ours else "had ended before"
        return self._was_ours, f"{self.name} {said}"

    def frozen(self) -> tuple[bool, str]:
        return _stands(self.name, self._target.pid)

    def _signal(self, number: int) -> bool:
        """Send a signal to exactly this process; False when it is gone."""
        try:
            fd = os.pidfd_open(self._target.pid)
        except ProcessLookupError:
            return False
        try:
            if not self._target.alive:  # the pid is somebody else's by now
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
    state = "gone" if found is None else found.state
    return state == "T", f"{name} (pid {pid}) is in state {state}"
