"""A load through DCP against real coordinators: a leased key protects the checkpoint until the load is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import strata
from strata.client import CoordinatorClient
from strata.client.rank.rank_client import RankClient
from strata.devcluster.local_cluster import LocalCluster
from strata.integrations.dcp import JsonLoadPlanner, JsonSavePlanner, StrataReader, StrataWriter
from strata.v1 import checkpoints_pb2 as pb

LIMIT_S = 30.0
COMMITTED = pb.CHECKPOINT_STATE_COMMITTED

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def trainer(cluster: LocalCluster, job: str) -> Iterator[RankClient]:
    client = strata.connect(cluster.endpoints, job=job, worker_id="w0", timeout_s=LIMIT_S)
    yield client
    client.close()


@pytest.fixture
def commands(cluster: LocalCluster, job: str) -> Iterator[CoordinatorClient]:
    with CoordinatorClient.connect(cluster.endpoints, job=job) as client:
        yield client


def until(client: CoordinatorClient, accept: Callable[[dict[int, pb.Checkpoint]], bool]) -> None:
    """Return once `accept` holds for the catalog's checkpoints by step."""
    client.call_until(
        pb.ListCheckpointsRequest(job=client.job),
        lambda answer: accept({c.step: c for c in answer.checkpoints}),
    )


@pytest.mark.slow
def test_retention_waits_until_a_load_is_done(
    trainer: RankClient, commands: CoordinatorClient, tmp_path: Path
) -> None:
    def save(step: int, **settings: Any) -> None:
        writer = StrataWriter(tmp_path, client=trainer, **settings)
        state = {"w": torch.full((3, 5), float(step))}
        dcp_save(state, checkpoint_id=str(step), storage_writer=writer, planner=JsonSavePlanner())
        writer.close()

    class Slow(StrataReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            save(3, keep_count=1)
            until(commands, lambda found: found[3].state == COMMITTED and not is_kept(found, 2))
            until(commands, lambda found: is_kept(found, 1) and len(found[1].readers) == 1)
            return super().read_data(plan, planner)

    def is_kept(found: dict[int, pb.Checkpoint], step: int) -> bool:
        return step in found and found[step].state == COMMITTED

    for step in (1, 2):
        save(step)
    here = {"w": torch.zeros(3, 5)}
    reader = Slow(tmp_path, step=1, client=trainer)
    dcp_load(here, storage_reader=reader, planner=JsonLoadPlanner())
    assert torch.equal(here["w"], torch.ones(3, 5))
    until(commands, lambda found: 3 in found and not is_kept(found, 1))
