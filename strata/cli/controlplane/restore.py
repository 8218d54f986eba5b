"""`strata controlplane restore | rebuild`: recovery after etcd was lost, wiped, or reset to an older snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import getpass
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from strata.cli.console.credentials import Config, Insecure
from strata.cli.console.output import Json, print_values
from strata.cli.console.progress import byte_progress, item_progress
from strata.cli.controlplane.restore_plan import as_values, print_plan
from strata.config import CoordinatorConfig, EtcdConfig
from strata.core.kv.codec import encode
from strata.core.kv.keys import ClusterKeys
from strata.core.restore.records import Backup
from strata.core.spans import utc_text
from strata.errors import ConfigError, Conflict, Refused, StrataError

if TYPE_CHECKING:
    from strata.controlplane.restoring import Base
    from strata.controlplane.rewriting import Keyspace
    from strata.controlplane.storage_search import Searched, Survey
    from strata.core.restore.control_plane import RestoredKeys
    from strata.etcd import EtcdStore

INTERRUPTED: Final = 128 + signal.SIGINT
_AGAIN: Final = "no coordinator serves until it is done; run the same command again, which takes it over\n"

StorageRoots = Annotated[
    list[str] | None,
    typer.Option(
        "--storage",
        "-s",
        help="A storage root, as a path or URI, to be searched; may be repeated.",
        metavar="ROOT",
    ),
]
Etcd = Annotated[str | None, typer.Option("--etcd", help="etcd's members, as host:port, by commas.")]
Cluster = Annotated[str | None, typer.Option("--cluster", help="The cluster's name. [default]")]
Replace = Annotated[bool, typer.Option("--replace", help="Replace the jobs that etcd holds now.")]
Verify = Annotated[bool, typer.Option("--verify", help="Read every byte of every checkpoint.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan, and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
TimeoutS = Annotated[float, typer.Option("--timeout-s", min=0.1, help="Seconds for each request to etcd.")]


def restore(
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Where backups lie (a folder, or s3://bucket/prefix), or a snapshot's file.",
            metavar="PLACE",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", help="A backup, as `backups` names it; newest: the newest that counts.")
    ] = "newest",
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place", help="Complete the data in etcd, which an operator restored from an older snapshot."
        ),
    ] = False,
    lineage: Annotated[
        str,
        typer.Option(
            "--lineage", help="The cluster whose backups to use, if the place has those of several."
        ),
    ] = "",
    storage: StorageRoots = None,
    etcd: Etcd = None,
    cluster: Cluster = None,
    insecure: Insecure = None,
    config: Config = None,
    replace: Replace = False,
    verify: Verify = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    timeout_s: TimeoutS = 30.0,
    as_json: Json = False,
) -> None:
    """Restore the control plane from a backup, and complete it from storage.

    Checkpoints that were committed after the backup are adopted, and checkpoints that were removed after it are
    left out. Coordinators may run: they wait during the restore, and then go on by themselves. Shows its plan,
    and asks before it writes.

    Example: strata controlplane restore --from /mnt/backups --storage /mnt/checkpoints --etcd host1:2379
    """
    if (from_ is None) is not in_place:
        raise ConfigError(
            "pass either --from PLACE or --in-place", hint="--from names a backup; --in-place needs none"
        )
    if in_place and lineage:
        raise ConfigError("--lineage needs a place with backups", hint="leave it out: etcd holds one cluster")
    flags = {"etcd.endpoints": etcd, "cluster": cluster, "credentials.insecure": insecure}
    settings = CoordinatorConfig.load(flags=flags, env=os.environ, path=config)
    work = _Work(
        settings, storage or [], timeout_s, replace=replace or in_place, verify=verify, quiet=as_json
    )
    if in_place:
        plan = work.plan_in_place()
    else:
        assert from_ is not None
        plan = work.plan(partial(_base_of, from_, name, lineage, settings, timeout_s))
    _carry_out(work, plan, dry_run=dry_run, yes=yes, as_json=as_json)


def rebuild(
    storage: StorageRoots = None,
    etcd: Etcd = None,
    cluster: Cluster = None,
    lineage: Annotated[
        str,
        typer.Option(
            "--lineage", help="The cluster whose jobs to restore, if the roots have those of several."
        ),
    ] = "",
    insecure: Insecure = None,
    config: Config = None,
    replace: Replace = False,
    verify: Verify = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    timeout_s: TimeoutS = 30.0,
    as_json: Json = False,
) -> None:
    """Rebuild the control plane from storage alone: etcd is lost, and there is no backup.

    Every committed checkpoint is in the catalog again, and each job goes on from its newest checkpoint. Limits,
    phases, pins, tags, retention and history are not in storage: the next run of a job brings its limits.

    Example: strata controlplane rebuild --storage /mnt/checkpoints --storage s3://bucket/runs --etcd host1:2379
    """
    if not storage:
        raise ConfigError(
            "no storage root to search is given", hint="pass --storage ROOT, once for each root"
        )
    flags = {"etcd.endpoints": etcd, "cluster": cluster, "credentials.insecure": insecure}
    settings = CoordinatorConfig.load(flags=flags, env=os.environ, path=config)
    work = _Work(settings, storage, timeout_s, replace=replace, verify=verify, quiet=as_json)
    _carry_out(work, work.plan_from_storage(lineage), dry_run=dry_run, yes=yes, as_json=as_json)


# -- the base of a restore


def _base_of(place: str, name: str, lineage: str, settings: CoordinatorConfig, timeout_s: float) -> Base:
    """Return the keys of a backup; a file must be a snapshot that `etcdctl snapshot save` made."""
    from strata.controlplane.backup_store import backup_to_restore, find_metadata  # noqa: PLC0415  # likewise
    from strata.controlplane.names import parse_stem  # noqa: PLC0415  # slow to import
    from strata.controlplane.places import open_place  # noqa: PLC0415  # likewise
    from strata.controlplane.restoring import download  # noqa: PLC0415  # likewise

    with tempfile.TemporaryDirectory(prefix="strata-restore-") as folder:
        snapshot, uid, record = Path(place), "", None
        source = f"the snapshot {place}"
        if not snapshot.is_file():
            where = open_place(place)
            if name == "newest":
                wanted_name = backup_to_restore(where, cluster=settings.cluster, lineage=lineage)
            else:
                wanted_name = parse_stem(name)
            described = find_metadata(where, wanted_name)
            if described.cluster != settings.cluster:
                raise Refused(
                    f"{wanted_name.stem} is a backup of cluster {described.cluster}, and not of {settings.cluster}",
                    hint="pass --cluster",
                )
            snapshot, uid = Path(folder) / "snapshot.db", described.cluster_uid
            source = f"the backup of {utc_text(described.unix_ms)}"
            record = encode(
                Backup(
                    revision=described.revision,
                    unix_ms=described.unix_ms,
                    where=where.uri,
                    size_bytes=described.size_bytes,
                )
            )
            with byte_progress(f"reading {wanted_name.stem}", described.size_bytes) as advance:
                download(where, wanted_name, described, snapshot, advance=advance)
        elif name != "newest" or lineage:
            raise ConfigError(
                "--name and --lineage need a place with backups, and --from names a snapshot's file"
            )
        base = _read_snapshot(snapshot, Path(folder) / "etcd", settings, source, uid, timeout_s)
    return base if record is None else dataclasses.replace(base, backup=record)


def _read_snapshot(
    snapshot: Path, folder: Path, settings: CoordinatorConfig, source: str, uid: str, timeout_s: float
) -> Base:
    """Return the keys of a snapshot, read from a temporary etcd on loopback."""
    from strata.cli.etcd.access import open_store  # noqa: PLC0415  # grpc, which not every command needs
    from strata.controlplane.restoring import read_base  # noqa: PLC0415  # slow to import
    from strata.devcluster.etcd_cluster import EtcdCluster  # noqa: PLC0415  # likewise

    own = settings.etcd
    serving = EtcdCluster.from_snapshot(folder, snapshot.absolute())
    try:
        # The snapshot has the cluster's etcd users, if authentication is on.
        access = EtcdConfig(
            endpoints=serving.endpoints, username=own.username, password_file=own.password_file
        )

        async def read() -> Base:
            async with await open_store(access, timeout_s=timeout_s) as store:
                return await read_base(store, ClusterKeys(settings.cluster), source=source, uid=uid)

        return asyncio.run(read())
    finally:
        serving.kill()


# -- the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The keys to write, and their sources: the surveys of storage, and the keys that are in etcd."""

    base: Base
    why: str
    surveys: Sequence[Survey]
    searched: Searched
    keys: RestoredKeys
    held: Keyspace
    now_unix_ms: int


