"""`RankProcess`: a rank's process, identified by a pidfd, which unlike a pid never refers to another process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
from pathlib import Path
from typing import Final, Self
from weakref import finalize

from strata.errors import Refused, Unavailable

_CREDENTIALS: Final = struct.Struct("iII")
"""struct ucred: pid, uid, gid."""


class RankProcess:
    """A process by its pid and its pidfd.

    `alive` is False once the process has ended, even while it is a zombie that its parent has not waited for. The pidfd
    is open as long as a reference to this object exists, so a watcher never polls a reused descriptor.
    """

    def __init__(self, pid: int) -> None:
        """Open the pidfd; `ProcessLookupError` if there is no such process."""
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)  # close-on-exec, always
        self.close = finalize(self, os.close, self._descriptor)
        """Closes the descriptor now. Idempotent."""

    def fileno(self) -> int:
        """Return the pidfd, which becomes readable when the process ends; `ValueError` once it is closed."""
        if not self.close.alive:
            raise ValueError(f"the descriptor of process {self.pid} is closed")
        return self._descriptor

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return not poll.poll(0)

    @property
    def exiting(self) -> bool:
        """Whether the process is ending: it runs no code any more, and the kernel is freeing its memory."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_bytes()
        except OSError:
            return False
        return b"\nVmSize:" not in status

    def send_signal(self, number: int) -> None:
        """Send a signal to the process; does nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fileno(), number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def peer_of(sock: socket.socket) -> RankProcess:
    """Return the process that connected this socket or created its socket pair; raises as `admitted` does."""
    pid, uid, _gid = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return admitted(pid, uid)


def admitted(pid: int, uid: int) -> RankProcess:
    """Return the process that the kernel names as the peer; `Refused` if it cannot be a rank of this agent."""
    if uid != os.getuid():
        raise Refused(f"process {pid} is of user {uid}; the agent serves user {os.getuid()} only")
    if pid == 0:
        raise Refused(
            "the agent cannot see this process: it is in another PID namespace",
            hint="run the agent and its ranks in one container, or with one PID namespace (shareProcessNamespace)",
        )
    try:
        return RankProcess(pid)
    except OSError as error:  # the process has ended, or no descriptor is left
        raise Unavailable(f"the agent cannot watch process {pid}: {error.strerror}", hint="") from error
