"""A rank with children of its own, some of which only SIGKILL ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from tests.ranks.saying import say

STUBBORN = "trap '' TERM INT HUP; while :; do sleep 1000; done"

children = [subprocess.Popen(["sleep", "1000"]), subprocess.Popen(["sh", "-c", STUBBORN])]
forked = os.fork()
if forked == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1000)
say("start", pid=os.getpid(), children=[*(c.pid for c in children), forked])
while True:
    time.sleep(1000)
