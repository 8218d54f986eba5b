"""Peak memory of saves and restores besides the state: at most two copies of the state, and less if memory is short.

A child process measures the peak:
1. It makes the state and saves a small one, so that imports and thread stacks do not count.
2. It resets the kernel's peak of its resident memory.
3. It saves or restores, and prints the rise of the peak.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import need
from tests.processes import Record, Talker

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
STATE_BYTES = 256 * MIB
ROUNDING_BYTES = 2 * 2 * MIB + 8 * MIB
"""Two arenas (save buffers) round up to huge pages. The interpreter uses the rest for digests, manifests and
allocator pages."""
ROOMS_BYTES = 2 * 4 * 8 * MIB
"""Each of four threads may assemble a block of 8 MiB and copy it to an aligned buffer for direct I/O."""

MEASURE = """
import json, sys, threading
import numpy as np
import strata
def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))
def forget():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is what it is now
    return status("VmRSS")
def arrays(value):
    # of many sizes, none a multiple of a page
    sizes = [1, 3_000_001, 17, 20_000_003, 4099]
    rest = STATE_BYTES - 4 * sum(sizes)
    return {f"w{number}": np.full(size, value, np.float32) for number, size in enumerate([*sizes, rest // 4])}
def measured(work):
    before = forget()
    work()
    print(json.dumps({"event": "peak", "bytes": status("VmHWM") - before}))
state = arrays(1)
"""
SAVES = """
settings, kinds = json.loads(sys.argv[2]), json.loads(sys.argv[3])
if "strided" in sys.argv:
    state = {name: np.repeat(array.reshape(-1, 1), 2, axis=1)[:, 0] for name, array in state.items()}
with strata.CheckpointManager(sys.argv[1] + "/small") as small:
    small.save_state({"w": np.ones(4 << 20, np.uint8)}, 1, sync=True)
ckpt = strata.CheckpointManager(sys.argv[1] + "/run", **settings)
copied = threading.Event()
def until_copied(info):
    assert copied.wait(40)
def save():
    for step, kind in enumerate(kinds, 1):
        wait = until_copied if len(kinds) > 1 and step == 1 else None
        ckpt.save_state(state, step, checkpoint_type=kind, progress=wait)
        if step == min(2, len(kinds)):
            copied.set()  # the third one finds two in flight, and waits
    ckpt.wait_until_finished()
measured(save)
assert ckpt.all_steps() == list(range(1, len(kinds) + 1))
ckpt.close()
"""

RESTORES = """
import gc, pathlib
from tests.unit.checkpoint.ports import Cluster
root, damage, coordinated = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), "coordinated" in sys.argv
cluster = Cluster(a=1)
def manager(name, **more):
    if coordinated:
        more |= {"client": cluster.port(0, restore=cluster.restore_point()), "corrupt_wait_s": 0.1}
    return strata.CheckpointManager(root / name / "near", replica_path=root / name / "far", **more)
def saved(name, state, steps):
    with manager(name) as ckpt:
        for step in steps:
            ckpt.save_state(state, step)
            ckpt.wait_until_finished()
        ckpt.wait_until_replicated(60)
        return ckpt.all_steps()
def flip(file, chunk):
    with open(file, "r+b") as image:
        image.seek(chunk * (8 << 20) + 99)
        byte = image.read(1)
        image.seek(-1, 1)
        image.write(bytes([byte[0] ^ 1]))
if not coordinated:
    small = {"w": np.ones(4 << 20, np.uint8)}
    saved("small", small, [1])
    with manager("small") as ckpt:
        ckpt.restore(small)
saved("run", state, [1, 2])
for where, steps, chunk in damage:
    for step in steps:
        (image,) = (root / "run" / where).glob(f"**/step-{step:012d}-*/*.safetensors")
        flip(image, chunk)
with manager("run") as ckpt:
    def restore():
        try:
            found = ckpt.restore(state)
        except strata.StrataError as error:
            print(json.dumps({"event": "restored", "error": str(error)}))
        else:
            print(json.dumps({"event": "restored", "step": found and found.step}))
    gc.disable()  # what only it would find counts
    measured(restore)
"""


def peak_bytes(program: str, *arguments: str) -> int:
    """Return the rise of the program's peak resident memory during the measured save or restore."""
    need("clear_refs", _clears(), "a kernel whose /proc/self/clear_refs takes a 5")
    record = Record()
    text = MEASURE.replace("STATE_BYTES", str(STATE_BYTES)) + program
    talker = Talker([sys.executable, "-c", text, *arguments], name="program", record=record, cwd=ROOT)
    assert talker.join(120) == 0, record.events
    return int(record.wait_one("peak")["bytes"])


def _clears() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def saved(tmp_path: Path, *kinds: str, strided: bool = False, **settings: object) -> int:
    more = ["strided"] if strided else []
    return peak_bytes(SAVES, str(tmp_path), json.dumps(settings), json.dumps(kinds), *more)


@pytest.mark.parametrize("copies", [1, 3])
def test_the_peak_memory_measurement_counts_freed_copies(copies: int) -> None:
    found = peak_bytes(f"measured(lambda: [arrays(value) for value in range({copies})])")
    assert abs(found - copies * STATE_BYTES) <= ROUNDING_BYTES


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("kind", ["full", "incremental"])
def test_a_save_holds_one_copy_of_the_state_in_memory(tmp_path: Path, kind: str, strided: bool) -> None:
    assert saved(tmp_path, kind, strided=strided) <= STATE_BYTES + ROUNDING_BYTES


@pytest.mark.parametrize("kinds", [("full", "full", "full"), ("full", "incremental")])
def test_overlapping_saves_take_at_most_two_copies_of_the_state(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    assert STATE_BYTES < saved(tmp_path, *kinds) <= 2 * STATE_BYTES + ROUNDING_BYTES


@pytest.mark.parametrize("kind", ["full", "incremental"])
def test_a_low_memory_save_takes_only_its_threads_buffers(tmp_path: Path, kind: str) -> None:
    found = saved(tmp_path, kind, low_memory=True)
    assert found <= ROOMS_BYTES + ROUNDING_BYTES, "which does not grow with the state"
    assert found <= 1.1 * STATE_BYTES


def test_a_low_memory_save_copies_a_strided_tensor_once(tmp_path: Path) -> None:
    found = saved(tmp_path, "full", low_memory=True, strided=True)
    assert found <= 1.1 * STATE_BYTES + ROUNDING_BYTES


NEAR, FAR = ["near", [2], 31], ["far", [2], 31]
ELSEWHERE = ["far", [2], 30]


@pytest.mark.parametrize("catalog", ["alone", "coordinated"])
@pytest.mark.parametrize(
    "damage",
    [[], [NEAR], [NEAR, ELSEWHERE], [NEAR, FAR], [["near", [1, 2], 31], ["far", [1, 2], 31]]],
    ids=["whole", "near", "patched", "step before", "lost"],
)
def test_a_damaged_checkpoint_does_not_raise_the_memory_of_a_restore(
    tmp_path: Path, damage: object, catalog: str
) -> None:
    found = peak_bytes(RESTORES, str(tmp_path), json.dumps(damage), catalog)
    assert found <= STATE_BYTES + ROOMS_BYTES + ROUNDING_BYTES
