"""The verdict on a recorded run: checkers, expectations, errors in logs, and the report. Begin with `judge`."""
