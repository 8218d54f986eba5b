"""`LoopState`: the state of a framework's loop as an entry of the `state` that `strata.init` saves and restores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final

from strata.errors import ConfigError, InvalidArgument

KEY: Final = "loop"


def check_arguments(arguments: Mapping[str, Any], *given: str) -> None:
    """Raise `ConfigError` for arguments of `strata.init` that a framework's user cannot choose."""
    for name in sorted(
        arguments.keys() & {"model", "optim", "sched", "data", "mesh", "virtual_ranks", *given}
    ):
        raise ConfigError(f"{name} cannot be given here", hint="leave it out: the framework decides it")


class LoopState(MutableMapping[str, Any]):
    """The program's own entries, and under `KEY` what `take` returns at the time of a save.

    A restore keeps the saved value in `restored`, because the framework can take it only piece by piece.
    """

    def __init__(self, own: MutableMapping[str, Any], take: Callable[[], Any]) -> None:
        if KEY in own:
            raise InvalidArgument(f"state has the key {KEY!r}", hint="choose another name for it")
        self.restored: Any = None
        self._own = own
        self._take = take
        self._begun = False

    def begin(self) -> None:
        """Have saves take the loop's state. Until then the entry is None, so a restore accepts a value of any shape."""
        self._begun = True

    def __getitem__(self, key: str) -> Any:
        if key != KEY:
            return self._own[key]
        return self._take() if self._begun else None

    def __setitem__(self, key: str, value: Any) -> None:
        if key == KEY:
            self.restored = value
        else:
            self._own[key] = value

    def __delitem__(self, key: str) -> None:
        del self._own[key]

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield KEY

    def __len__(self) -> int:
        return len(self._own) + 1
