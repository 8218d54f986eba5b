"""Every error a caller of Strata can see.

Each error says whose fault it is and what to do next (`hint`), and whether the same call may
simply be made again (`retryable`). Errors of grpc, of a storage library or of the operating
system never escape bare: the floor that meets them turns them into one of these.

`strata.wire.status` maps every class here to a gRPC status and back, by `code`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar, Final

_USERINFO: Final = re.compile(r"://[^/\s'\"]*@")


def redacted(text: str) -> str:
    """Return `text` without the users and passwords of the URLs in it.

    Strata's own addresses have none (`config.userinfo`). What a library says of a proxy or of a server
    may, so whatever becomes an error or a line of the log passes here.
    """
    return _USERINFO.sub("://…@", text) if "@" in text else text


class StrataError(Exception):
    """The base of all errors that Strata raises on purpose.

    `code` is stable, travels over the wire, and names the class on the other side.
    """

    code: ClassVar[str] = "STRATA"
    retryable: ClassVar[bool] = False
    lasting: bool = False
    """Whether the same program meets it again, however often it is started: somebody has to mend something first."""
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = redacted(message)
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else redacted(hint)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(StrataError):
    """The configuration or the environment is wrong; nothing was started."""

    code = "CONFIG"
    lasting = True


class InvalidArgument(StrataError):
    """The request itself is malformed: no state of the cluster would make it right."""

    code = "INVALID_ARGUMENT"
    lasting = True


class NotFound(StrataError):
    """What the request names does not exist."""

    code = "NOT_FOUND"


class Refused(StrataError):
    """The request is well formed, and the state of the cluster forbids it."""

    code = "REFUSED"


class Conflict(Refused):
    """Somebody else already holds what the request asks for (an id alive elsewhere, say)."""

    code = "CONFLICT"


class QuotaExceeded(Refused):
    """A stated limit would be passed: a value, a message, a count or etcd's own quota."""

    code = "QUOTA_EXCEEDED"


class Unauthenticated(Refused):
    """The server wants to know who calls, and was not told, or not convincingly."""

    code = "UNAUTHENTICATED"
    default_hint = "set tls.cert_file and tls.key_file, or auth.token_file"


class PermissionDenied(Refused):
    """Who calls is known, and may not do that."""

    code = "PERMISSION_DENIED"


class StaleGeneration(Refused):
    """The caller belongs to a generation that has ended."""

    code = "STALE_GENERATION"
    default_hint = "a newer world exists; rejoin it"


class StaleIncarnation(Refused):
    """The caller's place was taken by a newer process with the same name."""

    code = "STALE_INCARNATION"
    default_hint = "another process runs under this name; stop one of the two"


class ClusterReplaced(StrataError):
    """The cluster behind the endpoints is not the one this session began with, or its etcd lost what it had."""

    code = "CLUSTER_REPLACED"
    default_hint = (
        "etcd was restored or replaced: bring the control plane back by `strata controlplane restore` (with a backup,"
        " or --in-place), or by `strata controlplane rebuild` without one"
    )


class ClusterRestored(ClusterReplaced):
    """The control plane was restored or rebuilt since this session began: sessions begin anew, without a token."""

    code = "CLUSTER_RESTORED"
    default_hint = "connect again: the catalog and the jobs are there, worlds begin anew"


class NotLeader(StrataError):
    """This replica does not lead, and the request needs the leader's fence."""

    code = "NOT_LEADER"
    retryable = True


class Unavailable(StrataError):
    """Nobody could answer in time. The request may or may not have taken effect."""

    code = "UNAVAILABLE"
    retryable = True
    default_hint = "check that a coordinator and an etcd majority are reachable"


class TransportBroken(Unavailable):
    """The connection was ended or reset while it was used: the other side's host, or what stands
    between, said so. A silence and a timeout say nothing, and are a plain `Unavailable`.
    """

    code = "TRANSPORT_BROKEN"


class OutcomeUnknown(StrataError):
    """The request may have taken effect, and it is too late to find out by asking again."""

    code = "OUTCOME_UNKNOWN"
    default_hint = "read the current state before you repeat the request"


class BarrierBroken(StrataError):
    """The barrier ended without being released: a participant died or left."""

    code = "BARRIER_BROKEN"

    def __init__(self, message: str, *, missing: Iterable[str] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.missing = tuple(missing)


class BarrierTimeout(BarrierBroken):
    """The barrier ended because `missing` did not arrive within its time."""

    code = "BARRIER_TIMEOUT"


class StorageError(StrataError):
    """Reading or writing a storage root failed.

    `transient` says in a few words what time may heal ("disk full"); "" where only somebody can. It is `lasting`
    where it is known to be about a right, a name or a setting.
    """

    code = "STORAGE"

    def __init__(
        self, message: str, *, hint: str | None = None, transient: str = "", lasting: bool = False
    ) -> None:
        super().__init__(message, hint=hint)
        self.transient = transient
        self.lasting = lasting


class CheckpointError(StrataError):
    """A checkpoint could not be saved or restored."""

    code = "CHECKPOINT"
    lasting = True


class CheckpointNotFound(CheckpointError):
    """No checkpoint of that description exists."""

    code = "CHECKPOINT_NOT_FOUND"
    lasting = False


class CheckpointCorrupt(CheckpointError):
    """The bytes read differ from the bytes saved; they were not handed out."""

    code = "CHECKPOINT_CORRUPT"
    lasting = False


class CheckpointIncomplete(CheckpointCorrupt):
    """A file of it is not there, which says nothing of its bytes: it may be put back, or mounted."""

    code = "CHECKPOINT_INCOMPLETE"


class CheckpointAborted(CheckpointError):
    """The save was given up before it was complete; `latest` is unchanged."""

    code = "CHECKPOINT_ABORTED"
    lasting = False


class JobDone(Refused):
    """The job has finished and takes no more members."""

    code = "JOB_DONE"


class JobFailed(StrataError):
    """The job has ended in failure and takes no more members."""

    code = "JOB_FAILED"
    default_hint = "start it again under a new name, or with --resume"


class Preempted(SystemExit):
    """This training was asked to stop, and all its ranks did so after the same step.

    It ends the program with exit code 75, which tells a scheduler to put the job back into its
    queue. Not an `Exception`, so that code which survives errors does not survive this one.
    """

    code: int = 75

    def __init__(self, message: str) -> None:
        super().__init__(self.code)
        self.message = message

    def __str__(self) -> str:
        return self.message


def _subclasses(cls: type[StrataError]) -> Iterable[type[StrataError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _subclasses(sub)


def by_code() -> dict[str, type[StrataError]]:
    """Return every error class under its `code`."""
    return {cls.code: cls for cls in _subclasses(StrataError)}
