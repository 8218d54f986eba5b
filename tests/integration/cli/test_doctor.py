"""`strata doctor` on a faulty cluster: a lost coordinator, an etcd under restore, and invalid certificates."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from strata.core.access.authority import Role
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import ClusterUid, decode, encode
from strata.core.kv.txn import Delete, Put, Range, Txn
from strata.core.restore.lineage import successor
from strata.core.restore.records import Restoring
from strata.devcluster.local_cluster import LocalCluster
from strata.etcd import EtcdStore
from tests.cluster_fixtures import StartCluster, run_strata
from tests.processes import LIMIT_S
from tests.secured_fixtures import Secured, flags

KEYS = ClusterKeys("default")
Findings = dict[str, dict[str, Any]]


def found(*words: str) -> Findings:
    _code, output = run_strata("doctor", *words, "--json")
    assert output.startswith("["), output
    return {finding["what"]: finding for finding in json.loads(output)}


def found_until(what: str, level: str, *words: str) -> Findings:
    """Return the findings once the finding `what` has this level."""
    deadline = time.monotonic() + LIMIT_S
    while (findings := found(*words)).get(what, {}).get("level") != level:
        assert time.monotonic() < deadline, findings
        time.sleep(0.2)  # polls other processes
    return findings


@pytest.fixture(scope="module")
def breakable(start_module_cluster: StartCluster) -> LocalCluster:
    return start_module_cluster(coordinators=2)


@pytest.mark.slow
def test_a_coordinator_that_is_lost_is_named(breakable: LocalCluster) -> None:
    words = ("--endpoints", breakable.endpoints, "--timeout-s", "1")
    findings = found_until("clocks", "OK", *words)
    assert "coordinator-1" in findings["clocks"]["says"]
    assert "coordinator-2" in findings["clocks"]["says"]
    lost = breakable.coordinators[1]
    lost.child.kill()
    lost.child.join()
    findings = found(*words)
    what = f"coordinator {lost.address}"
    assert findings[what]["level"] == "WARN"
    assert f"{lost.address} does not answer" in findings[what]["says"]
    assert "lost-coordinator.md" in findings[what]["hint"]
    lost.restart()
    lost.wait_ready(LIMIT_S)
    assert what not in found_until("coordinators", "OK", *words)


@pytest.mark.slow
def test_every_check_names_an_interrupted_restore_and_its_command(
    breakable: LocalCluster,
) -> None:
    (member,) = breakable.etcd.endpoints
    restoring = Restoring(who="ada@h1, process 7", since_unix_ms=0, source="the backup of today")

    async def write(*operations: Put | Delete) -> bytes:
        async with await EtcdStore.connect(breakable.etcd.endpoints) as store:
            (uid,) = (await store.read(Range(key=KEYS.uid))).kvs or (None,)
            await store.execute(Txn(success=operations))
            return uid.value if uid is not None else b""

    uid = asyncio.run(write(Put(key=KEYS.restoring, value=encode(restoring)), Delete(key=KEYS.uid)))
    words = ("--endpoints", breakable.endpoints, "--timeout-s", "1", "--storage", "/no/such/root")
    findings = found_until("coordinators", "FAIL", *words)
    assert "the control plane is being restored: ada@h1, process 7 began" in findings["coordinators"]["says"]
    command = "strata controlplane restore --from PLACE --storage /no/such/root --etcd"
    assert findings["coordinators"]["commands"] == [f"{command} ETCD"]
    findings = found(*words, "--etcd", member)
    for what in ("coordinators", "restore"):
        assert findings[what]["level"] == "FAIL"
        assert findings[what]["commands"] == [f"{command} {member}"]
    now = ClusterUid(uid=successor(decode(ClusterUid, uid).uid, 1, "77aa"))
    asyncio.run(write(Put(key=KEYS.uid, value=encode(now)), Delete(key=KEYS.restoring)))
    assert "restore" not in found_until("coordinators", "OK", *words, "--etcd", member)


def test_doctor_reports_the_expiry_of_client_and_server_certificates(secured: Secured) -> None:
    mine = secured.who(Role.VIEWER, "v", days=20)
    findings = found("--endpoints", secured.local.endpoints, *flags(mine))
    assert findings["tls"]["level"] == "WARN"
    assert mine.cert_file is not None
    assert findings["tls"]["commands"] == [
        f"strata certs renew --ca {secured.authority.folder} --out {mine.cert_file.parent}"
    ]
    assert findings["tls authority"]["level"] == "OK"
    for coordinator in secured.local.coordinators:
        assert findings[f"server {coordinator.address}"]["level"] == "OK"
        assert "days left" in findings[f"server {coordinator.address}"]["says"]
    assert findings["clocks"]["level"] == "OK"
