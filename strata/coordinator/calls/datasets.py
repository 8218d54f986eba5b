"""The calls about datasets: which exist, and which worker owns which shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from strata.coordinator.calls.pages import fill, of_state, page
from strata.coordinator.calls.table import Row, change
from strata.coordinator.context import ReplicaContext, existing_job
from strata.core.access.authority import Identity
from strata.core.datasets import assignment as core
from strata.core.job import JobView
from strata.core.kv.records import Assignment, DatasetSpec
from strata.core.kv.view import Entry
from strata.errors import InvalidArgument, NotFound
from strata.v1 import datasets_pb2 as pb
from strata.wire import datasets as wire

PIECE_SHARDS: Final = 32_768
"""Shards of one worker in one page: each number takes up to three bytes."""


class DatasetCalls:
    """Answers the methods of `Datasets`."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context

    def rows(self) -> Iterator[Row]:
        def registered(_job: JobView, wanted: tuple[str, DatasetSpec]) -> dict[str, Any]:
            return {"dataset": wire.dataset_message(*wanted)}

        yield change(
            self._context,
            "Datasets.RegisterDataset",  # its shards are assigned once the job has a world
            lambda request: (request.dataset.name, wire.dataset_spec(request.dataset)),
            lambda job, wanted: core.decide_register_dataset(job, *wanted),
            registered,
        )
        yield Row(method="Datasets.GetAssignment", answer=self.get_assignment)
        yield Row(method="Datasets.ListDatasets", answer=self.list)

    async def get_assignment(
        self, request: pb.GetAssignmentRequest, _identity: Identity | None
    ) -> pb.GetAssignmentResponse:
        """Return an assignment. Before the job has a world no worker owns a shard: assign_epoch is 0, owners is
        empty.
        """
        job = self._context.job(request.job)
        try:
            name, spec = _dataset(job, request.dataset)
        except NotFound:
            await self._context.mirror.fresh()  # a refusal is a decision and needs a fresh view
            job = await existing_job(self._context, request.job)
            name, spec = _dataset(job, request.dataset)
        entry = job.view.entry(job.keys.assignment(name), Assignment)
        prefix = of_state(f"the assignment of {name}", request.page_token, entry)
        if entry is None:
            return pb.GetAssignmentResponse(dataset=wire.dataset_message(name, spec))
        assignment = entry.record
        answer = pb.GetAssignmentResponse()
        if not request.page_token:
            answer = wire.assignment_message(name, spec, assignment)
        owners = core.shards_of(assignment)
        if request.worker_id:
            owners = {request.worker_id: owners.get(request.worker_id, [])}
        named = [(f"{prefix}0/{worker}", worker, None) for worker in assignment.workers]
        owned = [
            (f"{prefix}1/{worker}/{number:06d}", worker, piece)
            for worker, shards in owners.items()
            for number, piece in enumerate(pieces(shards))
        ]

        def part(one: tuple[str, str, Sequence[int] | None]) -> pb.GetAssignmentResponse:
            _key, worker, shards = one
            if shards is None:
                return pb.GetAssignmentResponse(workers=[worker])
            return pb.GetAssignmentResponse(owners={worker: pb.Shards(index=shards)})

        fill(answer, [*named, *owned], key=lambda one: one[0], part=part, request=request)
        return answer

    async def list(
        self, request: pb.ListDatasetsRequest, _identity: Identity | None
    ) -> pb.ListDatasetsResponse:
        job = await existing_job(self._context, request.job)
        found, after = page(
            _datasets(job),
            key=lambda one: one[0],
            make=lambda one: wire.dataset_message(*one),
            size=request.page_size,
            token=request.page_token,
        )
        cursors = [] if request.page_token else wire.cursor_messages(job)
        return pb.ListDatasetsResponse(datasets=found, next_page_token=after, cursors=cursors)


def pieces(shards: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield one worker's shards in pieces of bounded size, at least one piece."""
    for start in range(0, max(1, len(shards)), PIECE_SHARDS):
        yield shards[start : start + PIECE_SHARDS]


def assignments(job: JobView) -> Iterator[tuple[str, Entry[Assignment]]]:
    """Yield each assigned dataset's name and assignment."""
    for name, _spec in _datasets(job):
        entry = job.view.entry(job.keys.assignment(name), Assignment)
        if entry is not None:
            yield name, entry


def _datasets(job: JobView) -> Iterator[tuple[str, DatasetSpec]]:
    for name in job.view.names(job.keys.datasets):
        spec = job.view.record(job.keys.dataset_spec(name), DatasetSpec)
        if spec is not None:
            yield name, spec


def _dataset(job: JobView, wanted: str) -> tuple[str, DatasetSpec]:
    """Return the dataset with that name; without a name, the job's only dataset."""
    there = dict(_datasets(job))
    if wanted:
        if wanted not in there:
            hint = f"it has {', '.join(sorted(there)[:8])}" if there else "register it first"
            raise NotFound(f"job {job.keys.name} has no dataset {wanted[:128]}", hint=hint)
        return wanted, there[wanted]
    if not there:
        raise NotFound(f"job {job.keys.name} has no dataset", hint="register one")
    if len(there) > 1:
        raise InvalidArgument(f"job {job.keys.name} has {len(there)} datasets", hint="name the one you mean")
    return next(iter(there.items()))
