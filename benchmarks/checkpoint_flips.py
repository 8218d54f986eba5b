"""One flipped bit anywhere in a checkpoint: which library finds it, and which loads it without an error.

    python -m benchmarks.checkpoint_flips [--json FILE] [--flips 1000] [--peer-flips 300] [--seed 1]

Each library saves the same tensors. Then one random bit of its files is flipped, everything is loaded, and the bit is
put back. A bit is *found* if the load fails, or (Strata) if the previous checkpoint is restored instead. The bit is
*silent* if other values than the saved ones are loaded without an error. The bit is *without effect* if the loaded
values are the saved ones (a bit of padding, or of unread data). Strata also reads and verifies unused data, so Strata
must find every bit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from strata.client.checkpoints.manager import CheckpointManager

# torch exports its documented names, but not in a form that a type checker sees
dcp: Any = importlib.import_module("torch.distributed.checkpoint")

ROOT: Final = Path(__file__).resolve().parent.parent
GOAL: Final = "100 % of ours found, and the good checkpoint before it restored instead"

State = dict[str, torch.Tensor]


def state_of(seed: int) -> State:
    """Return the tensors of a small model."""
    made = torch.Generator().manual_seed(seed)
    shapes = [(64, 64), (64,), (128, 32), (7,)]
    return {f"layer{i}.weight": torch.randn(shape, generator=made) for i, shape in enumerate(shapes)}


def zeros() -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in state_of(1).items()}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """Flip one bit of a file while the body runs."""
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    try:
        yield
    finally:
        path.write_bytes(whole)


def tried(folder: Path, load: Callable[[], State | None], flips: int, seeded: random.Random) -> Counter[str]:
    """Flip one bit at a time in the files below `folder`; return the counts of results."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    found = Counter[str]()
    for _ in range(flips):
        (index,) = seeded.choices(range(len(files)), weights=sizes)
        with flipped(files[index], seeded.randrange(8 * sizes[index])):
            try:
                state = load()
            except (Exception, dcp.CheckpointException):  # noqa: BLE001  # found; DCP's error is no Exception
                state = None
        if state is None:
            found["found"] += 1
        else:
            found["without effect" if same(state, state_of(2)) else "silent"] += 1
    return found


def ours(folder: Path, flips: int, seeded: random.Random) -> Counter[str]:
    """Return the counts for Strata; it must find every bit and restore the previous checkpoint."""
    with CheckpointManager(folder, capture_rng=False) as manager:
        for step in (1, 2):
            manager.save_state(state_of(step), step).wait()
        newest = Path(manager.all_checkpoints()[-1].path.removeprefix("file://"))

        def load() -> State | None:
            state: Any = zeros()
            restored = manager.restore(state)
            if restored is not None and restored.step == 1 and same(state, state_of(1)):
                return None  # found: the previous good checkpoint was restored
            return dict(state)

        return tried(newest, load, flips, seeded)


def by_torch(folder: Path, flips: int, seeded: random.Random) -> Counter[str]:
    torch.save(state_of(2), folder / "state.pt")
    return tried(folder, lambda: dict(torch.load(folder / "state.pt", weights_only=True)), flips, seeded)


def by_safetensors(folder: Path, flips: int, seeded: random.Random) -> Counter[str]:
    save_file(state_of(2), folder / "state.safetensors")

    def load() -> State:
        # a copy, because the bit is put back in the mapped file
        return {name: tensor.clone() for name, tensor in load_file(folder / "state.safetensors").items()}

    return tried(folder, load, flips, seeded)


def by_dcp(folder: Path, flips: int, seeded: random.Random) -> Counter[str]:
    dcp.save(state_of(2), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)

    def load() -> State:
        state = zeros()
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        return state

    return tried(folder, load, flips, seeded)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--peer-flips", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.getLogger("strata.checkpoint").setLevel(logging.CRITICAL)  # a thousand errors are expected
    warnings.simplefilter("ignore")
    savers = {"strata": ours, "torch.save": by_torch, "safetensors": by_safetensors, "DCP": by_dcp}
    results: dict[str, dict[str, int]] = {}
    base = ROOT / ".strata"
    base.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as name:
        for saver, run in savers.items():
            folder = Path(name) / saver
            folder.mkdir()
            flips = args.flips if saver == "strata" else args.peer_flips
            results[saver] = dict(run(folder, flips, random.Random(args.seed)))
            print(f"{saver}: {results[saver]} of {flips}", flush=True)
    met = results["strata"] == {"found": args.flips}
    peers = "; ".join(
        f"{saver} loads {results[saver].get('silent', 0) / args.peer_flips:.0%} silently"
        for saver in savers
        if saver != "strata"
    )
    print(f"{results['strata'].get('found', 0)} of {args.flips} flipped bits found; {peers}")
    if args.json is not None:
        args.json.write_text(
            json.dumps({"benchmark": "checkpoint_flips", "goal": GOAL, "met": met, "results": results})
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
