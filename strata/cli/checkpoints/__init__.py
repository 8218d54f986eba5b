"""`strata checkpoints`: list, verify, pin, tag, delete, copy and rewind to checkpoints.

The commands read a job's catalog from a coordinator. With `--storage` they read only a storage root.
`retention` and `rewind` need a coordinator.
"""

from __future__ import annotations

import typer

from strata.cli.checkpoints import copying, listing, policy, retention, verification

app = typer.Typer(
    help="List, show, verify, compare, keep, delete and move checkpoints.", no_args_is_help=True
)
app.command("list")(listing.list_checkpoints)
app.command("show")(listing.show)
app.command("verify")(verification.verify_checkpoints)
app.command("diff")(verification.diff)
app.command("pin")(retention.pin)
app.command("unpin")(retention.unpin)
app.command("tag")(retention.tag)
app.command("untag")(retention.untag)
app.command("delete")(retention.delete)
app.command("gc")(retention.collect)
app.command("export")(copying.export_checkpoint)
app.command("import")(copying.import_file)
app.command("fork")(copying.fork)
app.command("repair")(copying.repair)
app.command("retention")(policy.retention)
app.command("rewind")(policy.rewind)
