"""Use of the library after a fork. Real forks are in tests/integration/client/test_fork.py."""

from __future__ import annotations

import os

import pytest

from strata import errors
from strata.session import fork
from strata.session.fork import check_import_order


@pytest.mark.parametrize(("value", "fine"), [("0", True), ("false", True), ("1", False), (None, False)])
def test_grpcs_fork_handlers_must_be_off(
    value: str | None, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    if value is not None:
        monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", value)
    if fine:
        check_import_order()
    else:
        with pytest.raises(errors.ConfigError) as refusal:
            check_import_order()
        assert refusal.value.hint


def test_a_child_of_a_process_without_a_session_may_use_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "_user", None)
    monkeypatch.setattr(fork, "_forked_from", None)
    fork._after_in_child()
    fork.refuse_in_child()
    monkeypatch.setattr(fork, "_user", os.getpid())
    fork._after_in_child()
    with pytest.raises(errors.ConfigError, match="was forked from"):
        fork.refuse_in_child()
