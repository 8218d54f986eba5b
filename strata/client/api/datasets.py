"""`DatasetRegistry`: which shards of a dataset are whose."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from strata.client.api import arguments
from strata.client.api.coordinator import CoordinatorClient
from strata.config import Credentials
from strata.core.members.registration import DEFAULT_JOB
from strata.errors import ConfigError, NotFound, Unavailable
from strata.v1.datasets_pb2 import (
    Dataset,
    GetAssignmentRequest,
    GetAssignmentResponse,
    RegisterDatasetRequest,
)
from strata.v1.members_pb2 import Member

_FORMATTER: Final = string.Formatter()
_PADDING: Final = re.compile(r"(0?[1-9][0-9]?)?[dxX]?")
"""At most 99 wide, decimal or hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One numbered file of a dataset. `uri` is "" when the dataset was registered without one."""

    dataset: str
    index: int
    uri: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetAssignment:
    """Whose shards are whose, as of one assignment epoch: it grows with every change.

    `owners` holds every worker of the assignment, those without a shard too. It follows from
    `workers`, the number of shards and the published `ring`, so anybody can compute it.
    """

    dataset: str
    assign_epoch: int
    generation: int
    shards: int
    ring: str
    workers: tuple[str, ...]
    owners: Mapping[str, tuple[int, ...]]


class DatasetRegistry:
    """A blocking client of a job's datasets, for any thread.

    Takes the endpoints and the job of `CoordinatorClient.connect`, and raises what its calls raise.
    """

    def __init__(
        self,
        coordinator_url: str | Iterable[str] | None = None,
        *,
        job: str | None = None,
        timeout_s: float = 10.0,
        credentials: Credentials | None = None,
    ) -> None:
        self._client = CoordinatorClient.connect(
            coordinator_url, job=job, timeout_s=timeout_s, credentials=credentials
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def register(
        self, name: str, *, shards: int, uri: str = "", metadata: Mapping[str, str] | None = None
    ) -> None:
        """Create a dataset of `shards` files, or find it as it is.

        `uri` names a shard's file with `{shard}` in the place of its number, formatted as by
        `str.format`: "s3://bucket/part-{shard:05d}.parquet". `Conflict` when a dataset of this
        name exists with another spec, `NotFound` when the job does not exist.
        """
        _file(arguments.text("uri", uri), 0)
        dataset = Dataset(
            name=arguments.text("a dataset's name", name),
            shards=arguments.integer("shards", shards, below=2**31, hint="the number of the dataset's files"),
            uri=uri,
            metadata=arguments.metadata(metadata),
        )
        self._client.call(RegisterDatasetRequest(job=self._client.job, dataset=dataset))

    def datasets(self) -> list[str]:
        """Return the names of the job's datasets."""
        return [dataset.name for dataset in self._client.datasets()]

    def assignment(self, dataset: str | None = None) -> DatasetAssignment:
        """Return whose shards are whose; `dataset` may be left out when the job has only one.

        Waits, up to `timeout_s`, for the first assignment: there is none before the job has a
        world. `NotFound` when none came, or when there is no such dataset.
        """
        answer = self._ask(dataset, worker_id="")
        owned = {worker: tuple(sorted(shards.index)) for worker, shards in answer.owners.items()}
        return DatasetAssignment(
            dataset=answer.dataset.name,
            assign_epoch=answer.assign_epoch,
            generation=answer.generation,
            shards=answer.dataset.shards,
            ring=answer.ring,
            workers=tuple(answer.workers),
            owners={worker: owned.get(worker, ()) for worker in answer.workers},
        )

    def get_assigned_shards(self, *, worker_id: str, dataset: str | None = None) -> list[Shard]:
        """Return the shards of one worker in the order of their numbers.

        `worker_id` names a member of the job, not a rank. Waits, up to `timeout_s`, until it takes
        part in the assignment; `NotFound` when it does not: nobody is told that it owns nothing
        because it came too early. Where no dataset is registered, or no such worker, the error's hint
        has the calls to copy.
        """
        answer = self._ask(dataset, worker_id=worker_id)
        return [
            Shard(dataset=answer.dataset.name, index=index, uri=_file(answer.dataset.uri, index))
            for index in sorted(answer.owners[worker_id].index)
        ]

    def _ask(self, dataset: str | None, *, worker_id: str) -> GetAssignmentResponse:
        def settled(answer: GetAssignmentResponse) -> bool:
            return bool(answer.assign_epoch) and (not worker_id or worker_id in answer.workers)

        request = GetAssignmentRequest(
            job=self._client.job,
            dataset="" if dataset is None else arguments.text("dataset", dataset),
            worker_id=arguments.text("worker_id", worker_id),
        )
        try:
            answer: GetAssignmentResponse = self._client.call_until(request, settled)
            if not answer.assign_epoch:
                raise NotFound(
                    f"nobody owns shards of dataset {answer.dataset.name!r} yet",
                    hint="they are divided once the job has a world: see `strata members`",
                )
            if not settled(answer):
                raise NotFound(
                    f"worker {worker_id!r} has no part in dataset {answer.dataset.name!r}"
                    f" in generation {answer.generation}",
                    hint=f"its workers are {', '.join(answer.workers[:8])}; standbys own nothing",
                )
        except NotFound as error:
            self._check_begun(dataset, worker_id)
            raise error from None
        return answer

    def _check_begun(self, dataset: str | None, worker_id: str) -> None:
        """Raise a `NotFound` that names the calls which have to come first, where one has not come."""
        names: list[str] = []
        members: list[Member] = []
        try:
            names, members = self.datasets(), self._client.members()
        except NotFound:  # there is no such job
            pass
        except Unavailable:  # what is known already has to do
            return
        missing, calls = [], []
        if not names:
            missing.append("no dataset is registered")
            calls.append(f'DatasetRegistry({self._where}).register("{dataset or "train"}", shards=64)')
        if not members or (worker_id and worker_id not in [member.worker_id for member in members]):
            missing.append(f"worker {worker_id!r} is no member" if worker_id else "there is no member")
            heartbeat = f'heartbeat(worker_id="{worker_id or "worker-01"}")'
            calls.append(
                f"CoordinatorClient.connect({self._where}).{heartbeat}  # and again every second or two"
            )
        if not calls:
            return
        first = "these two calls have to come first" if len(calls) == 2 else "register it first"
        example = "\n".join(["from strata import CoordinatorClient, DatasetRegistry", *calls])
        raise NotFound(
            f"nobody owns shards in job {self._client.job!r}: {' and '.join(missing)}",
            hint=f"{first}:\n\n{example}\n\n",
        )

    @property
    def _where(self) -> str:
        """The arguments that lead to this job, as a person writes them."""
        endpoints = ",".join(map(str, self._client.endpoints))
        job = self._client.job
        return f'"{endpoints}"' if job == DEFAULT_JOB else f'"{endpoints}", job="{job}"'


def _file(uri: str, shard: int) -> str:
    """Return the name of a shard's file; `ConfigError` when `uri` is no format of one.

    The number may be padded, and nothing else is formatted: the format comes from whoever
    registered the dataset, and `{shard:1000000000}` would be a gigabyte.
    """
    try:
        for _text, name, spec, conversion in _FORMATTER.parse(uri):
            if name is not None and (name != "shard" or conversion or not _PADDING.fullmatch(spec or "")):
                raise ValueError(f"{{{name}{f'!{conversion}' if conversion else ''}:{spec}}}")
        return uri.format(shard=shard)
    except (LookupError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{uri[:200]!r} is not the name of a shard's file: {str(error)[:200]}",
            hint="write {shard}, or {shard:05d}, for the number, and other braces twice",
        ) from None
