"""Benchmarks of Strata's performance goals; `python -m benchmarks` runs them all."""
