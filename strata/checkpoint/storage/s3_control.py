"""The control plane of S3, by boto3: small objects, conditions, listing, deleting, sweeping.

**Conditional writes.** `create` asks for `If-None-Match: *`, so that of several writers one is
first. Its answer may be lost; then the repetition finds one's own object and is told 412. Therefore
each writer leaves its own mark in the object's metadata, and a 412 is followed by a look at it.
A server that does not know the condition would overwrite in silence. So the first object made is
made twice: a server that keeps its word refuses the second time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import boto3
import botocore.config
import botocore.exceptions
import botocore.loaders
import botocore.session

from strata.checkpoint.storage.place import S3Place
from strata.checkpoint.storage.s3_errors import S3Error, Taken, as_storage_error
from strata.checkpoint.storage.sink import NotAnObject, ObjectMissing
from strata.config.userinfo import refuse_userinfo
from strata.documents.parsing import MAX_DOCUMENT_BYTES
from strata.errors import ConfigError, StorageError, redacted

MARK: Final = "strata-writer"
"""The key of the metadata that says which writer made an object."""
_CONFLICTS: Final = frozenset({"ConditionalRequestConflict", "OperationAborted", "409"})
_NO_CONDITIONS: Final = frozenset({"NotImplemented", "501"})
_ATTEMPTS: Final = 5

log: Final = logging.getLogger("strata.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """How patient the requests are: attempts each, and seconds for connecting and for an answer."""

    attempts: int = 6
    connect_s: float = 5.0
    answer_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What is known of an object without its bytes; `age_s` by the server's own clock."""

    size_bytes: int
    mark: str
    age_s: float


