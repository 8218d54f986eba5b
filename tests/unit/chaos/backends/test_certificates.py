from __future__ import annotations

import os
from pathlib import Path

import pytest

from strata.config import CoordinatorConfig
from strata.core.access.authority import Role
from strata.security.certificates import describe
from strata_chaos.backends.certificates import RunCertificates
from strata_chaos.run.programs import members_of
from strata_chaos.scenario import Scenario, Workload
from strata_chaos.workloads.program import Options, show_certificates


@pytest.fixture
def certificates(tmp_path: Path) -> RunCertificates:
    return RunCertificates.issue(
        tmp_path,
        etcd_hosts=["198.18.0.11"],
        coordinators={"coordinator-1": "198.18.0.21"},
        members=["barriers-1-founder", "barriers-1-0"],
    )


def test_every_process_has_its_own_certificate(certificates: RunCertificates) -> None:
    roles = {
        path.parent.name: found.identity.role
        for path in certificates.folder.glob("*/cert.pem")
        if (found := describe(path)).identity is not None
    }

    assert roles == {
        "etcd": Role.ETCD,
        "observer": Role.COORDINATOR,
        "operator": Role.OPERATOR,
        "coordinator-1": Role.COORDINATOR,
        "barriers-1-founder": Role.MEMBER,
        "barriers-1-0": Role.MEMBER,
    }
    assert "198.18.0.21" in describe(certificates.folder / "coordinator-1" / "cert.pem").hosts
    assert "198.18.0.11" in describe(certificates.folder / "etcd" / "cert.pem").hosts


def test_a_coordinator_takes_its_files(certificates: RunCertificates) -> None:
    flags = dict(word.removeprefix("--").split("=") for word in certificates.options("coordinator-1"))

    config = CoordinatorConfig.load(
        flags={
            "listen": "198.18.0.21:50051",
            "credentials.ca_file": flags["tls-ca-file"],
            "credentials.cert_file": flags["tls-cert-file"],
            "credentials.key_file": flags["tls-key-file"],
        },
        env={},
        path=Path(flags["config"]),
    )

    assert config.serves_tls
    assert config.etcd.ca_file == certificates.folder / "coordinator-1" / "ca.pem"


def test_a_client_shows_the_certificate_of_its_worker(
    certificates: RunCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(client: int | None) -> str:
        show_certificates(
            Options(
                endpoints="e",
                job="barriers-1",
                history=Path("h"),
                seed=1,
                clients=1,
                storage=Path("s"),
                client=client,
            )
        )
        return Path(os.environ["STRATA_TLS_CERT_FILE"]).parent.name

    for name in ("STRATA_TLS_CA_FILE", "STRATA_TLS_CERT_FILE", "STRATA_TLS_KEY_FILE"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it after the test
    for name, value in certificates.environment.items():
        monkeypatch.setenv(name, value)

    assert (shown(None), shown(0)) == ("barriers-1-founder", "barriers-1-0")


def test_every_worker_of_a_scenario_is_listed() -> None:
    scenario = Scenario(
        name="s",
        title="t",
        duration_s=1,
        workloads=(Workload(name="churn", clients=2), Workload(name="watches")),
    )

    known = members_of(scenario)

    assert {"churn-1-founder", "churn-1-0", "churn-1-1", "watches-2-founder", "watches-2-6"} <= set(known)
