"""Which storage errors are transient: the one place that decides, for files and for S3.

A transient error holds a save (`save.retry`); any other one ends it. Transient is a state of the device, the server
or the network. A missing permission, a wrong name or a wrong setting is not transient.
"""

from __future__ import annotations

import errno
from typing import Final

SILENT: Final = "storage does not answer"
_FILES: Final = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota used up",
    errno.EIO: "device error",
    errno.ESTALE: "stale file handle",
    errno.ETIMEDOUT: SILENT,
    errno.EHOSTDOWN: SILENT,
    errno.EHOSTUNREACH: SILENT,
    errno.ENOTCONN: SILENT,
    errno.EREMOTEIO: "device error",
}
_BUSY: Final = frozenset(
    {
        "InternalError",
        "OperationAborted",
        "RequestLimitExceeded",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
    }
)
_STATUSES: Final = frozenset({408, 429, 500, 502, 503, 504, 507, 509})


def of_errno(number: int | None) -> str:
    """Return in a few words the transient error that `number` is; "" for any other error."""
    return _FILES.get(number or 0, "")


def of_answer(code: str, status: int) -> str:
    """Return the same for an answer of an object storage: its code, and its HTTP status or 0."""
    if status in _STATUSES:
        return f"storage answers {status}"
    return f"storage answers {code}" if code in _BUSY else ""
