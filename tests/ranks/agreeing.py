"""Two ranks that load through DCP while a checkpoint is committed between their reads of the storage.

    python -m tests.ranks.agreeing <storage> <folder for the ranks to meet in>

1. Step 2 is saved, and its commit marker is hidden. 2. One rank reads the metadata. 3. The marker is put back.
4. The other rank reads the metadata. Each rank reports the step that it loaded and the values it then has.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from strata.integrations.dcp import JsonLoadPlanner, JsonSavePlanner, StrataReader, StrataWriter
from tests.ranks.partitions import world
from tests.ranks.saying import say

warnings.filterwarnings("ignore", module="torch")

LIMIT = timedelta(seconds=60)
_rounds = itertools.count()


def a_state(value: float, *, dimension: int = 0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    return {
        "w": distribute_tensor(torch.full((6, 4), value), mesh, [Shard(dimension)]),
        "same": torch.full((3,), value),
        "note": {"value": value},
    }


@contextmanager
def in_turn(first: int, marker: Path, store: Any) -> Iterator[None]:
    """Let rank `first` read the metadata, then restore the marker, then let the other rank read."""
    rank, name = distributed.get_rank(), f"looked-{next(_rounds)}"
    look = StrataReader.read_metadata

    def read_metadata(reader: StrataReader) -> Any:
        if rank != first:
            store.wait([name], LIMIT)
            return look(reader)
        found = look(reader)
        marker.with_name("hidden").rename(marker)
        store.set(name, "1")
        return found

    with mock.patch.object(StrataReader, "read_metadata", read_metadata):
        yield


def load_while_it_is_committed(storage: str, folder: Path, *, first: int, dimension: int) -> None:
    path, rank = f"{storage}/{first}-{dimension}", distributed.get_rank()
    store = distributed.FileStore(str(folder / f"looks-{first}-{dimension}"), 2)  # type: ignore[attr-defined]  # not in their list
    writer = StrataWriter(path)
    for step in (1, 2):
        state = a_state(step, dimension=dimension if step == 2 else 0)
        dcp_save(state, checkpoint_id=str(step), storage_writer=writer, planner=JsonSavePlanner())
    writer.close()
    (marker,) = Path(path).glob("step-000000000002-*/COMMIT")
    distributed.barrier()
    if rank == 0:
        marker.rename(marker.with_name("hidden"))
    distributed.barrier()
    state, reader = a_state(0), StrataReader(path)
    try:
        with in_turn(first, marker, store):
            dcp_load(state, storage_reader=reader, planner=JsonLoadPlanner())
    except CheckpointException as error:
        say("refused", first=first, dimension=dimension, error=str(error))
        return
    assert reader.checkpoint is not None
    values = {*state["w"].full_tensor().flatten().tolist(), *state["same"].tolist(), state["note"]["value"]}
    say("agreed", first=first, step=reader.checkpoint.step, values=sorted(values))


def main() -> int:
    storage, folder = sys.argv[1], Path(sys.argv[2])

    def loading() -> None:
        for first in (0, 1):
            load_while_it_is_committed(storage, folder, first=first, dimension=0)
        load_while_it_is_committed(storage, folder, first=0, dimension=1)

    world(2, folder, loading)
    return 0


if __name__ == "__main__":
    sys.exit(main())
