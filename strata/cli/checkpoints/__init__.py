"""`strata checkpoints`: what is saved, whether it is whole, and what shall become of it.

Every command looks at a job's catalog, or with `--storage` at a storage root alone; `retention` and `rewind` are asked of
coordinators.
"""

from __future__ import annotations

import typer

from strata.cli.checkpoints import keeping, listing, moving, policy, proving

app = typer.Typer(
    help="List, show, verify, compare, keep, delete and move checkpoints.", no_args_is_help=True
)
app.command("list")(listing.list_checkpoints)
app.command("show")(listing.show)
app.command("verify")(proving.verify_checkpoints)
app.command("diff")(proving.diff)
app.command("pin")(keeping.pin)
app.command("unpin")(keeping.unpin)
app.command("tag")(keeping.tag)
app.command("untag")(keeping.untag)
app.command("delete")(keeping.delete)
app.command("gc")(keeping.collect)
app.command("export")(moving.export_checkpoint)
app.command("import")(moving.import_file)
app.command("fork")(moving.fork)
app.command("repair")(moving.repair)
app.command("retention")(policy.retention)
app.command("rewind")(policy.rewind)
