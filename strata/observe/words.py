"""Numbers, durations and sizes as text for people, on the command line and on the status page."""

from __future__ import annotations

from itertools import pairwise


def printable(text: str) -> str:
    """Return text without control characters and changes of direction, which a program's output may contain."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "?" for char in text)


def age(milliseconds: float) -> str:
    """Return a duration as rounded text: `340 ms`, `12 s`, `3 min`, `2.5 h`, `4 d`."""
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1000
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"


def counted(members: int, standbys: int) -> str:
    """Return the number of members, and the number of standbys among them: `3 members (1 standby)`."""
    among = f" ({standbys} standby)" if standbys else ""
    return f"{members} member{'' if members == 1 else 's'}{among}"


def unreachable(since_unix_ms: int, now_unix_s: float) -> str:
    """Return `unreachable for 14 s`; if no leader has recorded the time (0), without the duration."""
    if not since_unix_ms:
        return "unreachable"
    return f"unreachable for {age(max(0.0, 1000 * now_unix_s - since_unix_ms))}"


def size(count: int) -> str:
    """Return a number of bytes in the unit that fits."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def span(milliseconds: float) -> str:
    """Return a duration in its two largest units: `48 s`, `3 min 12 s`, `2 h 31 min`, `4 d 2 h`."""
    seconds = int(max(0.0, milliseconds) / 1000 + 0.5)
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    for (unit, length), (lesser, part) in pairwise(units):
        if seconds >= length:
            rest = seconds % length // part
            return f"{seconds // length} {unit} {rest} {lesser}" if rest else f"{seconds // length} {unit}"
    return f"{seconds} s"


def figure(value: float) -> str:
    """Return a number with about three significant digits: `1,204`, `27.4`, `5.00`, `0.0312`, `1.5e-05`."""
    magnitude = abs(value)
    if magnitude >= 1e9 or 0 < magnitude < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if magnitude >= 100 else f"{value:#.3g}".rstrip(".")


def percent(ratio: float) -> str:
    """Return a share as text: `12.0 %`."""
    return f"{100 * ratio:.1f} %"
