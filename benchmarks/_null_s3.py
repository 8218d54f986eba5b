"""An S3 server that accepts every upload and stores nothing: `python -m benchmarks._null_s3`.

It answers the requests of uploads by boto3 and obstore, and reads bodies as fast as Python can.
"""

from __future__ import annotations

import itertools
import socket
import socketserver
import sys
import threading
from urllib.parse import parse_qs, urlsplit

_BUFFER_BYTES = 1 << 20
_ETAG = '"00000000000000000000000000000000"'
_sizes: dict[str, int] = {}
_numbers = itertools.count(1)
_lock = threading.Lock()


class Handler(socketserver.StreamRequestHandler):
    """One connection, request after request."""

    disable_nagle_algorithm = True

    def handle(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        while line := self.rfile.readline():
            method, target, _ = line.decode().split(" ")
            headers = {}
            while (header := self.rfile.readline().strip()) != b"":
                name, _, value = header.decode().partition(":")
                headers[name.strip().lower()] = value.strip()
            if headers.get("expect") == "100-continue":
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            length = left = int(headers.get("content-length", 0))
            while left:
                count = self.rfile.readinto1(buffer[:left])
                if not count:
                    return
                left -= count
            self.answer(method, target, length)

    def answer(self, method: str, target: str, length: int) -> None:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        upload, more, body = query.get("uploadId", ""), f"ETag: {_ETAG}\r\n", b""
        if method == "POST" and "uploads" in query:
            body = xml("InitiateMultipartUploadResult", f"<UploadId>u{next(_numbers)}</UploadId>")
        elif method == "POST" and upload:
            with _lock:
                _sizes[parts.path] = _sizes.pop(upload, 0)
            body = xml("CompleteMultipartUploadResult", f"<ETag>{_ETAG}</ETag>")
        elif method == "PUT":
            with _lock:
                name = upload or parts.path
                _sizes[name] = length + (_sizes.get(name, 0) if upload else 0)
        elif method == "HEAD":
            if parts.path not in _sizes:
                self.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                return
            head = f"HTTP/1.1 200 OK\r\n{more}Content-Length: {_sizes[parts.path]}\r\n"
            self.wfile.write(f"{head}Last-Modified: Fri, 20 Nov 2026 00:00:00 GMT\r\n\r\n".encode())
            return
        elif method == "GET":
            kind = "ListMultipartUploadsResult" if "uploads" in query else "ListBucketResult"
            body = xml(kind, "<IsTruncated>false</IsTruncated>")
        self.wfile.write(f"HTTP/1.1 200 OK\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def xml(root: str, inside: str) -> bytes:
    return f"<{root}>{inside}</{root}>".encode()


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128


def main() -> int:
    with Server(("127.0.0.1", 0), Handler) as server:
        sys.stdout.write(f"http://127.0.0.1:{server.server_address[1]}\n")
        sys.stdout.flush()
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
