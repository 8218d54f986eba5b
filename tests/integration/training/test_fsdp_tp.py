"""examples/fsdp_tp on real processes: FSDP2 and tensor parallelism in meshes (dp, tp) of 2x2, 1x2 and 2x1 ranks."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import ROOT, Nodes
from tests.integration.training.test_ddp_bits import STARTED_S, wait_saved
from tests.integration.training.test_virtual_ranks import all_begun
from tests.processes import Event, Record, Talker

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

SAMPLES, EPOCHS = 202, 4  # the killed worlds train less than one of them
STEPS_OF_EPOCH = 13  # of 16 samples; the last step of an epoch has 10
SAVE_EVERY = 3  # so each checkpoint before the last step is in the middle of an epoch


def test_a_mesh_of_4_ranks_resumes_after_a_kill_and_goes_on_as_2_ranks(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    four = train(cluster, nodes, tmp_path / "disturbed", dp=2, tp=2)
    first = wait_begun(record, 1, dp=2, tp=2)
    wait_step_after_save(cluster, nodes, record, first)
    os.kill(first[2]["pid"], signal.SIGKILL)
    again = wait_begun(record, 2, dp=2, tp=2)
    wait_step_after_save(cluster, nodes, record, again)
    four.child.kill()
    four.join()
    one_replica = train(cluster, nodes, tmp_path / "disturbed", dp=1, tp=2)
    on_two = wait_begun(record, 3, dp=1, tp=2)
    wait_step_after_save(cluster, nodes, record, on_two)
    one_replica.child.kill()
    one_replica.join()
    no_tp = train(cluster, nodes, tmp_path / "disturbed", dp=2, tp=1)
    last = wait_begun(record, 4, dp=2, tp=1)
    assert no_tp.join(STARTED_S) == 0

    nodes.job = f"{nodes.job}-undisturbed"
    node = train(cluster, nodes, tmp_path / "undisturbed", dp=2, tp=2)
    assert node.join(STARTED_S) == 0
    undisturbed = {step: event for (_, step), event in steps_of(record, node.name).items()}
    assert sorted(undisturbed) == list(range(1, EPOCHS * STEPS_OF_EPOCH + 1))
    for epoch in range(EPOCHS):
        samples = [n for e in undisturbed.values() if e["epoch"] == epoch for n in e["samples"]]
        assert sorted(samples) == list(range(SAMPLES)), "each sample of an epoch is in one step"

    disturbed: dict[tuple[int, int], Event] = {}
    for source in (four, one_replica, no_tp):
        disturbed |= steps_of(record, source.name)
    assert {step for _, step in disturbed} == set(undisturbed)
    for (generation, step), event in disturbed.items():
        expected = undisturbed[step]
        assert event["samples"] == expected["samples"], f"step {step} of generation {generation}"
        assert event["loss"] == pytest.approx(expected["loss"], rel=0.01)
        if event["world"] == 4:
            assert event["digest"] == expected["digest"], f"step {step} of generation {generation}"
    for before, after in ((first, again), (again, on_two), (on_two, last)):
        restored = after[0]["step"]
        assert restored % SAVE_EVERY == 0
        assert restored % STEPS_OF_EPOCH, "in the middle of an epoch"
        saved = disturbed[before[0]["generation"], restored]
        assert after[0]["digest"] == saved["digest"], "parameters and moments, bit by bit"
    assert disturbed[last[0]["generation"], max(undisturbed)]["loss"] < disturbed[1, 1]["loss"] - 0.5


def train(cluster: LocalCluster, nodes: Nodes, storage: Path, *, dp: int, tp: int) -> Talker:
    return nodes.run_script(
        cluster.endpoints,
        ROOT / "examples" / "fsdp_tp" / "train.py",
        *("--tp", str(tp), "--epochs", str(EPOCHS), "--samples", str(SAMPLES), "--storage", str(storage)),
        node=f"{storage.name}-{dp}x{tp}",
        options=("--max-workers", "1", "--slots", str(dp * tp)),
        env={"STRATA_TRAIN_SAVE_EVERY_STEPS": str(SAVE_EVERY)},
    )


def wait_begun(record: Record, number: int, *, dp: int, tp: int) -> list[Event]:
    """Return the ranks' first events of the `number`-th generation of this test, by rank, once all have begun."""
    found = record.until(
        f"{dp}x{tp} ranks", partial(all_begun, number=number, ranks=dp * tp), limit_s=STARTED_S
    )
    found = sorted(found, key=lambda e: int(e["rank"]))
    assert [(e["dp"], e["tp"]) for e in found] == [(i, j) for i in range(dp) for j in range(tp)]
    assert len({(e["world"], e["step"], e["digest"]) for e in found}) == 1
    return found


def wait_step_after_save(cluster: LocalCluster, nodes: Nodes, record: Record, begun: list[Event]) -> None:
    """Wait until a generation has saved a step of its own, and completed a step after this one."""
    generation, step = begun[0]["generation"], begun[0]["step"] + SAVE_EVERY
    wait_saved(cluster, nodes.job, step)
    record.until(
        "a step more",
        lambda events: any(
            e["event"] == "step" and e["generation"] == generation and e["step"] > step for e in events
        ),
    )


def steps_of(record: Record, source: str) -> dict[tuple[int, int], Event]:
    """Return a node's steps by generation and step, each with all its samples in order and their mean loss.

    Assert that tensor-parallel peers had the same samples, and all ranks the same parameters.
    """
    worlds = {e["generation"]: e["world"] for e in record.of("begun", source=source)}
    ranks: dict[tuple[int, int], list[Event]] = {}
    for event in record.of("step", source=source):
        ranks.setdefault((event["generation"], event["step"]), []).append(event)
    found = {}
    for (generation, step), events in ranks.items():
        if len(events) < worlds[generation]:
            continue  # a killed generation's last step
        places = {e["dp"]: e for e in events}
        assert all(e["samples"] == places[e["dp"]]["samples"] for e in events), f"peers differ in step {step}"
        assert len({e["digest"] for e in events}) == 1
        in_order = [places[dp] for dp in sorted(places)]
        samples = [number for e in in_order for number in e["samples"]]
        loss = sum(e["loss"] * len(e["samples"]) for e in in_order) / len(samples)
        found[generation, step] = {**events[0], "world": worlds[generation], "samples": samples, "loss": loss}
    return found
