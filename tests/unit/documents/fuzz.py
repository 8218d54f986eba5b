"""Fuzz the readers of documents: `python -m tests.unit.documents.fuzz TARGET SECONDS FIRST_SEED FOLDER`.

The search has its own process, so that the process's memory is that of the readers. On success it exits with 0 and
prints a summary as JSON. It ends with a traceback and the example in three cases: a call raises another error than
`StrataError`, a call takes above 5 s, or the process takes more than `MAX_RSS_BYTES`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.numpy import save as as_safetensors

from strata.checkpoint.catalog.marks import tags
from strata.checkpoint.convert.file_import import read_file
from strata.checkpoint.format.digest import digest
from strata.checkpoint.format.manifest import Manifest, RankManifest
from strata.checkpoint.format.marker import Marker
from strata.checkpoint.format.uses import read_uses
from strata.checkpoint.restore.verify import verify
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.checkpoint.storage.place import parse_place
from strata.client.checkpoints.manager import CheckpointManager
from strata.config import (
    ClientConfig,
    CoordinatorConfig,
    Credentials,
    RunConfig,
    TrainingConfig,
    split_address,
)
from strata.documents import parsing
from strata.errors import StrataError
from strata.etcd.options import parse_endpoints as parse_etcd_endpoints
from strata.security.tls import read_pem
from strata.security.tokens import TokenFile, own_token
from strata.session.endpoints import parse_endpoints
from tests.unit.documents import hostile

MAX_CALL_S = 5.0
MAX_RSS_BYTES = 400 << 20
"""The imports take 75 MB.

The largest document within the limits, with its parsed values, takes 220 to 235 MB.
"""
EXAMPLES = 20

NEWEST = "step-000000000030-*"


class Judge:
    """Makes calls, and records the slowest one."""

    def __init__(self) -> None:
        self.calls = self.refused = 0
        self.slowest_s, self.slowest = 0.0, ""

    def call(self, what: str, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, or the `StrataError` that it raises; any other error ends the search."""
        self.calls += 1
        began, began_cpu = time.monotonic(), time.process_time()
        try:
            found = work()
        except StrataError as error:
            self.refused += 1
            found = StrataError(error.message)  # the original error refers to the document
        took_s, took_cpu_s = time.monotonic() - began, time.process_time() - began_cpu
        if took_cpu_s > self.slowest_s:
            self.slowest_s, self.slowest = took_cpu_s, what
        # CPU time is the limit, because a busy machine stretches wall time; wall time catches a call that waits
        assert took_cpu_s < MAX_CALL_S, f"{what} took {took_cpu_s:.1f} s"
        assert took_s < 5 * MAX_CALL_S, f"{what} took {took_s:.1f} s"
        return found


Round = Callable[[st.DataObject], None]


def _save_three(root: Path, *, with_rng: bool) -> None:
    with CheckpointManager(root, capture_rng=with_rng) as manager:
        for step in (10, 20, 30):
            state = {
                "model": {"w": np.full((3, 4), float(step))},
                "step": step,
                "lr": [0.1, (1, float("inf"))],
            }
            manager.save_state(state, step, metadata={"note": "n"}).wait()


