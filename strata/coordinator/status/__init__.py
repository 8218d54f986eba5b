"""What a replica tells people: the state of jobs, diagnoses, findings and recent events.

Begin with `observed`, which the dashboard and the metrics read.
"""
