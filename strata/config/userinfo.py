"""Refuses addresses that contain a user or a password, so that none can appear in an error or a log.

Strata takes no credentials in an address: each kind of server has separate settings for credentials. An address with
credentials is refused before any other code reads it, and the error does not repeat it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from strata.errors import ConfigError


def refuse_userinfo(what: str, addresses: Iterable[str], *, hint: str) -> None:
    """Raise `ConfigError`, without the address's text, if any address has an `@`, percent-encoded or not.

    Call this with all addresses before parsing any of them: a comma in a password splits one address into two.
    """
    for address in addresses:
        text = unicodedata.normalize("NFKC", address)  # urlsplit normalises in the same way: U+FF20 becomes @
        if not text.startswith("unix:") and ("@" in text or "%40" in text):
            raise ConfigError(f"{what} has a user or a password in it", hint=hint)
