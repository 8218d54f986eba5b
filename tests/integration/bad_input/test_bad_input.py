"""Every mistake of the table, through every interface, causes a typed error with a hint and affects no other client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata.errors import StrataError
from tests.cluster_fixtures import StartCluster, run_strata
from tests.integration.bad_input.case import Case
from tests.integration.bad_input.cases import CASES
from tests.integration.bad_input.place import Place, place, refusal


@pytest.fixture(scope="module")
def there(start_module_cluster: StartCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(start_module_cluster(coordinators=2), tmp_path_factory.mktemp("place")) as made:
        yield made


def having(way: str) -> pytest.MarkDecorator:
    cases = [case for case in CASES if getattr(case, way) is not None]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@having("library")
def test_the_library_rejects_bad_input(case: Case, there: Place) -> None:
    assert case.library is not None
    with pytest.raises(StrataError) as caught:
        case.library(there)
    judge(case, caught.value)
    there.check()


@having("request")
def test_coordinators_reject_bad_raw_requests(case: Case, there: Place) -> None:
    assert case.request is not None
    for coordinator in there.cluster.coordinators:
        status, error, packed = refusal(coordinator.address, case.request(there))
        assert status is case.status
        judge(case, error)
        assert packed or "4 MiB" in case.name, "only gRPC itself refuses without our details"
    there.check()


@having("command")
def test_the_command_line_rejects_bad_input(case: Case, there: Place) -> None:
    assert case.command is not None
    code, output = run_strata(*case.command(there), env=None)
    assert code == case.exit, output
    assert "Traceback" not in output
    assert case.says in output
    assert case.hint in output
    there.check()


def judge(case: Case, error: StrataError) -> None:
    """Check the class, message and hint of an error as a caller sees them."""
    assert type(error) is case.error
    assert case.says in error.message
    assert case.hint in error.hint
    assert len(str(error)) < 2000
