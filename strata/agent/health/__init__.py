"""An agent's watch over its ranks and devices: liveness, stacks, NCCL's flight recorder, NVML.

Begin with `rank_watch`.
"""
