"""Prints the size of pip's downloads for a requirement, before they happen.

A plain `torch` may be 200 MB or several GB of CUDA libraries, depending on the package index that the machine's pip
uses. pip's dry run lists the files, and their servers report the sizes.
"""

import json
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path


def planned_files(requirement: str) -> list[str]:
    """Return the URLs of the files that pip would download, including dependencies."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--report",
        "-",
        requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    return [item["download_info"]["url"] for item in report["install"]]


def size_bytes(url: str) -> int:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return Path(urllib.parse.unquote(parts.path)).stat().st_size
    request = urllib.request.Request(url, method="HEAD")  # noqa: S310 - a URL that pip itself would open
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - as above
        return int(answer.headers["Content-Length"])


def main() -> None:
    try:
        files = planned_files(sys.argv[1])
        total = sum(size_bytes(url) for url in files)
    except (
        subprocess.CalledProcessError,
        urllib.error.URLError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
    ):
        print("size unknown; a CPU build is about 200 MB, one with CUDA several GB")
        return
    print(f"{total / 1e6:,.0f} MB in {len(files)} files")


main()
