"""A torchrun agent that a program creates itself, with a role that only its specification names."""

from __future__ import annotations

import argparse
import os

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters

from strata.integrations.torchrun.handler import StrataRendezvous
from tests.ranks.saying import say

NAMES = ("RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_NAME")


def work() -> None:
    """Report this worker's place in the world."""
    say("place", **{name.lower(): os.environ[name] for name in NAMES})


def main() -> None:
    """Run the workers of one role."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoints", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--role", required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--agents", type=int, required=True)
    options = parser.parse_args()
    handler = StrataRendezvous.create(
        RendezvousParameters(
            backend="strata",
            endpoint=options.endpoints,
            run_id=options.job,
            min_nodes=options.agents,
            max_nodes=options.agents,
        )
    )
    spec = WorkerSpec(
        role=options.role,
        local_world_size=options.workers,
        entrypoint=work,
        args=(),
        rdzv_handler=handler,
        max_restarts=3,
        monitor_interval=0.1,
    )
    LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(), start_method="spawn").run()


if __name__ == "__main__":
    main()
