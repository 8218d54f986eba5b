"""Minimal client of an etcd member's HTTP port, for local clusters: health, status, peer URLs, leadership transfer."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.errors import Refused, Unavailable

_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdTls:
    """PEM files of one identity, used by the members for clients and peers, and by this process as a client.

    The certificate must name 127.0.0.1 and allow both server and client use.
    """

    cert: Path
    key: Path
    ca: Path

    def flags(self) -> tuple[str, ...]:
        """Return the flags that make a member require a certificate of this CA from clients and peers."""
        return (
            f"--cert-file={self.cert}",
            f"--key-file={self.key}",
            f"--trusted-ca-file={self.ca}",
            "--client-cert-auth",
            f"--peer-cert-file={self.cert}",
            f"--peer-key-file={self.key}",
            f"--peer-trusted-ca-file={self.ca}",
            "--peer-client-cert-auth",
        )

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of a client with this identity."""
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(str(self.cert), str(self.key))
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """A member's report about itself; `leader` is 0 while it knows none."""

    member_id: int
    leader: int
    term: int
    revision: int
    version: str

    @property
    def leads(self) -> bool:
        """Whether the member takes itself for the leader."""
        return self.leader == self.member_id


class EtcdHttp:
    """One member's HTTP port. Each call returns within a second, or raises `Unavailable`."""

    def __init__(self, url: str, tls: EtcdTls | None = None) -> None:
        self.url = url
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if tls is not None:
            handlers.append(urllib.request.HTTPSHandler(context=tls.context()))
        self._opener = urllib.request.build_opener(*handlers)

    def healthy(self) -> bool:
        """Tell whether the member answered a linearizable read just now."""
        try:
            return bool(self._ask("/health").get("health") == "true")
        except Unavailable:
            return False

    def status(self) -> MemberStatus:
        """Return the member's own view of the cluster."""
        answer = self._ask("/v3/maintenance/status", {})
        header = answer["header"]  # the gateway omits fields that are zero
        return MemberStatus(
            member_id=int(header["member_id"]),
            leader=int(answer.get("leader", 0)),
            term=int(answer.get("raftTerm", 0)),
            revision=int(header.get("revision", 0)),
            version=answer["version"],
        )

    def peer_urls(self) -> list[str]:
        """Return the answering member's addresses for its peers, by which the caller recognises the member.

        `Refused` if etcd's user authentication is on.
        """
        answer = self._ask("/v3/cluster/member/list", {"linearizable": False})
        own = answer["header"]["member_id"]
        return next((m.get("peerURLs", []) for m in answer["members"] if m["ID"] == own), [])

    def move_leader(self, member_id: int) -> None:
        """Have this member, which must be the leader, transfer leadership to another; return once the other leads."""
        self._ask("/v3/maintenance/transfer-leadership", {"targetID": str(member_id)})

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data)  # noqa: S310 - our own URL
        try:
            with self._opener.open(request, timeout=_LIMIT_S) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                refusal = error.read(4096).decode(errors="replace")
            if error.code in {401, 403} or "user name is empty" in refusal or "auth" in refusal:
                raise Refused(f"etcd at {self.url} asks for a user") from error
            raise Unavailable(f"etcd at {self.url} does not answer: {error}", hint="") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"etcd at {self.url} does not answer: {error}", hint="") from error
        return answer
