"""docs/security.md has the same table of roles and the same limits as the code."""

from __future__ import annotations

import re
from pathlib import Path

from strata.config import CoordinatorConfig
from strata.config.loading import settings
from strata.coordinator.calls.pages import ANSWER_BYTES
from strata.coordinator.calls.watches import QUEUE_EVENTS
from strata.core.access.authority import RULES, Role
from strata.core.access.rate_limits import MOST_OPEN, RATE
from strata.core.access.unsent_answers import DebtLimits
from strata.session.link import MAX_MESSAGE_BYTES
from strata.session.served import Limits
from strata.wire.streams import OUTBOX_LIMIT, SERVED_BYTES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text()
COLUMNS = (Role.COORDINATOR, Role.MEMBER, Role.OPERATOR, Role.VIEWER)


def cell(method: str, role: Role) -> str:
    rule = RULES[method]
    if role not in rule.roles:
        return "no"
    return "own" if role is Role.MEMBER and rule.own_worker else "yes"


def test_the_table_of_roles_matches_the_code() -> None:
    rows = re.findall(r"^\| `(\w+\.\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert {name: cells.split(" | ") for name, cells in rows} == {
        method: [cell(method, role) for role in COLUMNS] for method in RULES
    }


def test_the_limits_match_the_code() -> None:
    assert f"{MAX_MESSAGE_BYTES >> 20} MiB; the answer to a unary call {ANSWER_BYTES >> 10} KiB" in PAGE
    debts = DebtLimits()
    assert f"{debts.each_bytes >> 20} MiB; then `RESOURCE_EXHAUSTED`" in PAGE
    assert f"{debts.longest_s:.0f} s; {debts.all_bytes >> 20} MiB. A connection above the age" in PAGE
    review_s = next(each.default for each in settings(CoordinatorConfig) if each.toml == "auth.review_s")
    assert f"up to {review_s:.0f} s (`auth.review_s`)" in PAGE
    assert f"{RATE.per_s:.0f} a second, bursts of {RATE.burst:,.0f}" in PAGE
    assert f"| sessions of one identity at a replica | {MOST_OPEN['sessions']} |" in PAGE
    assert f"| watches of one identity at a replica | {MOST_OPEN['watches']} |" in PAGE
    assert f"| calls under way on one session | {Limits().calls} |" in PAGE
    assert f"{OUTBOX_LIMIT:,} messages, {SERVED_BYTES >> 20} MiB; then that stream ends" in PAGE
    assert f"| unread events of a watch | {QUEUE_EVENTS:,}; then" in PAGE
