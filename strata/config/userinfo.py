"""No address has a user or a password in it, so that none can show in an error or a log.

Strata takes no credentials in an address: each kind of server has settings of its own for them. Who
writes one all the same is refused before anything else looks at the address, and none of it is repeated.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from strata.errors import ConfigError


def refuse_userinfo(what: str, addresses: Iterable[str], *, hint: str) -> None:
    """Return if no address has an `@`, percent-encoded or not; else raise `ConfigError` without its text.

    All of them are looked at before any is read: a comma in a password makes two addresses of one.
    """
    for address in addresses:
        text = unicodedata.normalize("NFKC", address)  # as urlsplit reads it: U+FF20 is an @
        if not text.startswith("unix:") and ("@" in text or "%40" in text):
            raise ConfigError(f"{what} has a user or a password in it", hint=hint)
