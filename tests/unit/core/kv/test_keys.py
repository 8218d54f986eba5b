from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.ids import checked_id
from strata.core.kv.keys import ClusterKeys, JobKeys, number
from strata.errors import InvalidArgument

KEYS = ClusterKeys("c")
JOB = KEYS.job("j")


@given(st.integers(0, 10**12 - 1), st.integers(0, 10**12 - 1))
def test_the_order_of_keys_is_the_order_of_numbers(one: int, other: int) -> None:
    assert (number(one) < number(other)) == (one < other)
    assert int(number(one)) == one


@pytest.mark.parametrize("value", [-1, 10**12])
def test_a_number_that_would_break_the_order_is_refused(value: int) -> None:
    with pytest.raises(InvalidArgument, match="is not in"):
        number(value)


@pytest.mark.parametrize("name", ["", "/", "a/b", ".", "..", "-a", "_a", "a b", "a\n", "ä", "a" * 129, "a%"])
@pytest.mark.parametrize(
    "build",
    [
        ClusterKeys,
        KEYS.job,
        KEYS.replica,
        JOB.worker,
        JOB.barrier_name,
        JOB.dataset,
        lambda name: JOB.attempt(1, 1, name),
        lambda name: JOB.reader(1, 1, "a", name),
        lambda name: JOB.pin(1, name),
    ],
)
def test_an_invalid_name_cannot_escape_its_part_of_a_key(build: object, name: str) -> None:
    assert callable(build)
    with pytest.raises(InvalidArgument):
        build(name)


@pytest.mark.parametrize("name", ["a", "A9", "node-01.rack_2", "0", "x" * 128])
def test_ordinary_names_are_fine(name: str) -> None:
    assert checked_id("worker", name) == name
    assert JOB.worker(name).endswith("/" + name)


def every_key() -> dict[str, str]:
    """Return each key and folder of a job and of the cluster, by the name of its builder."""
    found = {}
    for prefix, keys in (("P", KEYS), ("J", JOB)):
        for name, member in inspect.getmembers(type(keys)):
            # a job's folder is the cluster's `jobs`, not another key
            if name.startswith("_") or name in {"cluster", "root", "job_of", "parts", "name", "folder"}:
                continue
            if not callable(member):
                found[f"{prefix}.{name}"] = getattr(keys, name)
            else:
                parameters = list(inspect.signature(member).parameters.values())[1:]
                arguments = [7 if p.annotation == "int" else "x" for p in parameters]
                built = member(keys, *arguments)
                found[f"{prefix}.{name}"] = built.root if isinstance(built, JobKeys) else built
    return found


def test_no_two_builders_make_the_same_key() -> None:
    found = every_key()
    assert len(found) > 35
    assert len(set(found.values())) == len(found), sorted(found.items(), key=lambda item: item[1])


def test_every_key_lies_below_the_root_and_none_has_an_empty_part() -> None:
    for name, key in every_key().items():
        assert key.startswith("/strata/v1/c/"), name
        assert "//" not in key, name
        assert key.isascii(), name


def test_no_key_is_a_prefix_of_another_by_accident() -> None:
    """A folder's name ends in a slash; the folder contains exactly the keys that begin with this name."""
    assert not JOB.worker("a").startswith(JOB.root + "world")
    assert not JOB.head.startswith(JOB.worlds)
    assert not JOB.barrier_name("b2").startswith(JOB.barrier_name("b"))
    assert not KEYS.job("j2").root.startswith(JOB.root)


def test_keys_parse_back_into_their_parts() -> None:
    assert KEYS.job_of(JOB.worker("w")) == "j"
    assert KEYS.job_of(KEYS.leader) is None
    assert KEYS.job_of("/strata/v1/other/jobs/j/spec") is None
    assert JOB.name == "j"
    assert KEYS.parts(JOB.worker("w")) == ("jobs", "j", "workers", "w")
    assert KEYS.parts("/elsewhere") == ()
