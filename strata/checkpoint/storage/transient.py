"""Which storage errors are transient: the one place that decides, for files and for S3.

After a transient error a save is held and retried (`save.retry`); any other error ends the save. An error is transient
if its cause is a state of the device, the server or the network. A missing permission, a wrong name or a wrong setting
is not transient.
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
    """Return a few words for the errno `number` if it is transient; else ""."""
    return _FILES.get(number or 0, "")


def of_answer(code: str, status: int) -> str:
    """Return a few words for an object storage's error answer if it is transient; else "". `status` is HTTP's, or 0."""
    if status in _STATUSES:
        return f"storage answers {status}"
    return f"storage answers {code}" if code in _BUSY else ""