def of_root(judge: Judge, folder: Path) -> Round:
    """Restore from, verify, list and save into a storage root of three checkpoints; the newest is hostile."""
    for whole, with_rng in ((folder / "whole", False), (folder / "with-rng", True)):
        _save_three(whole, with_rng=with_rng)
    root = folder / "root"

    def turn(data: st.DataObject) -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(folder / data.draw(st.sampled_from(["whole", "whole", "whole", "with-rng"])), root)
        (newest,) = root.glob(NEWEST)
        kind = data.draw(
            st.sampled_from(["shape", "marker", "manifest", "rank", "tag", "uses", "root", "bytes"])
        )
        documents = [newest / "COMMIT", newest / "manifest.json", newest / "rank-00000.json"]
        if kind == "shape":
            files = [*documents, newest / "rank-00000.safetensors", newest / "uses.json", root / "tags" / "x"]
            path = data.draw(st.sampled_from(files))
            path.parent.mkdir(exist_ok=True)
            hostile.put_shape(path, data.draw(st.sampled_from(hostile.SHAPES)))
        elif kind == "bytes":
            path = data.draw(st.sampled_from(documents))
            path.write_bytes(
                data.draw(st.binary(max_size=50)) or hostile.to_json(data.draw(hostile.values()))
            )
        elif kind == "tag":
            (root / "tags").mkdir()
            written = hostile.to_json(data.draw(hostile.changed({"attempt": newest.name[-32:]})))
            (root / "tags" / "x").write_bytes(written)
        elif kind == "uses":
            body = {"format": "strata-uses", "version": 1, "folders": ["step-000000000010-gen-000001-a"]}
            (newest / "uses.json").write_bytes(hostile.to_json(data.draw(hostile.changed(body))))
        elif kind == "root":
            path = root / "strata.json"
            path.write_bytes(hostile.to_json(data.draw(hostile.changed(json.loads(path.read_bytes())))))
        else:
            number = ["marker", "manifest", "rank"].index(kind)
            body = json.loads(documents[number].read_bytes())
            written = hostile.to_json(data.draw(hostile.changed(body)))
            documents[number].write_bytes(written)
            if kind == "rank":
                hostile.reseal(newest)
            elif kind == "manifest":
                hostile.remark(newest)
        use(root, newest, kind)

    def use(root: Path, newest: Path, kind: str) -> None:
        storage = LocalStorage(root, nonce=lambda: "n")
        judge.call("verify", lambda: verify(storage, newest.name, manifest_digest=None))
        judge.call("uses", lambda: read_uses(storage, newest.name))
        judge.call("tags", lambda: tags(storage))
        manager = judge.call("open", lambda: CheckpointManager(root))
        if isinstance(manager, StrataError):
            assert kind == "root", manager
            return
        with manager:
            listed = judge.call("list", manager.all_checkpoints)
            assert isinstance(listed, StrataError) or len(listed) >= 2, "the others are listed"
            state: dict[str, Any] = {"model": {}, "step": None}
            judge.call("restore", lambda: manager.restore(state))

    return turn


def of_manifests(judge: Judge, folder: Path) -> Round:
    """Read each kind of document separately, up to the largest allowed size."""
    whole = folder / "whole"
    with CheckpointManager(whole) as manager:
        manager.save_state(
            {"model": {"w": np.ones((3, 4))}, "step": 1, "n": [np.float32(2), {1: (2, 3)}]}, 30
        ).wait()
    (newest,) = whole.glob(NEWEST)
    readers: dict[str, Callable[..., Any]] = {
        "COMMIT": Marker.from_bytes,
        "manifest.json": Manifest.from_bytes,
        "rank-00000.json": RankManifest.from_bytes,
    }
    bodies = {name: json.loads((newest / name).read_bytes()) for name in readers}
    for name, text in hostile.worst_texts(parsing.MANIFEST.size_bytes):
        for reader in (RankManifest.from_bytes, Marker.from_bytes):
            judge.call(f"{name} as a document", lambda: reader(text, what="m"))  # noqa: B023  # called at once
            gc.collect()  # Python 3.13 keeps the values of a refused document in a cycle of its contextmanager

    def turn(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(readers)))
        body = data.draw(hostile.changed(bodies[name]) | hostile.values())
        if name == "COMMIT" and data.draw(st.booleans()):
            with contextlib.suppress(ValueError, RecursionError):
                body = hostile.signed(body)
        text = hostile.to_json(body)
        judge.call(name, lambda: readers[name](text, what=name))

    return turn


