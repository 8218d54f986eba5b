"""The state that a replica shows to people: jobs, diagnoses, findings and recent events.

Begin with `observed`, which the dashboard and the metrics read.
"""
