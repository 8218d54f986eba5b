"""Reports that it was imported, in which process, and whether the process had a rank yet."""

from __future__ import annotations

import os

from tests.ranks.saying import say

say("warm", pid=os.getpid(), placed="RANK" in os.environ)