class _Work:
    """Plans a restore, and opens the store to write it."""

    def __init__(
        self,
        settings: CoordinatorConfig,
        roots: Sequence[str],
        timeout_s: float,
        *,
        replace: bool,
        verify: bool,
        quiet: bool,
    ) -> None:
        self.settings = settings
        self.keys = ClusterKeys(settings.cluster)
        self._roots = roots
        self._timeout_s = timeout_s
        self._replace = replace
        self._verify = verify
        self._quiet = quiet

    def plan(self, read_base: Callable[[], Base]) -> _Plan:
        """Plan a restore from the keys of a backup. The backup is read last, because reading it takes longest."""
        held, surveys = self._held(), self._surveys()
        base = read_base()
        return self._planned(base, f"restored from {base.source}", surveys, held)

    def plan_in_place(self) -> _Plan:
        """Plan a restore of the keys that are in etcd."""
        from strata.controlplane.restoring import base_in_place  # noqa: PLC0415  # slow to import

        held = self._held()
        base = base_in_place(held)
        return self._planned(base, f"restored in place, from {base.source}", self._surveys(), held)

    def plan_from_storage(self, requested_lineage: str) -> _Plan:
        """Plan a cluster that is built from storage alone."""
        from strata.controlplane.restoring import Base, lineage_of  # noqa: PLC0415  # slow to import

        surveys = self._surveys()
        base = Base(jobs={}, uid=lineage_of(surveys, requested_lineage), source="storage")
        return self._planned(base, "rebuilt from storage", surveys, self._held())

    def again(self, plan: _Plan, held: Keyspace) -> _Plan:
        """Plan again, once no other process writes; checkpoints that the earlier plan verified are not read again."""
        from strata.controlplane.restoring import base_in_place  # noqa: PLC0415  # slow to import
        from strata.controlplane.storage_search import survey  # noqa: PLC0415  # likewise

        base = base_in_place(held) if plan.base.in_place else plan.base
        surveys = [survey(each.storage) for each in plan.surveys]
        return self._planned(base, plan.why, surveys, plan.held, earlier=plan)

    async def store(self) -> EtcdStore:
        from strata.cli.etcd.access import open_store  # noqa: PLC0415  # grpc, which not every command needs

        return await open_store(self.settings.etcd, timeout_s=self._timeout_s)

    def _surveys(self) -> list[Survey]:
        from strata.cli.checkpoints.root_listing import open_storage  # noqa: PLC0415  # slow to import
        from strata.controlplane.storage_search import survey  # noqa: PLC0415  # likewise

        storages = {storage.uri: storage for storage in map(open_storage, self._roots)}
        return [survey(storage) for storage in storages.values()]

    def _held(self) -> Keyspace:
        from strata.controlplane.rewriting import read_keyspace  # noqa: PLC0415  # slow to import

        async def read() -> Keyspace:
            async with await self.store() as store:
                return await read_keyspace(store, self.keys)

        held = asyncio.run(read())
        if held.jobs and held.restoring is None and not self._replace:
            names = sorted({name for key in held.jobs if (name := self.keys.job_of(key))})
            raise Refused(
                f"etcd holds {len(names)} jobs of cluster {self.keys.cluster}: {', '.join(names[:5])}",
                hint="restore --in-place completes the data in etcd; --replace replaces it",
            )
        return held

    def _planned(
        self,
        base: Base,
        why: str,
        surveys: Sequence[Survey],
        held: Keyspace,
        *,
        earlier: _Plan | None = None,
    ) -> _Plan:
        from strata.controlplane.restoring import expected  # noqa: PLC0415  # slow to import
        from strata.controlplane.storage_search import search  # noqa: PLC0415  # likewise
        from strata.core.restore.control_plane import complete  # noqa: PLC0415  # likewise
        from strata.core.restore.lineage import lineage  # noqa: PLC0415  # likewise

        with item_progress("checkpoints looked at") as advance:
            searched = search(
                surveys,
                lineage(base.uid),
                expected=expected(base.jobs, self.keys),
                earlier=earlier.searched.found if earlier is not None else None,
                verify=self._verify,
                on_folder=advance,
            )
        now = earlier.now_unix_ms if earlier is not None else _now_unix_ms()
        keys = complete(self.keys, base.jobs, searched.found, why=why, now_unix_ms=now)
        return _Plan(
            base=base, why=why, surveys=surveys, searched=searched, keys=keys, held=held, now_unix_ms=now
        )


