"""The job and the worker that a request names are found in every kind of request."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass

from strata.config import CoordinatorConfig, Credentials
from strata.coordinator.access.admission import Admission, own_identity
from strata.coordinator.access.permission import check_call, check_session, hide_others
from strata.core.access.authority import RULES, Identity, Role
from strata.core.access.rate_limits import Meter, Rate
from strata.errors import ConfigError, PermissionDenied, QuotaExceeded, Unauthenticated
from strata.security.certificates import Authority
from strata.security.private import write_private
from strata.security.tokens import TokenFile
from strata.v1 import (
    admin_pb2,
    barriers_pb2,
    checkpoints_pb2,
    datasets_pb2,
    members_pb2,
    recovery_pb2,
    worlds_pb2,
)

FILES = (admin_pb2, barriers_pb2, checkpoints_pb2, datasets_pb2, members_pb2, recovery_pb2, worlds_pb2)
REQUESTS = {
    f"{service.name}.{method.name}": GetMessageClass(method.input_type)
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def request(method: str, *, job: str, worker: str) -> Any:
    """Return a request of this kind that names `job`, and `worker` as its caller."""
    made: Any = REQUESTS[method]()
    fields = made.DESCRIPTOR.fields_by_name
    body = made.registration if "registration" in fields else made.arrival if "arrival" in fields else made
    if "job" in body.DESCRIPTOR.fields_by_name:
        body.job = job
    holder = made.author if "author" in fields else made.registration if "registration" in fields else made
    if "worker_id" in holder.DESCRIPTOR.fields_by_name:
        holder.worker_id = worker
    return made


def check(method: str, identity: Identity | None, *, job: str = "j", worker: str = "w1") -> None:
    check_call(identity, method, request(method, job=job, worker=worker), "c")


def member(*jobs: str) -> Identity:
    return Identity(cluster="c", role=Role.MEMBER, id="w1", jobs=frozenset(jobs))


@pytest.mark.parametrize("method", sorted(m for m in REQUESTS if Role.MEMBER in RULES[m].roles))
def test_a_member_acts_in_its_job(method: str) -> None:
    check(method, member("j"))
    check(method, member())
    if "job" in str(request(method, job="j", worker="")):
        with pytest.raises(PermissionDenied, match="in job z"):
            check(method, member("j"), job="z")


@pytest.mark.parametrize("method", sorted(m for m in REQUESTS if RULES[m].own_worker))
def test_a_member_names_itself(method: str) -> None:
    for worker in ("w2", ""):
        with pytest.raises(PermissionDenied, match="may not speak for"):
            check(method, member(), worker=worker)


@pytest.mark.parametrize("method", sorted(REQUESTS))
def test_without_authentication_every_call_is_allowed(method: str) -> None:
    check(method, None, job="any", worker="any")


def test_a_session_is_of_its_own_worker_job_and_cluster() -> None:
    check_session(member("j"), cluster="c", job="j", worker="w1")
    for cluster, job, worker in (("d", "j", "w1"), ("c", "k", "w1"), ("c", "j", "w2"), ("c", "j", "")):
        with pytest.raises(PermissionDenied):
            check_session(member("j"), cluster=cluster, job=job, worker=worker)


# -- the replica's own identity

NOW = dt.datetime.now(dt.UTC)


def config(credentials: Credentials, **more: Any) -> CoordinatorConfig:
    return CoordinatorConfig(cluster="c", credentials=credentials, **more)


@pytest.mark.parametrize(
    ("cluster", "role", "printed"),
    [
        ("c", Role.COORDINATOR, ""),
        ("c", Role.MEMBER, "strata://c/member/r1"),
        ("d", Role.COORDINATOR, "cluster c"),
    ],
)
def test_a_replica_needs_the_certificate_of_a_coordinator(
    tmp_path: Path, cluster: str, role: Role, printed: str
) -> None:
    authority = Authority.create(tmp_path / "ca", cluster=cluster, now=NOW)
    authority.issue(tmp_path / "r1", role=role, id="r1", now=NOW)
    ca, cert, key = (tmp_path / "r1" / f"{name}.pem" for name in ("ca", "cert", "key"))
    mine = config(Credentials(ca_file=ca, cert_file=cert, key_file=key))
    if not printed:
        assert own_identity(mine, now=lambda: NOW) == own_identity(
            replace(mine, replica="r1"), now=lambda: NOW
        )
        with pytest.raises(ConfigError, match="coordinator r1, and this replica is called r2") as raised:
            own_identity(replace(mine, replica="r2"), now=lambda: NOW)
        assert "--id r2" in raised.value.hint
        return
    with pytest.raises(ConfigError, match=printed) as raised:
        own_identity(mine, now=lambda: NOW)
    assert "--role coordinator" in raised.value.hint


@pytest.mark.parametrize("role", [Role.COORDINATOR, Role.MEMBER, None])
def test_a_replica_needs_the_token_of_a_coordinator(tmp_path: Path, role: Role | None) -> None:
    file = TokenFile(tmp_path / "accepted.json")
    _, token = file.add(role=role or Role.COORDINATOR, id="r1", now=NOW)
    write_private(tmp_path / "token", token.encode() if role else b"strata_another")
    mine = config(Credentials(token_file=tmp_path / "token"), accepted_tokens_file=file.path)
    if role is Role.COORDINATOR:
        own_identity(mine, now=lambda: NOW)
        return
    with pytest.raises(ConfigError, match="the token in"):
        own_identity(mine, now=lambda: NOW)


def test_a_replica_without_authentication_has_no_identity() -> None:
    own_identity(config(Credentials()), now=lambda: NOW)


def test_a_list_of_jobs_has_those_of_a_limited_identity_only() -> None:
    def seen(identity: Identity | None) -> list[str]:
        jobs = [worlds_pb2.Job(name=name) for name in "ajz"]
        response = worlds_pb2.ListJobsResponse(jobs=jobs, next_page_token="z")
        hide_others(identity, response)
        assert response.next_page_token == "z"
        return [job.name for job in response.jobs]

    assert seen(member("j", "unborn")) == ["j"]
    for identity in (None, member(), Identity(cluster="c", role=Role.COORDINATOR, id="r1")):
        assert seen(identity) == ["a", "j", "z"]


class Shows:
    """The context of a call that carries a token."""

    def __init__(self, token: str) -> None:
        self._token = token

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return "ipv4:10.0.0.7:40312"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._token}"),)


@pytest.mark.parametrize("method", ["Watch.Watch", "Sessions.Session", "Admin.GetStatus"])
async def test_a_stream_that_opens_counts_as_a_call(tmp_path: Path, method: str) -> None:
    file = TokenFile(tmp_path / "accepted.json")
    _, token = file.add(role=Role.MEMBER, id="w1", now=dt.datetime.now(dt.UTC))
    config = CoordinatorConfig(
        accepted_tokens_file=file.path, credentials=Credentials(token_file=tmp_path / "own")
    )
    meter = Meter(Rate(per_s=0.001, burst=2.0))
    admission = Admission(config, now=lambda: dt.datetime.now(dt.UTC), meter=meter)
    for _ in range(2):
        admission.admit(Shows(token), method)
    with pytest.raises(QuotaExceeded):
        admission.admit(Shows(token), method)


async def test_wrong_tokens_from_one_address_are_limited_and_right_ones_are_not(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "accepted.json")
    _, token = file.add(role=Role.MEMBER, id="w1", now=dt.datetime.now(dt.UTC))
    config = CoordinatorConfig(
        accepted_tokens_file=file.path, credentials=Credentials(token_file=tmp_path / "own")
    )
    meter = Meter(strangers=Rate(per_s=0.001, burst=2.0))
    admission = Admission(config, now=lambda: dt.datetime.now(dt.UTC), meter=meter)
    for _ in range(2):
        with pytest.raises(Unauthenticated):
            admission.asks(Shows("strata_wrong"))
    with pytest.raises(QuotaExceeded, match=r"from ipv4:10\.0\.0\.7 by unknown callers"):
        admission.asks(Shows("strata_wrong"))
    assert admission.asks(Shows(token)) is not None
    assert admission.admitted() == {"ipv4:10.0.0.7:40312"}


async def test_only_an_authenticated_call_admits_its_connection(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "accepted.json")
    _, token = file.add(role=Role.MEMBER, id="w1", now=dt.datetime.now(dt.UTC))
    config = CoordinatorConfig(
        accepted_tokens_file=file.path, credentials=Credentials(token_file=tmp_path / "own")
    )
    admission = Admission(config, now=lambda: dt.datetime.now(dt.UTC))
    with pytest.raises(Unauthenticated):
        admission.asks(Shows("strata_wrong"))
    assert admission.admitted() == set()
    admission.admit(Shows(token), "Sessions.Session")
    assert admission.admitted() == {"ipv4:10.0.0.7:40312"}
    assert admission.admitted() == set(), "they are told once"
