"""Authorisation: roles, identities, and one table with every RPC.

An identity comes from a certificate (the URI in its SAN) or from a token. `RULES` lists for each
method which roles may call it, and whether a member may call the method only for itself. Only `refusal` decides, by
this table: for unary calls, sessions and the calls in them, peers and watches.

An identity of None means that the replica authenticates no caller: plaintext on loopback, or --insecure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from strata.core.ids import checked_id
from strata.errors import InvalidArgument, PermissionDenied, StrataError, Unauthenticated

SCHEME: Final = "strata"
_JOB: Final = "job"
"""In a URI that limits the certificate to a job, this word stands in the place of the role."""
_OURS: Final = re.compile(rf"[\x00-\x20]*{SCHEME}:", re.IGNORECASE)
_URI: Final = re.compile(rf"{SCHEME}://([^/?#]*)/([^/?#]*)/([^?#]*)")


class Role(StrEnum):
    """The kind of an identity."""

    COORDINATOR = "coordinator"
    """A replica: it links to its peers, and forwards requests that it has already authorised."""
    MEMBER = "member"
    """An agent: acts for itself, in its jobs."""
    OPERATOR = "operator"
    """An administrator, a person or a program: reads everything, and changes everything that no member owns."""
    VIEWER = "viewer"
    """Only reads."""
    ETCD = "etcd"
    """An etcd member; may call nothing here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """An authenticated caller. `jobs` empty: every job of the cluster."""

    cluster: str
    role: Role
    id: str
    jobs: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.role} {self.id}"

    @property
    def uri(self) -> str:
        """The identity as the URI of a certificate's SAN."""
        return f"{SCHEME}://{self.cluster}/{self.role}/{self.id}"

    @property
    def job_uris(self) -> tuple[str, ...]:
        """The URIs that limit a certificate to jobs."""
        return tuple(f"{SCHEME}://{self.cluster}/{_JOB}/{job}" for job in sorted(self.jobs))


def parse_identity(uris: list[str]) -> Identity:
    """Return the identity that the URIs of a certificate name; `Unauthenticated` if there is not exactly one.

    URIs of other schemes are ignored.
    """
    found: list[Identity] = []
    jobs: set[tuple[str, str]] = set()
    for uri in uris:
        if not _OURS.match(uri):
            continue
        cluster, kind, name = _parts(uri)
        if kind == _JOB:
            jobs.add((cluster, name))
        else:
            found.append(Identity(cluster=cluster, role=Role(kind), id=name))
    if len(found) != 1:
        what = "no identity" if not found else f"{len(found)} identities"
        raise Unauthenticated(
            f"the certificate names {what}: it needs one URI {SCHEME}://<cluster>/<role>/<id>",
            hint="make it with `strata certs issue`",
        )
    (one,) = found
    if any(cluster != one.cluster for cluster, _job in jobs):
        raise Unauthenticated(
            f"the certificate of {one.uri} names a job of another cluster",
            hint="make it with `strata certs issue`",
        )
    return Identity(cluster=one.cluster, role=one.role, id=one.id, jobs=frozenset(job for _, job in jobs))


def _parts(uri: str) -> tuple[str, str, str]:
    """Return cluster, role and id exactly as written: nothing is decoded, and nothing is skipped."""
    try:
        found = _URI.fullmatch(uri)
        if found is None:
            raise ValueError("its form is different")
        cluster, kind, name = found.groups()
        if kind not in {_JOB, *Role}:
            raise ValueError(f"there is no role {kind[:40]!r}; the roles are {', '.join(Role)}")
        return checked_id("cluster", cluster), kind, checked_id("role's id", name)
    except (ValueError, InvalidArgument) as error:
        raise Unauthenticated(
            f"{uri[:200]!r} in the certificate is not {SCHEME}://<cluster>/<role>/<id>: {error}",
            hint="make it with `strata certs issue`",
        ) from None


# -- the table --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The roles that may call a method. `own_worker`: a member may call it only for the worker with its own id."""

    roles: frozenset[Role]
    own_worker: bool = False


_C, _M, _O, _V = Role.COORDINATOR, Role.MEMBER, Role.OPERATOR, Role.VIEWER
_READ: Final = Rule(roles=frozenset({_C, _M, _O, _V}))
_OWN: Final = Rule(roles=frozenset({_C, _M}), own_worker=True)
_OWN_OR_OPERATE: Final = Rule(roles=frozenset({_C, _M, _O}), own_worker=True)
_JOB_OR_OPERATE: Final = Rule(roles=frozenset({_C, _M, _O}))
_OPERATE: Final = Rule(roles=frozenset({_C, _O}))
_PEERS: Final = Rule(roles=frozenset({_C}))

