"""Where a storage root is: a folder, or a prefix of a bucket; parsed from the user's path or URI.

A URI is decoded once. It is rejected if it has parts that a client would drop silently (a user, a query, a fragment),
parts that lead outside the root (`..`), or characters that two clients would encode differently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from strata.config.userinfo import refuse_userinfo
from strata.errors import ConfigError

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://|(file|s3|gs|az|https?):", re.IGNORECASE)
"""Matches a URI, even with too few slashes: otherwise `s3:bucket` would name a folder below the current folder."""
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,62}\Z")
_KEY: Final = re.compile(r"[A-Za-z0-9!_.'()&$@=;:+, /-]*\Z")
"""The characters that every client and server of S3 encodes the same way in a key."""
_REGION: Final = re.compile(r"[a-z0-9-]{1,63}\Z")
_FILE_HINT: Final = 'give the path of a folder, or its URI: "file:///data/checkpoints"'
_S3_HINT: Final = 'write "s3://bucket/prefix", percent-encoded'
MAX_PREFIX_BYTES: Final = 700
"""S3's limit for a key is 1,024; the rest is for the names of Strata's objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Place:
    """A prefix of a bucket: decoded, without slashes at its ends; empty for the whole bucket.

    If `endpoint_url` or `region` is None, the environment and the AWS configuration decide.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None

    def __post_init__(self) -> None:
        if not _BUCKET.match(self.bucket) or ".." in self.bucket:
            raise ConfigError(
                f"{self.bucket[:100]!r} is no name of a bucket", hint="3 to 63 letters, digits, - . and _"
            )
        _check_prefix(self.prefix)
        if self.endpoint_url is not None:
            _check_endpoint(self.endpoint_url)
        if self.region is not None and not _REGION.match(self.region):
            raise ConfigError(f"{self.region[:100]!r} is no name of a region", hint='such as "eu-central-1"')

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{quote(self.prefix)}".rstrip("/")

    def key(self, name: str) -> str:
        """Return the key of the object `name` below this place."""
        return f"{self.prefix}/{name}" if self.prefix else name


Place = Path | S3Place


def scheme_of(text: str) -> str:
    """Return the scheme of a URI in lower case; "" for the path of a folder."""
    found = _SCHEME.match(text)
    return (found[1] or found[2]).lower() if found is not None else ""


def parse_place(text: str, *, endpoint_url: str | None = None, region: str | None = None) -> Place:
    """Return the place that a path or a URI names; `ConfigError` with a hint for anything else."""
    scheme = scheme_of(text)
    if scheme == "s3":
        return s3_place(text, endpoint_url=endpoint_url, region=region)
    if scheme not in {"", "file"}:
        raise ConfigError(
            f"checkpoints go to local or shared paths and to S3, not to {scheme}:",
            hint="an object store that speaks S3 has an s3:// path, and its endpoint_url",
        )
    if not text:
        raise ConfigError("no storage path is given", hint="CheckpointManager(storage_path=…)")
    return _folder(_path_of_uri(text) if scheme else text, text)


def s3_place(uri: str, *, endpoint_url: str | None = None, region: str | None = None) -> S3Place:
    """Return the place that an `s3://bucket/prefix` URI names."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise ConfigError(f"the storage path {uri!r} is no URI: {error}", hint=_S3_HINT) from None
    if not uri[len(parts.scheme) :].startswith("://") or not parts.netloc:
        raise ConfigError(f"the storage path {uri[:100]!r} names no bucket", hint=_S3_HINT)
    if "@" in parts.netloc or ":" in parts.netloc:
        raise ConfigError(
            "the storage path has a user or a port beside the bucket",
            hint="credentials come from the AWS configuration, the server's address from endpoint_url",
        )
    if parts.query or parts.fragment or "?" in uri or "#" in uri:
        raise ConfigError(
            f"the storage path {uri!r} is not s3://, a bucket and a prefix alone",
            hint="endpoint_url= and region= are settings of their own",
        )
    path = parts.path.removeprefix("/").removesuffix("/")
    if re.search(r"%(?![0-9A-Fa-f]{2})", path):
        raise ConfigError(f"the storage path {uri!r} has a % that encodes nothing", hint=_S3_HINT)
    try:
        prefix = unquote(path, errors="strict")
    except UnicodeDecodeError:
        raise ConfigError(f"the storage path {uri!r} is no UTF-8 when decoded", hint=_S3_HINT) from None
    return S3Place(bucket=parts.netloc, prefix=prefix, endpoint_url=endpoint_url, region=region)


def _check_prefix(prefix: str) -> None:
    if not prefix:
        return
    parts = prefix.split("/")
    if any(part in {"", ".", ".."} for part in parts):
        raise ConfigError(
            f"the prefix {prefix[:200]!r} has an empty part, or one that is . or ..", hint=_S3_HINT
        )
    if not _KEY.match(prefix) or any(part != part.strip() for part in parts):
        raise ConfigError(
            f"the prefix {prefix[:200]!r} has a character that clients of S3 spell differently",
            hint="letters, digits and !-_.'()&$@=;:+, are safe",
        )
    if len(prefix) > MAX_PREFIX_BYTES:
        raise ConfigError(
            f"the prefix has {len(prefix)} characters, at most {MAX_PREFIX_BYTES}",
            hint="choose a shorter one",
        )


def _check_endpoint(url: str) -> None:
    hint = 'such as "https://minio.example:9000"'
    refuse_userinfo("endpoint_url", (url,), hint="credentials come from the AWS configuration")
    try:
        parts = urlsplit(url)
        port_fits = parts.port is None or parts.port > 0
    except ValueError as error:
        raise ConfigError(f"endpoint_url is no URL: {error}", hint=hint) from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port_fits:
        raise ConfigError(f"endpoint_url {url!r} is not http(s):// and a host", hint=hint)
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ConfigError(f"endpoint_url {url!r} has more than a host and a port", hint=hint)


# -- folders ----------------------------------------------------------------------------------


def _folder(path: str, text: str) -> Path:
    if "\0" in path:
        raise ConfigError(f"the storage path {text!r} has a NUL character in it", hint=_FILE_HINT)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the storage path {text!r} is no Unicode text", hint="rename the folder, or link to it"
        ) from None
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # ~name, and there is no such user
        raise ConfigError(f"the storage path {text!r}: {error}", hint=_FILE_HINT) from None


def _path_of_uri(uri: str) -> str:
    """Return the path of a file: URI; `ConfigError` for parts that would be dropped silently."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise ConfigError(f"the storage path {uri!r} is no URI: {error}", hint=_FILE_HINT) from None
    if parts.netloc.lower() not in {"", "localhost"}:
        raise ConfigError(
            f"the storage path {uri!r} names the host {parts.netloc!r}",
            hint=f"mount that host's folder here and give its path, or write file:///{parts.netloc}{parts.path}"
            f" for the local folder /{parts.netloc}{parts.path}",
        )
    if not parts.path.startswith("/") or parts.query or parts.fragment:
        raise ConfigError(
            f"the storage path {uri!r} is not file:// and a path alone",
            hint="write ? as %3F and # as %23, or give the folder without file://",
        )
    return unquote(parts.path)
