"""`Case` (one case of bad input), and builders for the requests and calls of cases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from strata import CheckpointManager, DatasetRegistry
from strata.cli.console.exits import Exit
from strata.errors import (
    InvalidArgument,
    StrataError,
    Unavailable,
)
from strata.v1 import barriers_pb2, checkpoints_pb2, common_pb2, members_pb2, worlds_pb2
from tests.integration.bad_input.place import Place

Code = grpc.StatusCode
Do = Callable[[Place], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One mistake and its expected error.

    `library`, `request` or `command` is None if this interface cannot make the mistake.
    """

    name: str
    error: type[StrataError]
    says: str
    hint: str
    library: Do | None = None
    request: Callable[[Place], Message] | None = None
    status: grpc.StatusCode | None = None
    command: Callable[[Place], Sequence[str]] | None = None
    exit: Exit | None = None

    def __post_init__(self) -> None:
        assert (self.request is None) == (self.status is None), self.name
        assert (self.command is None) == (self.exit is None), self.name


R = TypeVar("R")
NAN, INF = float("nan"), float("inf")
NOWHERE: Final = "127.0.0.1:1"
ID_HINT: Final = "use 1 to 128 of A-Z a-z 0-9"


def given(value: Any, do: Callable[[Place, Any], R]) -> Callable[[Place], R]:
    """Return `do` with this value bound as its second argument."""
    return lambda place: do(place, value)


def registration(place: Place, **facts: Any) -> members_pb2.RegisterRequest:
    spec = worlds_pb2.JobSpec(min_workers=1, max_workers=1)
    whole: dict[str, Any] = {"job": "spare", "worker_id": "s0", "boot": "b", "slots": 1, "spec": spec} | facts
    return members_pb2.RegisterRequest(registration=members_pb2.Registration(**whole))


def arrival(place: Place, /, **facts: Any) -> barriers_pb2.WaitBarrierRequest:
    """Return an arrival of rank 0 of the pair, with the fields in `facts` replaced."""
    who: dict[str, Any] = {"worker_id": place.pair.worker, "incarnation": place.pair.incarnation}
    who |= {name: facts.pop(name) for name in tuple(facts) if name in who}
    whole: dict[str, Any] = {
        "job": "pair",
        "name": "b",
        "generation": place.pair_generation,
        "round": 1,
        "ranks": [0],
    }
    return barriers_pb2.WaitBarrierRequest(arrival=barriers_pb2.Arrival(**(whole | facts)), **who)


def begin(place: Place, **facts: Any) -> checkpoints_pb2.BeginCheckpointRequest:
    author = common_pb2.Author(
        worker_id=place.pair.worker,
        incarnation=facts.pop("incarnation", place.pair.incarnation),
        generation=facts.pop("generation", place.pair_generation),
        rank=facts.pop("rank", 0),
    )
    whole: dict[str, Any] = {
        "job": "pair",
        "author": author,
        "step": 5,
        "type": checkpoints_pb2.CHECKPOINT_TYPE_FULL,
        "root": "file:///nowhere",
        "attempt": "a1",
    }
    return checkpoints_pb2.BeginCheckpointRequest(**(whole | facts))


def registry(place: Place) -> DatasetRegistry:
    return DatasetRegistry(place.endpoints, job="witness")


def run(place: Place, *words: str, job: str = "spare") -> Sequence[str]:
    return ("run", "--endpoints", place.endpoints, "--job", job, *words, "--", "true")


def look(place: Place, command: str, job: str) -> Sequence[str]:
    return (*command.split(), "--endpoints", place.endpoints, "--job", job)


def other_participants(place: Place) -> barriers_pb2.WaitBarrierRequest:
    """Have rank 0 arrive for all participants; return an arrival in which rank 1 names itself as the only one."""
    with contextlib.suppress(Unavailable):  # rank 1 does not arrive; rank 0's arrival stays
        place.pair.client.call(arrival(place, name="digest"), timeout_s=0.5, attempt_s=0.4)
    return arrival(place, name="digest", ranks=[1], participants=[1])


def numbers(what: str, take: Callable[[Place, Any], object], *values: object, hint: str = "") -> list[Case]:
    """Return a case for each of the values, all of them invalid for this argument."""
    return [
        Case(
            name=f"{what}={str(value)[:20]}",
            error=InvalidArgument,
            says=what.rpartition(".")[2],
            hint=hint,
            library=given(value, take),
        )
        for value in values
    ]


SPANS: Final = (NAN, INF, -INF, -1, 0, 10**400, "5", None, True)
COUNTS: Final = (NAN, INF, -1, 2**63, 1.5, "5", None, True)


def save(place: Place, **facts: Any) -> object:
    """Save through a separate manager, so that its errors affect no other test."""
    with CheckpointManager(place.folder / "saves", client=place.witness) as manager:
        return manager.save(b"x", **facts).wait(10)


def etcd_of(place: Place) -> str:
    return place.cluster.etcd.endpoints[0].removeprefix("http://")


def listening(place: Place) -> str:
    return place.cluster.coordinators[0].address


def a_file(place: Place) -> str:
    path = place.folder / "a-file"
    path.write_text("in the way")
    return str(path)
