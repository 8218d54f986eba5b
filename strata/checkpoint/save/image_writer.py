"""Writing one rank's image: its whole snapshot, its share of replicated tensors, or the chunks changed since the base.

A whole image is hashed while it is written, straight from the snapshot's memory. A chunk that was hashed already,
to compare it with a base or with other ranks, is not hashed again. An image that lacks some chunks is assembled
from its other chunks.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from strata.checkpoint.format.digest import chunks, digest
from strata.checkpoint.format.image import Layout, lay_out
from strata.checkpoint.format.manifest import Identity, RankManifest, image_name
from strata.checkpoint.save.bases import Plan
from strata.checkpoint.save.incremental import entries, image_pieces
from strata.checkpoint.snapshot.snapshot import Snapshot
from strata.checkpoint.snapshot.tensors import TensorSpec
from strata.checkpoint.storage.pipeline import OnBlock, write_image
from strata.checkpoint.storage.sink import Storage, unobserved


def layout_of(snapshot: Snapshot, plan: Plan) -> Layout:
    """Return the layout of the image that the plan makes of the snapshot."""
    partly = plan.delta.partly if plan.delta is not None else _shared(snapshot)
    return lay_out(_specs(snapshot), partly=partly) if partly else snapshot.layout


def write_part(
    storage: Storage,
    folder: str,
    snapshot: Snapshot,
    plan: Plan,
    *,
    identity: Identity,
    rank: int,
    threads: int,
    on_block: OnBlock,
) -> RankManifest:
    """Write the rank's image to `folder`; return its manifest once the image is durable."""
    layout = layout_of(snapshot, plan)
    whole = layout is snapshot.layout
    if not whole:
        snapshot.wait()  # the image's bytes are not written in the order in which they are copied
    parts = {tensor: list(chunks(view)) for tensor, view in snapshot.views.items()}
    known = plan.digests or {}
    sink = storage.sink(f"{folder}/{image_name(rank)}")
    try:
        sink.begin(layout.size_bytes)
        found = write_image(
            sink,
            snapshot.pieces if whole else image_pieces(layout, snapshot.views),
            [chunk for part in parts.values() for chunk in part],
            known=[text for name, part in parts.items() for text in known.get(name) or [""] * len(part)],
            threads=threads,
            on_block=on_block,
            ready=snapshot.wait if whole else unobserved,
        )
        sink.finish()
    finally:
        sink.abort()
    left = iter(found)
    digests = {name: tuple(itertools.islice(left, len(part))) for name, part in parts.items()}
    snapshot.on_hashed(digests)
    kept = plan.delta.kept if plan.delta is not None else {}
    tensors, files = entries(layout, _specs(snapshot), digests, kept, snapshot.shards)
    for tensor in snapshot.shares:
        tensors[tensor] = replace(tensors[tensor], replicated=True)
    return RankManifest(
        identity=identity,
        rank=rank,
        image=image_name(rank),
        image_bytes=layout.size_bytes,
        header_bytes=len(layout.header),
        header_digest=digest(layout.header),
        tensors=tensors,
        tree=snapshot.tree,
        rng=snapshot.rng,
        files=files,
        mesh=snapshot.mesh,
    )


def _shared(snapshot: Snapshot) -> dict[str, tuple[range, ...]]:
    """Return the chunks that this rank writes, for each tensor that it does not write whole."""
    return {
        name: (mine,) if mine else ()
        for name, mine in snapshot.shares.items()
        if len(mine) < len(list(chunks(snapshot.views[name])))
    }


def _specs(snapshot: Snapshot) -> dict[str, TensorSpec]:
    return {tensor: place.spec for tensor, place in snapshot.places.items()}
