"""The registry of members: registration, hand-over, departure, and the ends of their ranks (PROTOCOLS 5).

Begin with `membership`.
"""
