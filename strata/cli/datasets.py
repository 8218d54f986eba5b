"""`strata datasets`: a job's datasets, and the assignment of shards to members."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.console.completion import complete_datasets
from strata.cli.console.credentials import connecting
from strata.cli.console.output import (
    DEFAULT_ENDPOINTS,
    DEFAULT_TIMEOUT_S,
    Endpoints,
    Job,
    Json,
    TimeoutS,
    print_json,
    print_table,
    ranks,
)
from strata.config import Credentials

if TYPE_CHECKING:
    from strata.client import CoordinatorClient


@connecting
def datasets(
    dataset: Annotated[
        str,
        typer.Argument(
            help="One dataset, with the shards of each worker. (all)", autocompletion=complete_datasets
        ),
    ] = "",
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    job: Job = "default",
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Show a job's datasets and how far its training has used them, or the shards of each worker in one dataset.

    Example: strata datasets --job gpt pile
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it

    with CoordinatorClient.connect(
        endpoints, job=job, timeout_s=timeout_s, credentials=credentials
    ) as client:
        if dataset:
            _show_one(client, dataset, as_json=as_json)
        else:
            _show_all(client, as_json=as_json)


def _show_all(client: CoordinatorClient, *, as_json: bool) -> None:
    from strata.v1.datasets_pb2 import ListDatasetsRequest  # noqa: PLC0415  # see above

    answer = client.call_whole(ListDatasetsRequest(job=client.job))
    if not answer.datasets:
        client.job_status()  # raises NotFound if the job does not exist
    if as_json:
        print_json(answer)
        return
    if answer.cursors:
        step = answer.cursors[0].step
        print_table(
            f"job {client.job}: samples used, as of the checkpoint of step {step}",
            ("DATASET", "EPOCH", "SAMPLES", "OF", "ORDER", "SEED"),
            (
                (
                    each.dataset,
                    each.epoch,
                    each.samples,
                    each.length or "-",
                    each.order or "-",
                    each.seed if each.HasField("seed") else "-",
                )
                for each in answer.cursors
            ),
            empty="",
        )
    if answer.datasets or not answer.cursors:
        print_table(
            f"job {client.job}: datasets whose shards members own",
            ("DATASET", "SHARDS", "URI"),
            ((each.name, each.shards, each.uri or "-") for each in answer.datasets),
            empty=f"job {client.job} has no dataset yet: register one with strata.DatasetRegistry",
        )


def _show_one(client: CoordinatorClient, dataset: str, *, as_json: bool) -> None:
    from strata.v1.datasets_pb2 import GetAssignmentRequest  # noqa: PLC0415  # see above

    answer = client.call_whole(GetAssignmentRequest(job=client.job, dataset=dataset))
    if as_json:
        print_json(answer)
        return
    print_table(
        f"dataset {dataset}: {answer.dataset.shards} shards, assignment {answer.assign_epoch} of"
        f" generation {answer.generation or 'none'}, {answer.ring or 'no ring yet'}",
        ("WORKER", "COUNT", "SHARDS"),
        (
            (worker, len(answer.owners[worker].index), ranks(answer.owners[worker].index))
            for worker in answer.workers
        ),
        empty=f"dataset {dataset} has no assignment yet: the job has no world",
    )
