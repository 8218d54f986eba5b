"""Enumerations, converted in both directions. UNSPECIFIED and the numbers of newer versions have no core value."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, TypeVar

from strata.core.checkpoints.maintenance import MaintenanceKind
from strata.core.kv.records import (
    BarrierResult,
    CheckpointState,
    CheckpointType,
    Phase,
    StopAction,
    TierState,
)
from strata.errors import InvalidArgument
from strata.v1 import barriers_pb2, checkpoints_pb2, worlds_pb2

E = TypeVar("E", bound=Enum)
V = TypeVar("V", bound=int)

PHASES: Final = {
    Phase.RUNNING: worlds_pb2.JOB_PHASE_RUNNING,
    Phase.PAUSED: worlds_pb2.JOB_PHASE_PAUSED,
    Phase.DONE: worlds_pb2.JOB_PHASE_DONE,
    Phase.FAILED: worlds_pb2.JOB_PHASE_FAILED,
}

STOP_ACTIONS: Final = {
    StopAction.PREEMPT: worlds_pb2.STOP_ACTION_PREEMPT,
    StopAction.PAUSE: worlds_pb2.STOP_ACTION_PAUSE,
    StopAction.DRAIN: worlds_pb2.STOP_ACTION_DRAIN,
    StopAction.SCALE: worlds_pb2.STOP_ACTION_SCALE,
}

RESULTS: Final = {
    BarrierResult.RELEASED: barriers_pb2.BARRIER_RESULT_RELEASED,
    BarrierResult.TIMED_OUT: barriers_pb2.BARRIER_RESULT_TIMED_OUT,
    BarrierResult.BROKEN: barriers_pb2.BARRIER_RESULT_BROKEN,
}

CHECKPOINT_TYPES: Final = {
    CheckpointType.FULL: checkpoints_pb2.CHECKPOINT_TYPE_FULL,
    CheckpointType.INCREMENTAL: checkpoints_pb2.CHECKPOINT_TYPE_INCREMENTAL,
    CheckpointType.OPTIMIZER_ONLY: checkpoints_pb2.CHECKPOINT_TYPE_OPTIMIZER_ONLY,
    CheckpointType.MODEL_ONLY: checkpoints_pb2.CHECKPOINT_TYPE_MODEL_ONLY,
}

TIER_STATES: Final = {
    TierState.PRESENT: checkpoints_pb2.TIER_STATE_PRESENT,
    TierState.CORRUPT: checkpoints_pb2.TIER_STATE_CORRUPT,
    TierState.DELETING: checkpoints_pb2.TIER_STATE_DELETING,
    TierState.REMOVED: checkpoints_pb2.TIER_STATE_REMOVED,
}

TASKS: Final = {
    MaintenanceKind.REMOVE: checkpoints_pb2.MAINTENANCE_KIND_REMOVE,
    MaintenanceKind.CLEAR: checkpoints_pb2.MAINTENANCE_KIND_CLEAR,
    MaintenanceKind.VERIFY: checkpoints_pb2.MAINTENANCE_KIND_VERIFY,
}

CHECKPOINT_STATES: Final = {
    CheckpointState.OPEN: checkpoints_pb2.CHECKPOINT_STATE_OPEN,
    CheckpointState.COMMITTED: checkpoints_pb2.CHECKPOINT_STATE_COMMITTED,
    CheckpointState.ABORTED: checkpoints_pb2.CHECKPOINT_STATE_ABORTED,
    CheckpointState.CORRUPT: checkpoints_pb2.CHECKPOINT_STATE_CORRUPT,
    CheckpointState.PREPARED: checkpoints_pb2.CHECKPOINT_STATE_PREPARED,
    CheckpointState.DELETING: checkpoints_pb2.CHECKPOINT_STATE_DELETING,
}


def from_wire(table: Mapping[E, V], number: int) -> E:
    """Return the value for `number`; `InvalidArgument` if it is unknown."""
    for value, wire in table.items():
        if wire == number:
            return value
    kind = type(next(iter(table))).__name__
    raise InvalidArgument(f"{number} is not a {kind}", hint="is the other side a newer version?")
