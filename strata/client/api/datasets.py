"""`DatasetRegistry`: datasets of a job, and the assignment of their shards to workers."""

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
"""The allowed format specs of a shard number: at most 99 characters wide, decimal or hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One numbered file of a dataset. `uri` is "" if the dataset was registered without one."""

    dataset: str
    index: int
    uri: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetAssignment:
    """The owner of each shard. `assign_epoch` is the assignment's version, which grows with every change.

    `owners` has every worker of the assignment, also workers without a shard. Every process can compute `owners`
    from `workers`, the number of shards and the published `ring`.
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

    It takes the same `endpoints` and `job` as `CoordinatorClient.connect`; its calls raise the same errors.
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
        """Create a dataset of `shards` files, or confirm an existing one with the same spec.

        `uri` names a shard's file, with `{shard}` for its number, formatted as by `str.format`:
        "s3://bucket/part-{shard:05d}.parquet". Raise `Conflict` if a dataset of this name exists with another
        spec, `NotFound` if the job does not exist.
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
        """Return the owner of each shard; `dataset` may be omitted if the job has only one.

        Wait, up to `timeout_s`, for the first assignment, which is made once the job has a world. Raise `NotFound`
        if it was not made in time, or if there is no such dataset.
        """
        answer = self._fetch(dataset, worker_id="")
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

        `worker_id` names a member of the job, not a rank. Wait, up to `timeout_s`, until the worker is in the
        assignment; otherwise raise `NotFound`. So a worker that calls too early never gets an empty list. If the
        dataset or the worker is not registered, the error's hint shows the missing calls.
        """
        answer = self._fetch(dataset, worker_id=worker_id)
        return [
            Shard(dataset=answer.dataset.name, index=index, uri=_file(answer.dataset.uri, index))
            for index in sorted(answer.owners[worker_id].index)
        ]

    def _fetch(self, dataset: str | None, *, worker_id: str) -> GetAssignmentResponse:
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
        """If a call that must come first is missing, raise a `NotFound` that names it."""
        names: list[str] = []
        members: list[Member] = []
        try:
            names, members = self.datasets(), self._client.members()
        except NotFound:  # there is no such job
            pass
        except Unavailable:  # the caller raises its first error
            return
        missing, calls = [], []
        if not names:
            missing.append("no dataset is registered")
            calls.append(f'DatasetRegistry({self._arguments}).register("{dataset or "train"}", shards=64)')
        if not members or (worker_id and worker_id not in [member.worker_id for member in members]):
            missing.append(f"worker {worker_id!r} is no member" if worker_id else "there is no member")
            heartbeat = f'heartbeat(worker_id="{worker_id or "worker-01"}")'
            calls.append(
                f"CoordinatorClient.connect({self._arguments}).{heartbeat}  # and again every second or two"
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
    def _arguments(self) -> str:
        """The arguments for this job, as source code."""
        endpoints = ",".join(map(str, self._client.endpoints))
        job = self._client.job
        return f'"{endpoints}"' if job == DEFAULT_JOB else f'"{endpoints}", job="{job}"'


def _file(uri: str, shard: int) -> str:
    """Return the name of a shard's file; `ConfigError` if `uri` is not a valid format.

    The number may be padded; no other formatting is allowed. The format comes from the process that registered
    the dataset, and `{shard:1000000000}` would make a string of a gigabyte.
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
