"""Pure decisions and data: no clock, no randomness, no I/O, no concurrency.

Everything here can be called with plain values and answers with plain values. Time and random
identifiers are arguments.
"""
