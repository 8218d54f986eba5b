"""An ordinary torch script, written for torchrun; it does not use Strata."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.ranks.saying import say

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
say("sum", value=total.item(), world=dist.get_world_size())
dist.destroy_process_group()
