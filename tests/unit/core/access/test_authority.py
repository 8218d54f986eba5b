"""Roles, identities and the table of rules."""

from __future__ import annotations

import string
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.access.authority import RULES, Identity, Role, call_name, parse_identity, refusal
from strata.errors import PermissionDenied, Unauthenticated
from strata.v1 import (
    admin_pb2,
    barriers_pb2,
    checkpoints_pb2,
    datasets_pb2,
    members_pb2,
    peers_pb2,
    recovery_pb2,
    session_pb2,
    watch_pb2,
    worlds_pb2,
)

FIRST = string.ascii_letters + string.digits
ids = st.builds(
    lambda first, rest: first + rest,
    st.sampled_from(FIRST),
    st.text(alphabet=f"{FIRST}._-", max_size=40),
)
identities = st.builds(
    Identity, cluster=ids, role=st.sampled_from(Role), id=ids, jobs=st.frozensets(ids, max_size=3)
)


def who(role: Role, id: str = "w1", *, jobs: tuple[str, ...] = (), cluster: str = "c") -> Identity:  # noqa: A002
    return Identity(cluster=cluster, role=role, id=id, jobs=frozenset(jobs))


def may(
    identity: Identity | None,
    method: str,
    *,
    job: str | None = "j",
    worker: str | None = None,
    cluster: str = "c",
) -> bool:
    return refusal(identity, method, cluster=cluster, job=job, worker=worker) is None


# -- identities


@given(identities)
def test_an_identity_survives_the_round_trip_through_its_uris(identity: Identity) -> None:
    assert parse_identity([identity.uri, *identity.job_uris]) == identity


@given(st.lists(st.text(max_size=60), max_size=4))
def test_any_certificate_yields_an_identity_or_a_refusal(uris: list[str]) -> None:
    with suppress(Unauthenticated):
        assert parse_identity(uris).uri in uris


@given(identities, st.text(alphabet="/?#%@: \x00é", min_size=1, max_size=3), st.data())
def test_no_foreign_character_gets_into_an_identity(
    identity: Identity, noise: str, data: st.DataObject
) -> None:
    uri = identity.uri
    at = data.draw(st.integers(len("strata://"), len(uri)))
    try:
        found = parse_identity([uri[:at] + noise + uri[at:]])
    except Unauthenticated:
        return
    assert found != identity
    assert all(c in f"{FIRST}._-" for c in found.cluster + found.id)


@pytest.mark.parametrize(
    ("uris", "why"),
    [
        ([], "no identity"),
        (["https://example.org/member/w1"], "no identity"),
        (["strata://c/member/w1", "strata://c/viewer/w1"], "2 identities"),
        (["strata://c/job/j"], "no identity"),
        (["strata://c/member/w1", "strata://other/job/j"], "another cluster"),
        (["strata://c/king/w1"], "no role 'king'"),
        (["strata://c/member/"], "cannot name"),
        (["strata://c/member/a/b"], "cannot name"),
        (["strata://c/member/..%2f"], "cannot name"),
        (["strata://c/member"], "its form"),
        (["strata:///member/w1"], "cannot name"),
        (["strata://c:1/member/w1"], "cannot name"),
        (["strata://u@c/member/w1"], "cannot name"),
        (["strata://c/member/w1?x=1"], "its form"),
        (["strata://c/member/w1#x"], "its form"),
        (["STRATA://c/member/w1", "strata://c/member/w2"], "its form"),
        (["STRATA://c/member/w1"], "its form"),
        (["strata://c/member/w1\n"], "cannot name"),
        (["strata://c/mem\tber/w1"], "no role"),
        (["strata://c\r/member/w1"], "cannot name"),
        ([" strata://c/operator/w1", "strata://c/member/w1"], "its form"),
        (["strata://c/member/w1", "strata:job"], "its form"),
        ([f"strata://c/member/{'x' * 129}"], "cannot name"),
    ],
)
def test_uris_without_one_valid_identity_are_refused(uris: list[str], why: str) -> None:
    with pytest.raises(Unauthenticated, match=why):
        parse_identity(uris)


# -- the table


def test_no_two_methods_have_one_call_name() -> None:
    assert len(set(map(call_name, RULES))) == len(RULES)
    assert call_name("Checkpoints.BeginCheckpoint") == "begin_checkpoint"


def test_every_method_of_the_protos_has_its_rule() -> None:
    files = (
        admin_pb2, barriers_pb2, checkpoints_pb2, datasets_pb2, members_pb2, peers_pb2, recovery_pb2,
        session_pb2, watch_pb2, worlds_pb2,
    )  # fmt: skip
    found = {
        f"{service.name}.{method.name}": method
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(found) == set(RULES)
    # a rule that reads a request's worker needs such a field
    for name, method in found.items():
        fields = method.input_type.fields_by_name
        if RULES[name].own_worker and not method.client_streaming:
            assert {"worker_id", "author", "registration"} & set(fields), name


def test_every_call_of_a_session_has_its_rule() -> None:
    assert {f.name for f in session_pb2.Call.DESCRIPTOR.oneofs_by_name["request"].fields} <= set(
        map(call_name, RULES)
    )


WRITES = {name for name, rule in RULES.items() if Role.VIEWER not in rule.roles}


def test_a_viewer_reads_and_does_nothing_else() -> None:
    allowed = {method for method in RULES if may(who(Role.VIEWER), method)}
    assert allowed == set(RULES) - WRITES
    assert {m.partition(".")[2][:3] for m in allowed} <= {"Get", "Lis", "Wat"}


@pytest.mark.parametrize(
    ("identity", "methods"),
    [
        (who(Role.ETCD), set()),
        (who(Role.COORDINATOR, "c1"), set(RULES)),
        *((who(role, cluster="d"), set()) for role in Role),  # of another cluster
        (None, {*RULES, "Future.Method"}),  # without authentication every caller may do everything
    ],
    ids=lambda value: (
        "" if isinstance(value, set) else str(value)
    ),  # the order of a set differs between processes
)
def test_identities_that_may_call_nothing_or_everything(identity: Identity | None, methods: set[str]) -> None:
    assert {m for m in (*RULES, "Future.Method") if may(identity, m, worker="w1")} == methods


def test_only_coordinators_are_peers() -> None:
    assert {r for r in Role if may(who(r), "Peers.Link", job=None)} == {Role.COORDINATOR}


@pytest.mark.parametrize("method", sorted(name for name, rule in RULES.items() if rule.own_worker))
def test_a_member_speaks_only_for_itself(method: str) -> None:
    member = who(Role.MEMBER, "w1")
    assert [w for w in ("w1", "w2", "W1", "", None) if may(member, method, worker=w)] == ["w1"]


@pytest.mark.parametrize("role", [Role.MEMBER, Role.OPERATOR, Role.VIEWER])
def test_an_identity_limited_to_jobs_acts_in_no_other_job(role: Role) -> None:
    limited = who(role, jobs=("a", "b"))
    for method in RULES:
        if may(who(role), method, worker="w1"):
            assert [job for job in ("a", "z", "") if may(limited, method, job=job, worker="w1")] == ["a"]


def test_an_operator_is_no_member() -> None:
    operator = who(Role.OPERATOR)
    assert not may(operator, "Sessions.Session", worker="w1")
    assert may(operator, "Checkpoints.DeleteCheckpoint")
    assert may(operator, "Members.Leave", worker="w7")


def test_a_method_without_a_rule_is_refused() -> None:
    error = refusal(who(Role.OPERATOR), "Future.Method", cluster="c")
    assert isinstance(error, PermissionDenied)
    assert "nobody" in error.hint