class S3Control:
    """Requests about one place of a bucket. May be used from any thread.

    `pause` waits a number of seconds between two attempts that a conflict ended.
    """

    def __init__(self, place: S3Place, *, options: S3Options, pause: Callable[[float], None]) -> None:
        self.place = place
        self.options = options
        self._pause = pause
        self._conditions: bool | None = None
        self._lock = threading.Lock()
        config = botocore.config.Config(
            connect_timeout=options.connect_s,
            read_timeout=options.answer_s,
            retries={"mode": "standard", "total_max_attempts": options.attempts},
            # documents carry their own digest; many servers do not take trailing checksums
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=16,
            user_agent_extra="strata",
        )
        try:
            session = _session(place.region)
            self._credentials = session.get_credentials()
            self.region: str = session.region_name or "us-east-1"
            self._client: Any = session.client(
                "s3", region_name=self.region, endpoint_url=place.endpoint_url, config=config
            )
        except (botocore.exceptions.BotoCoreError, ValueError) as error:
            # not `from error`: its text may hold a URL with a password
            raise ConfigError(f"the AWS configuration cannot be used: {redacted(str(error))}") from None
        if self._credentials is None:
            raise ConfigError(
                f"no credentials are found for {place.uri}",
                hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give the host a role",
            )
        self.endpoint_url: str = self._client.meta.endpoint_url
        refuse_userinfo(
            "the S3 endpoint of the AWS configuration",
            (self.endpoint_url,),
            hint="keys belong into its credentials file, or into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
        self.is_aws = self.endpoint_url.rstrip("/").endswith((".amazonaws.com", ".amazonaws.com.cn"))

    @property
    def conditions(self) -> bool | None:
        """Whether the server honours If-None-Match; None until an object was created."""
        return self._conditions

    def credentials(self) -> tuple[str, str, str | None]:
        """Return key, secret and token as they are now; the chain renews them when they expire."""
        frozen = self._credentials.get_frozen_credentials()
        return frozen.access_key, frozen.secret_key, frozen.token

    def find_region(self) -> str:
        """Return where the bucket is; AWS tells that even to whom asked in another region."""
        try:
            answer = self._client.head_bucket(Bucket=self.place.bucket)
        except botocore.exceptions.ClientError as error:
            answer = error.response
        except botocore.exceptions.BotoCoreError:
            return self.region
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return str(headers.get("x-amz-bucket-region") or self.region)

    # -- objects

    def head(self, key: str) -> Head:
        with as_storage_error("look at", self._what(key)):
            answer = self._client.head_object(Bucket=self.place.bucket, Key=key)
        return Head(
            size_bytes=int(answer["ContentLength"]),
            mark=str(answer.get("Metadata", {}).get(MARK, "")),
            age_s=_age_s(answer),
        )

    def find(self, key: str) -> Head | None:
        """Return the object's head, or None when there is no such object."""
        try:
            return self.head(key)
        except ObjectMissing:
            return None

    def get(self, key: str) -> bytes:
        """Return the whole of a small object, also when an answer breaks off on the way."""
        for attempt in range(1, _ATTEMPTS + 1):
            with as_storage_error("read", self._what(key)):
                answer = self._client.get_object(Bucket=self.place.bucket, Key=key)
                try:
                    return self._document(key, answer)
                except botocore.exceptions.BotoCoreError:
                    if attempt == _ATTEMPTS:
                        raise
        raise AssertionError("the loop returns or raises")

    def _document(self, key: str, answer: dict[str, Any]) -> bytes:
        """Return the bytes of an answer; `NotAnObject` for more than any document has."""
        data = _body(answer, MAX_DOCUMENT_BYTES + 1)
        if len(data) > MAX_DOCUMENT_BYTES:
            told = answer.get("ContentLength", len(data))
            raise NotAnObject(
                f"cannot read {self._what(key)}: it has {told} bytes, and at most {MAX_DOCUMENT_BYTES} are read",
                hint="somebody else made it; move it away",
            )
        return data

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return bytes `[start, end)`, also from a server that sends a part and calls it the whole."""
        with as_storage_error("read", self._what(key)):
            answer = self._client.get_object(
                Bucket=self.place.bucket, Key=key, Range=f"bytes={start}-{end - 1}"
            )
            if not str(answer.get("ContentRange", "")).startswith(f"bytes {start}-"):
                answer["Body"].close()
                raise StorageError(f"the server of {self._what(key)} sends no part of it")
            return _body(answer, end - start)

    def create(self, key: str, data: bytes, mark: str) -> bool:
        """Make an object unless there is one; tell whether it was made here, by `mark`."""
        with self._lock:  # one thread finds out for all
            if self._conditions is None:
                if self.find(key) is not None:
                    return False
                made = self._create(key, data, mark)
                if made and self._conditions is None:
                    self._heard(self._put_if_free(key, data, mark) is False)
                return made
        return self._create(key, data, mark)

    def _create(self, key: str, data: bytes, mark: str) -> bool:
        made = None if self._conditions is False else self._put_if_free(key, data, mark)
        if made is None:
            return self._create_unguarded(key, data, mark)
        # the answer may be to a repetition, whose first answer was lost
        return made or ((found := self.find(key)) is not None and found.mark == mark)

    def _put_if_free(self, key: str, data: bytes, mark: str) -> bool | None:
        """Tell whether the name was free; None where the server refuses conditions."""
        for attempt in itertools.count(1):
            try:
                self.put(key, data, mark, IfNoneMatch="*")
            except Taken:
                return False
            except S3Error as error:
                if error.reason in _NO_CONDITIONS:
                    self._heard(honours=False)
                    return None
                if error.reason not in _CONFLICTS or attempt == _ATTEMPTS:
                    raise
                self._pause(0.1 * 2**attempt)
            else:
                return True
        raise AssertionError("the loop returns or raises")

    def _create_unguarded(self, key: str, data: bytes, mark: str) -> bool:
        """As well as it can be done where a server knows no conditions: the last writer is found out."""
        if (found := self.find(key)) is not None:
            return found.mark == mark
        self.put(key, data, mark)
        return self.head(key).mark in {mark, ""}

    def _heard(self, honours: bool) -> None:
        """Take note of whether the server honours conditions."""
        self._conditions = honours
        if not honours:
            log.warning(
                "%s does not honour If-None-Match: two processes that write one root without coordinators"
                " may not notice each other",
                self.endpoint_url,
            )

    def put(self, key: str, data: bytes, mark: str, **condition: str) -> None:
        """Make or replace an object, if the condition holds."""
        with as_storage_error("write", self._what(key)):
            self._client.put_object(
                Bucket=self.place.bucket, Key=key, Body=data, Metadata={MARK: mark}, **condition
            )

    def delete(self, key: str) -> None:
        try:
            with as_storage_error("delete", self._what(key)):
                self._client.delete_object(Bucket=self.place.bucket, Key=key)
        except ObjectMissing:
            return

    def takes_crc64nvme(self, key: str) -> bool:
        """Tell whether the server proves parts by CRC64NVME: an upload to `key` is begun, and aborted."""
        bucket = self.place.bucket
        try:
            with as_storage_error("write", self._what(key)):
                answer = self._client.create_multipart_upload(
                    Bucket=bucket, Key=key, ChecksumAlgorithm="CRC64NVME"
                )
                self._client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=answer["UploadId"])
        except StorageError as error:
            log.debug(
                "no checksums of parts: %s", error.message
            )  # what is wrong beyond that, the upload tells
            return False
        return bool(answer.get("ChecksumAlgorithm") == "CRC64NVME")

    # -- listing

    def names(self, prefix: str) -> list[str]:
        """Return what follows `prefix` in the keys that have it, up to the next slash."""
        found: set[str] = set()
        with as_storage_error("list", self._what(prefix)):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.place.bucket, Prefix=prefix, Delimiter="/"
            )
            for page in pages:
                found.update(item["Prefix"][len(prefix) : -1] for item in page.get("CommonPrefixes", ()))
                found.update(item["Key"][len(prefix) :] for item in page.get("Contents", ()))
        return sorted(found - {""})

    def any_below(self, prefix: str) -> bool:
        """Tell whether a key begins with `prefix`."""
        with as_storage_error("list", self._what(prefix)):
            page = self._client.list_objects_v2(Bucket=self.place.bucket, Prefix=prefix, MaxKeys=1)
        return bool(page.get("Contents"))

    # -- uploads that were never completed

    def abort_uploads(self, prefix: str, *, older_than_s: float = 0.0) -> int:
        """Abort the incomplete uploads below `prefix`; return how many. Age by the server's clock."""
        bucket, count = self.place.bucket, 0
        with as_storage_error("sweep", self._what(prefix)):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=bucket, Prefix=prefix
            )
            for page in pages:
                now = _server_time(page)
                for upload in page.get("Uploads", ()):
                    if older_than_s and (
                        now is None or (now - upload["Initiated"]).total_seconds() < older_than_s
                    ):
                        continue
                    try:
                        self._client.abort_multipart_upload(
                            Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )
                    except self._client.exceptions.NoSuchUpload:
                        continue  # it was completed, or aborted by another
                    count += 1
        return count

    def _what(self, key: str) -> str:
        return f"s3://{self.place.bucket}/{key}"


def _body(answer: dict[str, Any], most_bytes: int) -> bytes:
    """Return so many bytes of an answer, or all that it has; `IncompleteReadError` where it breaks off."""
    with contextlib.closing(answer["Body"]) as body:
        data = bytes(body.read(most_bytes))
        if len(data) < most_bytes:
            body.read(1)  # at the end botocore looks whether it is whole
        return data


@functools.cache
def _loader() -> Any:
    """Return what reads boto3's descriptions of services: slow, so once for all sessions."""
    return botocore.loaders.create_loader()


def _session(region: str | None) -> Any:
    inner = botocore.session.Session()
    inner.register_component("data_loader", _loader())
    return boto3.session.Session(region_name=region, botocore_session=inner)


def _server_time(answer: dict[str, Any]) -> datetime | None:
    text = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return parsedate_to_datetime(text) if text else None
    except ValueError:
        return None


def _age_s(answer: dict[str, Any]) -> float:
    now, then = _server_time(answer), answer.get("LastModified")
    return (now - then).total_seconds() if now is not None and then is not None else 0.0
