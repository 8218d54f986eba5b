"""Requests about datasets: which there are, and whose shards are whose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from strata.coordinator.calls.dispatch import Answer
from strata.coordinator.calls.lookups import existing_job, job_view
from strata.coordinator.calls.pages import page
from strata.coordinator.context import ReplicaContext
from strata.core import datasets as core
from strata.core.job import JobView
from strata.core.records import Assignment, DatasetSpec
from strata.errors import InvalidArgument, NotFound
from strata.v1 import datasets_pb2 as pb
from strata.wire import datasets as wire


class DatasetCalls:
    """Answers what `Datasets` offers."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context

    def table(self) -> Mapping[str, Answer]:
        return {
            "register_dataset": self.register,
            "get_assignment": self.get_assignment,
            "list_datasets": self.list,
        }

    async def register(self, request: pb.RegisterDatasetRequest) -> pb.RegisterDatasetResponse:
        """Create the dataset; its shards are assigned once the job has a world."""
        name, spec = request.dataset.name, wire.dataset_spec(request.dataset)
        keys = self._context.keys.job(request.job)
        await self._context.executor.settle(
            lambda view: core.decide_register_dataset(JobView(view, keys), name, spec), coalesce=True
        )
        return pb.RegisterDatasetResponse(dataset=wire.dataset_message(name, spec))

    async def get_assignment(self, request: pb.GetAssignmentRequest) -> pb.GetAssignmentResponse:
        """Before the job has a world nobody owns a shard: assign_epoch is 0 and owners is empty."""
        job = job_view(self._context, request.job)
        try:
            name, spec = _dataset(job, request.dataset)
        except NotFound:
            await self._context.mirror.fresh()  # a refusal is a decision: it takes a fresh view
            job = await existing_job(self._context, request.job)
            name, spec = _dataset(job, request.dataset)
        assignment = job.view.record(job.keys.assignment(name), Assignment)
        if assignment is None:
            return pb.GetAssignmentResponse(dataset=wire.dataset_message(name, spec))
        owners = core.shards_of(assignment)
        if request.worker_id:
            owners = {request.worker_id: owners.get(request.worker_id, [])}
        return wire.assignment_message(name, spec, assignment, owners)

    async def list(self, request: pb.ListDatasetsRequest) -> pb.ListDatasetsResponse:
        job = await existing_job(self._context, request.job)
        found, after = page(
            _datasets(job),
            key=lambda one: one[0],
            make=lambda one: wire.dataset_message(*one),
            size=request.page_size,
            token=request.page_token,
        )
        return pb.ListDatasetsResponse(datasets=found, next_page_token=after)


def shards_of(job: JobView, worker: str) -> Iterator[tuple[str, list[int]]]:
    """Yield every dataset's name with the shards that `worker` owns, where it owns any."""
    for name, _spec in _datasets(job):
        assignment = job.view.record(job.keys.assignment(name), Assignment)
        if assignment is not None and worker in assignment.workers:
            yield name, core.shards_of(assignment)[worker]


def _datasets(job: JobView) -> Iterator[tuple[str, DatasetSpec]]:
    for name in job.view.names(job.keys.datasets):
        spec = job.view.record(job.keys.dataset_spec(name), DatasetSpec)
        if spec is not None:
            yield name, spec


def _dataset(job: JobView, wanted: str) -> tuple[str, DatasetSpec]:
    """Return the dataset of that name; without a name, the job's only one."""
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