RULES: Final[Mapping[str, Rule]] = {
    "Admin.ForgetCoordinator": _OPERATE,
    "Admin.GetResource": _READ,
    "Admin.GetStatus": _READ,
    "Barriers.WaitBarrier": _OWN,
    "Barriers.ListBarriers": _READ,
    "Checkpoints.BeginCheckpoint": _OWN,
    "Checkpoints.AckCheckpoint": _OWN,
    "Checkpoints.SealCheckpoint": _OWN,
    "Checkpoints.AbortCheckpoint": _OWN_OR_OPERATE,
    "Checkpoints.HoldSaves": _OWN,
    "Checkpoints.GetCheckpoint": _READ,
    "Checkpoints.ListCheckpoints": _READ,
    "Checkpoints.PinCheckpoint": _JOB_OR_OPERATE,
    "Checkpoints.UnpinCheckpoint": _JOB_OR_OPERATE,
    "Checkpoints.DeleteCheckpoint": _JOB_OR_OPERATE,
    "Checkpoints.TagCheckpoint": _JOB_OR_OPERATE,
    "Checkpoints.UntagCheckpoint": _JOB_OR_OPERATE,
    "Checkpoints.OpenCheckpoint": _JOB_OR_OPERATE,
    "Checkpoints.CloseCheckpoint": _JOB_OR_OPERATE,
    "Checkpoints.ReportCopy": _JOB_OR_OPERATE,
    "Checkpoints.ReportDamage": _JOB_OR_OPERATE,
    "Checkpoints.ListMaintenance": _READ,
    "Checkpoints.AdoptCheckpoint": _JOB_OR_OPERATE,
    "Checkpoints.SetRetention": _JOB_OR_OPERATE,
    "Checkpoints.GetRetention": _READ,
    "Checkpoints.ForkCheckpoint": _OPERATE,
    "Checkpoints.RewindJob": _OPERATE,
    "Datasets.RegisterDataset": _JOB_OR_OPERATE,
    "Datasets.GetAssignment": _READ,
    "Datasets.ListDatasets": _READ,
    "Members.Register": _OWN,
    "Members.Heartbeat": _OWN,
    "Members.ReportRankExit": _OWN,
    "Members.Leave": _OWN_OR_OPERATE,
    "Members.ListMembers": _READ,
    "Peers.Link": _PEERS,
    "Recovery.GetRecovery": _READ,
    "Sessions.Session": _OWN,
    "Watch.Watch": _READ,
    "Worlds.DeleteJob": _OPERATE,
    "Worlds.GetJob": _READ,
    "Worlds.GetWorld": _READ,
    "Worlds.ListGenerations": _READ,
    "Worlds.ListJobs": _READ,
    "Worlds.ResumeJob": _OPERATE,
    "Worlds.ScaleJob": _OPERATE,
    "Worlds.StopJob": _JOB_OR_OPERATE,
}
"""Every method of `strata.v1`; a test compares it with the protos. No role may call an absent method."""


def call_name(method: str) -> str:
    """Return the name of a unary method as in `Call` of session.proto: `begin_checkpoint`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", method.rpartition(".")[2]).lower()


def refusal(
    identity: Identity | None,
    method: str,
    *,
    cluster: str,
    job: str | None = None,
    worker: str | None = None,
) -> StrataError | None:
    """Return why `identity` may not call `method` ("Worlds.GetJob"), or None if it may.

    `job`: the job that the request names; None if requests of this kind name no job. `worker`: the worker for which
    the request acts; None if requests of this kind name no worker. A request that should name a worker but has ""
    is refused.
    """
    if identity is None:
        return None
    if identity.cluster != cluster:
        return PermissionDenied(
            f"{identity.uri} belongs to cluster {identity.cluster}, this is {cluster}",
            hint="check the endpoints, and --cluster where the certificate was made",
        )
    rule = RULES.get(method)
    if rule is None or identity.role not in rule.roles:
        may = ", ".join(sorted(rule.roles)) if rule is not None else "nobody"
        return PermissionDenied(
            f"{identity} may not call {method}", hint=f"the roles that may: {may}; see docs/security.md"
        )
    if identity.role is _C:
        return None
    if identity.jobs and job is not None and job not in identity.jobs:
        return PermissionDenied(
            f"{identity} may not act in job {job[:128] or '(none)'}",
            hint=f"it is limited to {', '.join(sorted(identity.jobs))}",
        )
    if identity.role is _M and rule.own_worker and worker != identity.id:
        named = f"worker {worker[:128]!r}" if worker else "a request that names no worker"
        return PermissionDenied(
            f"{identity} may not speak for {named}",
            hint=f"a member speaks only for itself: its worker id is {identity.id}",
        )
    return None
