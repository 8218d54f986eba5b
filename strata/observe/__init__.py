"""Observability of a process: structured logs, counters, event loop lag."""

from strata.observe.logs import Logger, configure, get_logger

__all__ = ["Logger", "configure", "get_logger"]
