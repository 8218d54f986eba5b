"""Health of an agent's ranks and devices: liveness, stacks, NCCL's flight recorder, NVML.

Begin with `rank_watch`.
"""
