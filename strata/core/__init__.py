"""Pure decisions and data: no clock, no randomness, no I/O, no concurrency.

Everything here takes plain values and returns plain values. Time and random identifiers are arguments.
"""