def of_headers(judge: Judge, folder: Path) -> Round:
    """Read images, and import safetensors files, whose header is hostile."""
    good = as_safetensors({"w": np.ones((3, 4)), "v": np.zeros(5)}, {"strata": "{}"})
    size = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + size])
    root = folder / "root"
    with CheckpointManager(root) as manager:
        manager.save_state({"model": {"w": np.ones((3, 4))}, "step": 1}, 30).wait()
    (newest,) = root.glob(NEWEST)
    image, written = newest / "rank-00000.safetensors", (newest / "rank-00000.json").read_bytes()
    data_of_image = image.read_bytes()
    storage = LocalStorage(root, nonce=lambda: "n")

    def turn(data: st.DataObject) -> None:
        path = folder / "file.safetensors"
        text = hostile.to_json(data.draw(hostile.changed(header) | hostile.values()))
        header_bytes = data.draw(
            st.just(len(text)) | st.sampled_from([0, 2**50, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
        )
        path.write_bytes(header_bytes.to_bytes(8, "little") + text + good[8 + size :])
        judge.call("import", lambda: read_file(path))

        body = json.loads(written)
        body["image"]["header_bytes"] = data.draw(
            st.sampled_from(hostile.NUMBERS) | st.integers(0, 2 * len(data_of_image))
        )
        body["image"]["size_bytes"] = data.draw(st.sampled_from([len(data_of_image), *hostile.NUMBERS]))
        body["image"]["header_digest"] = (
            digest(data_of_image[: body["image"]["header_bytes"]])
            if data.draw(st.booleans())
            and isinstance(body["image"]["header_bytes"], int)
            and 0 <= body["image"]["header_bytes"] < 10**6
            else ""
        )
        (newest / "rank-00000.json").write_bytes(hostile.to_json(body))
        hostile.reseal(newest)
        judge.call("verify", lambda: verify(storage, newest.name, manifest_digest=None))

    return turn


NAMES_OF_SETTINGS = ("endpoints", "job", "cluster", "detect_s", "insecure")
TABLES = {
    "run": (
        "slots",
        "min_workers",
        "settle_s",
        "stall_limits",
        "warm_imports",
        "restart",
        "run_id",
        "ignored_xids",
    ),
    "coordinator": ("listen", "advertise", "http_listen", "max_jobs"),
    "etcd": ("endpoints", "password_file", "wait_s", "quota_bytes"),
    "train": ("storage", "save_every_s", "keep_count", "preempt_grace_s"),
    "tls": ("ca_file", "cert_file", "key_file"),
    "auth": ("token_file", "accepted_tokens_file"),
    "log": ("level",),
}


@st.composite
def toml_texts(draw: st.DrawFn) -> str:
    """A hostile `strata.toml`, as input of `hostile.to_toml`."""
    value = st.one_of(
        st.sampled_from(range(len(hostile.TOML))).map("@@{}@@".format),
        st.integers().map(str),
        st.floats().map(str),
        st.text(max_size=30).map(json.dumps),
        st.binary(max_size=20).map(lambda raw: raw.decode("latin-1")),
    )
    lines = [
        f"{draw(st.sampled_from(NAMES_OF_SETTINGS))} = {draw(value)}" for _ in range(draw(st.integers(0, 2)))
    ]
    for table in draw(st.lists(st.sampled_from(sorted(TABLES)), max_size=3)):
        lines.append(draw(st.sampled_from([f"[{table}]", f"[[{table}]]", f"{table}.a.b = 1"])))
        lines += [
            f"{draw(st.sampled_from(TABLES[table]))} = {draw(value)}" for _ in range(draw(st.integers(0, 3)))
        ]
    lines += draw(st.lists(st.sampled_from(range(len(hostile.TOML_LINES))).map("%%{}%%".format), max_size=1))
    return "\n".join(lines)


def of_settings(judge: Judge, folder: Path) -> Round:
    """Read a hostile `strata.toml`, environment, and files that settings refer to."""
    configs: tuple[Any, ...] = (RunConfig, CoordinatorConfig, TrainingConfig, ClientConfig, Credentials)
    path, secret = folder / "strata.toml", folder / "secret"

    def turn(data: st.DataObject) -> None:
        shape = data.draw(st.sampled_from(["text"] * 6 + list(hostile.SHAPES)))
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if shape == "text":
            path.write_bytes(hostile.to_toml(data.draw(toml_texts())))
        else:
            hostile.put_shape(path, shape)
        texts = st.text(max_size=20) | st.sampled_from(
            ["inf", "1e999", "9" * 5000, "~nobody-at-all", "-1", "nan"]
        )
        names = st.sampled_from(
            ["STRATA_RUN_SLOTS", "STRATA_MAX_JOBS", "STRATA_ENDPOINTS", "STRATA_LISTEN", "STRATA_DETECT_S",
             "STRATA_TLS_CA_FILE", "SLURM_JOB_ID", "SLURM_NODEID", "STRATA_RUN_STALL_LIMITS", "STRATA_ETCD_QUOTA_BYTES"]
        )  # fmt: skip
        env = data.draw(st.dictionaries(names, texts, max_size=2))
        config = data.draw(st.sampled_from(configs))
        judge.call(config.__name__, lambda: config.load(flags={}, env=env, path=path))

        shutil.rmtree(secret) if secret.is_dir() else secret.unlink(missing_ok=True)
        shape = data.draw(st.sampled_from(["json"] * 3 + list(hostile.SHAPES)))
        if shape == "json":
            entry = {
                "sha256": "0" * 64,
                "role": "member",
                "id": "a",
                "jobs": ["j"],
                "created": "",
                "expires": None,
            }
            secret.write_bytes(hostile.to_json(data.draw(hostile.changed({"v": 1, "tokens": [entry]}))))
        else:
            hostile.put_shape(secret, shape)
        if not secret.is_symlink():
            secret.chmod(0o600)
        shown = Credentials(ca_file=secret, cert_file=secret, key_file=secret, token_file=secret)
        judge.call("tokens", TokenFile(secret).entries)
        judge.call("token", lambda: own_token(shown))
        judge.call("pem", lambda: read_pem(shown, dt.datetime.now(dt.UTC)))

    return turn


def of_endpoints(judge: Judge, folder: Path) -> Round:
    """Parse hostile endpoints, addresses and storage URIs."""
    parts = st.sampled_from(
        ["http://", "https://", "unix:", "s3://", "file://", "grpc://", "[", "]", "::1", ":", "@", "user:secret@", "/",
         "host", "127.0.0.1", ",", "%", "%00", "\0", "9" * 5000, "50051", "..", "a." * 5000, "~nobody-at-all", "?",
         "#", "\ud800", "ß", "\u0661", "x" * 70, "[" * 5000, " "]
    )  # fmt: skip
    texts = st.lists(parts | st.text(max_size=5), max_size=8).map("".join)
    readers: dict[str, Callable[[str], Any]] = {
        "coordinators": parse_endpoints,
        "etcd": lambda text: parse_etcd_endpoints([text]),
        "address": lambda text: split_address("x", text),
        "place": parse_place,
        "endpoint_url": lambda text: parse_place("s3://bucket/prefix", endpoint_url=text, region=text),
    }

    def turn(data: st.DataObject) -> None:
        text = data.draw(texts)
        for name, reader in readers.items():
            judge.call(name, lambda: reader(text))  # noqa: B023  # called at once

    return turn


TARGETS: dict[str, Callable[[Judge, Path], Round]] = {
    "root": of_root,
    "manifests": of_manifests,
    "headers": of_headers,
    "settings": of_settings,
    "endpoints": of_endpoints,
}


def most_rss_bytes() -> int:
    """Return this program's peak memory. `ru_maxrss` would include the memory of the process that started this one."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) << 10


def search(target: str, seconds: float, first: int, folder: Path) -> dict[str, Any]:
    """Search for `seconds`; return a summary."""
    end = time.monotonic() + seconds
    judge = Judge()
    turn = TARGETS[target](judge, folder)
    number = first

    while time.monotonic() < end or number == first:

        @seed(number)
        @settings(
            max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(st.data())
        def look(data: st.DataObject) -> None:
            turn(data)

        look()
        number += 1
    rss_bytes = most_rss_bytes()
    assert rss_bytes < MAX_RSS_BYTES, f"{rss_bytes >> 20} MB"
    return {
        "target": target,
        "seeds": [first, number],
        "calls": judge.calls,
        "refused": judge.refused,
        "slowest_s": round(judge.slowest_s, 3),
        "slowest": judge.slowest,
        "rss_mb": rss_bytes >> 20,
    }


if __name__ == "__main__":
    name, duration, begin, where = sys.argv[1:]
    logging.disable()
    sys.stdout.write(json.dumps(search(name, float(duration), int(begin), Path(where))) + "\n")
