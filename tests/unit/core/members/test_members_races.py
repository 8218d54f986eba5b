"""Registrations, hand-overs, deaths and departures under one worker name, interleaved at every transaction."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from strata.core.ids import BootId, InstanceId, WorkerId
from strata.core.kv.records import Worker, decode
from strata.core.kv.txn import Decision, Delete, Put
from strata.core.members.membership import decide_leave, decide_register, decide_remove
from strata.errors import StrataError
from tests.not_none import not_none
from tests.unit.core.rig import JOB, Observer, Store, registration

W1 = WorkerId("w1")
BOOTS = ("a", "b", "c")
REPLICAS = (InstanceId("i-r1"), InstanceId("i-r2"))


@dataclass
class Replica:
    """A replica with a lagging view, which serves any process."""

    observer: Observer
    instance: InstanceId


SEEDS = 400


def steps(seed: int) -> Iterator[tuple[str, int, str, int]]:
    """Yield an action, the index of its replica, a process, and that replica's lag in revisions."""
    rng = random.Random(seed)
    actions = ["register", "register", "supersede", "leave", "remove", "look"]
    for _ in range(60):
        yield rng.choice(actions), rng.randrange(len(REPLICAS)), rng.choice(BOOTS), rng.choice([0, 0, 1, 3])


def test_a_name_belongs_to_one_process_at_a_time() -> None:
    written = [run(seed) for seed in range(SEEDS)]
    # the test is meaningful only if many registrations succeed
    assert sum(len(owners) for owners in written) > 5 * SEEDS


def run(seed: int) -> dict[int, str]:
    """Play one race; return the process of each incarnation."""
    store = Store()
    replicas = [Replica(Observer(store), instance) for instance in REPLICAS]
    born: dict[str, int] = {}  # by boot: the incarnation that the process believes to have
    failed: set[int] = set()  # incarnations whose transport failed, known to their replica
    owner: dict[int, str] = {}  # by incarnation: its boot

    for action, index, boot, lag in steps(seed):
        replica = replicas[index]
        replica.observer.catch_up(max(replica.observer.view.revision, store.revision - lag))
        held = replica.observer.job.worker("w1")
        decision: Decision | None = None
        allowed: set[int] = set()  # incarnations that the action may end
        if action in {"register", "supersede"}:
            broken = held.create_revision if held is not None and action == "supersede" else 0
            if broken:
                failed.add(broken)
            new = registration("w1", boot=boot, incarnation=born.get(boot, 0))
            decision = decide_register(
                replica.observer.job,
                new,
                served_by=replica.instance,
                failed_incarnation=broken if broken in failed else 0,
            )
            allowed = {broken}
        elif action == "leave" and boot in born:
            decision = decide_leave(replica.observer.job, W1, born[boot])
            allowed = {born[boot]}
        elif action == "remove" and held is not None:
            decision = decide_remove(replica.observer.job, W1, mod_revision=held.mod_revision, reason="gone")
            allowed = {held.create_revision}
        if decision is None or decision.txn is None:
            if decision is not None and decision.refusal is not None:
                assert isinstance(decision.refusal, StrataError)
            continue
        before = store.live.worker("w1")
        if not store.execute(decision.txn).succeeded:
            continue
        after = store.live.worker("w1")
        for operation in decision.txn.success:
            if isinstance(operation, Delete):
                assert before is not None
                assert after is None
                assert before.create_revision in allowed, "somebody else was removed"
            elif isinstance(operation, Put) and operation.key == JOB.worker("w1"):
                assert after is not None
                written = decode(Worker, operation.value)
                assert written.boot == boot
                incarnation = after.create_revision
                assert owner.setdefault(incarnation, boot) == boot, "an incarnation changed hands"
                if before is not None:
                    assert before.record.boot == BootId(boot), "a process was overwritten"
                born[boot] = incarnation
    return owner


def test_a_hand_over_races_a_removal_and_only_one_happens(store: Store) -> None:
    new = registration("w1", boot="a")
    store.settle(lambda job: decide_register(job, new, served_by=REPLICAS[0]))
    held = not_none(store.live.worker("w1"))
    view = store.live
    removal = decide_remove(view, W1, mod_revision=held.mod_revision, reason="silent")
    hand_over = decide_register(view, new, served_by=REPLICAS[1])
    assert removal.txn is not None
    assert hand_over.txn is not None
    assert store.execute(hand_over.txn).succeeded
    assert not store.execute(removal.txn).succeeded

    store = Store()
    store.settle(lambda job: decide_register(job, new, served_by=REPLICAS[0]))
    assert store.execute(removal.txn).succeeded, "the same revisions in a fresh store"
    assert not store.execute(hand_over.txn).succeeded
    store.settle(lambda job: decide_register(job, new, served_by=REPLICAS[1]))
    assert not_none(store.live.worker("w1")).create_revision > held.create_revision
