"""An agent that starts when its job is done: late in the same run, or in another run."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest

from strata.errors import JobDone, Refused, StrataError
from tests.unit.integrations.torchrun.test_settings import settings

pytest.importorskip("torch")


class _Refusing:
    """A background loop that refuses every call with `error`."""

    def __init__(self, error: StrataError) -> None:
        self._error = error

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        coroutine.close()
        raise self._error


@pytest.mark.parametrize(
    ("env", "error", "graceful"),
    [
        ({"SLURM_JOB_ID": "4711"}, JobDone("job gpt is done"), True),
        ({}, JobDone("job gpt is done"), False),
        ({"SLURM_JOB_ID": "4712"}, Refused("job gpt finished at 14:02 UTC"), False),
    ],
    ids=["late in the same run", "nobody knows the run", "another run"],
)
def test_a_late_agent_exits_gracefully_only_if_the_scheduler_knows_its_run(
    env: dict[str, str], error: StrataError, graceful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.rendezvous import (  # noqa: PLC0415
        RendezvousClosedError,
        RendezvousGracefulExitError,
    )

    from strata.integrations.torchrun.handler import StrataRendezvous  # noqa: PLC0415

    handler = StrataRendezvous(settings(env=env))
    monkeypatch.setattr(handler, "_loop", _Refusing(error))
    with pytest.raises(RendezvousGracefulExitError if graceful else RendezvousClosedError) as raised:
        handler._join(None)
    assert "gpt" in str(raised.value)
    if not graceful:
        assert "--rdzv-conf=attempt=N" in str(raised.value)
