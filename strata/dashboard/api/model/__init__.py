"""The resources of the HTTP API, as data; `openapi.json` is generated from these classes.

`GET` of a resource's path returns the resource. Later versions add fields, and remove none. Times of day are in
milliseconds since 1970; ages and durations name their unit. A value that was not reported yet is None.
"""

from __future__ import annotations

from strata.dashboard.api.model.barriers import Barriers, Bucket, EndedBarrier, MissingRank, OpenBarrier
from strata.dashboard.api.model.cluster import Cluster, EtcdMember, Replica
from strata.dashboard.api.model.jobs import (
    Event,
    Events,
    Finding,
    Generation,
    Generations,
    Goodput,
    GoodputPart,
    Job,
    Jobs,
    JobSummary,
    Notice,
    Progress,
)
from strata.dashboard.api.model.ranks import (
    Device,
    Devices,
    Heatmap,
    History,
    Rank,
    RankLog,
    Ranks,
    Series,
    Worker,
)
from strata.dashboard.api.model.requests import Change, CheckpointAction, Me, Problem
from strata.dashboard.api.model.saves import Checkpoint, Checkpoints, Copy, Cursor, Dataset, Datasets

__all__ = [
    "Barriers",
    "Bucket",
    "Change",
    "Checkpoint",
    "CheckpointAction",
    "Checkpoints",
    "Cluster",
    "Copy",
    "Cursor",
    "Dataset",
    "Datasets",
    "Device",
    "Devices",
    "EndedBarrier",
    "EtcdMember",
    "Event",
    "Events",
    "Finding",
    "Generation",
    "Generations",
    "Goodput",
    "GoodputPart",
    "Heatmap",
    "History",
    "Job",
    "JobSummary",
    "Jobs",
    "Me",
    "MissingRank",
    "Notice",
    "OpenBarrier",
    "Problem",
    "Progress",
    "Rank",
    "RankLog",
    "Ranks",
    "Replica",
    "Series",
    "Worker",
]
