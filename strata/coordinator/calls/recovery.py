"""The call that returns to a restarting worker its world, its ranks' parts of the checkpoint, and its shards."""

from __future__ import annotations

from collections.abc import Iterator

from strata.checkpoint.format.manifest import rank_manifest_name
from strata.coordinator.calls.datasets import assignments, pieces
from strata.coordinator.calls.pages import fill, of_state
from strata.coordinator.calls.table import Row
from strata.coordinator.context import ReplicaContext, existing_job
from strata.core.access.authority import Identity
from strata.core.datasets.assignment import shards_of
from strata.core.ids import checked_id
from strata.core.worlds.restore_point import ranks_of, recovery_point
from strata.v1 import recovery_pb2 as pb
from strata.wire import checkpoints as checkpoint_wire
from strata.wire import worlds as wire


class RecoveryCalls:
    """Answers the methods of `Recovery`."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context

    def rows(self) -> Iterator[Row]:
        yield Row(method="Recovery.GetRecovery", answer=self.get_recovery)

    async def get_recovery(
        self, request: pb.RecoveryRequest, _identity: Identity | None
    ) -> pb.RecoveryResponse:
        """Return an empty answer if the job has no world yet."""
        checked_id("worker", request.worker_id)
        job = await existing_job(self._context, request.job)
        response = pb.RecoveryResponse()
        world, assigned = job.world(), dict(assignments(job))
        what = f"the recovery of {request.worker_id}"
        prefix = of_state(what, request.page_token, job.head(), *assigned.values())
        if world is None:
            return response
        point = recovery_point(job, request.worker_id)
        if not request.page_token:
            response.world.CopyFrom(wire.world_message(job, world.head))
            response.ranks.extend(ranks_of(world, request.worker_id))
            if world.head.restore is not None:
                response.step = world.head.restore.step
            if point is not None:
                response.epoch = point.entry.record.epoch
                response.checkpoint.CopyFrom(checkpoint_wire.checkpoint_message(job, point.entry))
        path = "" if point is None else point.entry.record.path
        items: list[tuple[str, pb.RankRecovery | pb.DatasetShards]] = [
            (
                f"{prefix}0/{rank:010d}",
                pb.RankRecovery(
                    rank=rank,
                    manifest=f"{path}/{rank_manifest_name(rank)}" if digest else "",
                    manifest_digest=digest,
                ),
            )
            for rank, digest in ({} if point is None else point.parts).items()
        ]
        items += [
            (f"{prefix}1/{name}/{number:06d}", pb.DatasetShards(dataset=name, shards=piece))
            for name, entry in assigned.items()
            if request.worker_id in entry.record.workers
            for number, piece in enumerate(pieces(shards_of(entry.record)[request.worker_id]))
        ]

        def alone(one: tuple[str, pb.RankRecovery | pb.DatasetShards]) -> pb.RecoveryResponse:
            if isinstance(one[1], pb.RankRecovery):
                return pb.RecoveryResponse(rank_recoveries=[one[1]])
            return pb.RecoveryResponse(shards=[one[1]])

        fill(response, items, key=lambda one: one[0], part=alone, request=request)
        return response
