"""The file of token hashes, and its readers."""

from __future__ import annotations

import datetime as dt
import json
import stat
import threading
from pathlib import Path

import pytest

from strata.config import Credentials
from strata.core.access.authority import Identity, Role
from strata.errors import ConfigError, NotFound, Unauthenticated
from strata.security.private import write_private
from strata.security.tokens import AcceptedTokens, TokenFile, own_token

NOW = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
DAY = dt.timedelta(days=1)


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "tokens.json")


def accepted(file: TokenFile, *, now: dt.datetime = NOW) -> AcceptedTokens:
    return AcceptedTokens(file.path, cluster="c", now=lambda: now)


def test_a_token_is_its_identity_and_only_its_hash_is_kept(file: TokenFile) -> None:
    entry, token = file.add(role=Role.MEMBER, id="w1", jobs=("b", "a"), now=NOW)
    assert accepted(file).identify(token) == Identity(
        cluster="c", role=Role.MEMBER, id="w1", jobs=frozenset({"a", "b"})
    )
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert token not in file.path.read_text()
    assert file.entries() == [entry]


def test_tokens_come_and_go_under_a_running_coordinator(file: TokenFile) -> None:
    _, first = file.add(role=Role.VIEWER, id="a", now=NOW)
    running = accepted(file)
    entry, second = file.add(role=Role.VIEWER, id="b", now=NOW)
    assert [running.identify(t).id for t in (first, second)] == ["a", "b"]
    assert file.revoke(entry.name[:6]) == entry
    with pytest.raises(Unauthenticated, match="revoked"):
        running.identify(second)
    assert running.identify(first).id == "a"


def test_an_expired_token_is_refused_with_its_date(file: TokenFile) -> None:
    _, token = file.add(role=Role.VIEWER, id="a", now=NOW, days=5)
    assert accepted(file, now=NOW + 5 * DAY).identify(token).id == "a"
    with pytest.raises(Unauthenticated, match="expired on 2026-03-06"):
        accepted(file, now=NOW + 5 * DAY + dt.timedelta(seconds=1)).identify(token)


@pytest.mark.parametrize("token", ["", "strata_", "x", "\x00", "ä" * 50])
def test_an_unknown_token_is_refused(file: TokenFile, token: str) -> None:
    file.add(role=Role.VIEWER, id="a", now=NOW)
    with pytest.raises(Unauthenticated) as error:
        accepted(file).identify(token)
    assert error.value.hint
    assert not token or token not in str(error.value)


def test_an_unreadable_token_file_accepts_no_token(file: TokenFile) -> None:
    _, token = file.add(role=Role.VIEWER, id="a", now=NOW)
    running = accepted(file)
    file.path.unlink()
    with pytest.raises(Unauthenticated, match="cannot read its file"):
        running.identify(token)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        '{"v": 2, "tokens": []}',
        '{"v": 1, "tokens": [{}]}',
        '{"v": 1, "tokens": [{"sha256": "00", "role": "viewer", "id": "a"}]}',
        json.dumps({"v": 1, "tokens": [{"sha256": "0" * 64, "role": "king", "id": "a"}]}),
        json.dumps({"v": 1, "tokens": [{"sha256": "0" * 64, "role": "viewer", "id": "a/b"}]}),
        json.dumps(
            {"v": 1, "tokens": [{"sha256": "0" * 64, "role": "viewer", "id": "a", "expires": "soon"}]}
        ),
        json.dumps(
            {"v": 1, "tokens": [{"sha256": "0" * 64, "role": "viewer", "id": "a", "expires": "2027-01-01"}]}
        ),
    ],
)
def test_a_malformed_token_file_is_a_config_error(file: TokenFile, body: str) -> None:
    write_private(file.path, body.encode())
    with pytest.raises(ConfigError, match="is not a file of token hashes"):
        accepted(file)


def test_a_token_file_readable_by_other_users_is_refused(file: TokenFile) -> None:
    file.add(role=Role.VIEWER, id="a", now=NOW)
    file.path.chmod(0o604)
    with pytest.raises(ConfigError, match="can be read by others") as error:
        accepted(file)
    assert error.value.hint == f"chmod 600 {file.path}"


def test_only_one_token_is_revoked_at_once(file: TokenFile) -> None:
    file.add(role=Role.VIEWER, id="a", now=NOW)
    for name in ("", "zz"):
        with pytest.raises(NotFound):
            file.revoke(name)


def test_concurrent_additions_lose_no_token(file: TokenFile) -> None:
    threads = [
        threading.Thread(target=lambda n=n: file.add(role=Role.VIEWER, id=f"v{n}", now=NOW)) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {entry.id for entry in file.entries()} == {f"v{n}" for n in range(8)}


def test_the_token_to_show_comes_from_a_private_file(tmp_path: Path, file: TokenFile) -> None:
    _, token = file.add(role=Role.VIEWER, id="a", now=NOW)
    path = tmp_path / "mine"
    write_private(path, f"{token}\n".encode())
    assert own_token(Credentials(token_file=path)) == token
    assert own_token(Credentials()) == ""
    for body in (b"", b"two words", token.encode() + b"\nx: y", b"\xff" * 40):
        write_private(path, body)
        with pytest.raises(ConfigError, match="does not hold a token") as error:
            own_token(Credentials(token_file=path))
        assert token not in str(error.value)
