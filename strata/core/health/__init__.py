"""Health of a job's ranks and devices: stalls, stragglers, attribution, goodput, and the findings that are shown.

Begin with `findings`.
"""
