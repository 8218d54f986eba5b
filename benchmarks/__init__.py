"""Measurements of what Strata promises in numbers; `python -m benchmarks` runs them all."""
