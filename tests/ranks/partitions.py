"""Worlds of several sizes, one after another, that save and load one state in different shards.

    python -m tests.ranks.partitions <storage> <folder for the ranks to meet in>

Ranks are forked from one process that has already imported torch. Each rank reports its action and the digest of the
whole state that it then has.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from strata.client.checkpoints.manager import CheckpointManager
from strata.client.checkpoints.port import SessionPort
from strata.integrations.dcp import JsonLoadPlanner, JsonSavePlanner, StrataReader, StrataWriter
from strata.integrations.dcp.relay import BorrowedPort, Loan, lend
from strata.v1.worlds_pb2 import RestorePoint
from tests.ranks.saying import say
from tests.unit.checkpoint.ports import Cluster

warnings.filterwarnings("ignore", module="torch")


def network(seed: int) -> nn.Sequential:
    """Return a network whose sizes are not divisible by the number of ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 5))


def trained(seed: int, *, steps: int, sharded: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network and its optimizer after that many steps."""
    model = network(seed)
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        model(torch.full((4, 33), step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def digest_of(value: Any) -> str:
    """Return a digest of every bit of a state; its sharded tensors are gathered from all ranks."""
    found = hashlib.sha256()

    def walk(path: str, item: Any) -> None:
        if isinstance(item, dict):
            for key in sorted(item, key=str):
                walk(f"{path}.{key}", item[key])
        elif isinstance(item, torch.Tensor):
            whole = item.full_tensor() if isinstance(item, DTensor) else item
            found.update(path.encode() + whole.detach().contiguous().numpy().tobytes())
        else:
            found.update(f"{path}{item!r}".encode())

    walk("", value)
    return found.hexdigest()


def torch_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state in the form that DCP's users have."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments, "note": {"lr": [0.1, None], "name": "run"}}


def save(storage: str) -> None:
    """Save an FSDP2 training, and a DDP network that is equal on all ranks."""
    writer = StrataWriter(f"{storage}/dcp", keep_count=2)
    state = torch_state(*trained(0, steps=3))
    dcp_save(state, checkpoint_id="3", storage_writer=writer, planner=JsonSavePlanner())
    say("saved", digest=digest_of(state), committed=writer.last.step if writer.last is not None else None)
    ddp = DistributedDataParallel(network(5))
    writer = StrataWriter(f"{storage}/ddp")
    dcp_save({"model": ddp.state_dict()}, checkpoint_id="1", storage_writer=writer)
    writer.close()


def load(storage: str, *, sharded: bool) -> None:
    """Load the checkpoint of `save` into a training with different values."""
    state = torch_state(*trained(1, steps=1, sharded=sharded))
    state["note"] = {"lr": [], "name": ""}
    before = digest_of(state)
    reader = StrataReader(f"{storage}/dcp")
    dcp_load(state, storage_reader=reader, planner=JsonLoadPlanner(), no_dist=not sharded)
    say("loaded", digest=digest_of(state), before=before, note=state["note"])


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer, ddp: nn.Module) -> dict[str, Any]:
    """Return the state in the form that users of a `CheckpointManager` have."""
    return {"fsdp": model, "optim": optimizer, "ddp": ddp, "same": torch.zeros(3)}


def native_digest(state: dict[str, Any]) -> str:
    """Return a digest of the state in `whole_state`."""
    return digest_of(
        {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}
    )


class MeetingPort(BorrowedPort):
    """A rank's port whose barriers use the process group, which the trainer does not use meanwhile."""

    def barrier(
        self,
        name: str,
        payload: bytes | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, bytes]:
        reported: list[Any] = [None] * self.world_size
        distributed.all_gather_object(reported, payload or b"")
        return dict(enumerate(reported))


def native_save(storage: str, loans: list[Loan]) -> None:
    """Save with a coordinated `CheckpointManager`: sharded, replicated, and half-sharded half-replicated tensors."""
    rank = distributed.get_rank()
    model, optimizer = trained(0, steps=3)
    state = whole_state(model, optimizer, DistributedDataParallel(network(5)))
    state["same"] += 7
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "halves"))
    state["halves"] = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Replicate(), Shard(0)])
    with CheckpointManager(f"{storage}/native", client=MeetingPort(loans[rank])) as manager:
        manager.save_state(state, step=3, replicated=["same"])
        manager.wait_until_finished(60)
    say("natively saved", digest=native_digest({k: v for k, v in state.items() if k != "halves"}))


