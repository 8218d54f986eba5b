"""torch's distributed checkpoints (DCP) through Strata's engine and catalog.

    import torch.distributed.checkpoint as dcp
    from strata.integrations.dcp import JsonSavePlanner, StrataReader, StrataWriter

    writer = StrataWriter("/data/checkpoints")
    dcp.save(state, checkpoint_id="120", storage_writer=writer, planner=JsonSavePlanner())
    dcp.load(state, storage_reader=StrataReader("/data/checkpoints"), planner=JsonLoadPlanner())

The writer hashes and writes the items that DCP's planner assigns to each rank, and `finish` commits. Under `strata run`
the commit is a record in the coordinators' catalog, elsewhere a marker in storage.
"""

from strata.integrations.dcp.planners import JsonLoadPlanner, JsonSavePlanner
from strata.integrations.dcp.reader import StrataReader
from strata.integrations.dcp.writer import StrataWriter

__all__ = ["JsonLoadPlanner", "JsonSavePlanner", "StrataReader", "StrataWriter"]
