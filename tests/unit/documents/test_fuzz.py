"""Search for documents that break Strata: 20 s in all, or the time of STRATA_FUZZ_S (600 for 10 minutes).

Each target runs in its own process, and the memory of this process is measured. STRATA_FUZZ_SEED is the first seed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SHOWN
from tests.unit.documents.fuzz import TARGETS

SECONDS = float(os.environ.get("STRATA_FUZZ_S", "20")) / len(TARGETS)
FIRST_SEED = os.environ.get("STRATA_FUZZ_SEED", "0")


@pytest.mark.timeout(SECONDS + 170)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_hostile_documents_raise_our_errors_in_bounded_time_and_memory(
    target: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    # the start of the process and its work before the first example do not count as search time
    program = (
        sys.executable,
        "-m",
        "tests.unit.documents.fuzz",
        target,
        str(SECONDS - 1.5),
        FIRST_SEED,
        str(tmp_path),
    )
    done = subprocess.run(program, capture_output=True, text=True, timeout=SECONDS + 160, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    record_property(SHOWN, f"fuzz: {done.stdout.strip()}")
