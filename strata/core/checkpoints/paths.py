"""Paths of an attempt's files: below the storage root and the job, in a folder that no other attempt ever uses."""

from __future__ import annotations

import re

from strata.errors import InvalidArgument

MAX_ROOT_CHARS = 4096
_ROOT = re.compile(
    r"(file://(localhost)?/|(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*(/|\Z))[^\x00-\x20\x7f?#]*\Z"
)


def folder_name(step: int, generation: int, attempt: str) -> str:
    """Return the name of an attempt's folder; the attempt id makes it unique for ever."""
    return f"step-{step:012d}-gen-{generation:06d}-{attempt}"


def attempt_path(root: str, job: str, step: int, generation: int, attempt: str) -> str:
    """Return the URI of an attempt's folder."""
    return f"{root.rstrip('/')}/{job}/{folder_name(step, generation, attempt)}"


def check_root(root: str) -> None:
    """Raise `InvalidArgument` unless `root` is the URI of a storage root."""
    if len(root) > MAX_ROOT_CHARS or not _ROOT.match(root):
        raise InvalidArgument(
            f"{root[:100]!r} is not the URI of a storage root",
            hint="write file:///folder or s3://bucket/prefix, percent-encoded, with no user and no query",
        )
