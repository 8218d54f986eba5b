"""What a process tells about itself: structured logs, counters, how late its loop is."""

from strata.observe.logs import Logger, configure, get_logger

__all__ = ["Logger", "configure", "get_logger"]
