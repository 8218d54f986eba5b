"""S3 requests other than data transfers, by boto3: small objects, conditional writes, listing, deletion, aborts.

**Conditional writes.** `create` sends `If-None-Match: *`, so exactly one of several writers creates the object. If
the reply is lost, boto3 repeats the request, finds the writer's own object, and gets 412. Therefore each writer puts
a mark of its own in the object's metadata, and reads the mark after a 412. A server that does not know the condition
would overwrite silently. So the first object is written twice: a server that honours the condition rejects the second
write.
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
"""The metadata key of the mark, which identifies the writer of an object."""
_CONFLICTS: Final = frozenset({"ConditionalRequestConflict", "OperationAborted", "409"})
_NO_CONDITIONS: Final = frozenset({"NotImplemented", "501"})
_ATTEMPTS: Final = 5

log: Final = logging.getLogger("strata.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """Limits of a request: its attempts, and the seconds to connect and to wait for an answer."""

    attempts: int = 6
    connect_s: float = 5.0
    answer_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The metadata of an object; `age_s` is its age by the server's clock."""

    size_bytes: int
    mark: str
    age_s: float


class S3Control:
    """Requests for one place of a bucket. May be used from any thread.

    After a conflict, `pause` waits the given seconds before the next attempt.
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
            # many servers reject trailing checksums; documents contain their own digest, so need none
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
            # not `from error`: the error's text may contain a URL with a password
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
        """Whether the server honours If-None-Match; None until an object has been created."""
        return self._conditions

    def credentials(self) -> tuple[str, str, str | None]:
        """Return the current key, secret and token; the credential chain renews them when they expire."""
        frozen = self._credentials.get_frozen_credentials()
        return frozen.access_key, frozen.secret_key, frozen.token

    def find_region(self) -> str:
        """Return the bucket's region; AWS reports it even to requests sent to another region."""
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
        """Return the object's head, or None if there is no such object."""
        try:
            return self.head(key)
        except ObjectMissing:
            return None

    def get(self, key: str) -> bytes:
        """Return the whole of a small object; try again if the connection breaks while reading."""
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
        """Return the body of an answer; `NotAnObject` if it is larger than any document."""
        data = _body(answer, MAX_DOCUMENT_BYTES + 1)
        if len(data) > MAX_DOCUMENT_BYTES:
            stated = answer.get("ContentLength", len(data))
            raise NotAnObject(
                f"cannot read {self._what(key)}: it has {stated} bytes, and at most {MAX_DOCUMENT_BYTES} are read",
                hint="somebody else made it; move it away",
            )
        return data

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return bytes `[start, end)`, also if the server sends a range with the status of a whole object."""
        with as_storage_error("read", self._what(key)):
            answer = self._client.get_object(
                Bucket=self.place.bucket, Key=key, Range=f"bytes={start}-{end - 1}"
            )
            if not str(answer.get("ContentRange", "")).startswith(f"bytes {start}-"):
                answer["Body"].close()
                raise StorageError(f"the server of {self._what(key)} sends no part of it")
            return _body(answer, end - start)

    def create(self, key: str, data: bytes, mark: str) -> bool:
        """Create an object with `mark` unless it exists; return whether this call created it."""
        with self._lock:  # one thread finds out for all threads whether the server honours conditions
            if self._conditions is None:
                if self.find(key) is not None:
                    return False
                made = self._create(key, data, mark)
                if made and self._conditions is None:
                    self._record_conditions(self._put_if_free(key, data, mark) is False)
                return made
        return self._create(key, data, mark)

    def _create(self, key: str, data: bytes, mark: str) -> bool:
        made = None if self._conditions is False else self._put_if_free(key, data, mark)
        if made is None:
            return self._create_unguarded(key, data, mark)
        # "taken" may be the answer to a repeated request, if the first answer was lost
        return made or ((found := self.find(key)) is not None and found.mark == mark)

    def _put_if_free(self, key: str, data: bytes, mark: str) -> bool | None:
        """Create the object; return False if the name is taken, None if the server refuses conditions, else True."""
        for attempt in itertools.count(1):
            try:
                self.put(key, data, mark, IfNoneMatch="*")
            except Taken:
                return False
            except S3Error as error:
                if error.reason in _NO_CONDITIONS:
                    self._record_conditions(honours=False)
                    return None
                if error.reason not in _CONFLICTS or attempt == _ATTEMPTS:
                    raise
                self._pause(0.1 * 2**attempt)
            else:
                return True
        raise AssertionError("the loop returns or raises")

    def _create_unguarded(self, key: str, data: bytes, mark: str) -> bool:
        """Create without conditions: look, write, read the mark. Limit: a later writer may still overwrite."""
        if (found := self.find(key)) is not None:
            return found.mark == mark
        self.put(key, data, mark)
        return self.head(key).mark in {mark, ""}

    def _record_conditions(self, honours: bool) -> None:
        """Record whether the server honours conditions."""
        self._conditions = honours
        if not honours:
            log.warning(
                "%s does not honour If-None-Match: two processes that write one root without coordinators"
                " may not notice each other",
                self.endpoint_url,
            )

    def put(self, key: str, data: bytes, mark: str, **condition: str) -> None:
        """Create or replace an object, if `condition` is met."""
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
        """Return whether the server verifies parts by CRC64NVME; to find out, begin an upload to `key` and abort it."""
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
            )  # if anything else is wrong, the upload raises it
            return False
        return bool(answer.get("ChecksumAlgorithm") == "CRC64NVME")

    # -- listing

    def names(self, prefix: str) -> list[str]:
        """Return the names that follow `prefix` in the keys, each up to the next slash."""
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
        """Return whether a key begins with `prefix`."""
        with as_storage_error("list", self._what(prefix)):
            page = self._client.list_objects_v2(Bucket=self.place.bucket, Prefix=prefix, MaxKeys=1)
        return bool(page.get("Contents"))

    # -- uploads that were never completed

    def abort_uploads(self, prefix: str, *, older_than_s: float = 0.0) -> int:
        """Abort the incomplete uploads below `prefix`; return their number. Age is by the server's clock."""
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
                        continue  # completed meanwhile, or aborted by another process
                    count += 1
        return count

    def _what(self, key: str) -> str:
        return f"s3://{self.place.bucket}/{key}"


def _body(answer: dict[str, Any], most_bytes: int) -> bytes:
    """Return up to `most_bytes` of an answer's body; `IncompleteReadError` if the connection breaks."""
    with contextlib.closing(answer["Body"]) as body:
        data = bytes(body.read(most_bytes))
        if len(data) < most_bytes:
            body.read(1)  # a read at the end makes botocore check that the body is complete
        return data


@functools.cache
def _loader() -> Any:
    """Return the loader of boto3's service descriptions; all sessions share it, because loading is slow."""
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
