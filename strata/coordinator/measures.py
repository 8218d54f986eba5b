"""The metrics of one replica, made with it. The exporter of `/metrics` reads them; no other part depends on them.

If a metric's help text contains "seen", every replica counts the same events, because each sees all of the
keyspace: read the metric of any one replica, never the sum over replicas.
"""

from __future__ import annotations

from strata.observe.metrics import Counter, Family, Histogram, counters, histograms

SAVE_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
ROUND_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0)


class Measures:
    """The metric families of one replica; their descriptions are the HELP texts of `/metrics`."""

    def __init__(self) -> None:
        self.arrivals: Family[Counter] = counters(
            "strata_barrier_arrivals_total",
            "Arrivals of ranks that reached this replica, from members served here or forwarded by a peer.",
            "source",
        )
        self.rounds: Family[Counter] = counters(
            "strata_barrier_rounds_total", "Rounds of barriers seen to end, by result.", "result"
        )
        self.round_seconds: Family[Histogram] = histograms(
            "strata_barrier_round_seconds",
            "From a round's first arrival until its outcome was seen, for rounds that were open here.",
            bounds=ROUND_BOUNDS_S,
        )
        self.etcd_seconds: Family[Histogram] = histograms(
            "strata_etcd_request_seconds", "Requests to etcd, by kind and outcome.", "kind", "outcome"
        )
        self.watch_batches: Family[Counter] = counters(
            "strata_watch_batches_total", "Batches that the watch of the keyspace delivered."
        )
        self.watch_events: Family[Counter] = counters(
            "strata_watch_events_total", "Changed keys that the watch of the keyspace delivered."
        )
        self.watch_starts: Family[Counter] = counters(
            "strata_watch_starts_total",
            "Watches of the keyspace begun; more than one means that one was lost.",
        )
        self.txn_retries: Family[Counter] = counters(
            "strata_txn_retries_total",
            "Decisions tried again: another writer was faster, or etcd's answer was unknown.",
            "cause",
        )
        self.controller_turns: Family[Counter] = counters(
            "strata_controller_turns_total",
            "Turns of the controllers, by controller and outcome.",
            *("controller", "outcome"),
        )
        self.fenced_writes: Family[Counter] = counters(
            "strata_fenced_writes_total", "Transactions that controllers executed under the fence.", "outcome"
        )
        self.leader_changes: Family[Counter] = counters(
            "strata_leader_changes_total", "Leaders seen to begin since this replica started."
        )
        self.generations: Family[Counter] = counters(
            "strata_generations_total", "Generations of all jobs seen to begin."
        )
        self.checkpoints: Family[Counter] = counters(
            "strata_checkpoints_total", "Checkpoints seen to reach a state.", "state"
        )
        self.phase_seconds: Family[Histogram] = histograms(
            "strata_checkpoint_phase_seconds",
            "How long a phase of a save took one rank, as the rank reported to this replica.",
            *("backend", "type", "phase"),
            bounds=SAVE_BOUNDS_S,
        )
        self.phase_bytes: Family[Counter] = counters(
            "strata_checkpoint_phase_bytes_total",
            "Bytes that went through a phase of a save of one rank, as the rank reported to this replica.",
            *("backend", "type", "phase"),
        )
        self.save_seconds: Family[Histogram] = histograms(
            "strata_checkpoint_save_seconds",
            "From a checkpoint's begin until it was committed, for checkpoints seen to do both.",
            *("backend", "type"),
            bounds=SAVE_BOUNDS_S,
        )
        self.commit_seconds: Family[Histogram] = histograms(
            "strata_checkpoint_commit_seconds",
            "From the last rank's ack until the checkpoint was committed, for checkpoints seen to begin here.",
            *("backend", "type"),
            bounds=SAVE_BOUNDS_S,
        )
        self.removals: Family[Counter] = counters(
            "strata_member_removals_total", "Members that this replica removed, by reason.", "reason"
        )
        self.violations: Family[Counter] = counters(
            "strata_invariant_violations_total",
            "Violated invariants found in the keyspace, each counted once. Must stay 0.",
        )
        self.moved: Family[Counter] = counters(
            "strata_sessions_moved_total", "Sessions that this replica sent to another one."
        )

        self.oversized: Family[Counter] = counters(
            "strata_answers_too_large_total",
            "Unary answers not sent for being above the limit; each is a bug.",
        )
        self.unread: Family[Counter] = counters(
            "strata_unread_answers_total",
            "Calls refused, and connections closed, because callers do not read their answers.",
            "outcome",
        )
        self.revoked: Family[Counter] = counters(
            "strata_streams_revoked_total",
            "Open streams ended because their caller would not be admitted any more.",
            "kind",
        )

        for family, values in (
            (self.removals, ("transport_failed", "left")),
            (self.fenced_writes, ("written", "outdated", "fenced_off")),
            (self.unread, ("refused", "closed")),
            (self.revoked, ("sessions", "watches", "links")),
        ):
            for value in values:
                family.child(value)  # present from the start, so that its first event shows as an increase

    def families(self) -> tuple[Family[Counter] | Family[Histogram], ...]:
        """Return all families, in the order of their definition."""
        return tuple(vars(self).values())
