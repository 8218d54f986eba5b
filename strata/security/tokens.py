"""Tokens: authentication of callers without client certificates.

A token is 256 random bits. Its holder stores the token in a file of mode 0600. Coordinators have a file of the
tokens' hashes, and a hash cannot be used as a token. A plain SHA-256 suffices, because random bits cannot be guessed.
Every comparison takes the same time.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strata.config import Credentials
from strata.core.access.authority import Identity, Role
from strata.core.ids import checked_id
from strata.documents.parsing import TOKENS, check_json, json_object
from strata.errors import ConfigError, InvalidArgument, NotFound, Unauthenticated
from strata.security.private import read_private, write_private

PREFIX: Final = "strata_"
_BYTES: Final = 32
_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One accepted token. `name` is the beginning of its hash, by which it can be revoked."""

    name: str
    digest: str
    role: Role
    id: str
    jobs: tuple[str, ...]
    created: str
    expires: str | None = None

    def expired(self, now: dt.datetime) -> bool:
        return self.expires is not None and now > dt.datetime.fromisoformat(self.expires)


class TokenFile:
    """The file of hashes, which `strata tokens` edits and a coordinator reads."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[Entry]:
        """Return the entries; raise `ConfigError` if others may read the file, or if it is not a file of hashes."""
        body = read_private(self.path, "the file of token hashes", most_bytes=TOKENS.size_bytes)
        try:
            document = json_object(body, TOKENS)
            if document["v"] != _VERSION:
                raise ValueError(f"version {document['v']} is not {_VERSION}")
            return [_entry(each) for each in document["tokens"]]
        except (ValueError, KeyError, TypeError, AttributeError, InvalidArgument) as error:
            raise ConfigError(
                f"{self.path} is not a file of token hashes: {error}",
                hint="`strata tokens add` makes one; a token itself belongs into auth.token_file",
            ) from None

    def add(
        self,
        *,
        role: Role,
        id: str,  # noqa: A002  # named as on the command line
        jobs: tuple[str, ...] = (),
        now: dt.datetime,
        days: float | None = None,
    ) -> tuple[Entry, str]:
        """Make a token for an identity; return the entry and the token. The file does not store the token."""
        try:
            checked_id("role's id", id)
            for job in jobs:
                checked_id("job", job)
        except InvalidArgument as error:
            raise ConfigError(error.message, hint=error.hint) from None
        if days is not None and not 0 < days <= 36500:
            raise ConfigError(f"a token cannot be valid for {days:g} days", hint="--days takes 1 to 36500")
        token = PREFIX + secrets.token_urlsafe(_BYTES)
        digest = _digest(token)
        entry = Entry(
            name=digest[:12],
            digest=digest,
            role=role,
            id=id,
            jobs=tuple(sorted(jobs)),
            created=now.isoformat(timespec="seconds"),
            expires=(now + dt.timedelta(days=days)).isoformat(timespec="seconds") if days else None,
        )
        with self._locked():
            self._write([*(self.entries() if self.path.exists() else ()), entry])
        return entry, token

    def revoke(self, name: str) -> Entry:
        """Remove the token whose hash begins with `name`; raise `NotFound` unless exactly one hash does."""
        with self._locked():
            entries = self.entries()
            found = [entry for entry in entries if name and entry.digest.startswith(name)]
            if len(found) != 1:
                what = "no token" if not found else f"{len(found)} tokens"
                raise NotFound(
                    f"{what} in {self.path} has a name like {name!r}", hint="see `strata tokens list`"
                )
            self._write([entry for entry in entries if entry is not found[0]])
        return found[0]

    def _write(self, entries: list[Entry]) -> None:
        tokens = [
            {
                "sha256": entry.digest,
                "role": str(entry.role),
                "id": entry.id,
                "jobs": list(entry.jobs),
                "created": entry.created,
                "expires": entry.expires,
            }
            for entry in entries
        ]
        body = json.dumps({"v": _VERSION, "tokens": tokens}, indent=1).encode() + b"\n"
        try:
            check_json(body, TOKENS)
        except ValueError as error:
            raise ConfigError(f"{self.path} takes no more tokens: {error}", hint="revoke some") from None
        write_private(self.path, body)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder, so that one command at a time edits the file."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"cannot open {self.path.parent}: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


class AcceptedTokens:
    """The accepted tokens of a coordinator; a replaced file is read again."""

    def __init__(self, path: Path, *, cluster: str, now: Callable[[], dt.datetime]) -> None:
        self._file = TokenFile(path)
        self._cluster = cluster
        self._now = now
        self._stamp: tuple[int, int, int] | None = None
        self._entries: list[Entry] = []
        self.reload()

    def reload(self) -> None:
        """Read the file if it changed; raise `ConfigError` if it cannot be used."""
        try:
            info = self._file.path.stat()
        except OSError as error:
            raise ConfigError(
                f"cannot read {self._file.path}: {error.strerror}", hint="check its path and its owner"
            ) from None
        stamp = (info.st_ino, info.st_mtime_ns, info.st_size)
        if stamp != self._stamp:
            self._entries = self._file.entries()
            self._stamp = stamp

    def identify(self, token: str) -> Identity:
        """Return the identity of a token's holder; raise `Unauthenticated` if the token is unknown or has expired."""
        try:
            self.reload()
        except ConfigError as error:
            # If the file cannot be read, no token is accepted: a token known from an earlier reading may have been
            # revoked.
            raise Unauthenticated(
                "this coordinator cannot read its file of tokens", hint=error.message
            ) from error
        return self.holder(token)

    def holder(self, token: str) -> Identity:
        """Return the identity as `identify` does, but without reading the file again."""
        digest = _digest(token)
        found = None
        for entry in self._entries:  # compare with every entry, so that the time does not depend on the match
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        if found is None:
            raise Unauthenticated(
                "this cluster does not accept the token: it is mistyped or revoked",
                hint="make one: strata tokens add",
            )
        if found.expired(self._now()):
            raise Unauthenticated(
                f"the token of {found.role} {found.id} expired on {found.expires}",
                hint="make a new one: strata tokens add",
            )
        return Identity(cluster=self._cluster, role=found.role, id=found.id, jobs=frozenset(found.jobs))


def own_token(credentials: Credentials) -> str:
    """Return the token that this process sends; "" if none is configured."""
    path = credentials.token_file
    if path is None:
        return ""
    text = read_private(path, "auth.token_file").decode("utf-8", errors="replace").strip()
    if not text.startswith(PREFIX) or not text.isascii() or len(text) > 200 or len(text.split()) != 1:
        raise ConfigError(
            f"auth.token_file {path} does not hold a token", hint="`strata tokens add --out FILE` writes one"
        )
    return text


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _entry(each: dict[str, Any]) -> Entry:
    digest = each["sha256"]
    if len(bytes.fromhex(digest)) != _BYTES:
        raise ValueError("a hash is too short")
    if each.get("expires") is not None and dt.datetime.fromisoformat(each["expires"]).tzinfo is None:
        raise ValueError(f"{each['expires']} has no time zone")
    return Entry(
        name=digest[:12],
        digest=digest,
        role=Role(each["role"]),
        id=checked_id("role's id", each["id"]),
        jobs=tuple(checked_id("job", job) for job in each.get("jobs", ())),
        created=str(each.get("created", "")),
        expires=each.get("expires"),
    )
