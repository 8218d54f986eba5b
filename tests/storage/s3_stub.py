"""A small S3 server in this process that fails on request, with faults that no real server produces on demand.

It keeps objects in memory and implements the requests of Strata: conditional puts, ranges, listing, multipart
uploads. `stub.fail(…)` plans a fault for the next matching requests. The stub checks no signature.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_XML = '<?xml version="1.0" encoding="UTF-8"?>'
CODES = {
    400: "InvalidRequest",
    403: "AccessDenied",
    404: "NoSuchBucket",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    500: "InternalError",
    501: "NotImplemented",
    503: "SlowDown",
}


@dataclass(slots=True)
class Request:
    """The properties of a request by which a fault is chosen.

    `kind` is put, get, head, delete, list, create, part, complete, abort or uploads.
    """

    kind: str
    key: str
    headers: dict[str, str]
    part: int = 0


@dataclass(slots=True)
class Fault:
    """The effect on a request: `status` (with `code`, if the code is not the usual one), or `how`.

    `lost`: the request is carried out, and the connection closes without an answer. `torn`: the connection closes
    in the middle of the body. `slow`: the answer is sent once `until` is set, or never.
    """

    fits: Callable[[Request], bool]
    status: int = 0
    how: str = ""
    times: int = 1
    code: str = ""
    until: threading.Event | None = None


@dataclass(slots=True)
class Stored:
    data: bytes
    metadata: dict[str, str]
    modified: float


@dataclass(slots=True)
class Upload:
    key: str
    metadata: dict[str, str]
    begun: float
    parts: dict[int, bytes] = field(default_factory=dict)


class StubS3:
    """The server's state. Its `clock` advances when a test sets it."""

    def __init__(self, *, conditions: bool = True) -> None:
        self.bucket = "bucket"
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, Upload] = {}
        self.requests: list[Request] = []
        self.conditions = conditions
        self.ahead_s = 0.0
        self.url = ""
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._numbers = iter(range(1, 1 << 30))

    def now(self) -> float:
        return time.time() + self.ahead_s

    def fail(
        self, kind: str, *, status: int = 0, code: str = "", how: str = "", times: int = 1, key: str = ""
    ) -> Fault:
        """Plan a fault for the next `times` requests of that kind whose key contains `key`."""
        fault = Fault(
            lambda r: r.kind == kind and key in r.key, status=status, code=code, how=how, times=times
        )
        self._faults.append(fault)
        return fault

    def fault_of(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for fault in self._faults:
                if fault.times > 0 and fault.fits(request):
                    fault.times -= 1
                    return fault
        return None

    def count(self, kind: str) -> int:
        return sum(request.kind == kind for request in self.requests)

    # -- the requests; each returns (status, body, headers)

    def act(self, request: Request, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        with self._lock:
            return getattr(self, f"_{request.kind}")(request, query, body)  # type: ignore[no-any-return]  # each returns the three

    def _put(self, request: Request, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if self.conditions and request.headers.get("if-none-match") == "*" and request.key in self.objects:
            return error(412)
        self.objects[request.key] = Stored(body, metadata_of(request), self.now())
        return 200, b"", {"ETag": etag(body)}

    def _get(self, request: Request, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        stored = self.objects.get(request.key)
        if stored is None:
            return error(404, "NoSuchKey")
        given = request.headers.get("range", "")
        if not given:
            return 200, stored.data, head_of(stored)
        first, _, last = given.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or 1 << 60), len(stored.data) - 1)
        if start >= len(stored.data):
            return error(416, "InvalidRange")
        reported = {**head_of(stored), "Content-Range": f"bytes {start}-{end}/{len(stored.data)}"}
        return 206, stored.data[start : end + 1], reported

    def _head(
        self, request: Request, query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        stored = self.objects.get(request.key)
        if stored is None:
            return 404, b"", {}
        return 200, stored.data, head_of(stored)

    def _delete(
        self, request: Request, query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        self.objects.pop(request.key, None)
        return 204, b"", {}

    def _list(
        self, request: Request, query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        keys, folders = [], set()
        for key in sorted(k for k in self.objects if k.startswith(prefix)):
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                keys.append(key)
        found = "".join(f"<Contents><Key>{escape(k)}</Key><Size>1</Size></Contents>" for k in keys)
        found += "".join(
            f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders)
        )
        return xml("ListBucketResult", f"<IsTruncated>false</IsTruncated>{found}")

    def _create(
        self, request: Request, query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        name = f"upload-{next(self._numbers)}"
        self.uploads[name] = Upload(request.key, metadata_of(request), self.now())
        return xml(
            "InitiateMultipartUploadResult",
            f"<Bucket>{self.bucket}</Bucket><Key>{escape(request.key)}</Key><UploadId>{name}</UploadId>",
        )

    def _part(
        self, request: Request, query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        upload = self.uploads.get(query["uploadId"])
        if upload is None:
            return error(404, "NoSuchUpload")
        upload.parts[request.part] = body
        return 200, b"", {"ETag": etag(body)}

    def _complete(
        self, request: Request, query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        upload = self.uploads.pop(query["uploadId"], None)
        if upload is None:
            return error(404, "NoSuchUpload")
        data = b"".join(upload.parts[number] for number in sorted(upload.parts))
        self.objects[upload.key] = Stored(data, upload.metadata, self.now())
        return xml(
            "CompleteMultipartUploadResult",
            f"<Bucket>{self.bucket}</Bucket><Key>{escape(upload.key)}</Key><ETag>{etag(data)}</ETag>",
        )

    def _abort(
        self, request: Request, query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        return (204, b"", {}) if self.uploads.pop(query["uploadId"], None) else error(404, "NoSuchUpload")

    def _uploads(
        self, request: Request, query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        found = "".join(
            f"<Upload><Key>{escape(u.key)}</Key><UploadId>{name}</UploadId>"
            f"<Initiated>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(u.begun))}</Initiated></Upload>"
            for name, u in self.uploads.items()
            if u.key.startswith(query.get("prefix", ""))
        )
        return xml("ListMultipartUploadsResult", f"<IsTruncated>false</IsTruncated>{found}")


@contextmanager
def serving(stub: StubS3) -> Iterator[StubS3]:
    """Serve the stub on a port of loopback; `stub.url` is its address."""
    handler = type("Handler", (_Handler,), {"stub": stub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    stub: StubS3
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).removeprefix("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        request = Request(
            kind=kind_of(self.command, key, query),
            key=key,
            headers={name.lower(): value for name, value in self.headers.items()},
            part=int(query.get("partNumber", 0)),
        )
        fault = self.stub.fault_of(request)
        length = int(self.headers.get("Content-Length") or 0)
        if fault is not None and fault.how == "torn" and length:
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(length)
        if fault is not None and fault.status:
            self.answer(*error(fault.status, fault.code))
            return
        if fault is not None and fault.how == "slow":
            fault.until = fault.until or threading.Event()
            fault.until.wait(30)
        if bucket != self.stub.bucket:
            self.answer(*error(404))
            return
        answer = self.stub.act(request, query, body)
        if fault is not None and fault.how == "lost":
            self.close_connection = True
            self.connection.close()
            return
        if fault is not None and fault.how == "torn":
            self.answer(answer[0], answer[1], answer[2], torn=True)
            return
        self.answer(*answer)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any  # noqa: N815  # the names it looks for

    def answer(self, status: int, body: bytes, headers: dict[str, str], *, torn: bool = False) -> None:
        self.send_response_only(status)
        self.send_header("Date", formatdate(self.stub.now(), usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if torn else body)
        if torn:
            self.close_connection = True

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


def kind_of(method: str, key: str, query: dict[str, str]) -> str:
    if "uploads" in query:
        return "create" if method == "POST" else "uploads"
    if "uploadId" in query:
        return {"PUT": "part", "POST": "complete", "DELETE": "abort"}[method]
    if method == "GET" and not key:
        return "list"
    return {"PUT": "put", "GET": "get", "HEAD": "head", "DELETE": "delete", "POST": "put"}[method]


def metadata_of(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.startswith("x-amz-meta-")}


def head_of(stored: Stored) -> dict[str, str]:
    return {
        **stored.metadata,
        "ETag": etag(stored.data),
        "Last-Modified": formatdate(stored.modified, usegmt=True),
        "Accept-Ranges": "bytes",
    }


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def xml(root: str, inside: str) -> tuple[int, bytes, dict[str, str]]:
    return 200, f"{_XML}<{root}>{inside}</{root}>".encode(), {"Content-Type": "application/xml"}


def error(status: int, code: str = "") -> tuple[int, bytes, dict[str, str]]:
    body = f"{_XML}<Error><Code>{code or CODES.get(status, 'Error')}</Code><Message>planned</Message></Error>"
    return status, body.encode(), {"Content-Type": "application/xml"}
