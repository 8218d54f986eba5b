"""Errors of boto3 and obstore as `StorageError`, with a cause and a hint.

Request headers are never quoted: they contain the signature.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

import obstore.exceptions
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004  # botocore's own
    CredentialRetrievalError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
)

from strata.checkpoint.storage.sink import ObjectMissing
from strata.checkpoint.storage.transient import SILENT, of_answer
from strata.errors import StorageError, redacted

_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_STATUS: Final = re.compile(r"(?:status(?: code)?:?|HTTP status[^(]*\()\s*(\d{3})\b")
_MISSING: Final = frozenset({"NoSuchKey", "NoSuchUpload", "NotFound", "404"})
_CREDENTIALS: Final = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_RENEWED: Final = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "RequestTimeTooSkewed", "TokenRefreshRequired"}
)
"""The codes among these that a restart may cure: the new process reads its credentials and the clock again."""
_ELSEWHERE: Final = frozenset(
    {"301", "307", "AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect"}
)
_HINTS: Final = {
    "credentials": "the credentials are not accepted: look at AWS_ACCESS_KEY_ID, AWS_PROFILE or the role",
    "elsewhere": "the bucket is in another region: set region=, or AWS_REGION",
    "refused": "the credentials may not do this here: they need to read, write, list and delete in the bucket",
    "bucket": "create the bucket, or look for a slip in its name, the region and the endpoint",
    "busy": "the server has an error or wants fewer requests; the save can be repeated",
    "gone": "an upload was aborted on its way, by a lifecycle rule or by hand; the save can be repeated",
    "silent": "look at endpoint_url, the network and its proxies",
}


class S3Error(StorageError):
    """The server or the connection failed. `reason` is the server's code, or the status as text."""

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        hint: str | None = None,
        transient: str = "",
        lasting: bool = False,
    ) -> None:
        super().__init__(message, hint=hint, transient=transient, lasting=lasting)
        self.reason = reason


class Taken(StorageError):
    """The condition of a conditional write is not met (412)."""


@contextlib.contextmanager
def as_storage_error(verb: str, what: str) -> Iterator[None]:
    """Turn errors of boto3 and obstore in the operation `verb` on the object at `what` into `StorageError`."""
    try:
        yield
    except ClientError as error:
        answer = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        raise storage_error(verb, what, str(answer.get("Code", "")), int(status)) from error
    except (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError) as error:
        raise S3Error(
            f"cannot {verb} {what}: {error}", reason="credentials", hint=_HINTS["credentials"]
        ) from error
    except (HTTPClientError, ConnectionError) as error:
        raise _silent(verb, what, error) from error
    except BotoCoreError as error:
        raise S3Error(f"cannot {verb} {what}: {_first_line(error)}", reason=type(error).__name__) from error
    except (OSError, obstore.exceptions.BaseError) as error:  # obstore's file-like writer raises the former
        raise _of_obstore(verb, what, error) from error


def storage_error(verb: str, what: str, code: str, status: int) -> StorageError:
    """Return the error for an answer of the server."""
    answered = f"{code or 'an error'} ({status})" if status else code
    message = f"cannot {verb} {what}: the server answered {answered}"
    if code == "NoSuchBucket":
        return S3Error(message, reason=code, hint=_HINTS["bucket"], lasting=True)
    if code in _MISSING or (status == 404 and not code):
        # a new object cannot be missing: its upload was removed, or the server has an error
        return (
            S3Error(message, reason=code, hint=_HINTS["gone"]) if verb == "write" else ObjectMissing(message)
        )
    if code in {"PreconditionFailed", "412"} or status == 412:
        return Taken(message)
    if code in _CREDENTIALS or status == 401:
        lasting = code not in _RENEWED
        return S3Error(message, reason=code, hint=_HINTS["credentials"], lasting=lasting)
    if code in _ELSEWHERE or status in {301, 307}:
        # 307: the name of a new bucket has not propagated yet
        return S3Error(message, reason=code, hint=_HINTS["elsewhere"], lasting=status != 307)
    if status == 403 or code == "AccessDenied":
        return S3Error(message, reason=code or "403", hint=_HINTS["refused"], lasting=True)
    transient = of_answer(code, status)
    busy = _HINTS["busy"] if transient or status >= 500 else None
    return S3Error(message, reason=code or str(status), hint=busy, transient=transient)


def _of_obstore(verb: str, what: str, error: Exception) -> StorageError:
    text = str(error)
    codes, statuses = _CODE.search(text), _STATUS.search(text)
    code, status = codes[1] if codes else "", int(statuses[1]) if statuses else 0
    if isinstance(error, FileNotFoundError):
        return storage_error(verb, what, code or "NoSuchKey", 404)
    if isinstance(error, obstore.exceptions.PermissionDeniedError):
        return storage_error(verb, what, code or "AccessDenied", status or 403)
    if isinstance(error, obstore.exceptions.UnauthenticatedError):
        return storage_error(verb, what, code, status or 401)
    if code or status:
        return storage_error(verb, what, code, status)
    return _silent(verb, what, error)


def _silent(verb: str, what: str, error: Exception) -> S3Error:
    return S3Error(
        f"cannot {verb} {what}: {_first_line(error)}",
        reason="silent",
        hint=_HINTS["silent"],
        transient=SILENT,
    )


def _first_line(error: Exception) -> str:
    return (redacted(str(error)).strip().splitlines() or [type(error).__name__])[0][:300]