def native_load(storage: str, loans: list[Loan], *, sharded: bool) -> None:
    """Restore that checkpoint into a training that has made no step yet."""
    rank = distributed.get_rank() if sharded else 0
    model, optimizer = trained(1, steps=0, sharded=sharded)
    ddp = DistributedDataParallel(network(6)) if sharded else Wrapped(network(6))
    state = whole_state(model, optimizer, ddp)
    state["halves"] = torch.zeros(4, 3)
    size = distributed.get_world_size() if sharded else 1
    port = BorrowedPort(known(loans[rank], world_size=size))
    with CheckpointManager(f"{storage}/native", client=port) as manager:
        manager.restore(state)
    halves = state.pop("halves")
    say("natively loaded", digest=native_digest(state), halves=halves.flatten().tolist())


def alone_save(storage: str, port: SessionPort) -> None:
    """Save a training that is not sharded."""
    model, optimizer = trained(0, steps=3, sharded=False)
    with CheckpointManager(f"{storage}/alone", client=port) as manager:
        manager.save_state({"fsdp": model, "optim": optimizer}, step=3)
        manager.wait_until_finished(60)
    say("saved alone", digest=native_digest({"fsdp": model, "optim": optimizer}))


def alone_load(storage: str, loans: list[Loan]) -> None:
    """Restore that checkpoint into a sharded training."""
    model, optimizer = trained(1, steps=0)
    size, rank = distributed.get_world_size(), distributed.get_rank()
    port = BorrowedPort(known(loans[rank], rank=rank, world_size=size))
    state = {"fsdp": model, "optim": optimizer}
    with CheckpointManager(f"{storage}/alone", client=port) as manager:
        manager.restore(state)
    say("sharded", digest=native_digest(state))


def in_background(storage: str, meet: Path) -> None:
    """Save in DCP's background thread and process; the process uses this process's session."""
    store = distributed.FileStore(str(meet / "store-background"), 1)  # type: ignore[attr-defined]  # not in their list
    distributed.init_process_group("cpu:gloo", store=store, rank=0, world_size=1)
    cluster = Cluster(n1=1)
    writer = StrataWriter(f"{storage}/background", client=cluster.port(0))
    for step, kind in enumerate((AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS), 1):
        state = {"w": torch.full((100,), float(step)), "step": step}
        future: Any = async_save(
            state,
            checkpoint_id=str(step),
            storage_writer=writer,
            planner=JsonSavePlanner(),
            async_checkpointer_type=kind,
        )
        future.result()
        reader = StrataReader(f"{storage}/background", client=cluster.port(0), step=step)
        found = {"w": torch.zeros(100), "step": 0}
        dcp_load(found, storage_reader=reader, planner=JsonLoadPlanner())
        say("in background", kind=kind.name, same=digest_of(found) == digest_of(state))
    writer.close()
    distributed.destroy_process_group()


class Wrapped(nn.Module):
    """A module that holds a network under the same name as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def world(size: int, folder: Path, work: Callable[[], None]) -> None:
    """Fork `size` ranks that meet in a process group, and wait until all have ended."""
    store = folder / f"store-{size}-{work.__name__}"
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ["RANK"] = str(rank)
                os.environ["WORLD_SIZE"] = str(size)
                torch.set_num_threads(1)
                distributed.init_process_group(
                    "gloo", init_method=f"file://{store}", rank=rank, world_size=size
                )
                work()
                distributed.destroy_process_group()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    say("world", size=size, codes=codes)


def known(loan: Loan, **other: object) -> Loan:
    """Return a loan whose session has these values instead of its rank, world size or restore point."""
    return replace(loan, known={**loan.known, **other})


def loans_of(cluster: Cluster, count: int, *, rank: int | None = None) -> list[Loan]:
    """Lend the sessions of all ranks, or one rank's session `count` times, to the next forked processes."""
    return [lend(cluster.port(each if rank is None else rank)) for each in range(count)]


def point_of(cluster: Cluster) -> RestorePoint:
    """Return the restore point of the next world."""
    point = cluster.restore_point()
    assert point is not None, "committed"
    return point


def main() -> int:
    storage, folder = sys.argv[1], Path(sys.argv[2])
    cluster = Cluster(n1=4)
    one = Cluster(n1=1)
    alone_save(storage, one.port(0))
    loans = loans_of(cluster, 4)
    alone: list[Loan] = []

    def saving() -> None:
        save(storage)
        native_save(storage, loans)

    def loading() -> None:
        load(storage, sharded=True)
        native_load(storage, loans, sharded=True)
        alone_load(storage, alone)

    world(4, folder, saving)
    loans = [known(loan, restore_point=point_of(cluster)) for loan in loans_of(cluster, 2)]
    alone = [known(loan, restore_point=point_of(one)) for loan in loans_of(one, 2, rank=0)]
    world(2, folder, loading)
    load(storage, sharded=False)
    native_load(storage, [known(loans_of(cluster, 1)[0], restore_point=point_of(cluster))], sharded=False)
    in_background(storage, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
