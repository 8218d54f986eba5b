import pytest

from strata.core.leadership.etcd_version import BUGS, EtcdVersion, Fitness, judge


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("3.5.30", EtcdVersion(3, 5, 30)),
        ("v3.6.0-rc.1", EtcdVersion(3, 6, 0)),
        ("3.5.30+ds1", EtcdVersion(3, 5, 30)),
        ("etcd Version: 3.5.1\nGit SHA: d42e8589e\nGo Version: go1.16.2\n", EtcdVersion(3, 5, 1)),
    ],
)
def test_parse(text: str, version: EtcdVersion) -> None:
    assert EtcdVersion.parse(text) == version


@pytest.mark.parametrize("text", ["", "etcd", "command not found", "3.5", "Go Version: go1.16.2"])
def test_an_invalid_etcd_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no etcd version"):
        EtcdVersion.parse(text)


@pytest.mark.parametrize(
    ("text", "fitness"),
    [
        ("2.3.8", Fitness.REFUSED),
        ("3.3.27", Fitness.REFUSED),
        ("3.4.0", Fitness.SUSPECT),
        ("3.4.99", Fitness.SUSPECT),
        ("3.5.0", Fitness.SUSPECT),
        ("3.5.27", Fitness.SUSPECT),
        ("3.5.28", Fitness.GOOD),
        ("3.5.30", Fitness.GOOD),
        ("3.6.0", Fitness.SUSPECT),
        ("3.6.8", Fitness.SUSPECT),
        ("3.6.9", Fitness.GOOD),
        ("3.7.0", Fitness.GOOD),
        ("4.0.0", Fitness.GOOD),
    ],
)
def test_the_bounds(text: str, fitness: Fitness) -> None:
    verdict = judge(EtcdVersion.parse(text))
    assert verdict.fitness is fitness
    assert bool(verdict.reason) == (fitness is not Fitness.GOOD)


@pytest.mark.parametrize(
    ("text", "issues"),
    [
        ("3.5.1", {13766, 15271, 15247, 17529, 18089, 19179, 20418}),
        ("3.5.3", {15271, 15247, 17529, 18089, 19179, 20418}),
        ("3.5.13", {18089, 19179, 20418}),
        ("3.4.34", {15247, 19179, 20418}),
        ("3.6.0", {20418}),
    ],
)
def test_the_warning_names_the_bugs(text: str, issues: set[int]) -> None:
    reason = judge(EtcdVersion.parse(text)).reason
    assert {bug.issue for bug in BUGS if f"etcd#{bug.issue}" in reason} == issues


@pytest.mark.parametrize(("text", "advice"), [("3.4.20", "3.5.28"), ("3.5.1", "3.5.28"), ("3.6.2", "3.6.9")])
def test_the_warning_recommends_a_version_to_update_to(text: str, advice: str) -> None:
    assert f"update to {advice} or newer" in judge(EtcdVersion.parse(text)).reason


@pytest.mark.parametrize(("text", "alone"), [("3.4.20", False), ("3.5.2", True), ("3.5.3", False)])
def test_an_etcd_version_whose_members_may_diverge_is_limited_to_one_member(text: str, alone: bool) -> None:
    assert judge(EtcdVersion.parse(text)).one_member_only is alone
