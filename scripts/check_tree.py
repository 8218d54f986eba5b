"""House rules that no linter knows, checked over the files git tracks.

- a hand-written .py or .proto file is at most 500 lines: past that, look for the two ideas in it;
- no registry host and no path of one machine in any file: a clone takes both from where it runs.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 500
GENERATED = ("strata/v1/", "strata/etcdapi/")
BANNED = {
    "a registry's host": re.compile(
        r"\b(?:files\.pythonhosted|(?:test\.)?pypi|(?:deb|ftp|security|snapshot)\.debian"
        r"|(?:archive|security|ports)\.ubuntu|registry\.npmjs|download\.pytorch|proxy\.golang)\.\w+"
    ),
    "a path of one machine": re.compile(r"(?<![\w.$}])/(?:work|root|opt/wheels|opt/pypi)(?:/|\b)"),
    "the steering folder, which a clone does not have": re.compile(r"\.\./shared\b"),
}


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    return sorted(name for name in listed.stdout.decode().split("\0") if name and Path(name).is_file())


def problems(name: str) -> Iterator[str]:
    try:
        text = Path(name).read_text()
    except UnicodeDecodeError:
        return  # a picture or an archive
    lines = text.splitlines()
    hand_written = name.endswith((".py", ".proto")) and not name.startswith(GENERATED)
    if hand_written and len(lines) > MAX_LINES:
        yield f"{name}: {len(lines)} lines, at most {MAX_LINES}"
    for number, line in enumerate(lines, 1):
        for what, pattern in BANNED.items():
            if pattern.search(line) and name != "scripts/check_tree.py":
                yield f"{name}:{number}: names {what}"


def main() -> int:
    names = tracked()
    found = [problem for name in names for problem in problems(name)]
    for problem in found:
        print(problem)
    print(f"house rules: {len(names)} files, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
