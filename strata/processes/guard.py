"""Two tiny programs that keep children from outliving their parent. Standard library only.

`strata.processes.children` runs this file as a script, by path, with `python -I -S`: it starts in about 10 ms and
imports nothing of Strata.

`exec`: become the given program, after requesting from the kernel to kill this process when the parent dies. A
`preexec_fn` could make that request too, but runs Python code in the fork of a threaded parent. Such code deadlocks on
any lock that another thread held, runs grpc's fork handlers, and keeps `subprocess` from using vfork.

`watch`: stay beside the parent and, when it has ended in any way, SIGKILL the process groups of its children. The
kernel's death signal reaches a child but not the child's own children (DataLoader workers, a shell's pipeline);
a signal to the group reaches them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1
FALLBACK_POLL_MS = 200
"""How often to check for the parent on a kernel without pidfd (before 5.3)."""


def exec_guarded(parent: int, guardian_fd: int, argv: list[str], *, ctype_given: bool) -> None:
    """Become `argv`, to be SIGKILLed when process `parent` (strictly: its forking thread) ends."""
    import ctypes  # noqa: PLC0415 - the guardian does not need it, and it costs a quarter of the start

    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent died before the call above, so no signal will ever come
        os._exit(128 + signal.SIGKILL)
    # The child itself registers, before the program runs, so that a grandchild never exists without the guardian
    # knowing its group. If the guardian was killed, the death signal still works.
    with contextlib.suppress(BrokenPipeError):
        os.write(guardian_fd, b"+%d\n" % os.getpid())
    os.close(guardian_fd)
    # Undo what Python's own start did to the process: an exec would pass it on.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if not ctype_given:  # PEP 538: in the C locale Python puts LC_CTYPE into the environment
        os.environ.pop("LC_CTYPE", None)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"cannot run {argv[0]}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


class Guardian:
    """The process groups to kill once `parent` has ended, as reported through a pipe."""

    def __init__(self, parent: int, fd: int) -> None:
        self.parent = parent
        self.fd = fd
        self.groups: set[int] = set()
        self.rest = b""

    def read(self) -> bool:
        """Process the lines that wait in the pipe; return False once no process can write to it any more."""
        chunk = os.read(self.fd, 65536)
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            group = int(line[1:])
            if line[:1] == b"+":
                self.groups.add(group)
            else:
                self.groups.discard(group)
        return bool(chunk)

    def run(self) -> None:
        """Return once the parent has ended and its groups are killed.

        The end of the pipe does not show the parent's end: a parent that executes another program closes the pipe and
        lives, and a fork of an ended parent may keep the pipe open.
        """
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        timeout: int | None = FALLBACK_POLL_MS
        # Without pidfd, or if the parent has ended already, getppid shows the parent's end.
        with contextlib.suppress(OSError):
            poll.register(os.pidfd_open(self.parent), select.POLLIN)
            timeout = None
        while os.getppid() == self.parent:
            for fd, _ in poll.poll(timeout):
                if fd == self.fd and not self.read():
                    poll.unregister(self.fd)
        os.set_blocking(self.fd, False)
        # A child that has not registered, and so still has the pipe open, gets the kernel's death signal.
        with contextlib.suppress(BlockingIOError):
            while self.read():
                pass
        for group in self.groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


def main(argv: list[str]) -> None:
    """Run `exec PARENT FD CTYPE_GIVEN PROGRAM...` or `watch PARENT FD`."""
    mode, parent, fd = argv[1], int(argv[2]), int(argv[3])
    if mode == "exec":
        exec_guarded(parent, fd, argv[5:], ctype_given=argv[4] == "1")
    else:
        Guardian(parent, fd).run()


if __name__ == "__main__":
    main(sys.argv)