# -- writing


def _carry_out(work: _Work, plan: _Plan, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    if as_json and not (yes or dry_run):
        raise ConfigError("--json cannot ask", hint="pass --yes, or --dry-run")
    if not as_json:
        _show(work, plan)
    if dry_run:
        if as_json:
            print_values(_values(work, plan, uid=""))
        return
    if not yes:
        typer.confirm(f"Write this to etcd, as cluster {work.keys.cluster}?", abort=True, err=True)
    with _explain_interrupt():
        plan, uid = asyncio.run(_write(work, plan, say=not as_json))
    if as_json:
        print_values(_values(work, plan, uid=uid))
        return
    typer.echo(f"done: cluster {work.keys.cluster} is {uid}")
    if plan.held.replicas:
        typer.echo("next: nothing; the coordinators go on by themselves, and trainings with them")
    else:
        typer.echo("next: start the coordinators; trainings that still run go on by themselves")


async def _write(work: _Work, plan: _Plan, *, say: bool) -> tuple[_Plan, str]:
    from strata.controlplane.rewriting import Rewriting, read_keyspace  # noqa: PLC0415  # slow to import
    from strata.core.restore.records import Restoring  # noqa: PLC0415  # likewise

    who = f"{_user()}@{socket.gethostname()}, process {os.getpid()}"
    me = Restoring(
        who=who, since_unix_ms=_now_unix_ms(), source=plan.base.source, in_place=plan.base.in_place
    )
    async with await work.store() as store:
        rewriting = Rewriting(store, work.keys, me, sleep=asyncio.sleep)
        try:
            before = await rewriting.begin(plan.held)
            if before is not None and say:
                typer.echo(f"taken over: the restore that {before}")
            shown, held = plan.keys, await read_keyspace(store, work.keys)
            plan = await asyncio.to_thread(work.again, plan, held)
            if plan.keys.values != shown.values and say:
                typer.echo("the keys in etcd changed meanwhile; this is the new plan:")
                _show_plan(plan)
            await rewriting.bring(plan.keys.values, backup=plan.base.backup)
            uid = await rewriting.finish(plan.base.uid, int(time.time()), secrets.token_hex(4))
        except Conflict:
            raise  # another restore has taken over
        except StrataError:
            sys.stderr.write(_AGAIN)
            raise
    return plan, uid.uid


def _show(work: _Work, plan: _Plan) -> None:
    held, roots = plan.held, plan.searched.found.roots
    typer.echo(f"cluster {work.keys.cluster} ({plan.base.uid}) is to be {plan.why}")
    typer.echo(f"searched: {', '.join(roots) or 'no storage root; later commits are not known (--storage)'}")
    _show_plan(plan)
    if held.restoring is not None:
        typer.echo(f"an earlier restore was interrupted, and is taken over: {held.restoring}")
    if held.replicas:
        typer.echo(f"coordinators run, and wait meanwhile: {', '.join(held.replicas)}")


def _show_plan(plan: _Plan) -> None:
    print_plan(plan.keys.jobs, plan.searched.skipped, empty="it has no jobs")


def _values(work: _Work, plan: _Plan, *, uid: str) -> dict[str, Any]:
    return {
        "cluster": work.keys.cluster,
        "uid_before": plan.base.uid,
        "uid": uid,
        "written": bool(uid),
        "source": plan.base.source,
        "searched": list(plan.searched.found.roots),
        "jobs": [as_values(job) for job in plan.keys.jobs],
        "skipped": list(plan.searched.skipped),
        "coordinators": list(plan.held.replicas),
    }


@contextlib.contextmanager
def _explain_interrupt() -> Iterator[None]:
    """After Ctrl-C, print the state of the restore and the command that completes it."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted: {_AGAIN}")
        raise typer.Exit(INTERRUPTED) from None


def _user() -> str:
    with contextlib.suppress(OSError, KeyError):
        return getpass.getuser()
    return "somebody"


def _now_unix_ms() -> int:
    return time.time_ns() // 1_000_000
