"""The registry of members: registration, hand-over, departure, and how their ranks end (PROTOCOLS 5).

Begin with `membership`.
"""
