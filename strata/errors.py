"""Every error a caller of Strata can see.

Each error states its cause, what to do next (`hint`), and whether the same call may be repeated (`retryable`). Errors
of grpc, of a storage library or of the operating system never reach a caller: the layer that catches such an error
converts it into one of these classes.

`strata.wire.status` maps every class here to a gRPC status and back, by `code`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar, Final

_USERINFO: Final = re.compile(r"://[^/\s'\"]*@")


def redacted(text: str) -> str:
    """Return `text` without the users and passwords of the URLs in it.

    Strata's own addresses contain neither (`config.userinfo` refuses both), but a library's message about a proxy
    or a server may contain them. So every error message and log line goes through this function.
    """
    return _USERINFO.sub("://…@", text) if "@" in text else text


class StrataError(Exception):
    """The base of all errors that Strata raises on purpose.

    `code` is stable, and identifies the class on the other side of a connection.
    """

    code: ClassVar[str] = "STRATA"
    retryable: ClassVar[bool] = False
    lasting: bool = False
    """Whether every restart of the same program would fail with this error again until somebody fixes the cause."""
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


class DatasetMismatch(ConfigError):
    """The dataset is not the one of the checkpoint's position, or the ranks have different datasets.

    The message names the dataset and the position. No sample was trained on after the position.
    """

    code = "DATASET_MISMATCH"


class InvalidArgument(StrataError):
    """The request itself is malformed: it is wrong in any state of the cluster."""

    code = "INVALID_ARGUMENT"
    lasting = True


class NotFound(StrataError):
    """The object that the request names does not exist."""

    code = "NOT_FOUND"


class Refused(StrataError):
    """The request is well formed, but the state of the cluster forbids it."""

    code = "REFUSED"


class Conflict(Refused):
    """The requested object already belongs to another caller (for example, an id that another live process uses)."""

    code = "CONFLICT"


class QuotaExceeded(Refused):
    """The request would exceed a limit: on a value, a message, a count or etcd's own quota."""

    code = "QUOTA_EXCEEDED"


class Unauthenticated(Refused):
    """The server requires credentials, and the caller sent none, or invalid ones."""

    code = "UNAUTHENTICATED"
    default_hint = "set tls.cert_file and tls.key_file, or auth.token_file"


class PermissionDenied(Refused):
    """The caller is authenticated, but may not make this request."""

    code = "PERMISSION_DENIED"


class StaleGeneration(Refused):
    """The caller belongs to a generation that has ended."""

    code = "STALE_GENERATION"
    default_hint = "a newer world exists; rejoin it"


class StaleIncarnation(Refused):
    """A newer process with the same name has replaced the caller."""

    code = "STALE_INCARNATION"
    default_hint = "another process runs under this name; stop one of the two"


class ClusterReplaced(StrataError):
    """The cluster behind the endpoints is not the cluster that this session began with, or its etcd has lost data."""

    code = "CLUSTER_REPLACED"
    default_hint = (
        "etcd was restored or replaced: bring the control plane back by `strata controlplane restore` (with a backup,"
        " or --in-place), or by `strata controlplane rebuild` without one"
    )


class ClusterRestored(ClusterReplaced):
    """The control plane was restored or rebuilt since this session began: start a new session, without its token."""

    code = "CLUSTER_RESTORED"
    default_hint = "connect again: the catalog and the jobs are there, worlds form again"


class NotLeader(StrataError):
    """This replica is not the leader, and the request needs the leader's fence."""

    code = "NOT_LEADER"
    retryable = True


class Unavailable(StrataError):
    """No response arrived in time. The request may or may not have taken effect."""

    code = "UNAVAILABLE"
    retryable = True
    default_hint = "check that a coordinator and an etcd majority are reachable"


class TransportBroken(Unavailable):
    """The connection was ended or reset while in use, by the other side's host or by a device in between.

    Silence and timeouts are a plain `Unavailable`: they do not prove that the connection has ended.
    """

    code = "TRANSPORT_BROKEN"


class OutcomeUnknown(StrataError):
    """The request may have taken effect, and repeating the request can no longer show whether it did."""

    code = "OUTCOME_UNKNOWN"
    default_hint = "read the current state before you repeat the request"


class BarrierBroken(StrataError):
    """The barrier ended without being released: a participant died or left."""

    code = "BARRIER_BROKEN"

    def __init__(self, message: str, *, missing: Iterable[str] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.missing = tuple(missing)


class BarrierTimeout(BarrierBroken):
    """The barrier ended because the ranks in `missing` did not arrive within its time."""

    code = "BARRIER_TIMEOUT"


class StorageError(StrataError):
    """Reading or writing a storage root failed.

    `transient` names in a few words a cause that may pass ("disk full"); "" if somebody has to fix it. `lasting`
    is true if the cause is known to be a permission, a name or a setting.
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
    """The bytes read differ from the bytes saved; the reader did not return them."""

    code = "CHECKPOINT_CORRUPT"
    lasting = False


class CheckpointIncomplete(CheckpointCorrupt):
    """A file of the checkpoint is missing. Its bytes may be intact: it can be put back, or its storage mounted."""

    code = "CHECKPOINT_INCOMPLETE"


class CheckpointAborted(CheckpointError):
    """The save was aborted before it was complete; `latest` is unchanged."""

    code = "CHECKPOINT_ABORTED"
    lasting = False


class JobDone(Refused):
    """The job has finished and admits no more members."""

    code = "JOB_DONE"


class JobFailed(StrataError):
    """The job has failed and admits no more members."""

    code = "JOB_FAILED"
    default_hint = "start it again under a new name, or with --resume"


class Preempted(SystemExit):
    """A stop was requested, and all ranks of this training have stopped after the same step.

    It ends the program with exit code 75, which makes a scheduler requeue the job. It is not an `Exception`, so that
    code which catches all exceptions does not catch it.
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
