"""Types of identifiers, which a type checker can tell apart, and their syntax."""

from __future__ import annotations

import re
from typing import NewType

from strata.errors import InvalidArgument

WorkerId = NewType("WorkerId", str)
ReplicaId = NewType("ReplicaId", str)
InstanceId = NewType("InstanceId", str)
"""The random uuid of one run of a replica; comparisons use instances, never names."""
BootId = NewType("BootId", str)
"""The random uuid of one run of a member's process."""
AttemptId = NewType("AttemptId", str)
Uid = NewType("Uid", str)
"""The random uuid of the cluster's data; epochs, revisions and generations are relative to it."""

Epoch = NewType("Epoch", int)
"""The create_revision of the leader key: the fence of every controller write."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


def is_id(value: object) -> bool:
    """Return whether `value` may be a name in a key."""
    return isinstance(value, str) and _ID.match(value) is not None


def checked_id(what: str, value: str) -> str:
    """Return `value` if it may name a `what` in a key; else raise `InvalidArgument`."""
    if not is_id(value):
        shown = repr(value[:140]) if isinstance(value, str) else type(value).__name__
        raise InvalidArgument(
            f"{shown} cannot name a {what}",
            hint="use 1 to 128 of A-Z a-z 0-9 . _ - beginning with a letter or a digit",
        )
    return value
