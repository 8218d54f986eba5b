"""The options of `strata checkpoints` that select a job or a storage root, declared once for all commands.

A command takes `looking: SourceOptions` and is decorated with `on_source` or `on_catalog`. `on_source` replaces the
parameter by the options of a job and of a storage root, `on_catalog` only by the options of a job. Both add the
options for credentials. If the command has `--json`, both place it among these options.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from strata.cli.checkpoints.root_listing import StorageSource
from strata.cli.checkpoints.where import StorageRoot, catalog_of, opened
from strata.cli.console.credentials import connecting
from strata.cli.console.output import DEFAULT_ENDPOINTS, DEFAULT_TIMEOUT_S, Endpoints, Job, TimeoutS
from strata.config import Credentials

if TYPE_CHECKING:
    from strata.cli.checkpoints.cluster import ClusterSource

C = TypeVar("C", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The selected job or storage root, and how to connect."""

    endpoints: str
    job: str
    timeout_s: float
    credentials: Credentials
    storage: str | None = None

    @contextlib.contextmanager
    def source(self) -> Iterator[StorageSource | ClusterSource]:
        """Yield the checkpoints of the storage root; without a root, those of the job."""
        with opened(
            self.storage,
            endpoints=self.endpoints,
            job=self.job,
            timeout_s=self.timeout_s,
            credentials=self.credentials,
        ) as source:
            yield source

    @contextlib.contextmanager
    def catalog(self) -> Iterator[ClusterSource]:
        """Yield the checkpoints of the job."""
        with catalog_of(
            self.job, endpoints=self.endpoints, timeout_s=self.timeout_s, credentials=self.credentials
        ) as source:
            yield source


def on_source(command: C) -> C:
    """Give a command the options that select a job or a storage root."""
    return _with_options(command, storage=True)


def on_catalog(command: C) -> C:
    """Give a command the options that select a job."""
    return _with_options(command, storage=False)


def _with_options(command: C, *, storage: bool) -> C:
    taken = inspect.signature(command, eval_str=True)
    own = [p for p in taken.parameters.values() if p.name not in {"looking", "as_json"}]
    as_json = [p for p in taken.parameters.values() if p.name == "as_json"]
    where = [
        *([_option("storage", StorageRoot, None)] if storage else []),
        _option("endpoints", Endpoints, DEFAULT_ENDPOINTS),
        _option("job", Job, "default"),
    ]
    waits = _option("timeout_s", TimeoutS, DEFAULT_TIMEOUT_S)

    @functools.wraps(command)
    def looked(
        *,
        endpoints: str,
        job: str,
        timeout_s: float,
        credentials: Credentials,
        storage: str | None = None,
        **given: Any,
    ) -> Any:
        looking = SourceOptions(
            storage=storage, endpoints=endpoints, job=job, timeout_s=timeout_s, credentials=credentials
        )
        return command(**given, looking=looking)

    wrapper: Any = looked
    options = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *where, *as_json, waits)]
    wrapper.__signature__ = taken.replace(
        parameters=[*options, _option("credentials", Credentials, inspect.Parameter.empty)]
    )
    return connecting(wrapper)  # type: ignore[no-any-return]  # only typer calls a command


def _option(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
