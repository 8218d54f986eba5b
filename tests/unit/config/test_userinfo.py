"""A password in an address is refused, and appears in no error, log, traceback or help."""

from __future__ import annotations

import io
import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
import structlog
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from strata.checkpoint.storage.place import S3Place
from strata.cli.app import assembled
from strata.config import ClientConfig, CoordinatorConfig, EtcdConfig, LibraryConfig, RunConfig, split_address
from strata.errors import ConfigError, StrataError, Unavailable, redacted
from strata.etcd.options import parse_endpoints as parse_etcd
from strata.observe import configure, get_logger
from strata.session.endpoints import parse_endpoints

SECRET = "hunter2"

PLACES: dict[str, Callable[[str], object]] = {
    "etcd, flag": lambda text: CoordinatorConfig.load(flags={"etcd.endpoints": text}, env={}),
    "etcd, environment": lambda text: CoordinatorConfig.load(flags={}, env={"STRATA_ETCD_ENDPOINTS": text}),
    "etcd, several": lambda text: EtcdConfig(endpoints=("a:1", text)),
    "etcd, client": lambda text: parse_etcd([text]),
    "etcd, client, text": parse_etcd,
    "coordinators, flag": lambda text: ClientConfig.load(flags={"endpoints": text}, env={}),
    "coordinators, library": lambda text: LibraryConfig.load(env={"STRATA_ENDPOINTS": text}),
    "coordinators, run": lambda text: RunConfig(endpoints=(text,)),
    "coordinators, client": parse_endpoints,
    "S3": lambda text: S3Place(bucket="bucket", endpoint_url=text),
    "listen": lambda text: CoordinatorConfig(listen=text),
    "advertise": lambda text: CoordinatorConfig(advertise=text),
    "page": lambda text: CoordinatorConfig(http_listen=text),
    "address": lambda text: split_address("address", text),
}

SCHEMES = st.sampled_from(["", "http://", "https://", "grpc://", "HTTP://", "//"])
HOSTS = st.sampled_from(
    ["host", "host:2379", "[::1]:2379", "[::1]", "127.0.0.1:1", "[fe80::1%25eth0]:1", ":", ""]
)
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0")
    | st.sampled_from(list("@:/%#?,[] &'\"\\")),
    max_size=8,
)


@st.composite
def addresses(draw: st.DrawFn) -> str:
    password = draw(TEXTS) + SECRET + draw(TEXTS)
    user = draw(st.sampled_from(["ada", "", "a b", "ä"]))
    userinfo = f"{user}:{password}" if draw(st.booleans()) else password
    if draw(st.booleans()):
        userinfo = quote(userinfo, safe=draw(st.sampled_from(["", ":"])))
    at = draw(st.sampled_from(["@", "@", "%40", "\uff20"]))
    return f"{draw(SCHEMES)}{userinfo}{at}{draw(HOSTS)}"


def everything(error: BaseException) -> str:
    return "\n".join([str(error), repr(error), repr(error.args), *traceback.format_exception(error)])


@pytest.mark.parametrize("place", PLACES)
@given(address=addresses())
@example(address="http://ada:hunter2@host:2379")
@example(address="http://ada:hun@ter2@hunter2@[::1]:2379")
@example(address="ada:hunter2%40host")
@example(address="http://ada:hunter2,x@host")
@example(address="http://ada:a/b#c?hunter2@host")
def test_no_error_of_an_address_shows_its_password(place: str, address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PLACES[place](address)
    assert SECRET not in everything(caught.value)
    assert caught.value.hint


@given(address=addresses(), shape=st.sampled_from(["text", "list", "nested", "table"]))
def test_no_error_of_a_config_file_shows_a_password(
    address: str, shape: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = json.dumps(address, ensure_ascii=False).replace("\x7f", "\\u007F")
    value = {"text": text, "list": f"[{text}]", "nested": f"[[{text}]]", "table": f"{{url = {text}}}"}[shape]
    file = tmp_path_factory.getbasetemp() / "userinfo.toml"
    file.write_text(f"[etcd]\nendpoints = {value}\n")
    with pytest.raises(ConfigError) as caught:
        CoordinatorConfig.load(flags={}, env={}, path=file)
    assert SECRET not in everything(caught.value)


@pytest.mark.parametrize("ordinary", ["host", "host:1", "https://host:1/", "[::1]:1", "unix:/tmp/a@b/socket"])
def test_an_address_without_a_password_is_accepted(ordinary: str) -> None:
    assert parse_endpoints(ordinary)


def test_a_proxy_password_in_a_library_s_message_is_redacted() -> None:
    message = 'Failed to connect to proxy URL: "http://ada:hunter2@proxy:3128", s3://bucket/a@b is fine'
    shown = 'Failed to connect to proxy URL: "http://…@proxy:3128", s3://bucket/a@b is fine'
    assert redacted(message) == shown
    error = Unavailable(message, hint=message)
    assert (error.message, error.hint) == (shown, shown)
    assert SECRET not in everything(error)


@pytest.mark.parametrize("fmt", ["json", "plain"])
def test_no_log_line_shows_a_password(fmt: str) -> None:
    out = io.StringIO()
    before = structlog.get_config()
    try:
        configure(fmt=fmt, stream=out)
        log = get_logger()
        log.warning("asked", url="http://ada:hunter2@host:1", urls=["https://a:hunter2@b"])
        try:
            raise OSError("cannot reach http://ada:hunter2@host")
        except OSError:
            log.exception("failed")
    finally:
        structlog.configure(**before)
    assert "asked" in out.getvalue()
    assert "OSError" in out.getvalue()
    assert SECRET not in out.getvalue()


@pytest.mark.parametrize(
    "words",
    [
        ("status", "--endpoints", "http://ada:hunter2@host:1"),
        ("doctor", "--etcd", "http://ada:hunter2@host:1"),
        ("coordinator", "--etcd", "ada:hunter2@host:1"),
        ("run", "--endpoints", "ada:hunter2@host", "--", "true"),
        ("watch", "/", "--endpoints", "ada:hunter2@host"),
        ("status", "--help"),
        ("coordinator", "--help"),
    ],
)
def test_no_command_shows_a_password(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("STRATA_ENDPOINTS", "STRATA_ETCD_ENDPOINTS", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://ada:hunter2@host:1")
    logging.disable()
    try:
        result = CliRunner().invoke(assembled(), list(words))
    finally:
        logging.disable(logging.NOTSET)
    assert SECRET not in result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, StrataError)
        assert SECRET not in everything(result.exception)
    assert ("--help" in words) == (result.exit_code == 0)
