"""Health of a job's ranks and devices: stalls, stragglers, attribution, goodput, and the findings shown to people.

Begin with `findings`.
"""
