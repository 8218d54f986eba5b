"""The settings of an agent under torchrun, and settings that the agent refuses before it connects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from strata.config import Credentials, TrainingConfig
from strata.errors import ConfigError, StrataError
from strata.integrations.torchrun.launcher import Launch, Workers
from strata.integrations.torchrun.settings import NO_BREAKER, AgentSettings, of_agent, read_settings

LAUNCH = Launch(slots=8, max_restarts=3, role="default")


def settings(
    *,
    run_id: str = "gpt",
    endpoint: str = "127.0.0.1:1,127.0.0.2:2",
    conf: Mapping[str, Any] | None = None,
    launch: Launch | None = LAUNCH,
    env: Mapping[str, str] | None = None,
    host: str = "node-7",
    training: TrainingConfig | None = None,
) -> AgentSettings:
    return read_settings(
        run_id=run_id,
        endpoint=endpoint,
        min_nodes=2,
        max_nodes=3,
        local_addr=None,
        conf={"timeout": 900, **(conf or {})},
        launch=launch,
        env=env or {},
        host=host,
        pid=42,
        credentials=Credentials(),
        training=training or TrainingConfig(),
    )


@pytest.mark.parametrize(
    ("env", "conf", "who", "grace_s"),
    [
        ({}, {}, "member", 40.0),
        ({"STRATA_RUN_PREEMPT": "job", "STRATA_RUN_PREEMPT_GRACE_S": "50"}, {}, "job", 50.0),
        ({"STRATA_RUN_PREEMPT": "job"}, {"preempt": "member", "preempt_grace_s": "60"}, "member", 60.0),
    ],
)
def test_preempt_settings_take_the_same_precedence_as_in_strata_run(
    env: dict[str, str], conf: dict[str, str], who: str, grace_s: float
) -> None:
    """The training's setting, from STRATA_TRAIN_PREEMPT or strata.toml, counts unless the agent's own override it."""
    found = settings(env=env, conf=conf, training=TrainingConfig(preempt="member", preempt_grace_s=40.0))
    assert (found.preempt, found.preempt_grace_s) == (who, grace_s)


@pytest.mark.parametrize(
    "conf",
    [{"preempt": "nobody"}, {"preempt_grace_s": "0"}, {"preempt_grace_s": "soon"}, {"preempt_grace_s": 1e6}],
)
def test_invalid_preempt_settings_are_refused(conf: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="preempt"):
        settings(conf=conf)


def test_torchrun_s_own_options_are_enough() -> None:
    found = settings()
    assert [str(endpoint) for endpoint in found.endpoints] == ["127.0.0.1:1", "127.0.0.2:2"]
    assert (found.run_id, found.worker_id, found.slots) == ("gpt", "node-7-42", 8)
    assert (found.min_nodes, found.max_nodes) == (2, 3)
    assert (found.settle_s, found.join_timeout_s, found.attempt) == (2.0, 600.0, 0)
    assert found.max_no_progress_generations == NO_BREAKER


def test_every_option_of_rdzv_conf_is_applied() -> None:
    conf = {
        "worker_id": "w",
        "settle_s": "0.5",
        "join_timeout": "60",
        "attempt": "2",
        "max_no_progress_generations": "5",
        "slots": "8",
    }
    found = settings(conf=conf)
    assert (found.worker_id, found.settle_s, found.join_timeout_s) == ("w", 0.5, 60.0)
    assert (found.attempt, found.max_no_progress_generations) == (2, 5)


@pytest.mark.parametrize(
    ("env", "conf", "attempt"),
    [
        ({}, {}, 0),
        ({"SLURM_RESTART_COUNT": "3"}, {}, 3),
        ({"SLURM_RESTART_COUNT": ""}, {}, 0),
        ({"SLURM_RESTART_COUNT": "3"}, {"attempt": "7"}, 7),
    ],
)
def test_the_attempt_is_the_scheduler_s_unless_given(
    env: dict[str, str], conf: dict[str, str], attempt: int
) -> None:
    assert settings(env=env, conf=conf).attempt == attempt


def test_last_call_timeout_sets_settle_s_and_variables_set_endpoints_and_worker() -> None:
    found = settings(
        endpoint="",
        conf={"last_call_timeout": "9"},
        env={"STRATA_ENDPOINTS": "127.0.0.1:7", "STRATA_WORKER_ID": "w9"},
    )
    assert (found.settle_s, str(found.endpoints[0]), found.worker_id) == (9.0, "127.0.0.1:7", "w9")


def test_outside_torchs_launcher_slots_come_from_the_config() -> None:
    assert settings(launch=None).slots == 1
    assert settings(launch=None, conf={"slots": 4}).slots == 4


def test_the_agents_worker_spec_sets_role_and_slots() -> None:
    found = of_agent(settings(launch=None), Workers(slots=2, role="trainer"))
    assert (found.slots, found.role) == (2, "trainer")
    assert of_agent(settings(), None) == settings()
    with pytest.raises(ConfigError, match="slots = 4, but the agent runs 2 workers"):
        of_agent(settings(launch=None, conf={"slots": 4}), Workers(slots=2, role="trainer"))


@pytest.mark.parametrize(
    ("change", "what", "hint"),
    [
        ({"run_id": "none"}, "default, none", "--rdzv-id"),
        ({"run_id": "my run"}, "--rdzv-id", "A-Z"),
        (
            {"launch": Launch(slots=1, max_restarts=0, role="default")},
            "--max-restarts is 0: the first failure of any worker",
            "--max-restarts 10",
        ),
        ({"endpoint": ""}, "no coordinator", "--rdzv-endpoint"),
        ({"endpoint": "a:b"}, "not a port", "host:port"),
        ({"endpoint": "10.0.0.1:1"}, "plaintext", "tls.ca_file"),
        ({"conf": {"setle_s": "1"}}, "no setle_s", "settle_s"),
        ({"conf": {"settle_s": "soon"}}, "not a number of seconds", ""),
        ({"conf": {"settle_s": "nan"}}, "not a number of seconds", ""),
        ({"conf": {"join_timeout": "-1"}}, "not a number of seconds", ""),
        ({"conf": {"attempt": "-1"}}, "not 0 or more", ""),
        ({"conf": {"attempt": "first"}}, "not a number", ""),
        ({"conf": {"slots": "2"}}, "runs 8 workers", "leave slots out"),
        ({"conf": {"worker_id": "a b"}}, "cannot name a worker", "A-Z"),
    ],
)
def test_unworkable_settings_are_refused_with_a_hint(change: dict[str, Any], what: str, hint: str) -> None:
    with pytest.raises(StrataError, match=re.escape(what)) as refused:
        settings(**change)
    assert hint in refused.value.hint


@pytest.mark.parametrize("host", ["", "-.-", "héhé", "x" * 200])
def test_any_host_s_name_makes_a_worker_id(host: str) -> None:
    assert settings(host=host).worker_id.endswith("-42")


def test_invalid_settings_raise_config_error() -> None:
    with pytest.raises(ConfigError):
        settings(run_id="none")


def test_the_scheduler_identifies_the_run_and_a_rendezvous_id_does_not() -> None:
    """`--rdzv-id` is the job's name, so a later training of that name has the same id."""
    assert settings(env={"TORCHELASTIC_RUN_ID": "gpt"}).scheduled_run == ""
    assert settings(env={"SLURM_JOB_ID": "4711"}).scheduled_run == "slurm-4711"
    assert settings(env={"SLURM_JOB_ID": "4711", "STRATA_RUN_ID": "8f3c"}).scheduled_run == "8f3c"
