"""Workloads: programs that use Strata as its users do, and record their operations and the results."""
