"""A headless Chromium, controlled over WebDriver, with the few commands that a page's test needs."""

from __future__ import annotations

import base64
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strata.devcluster.ports import free_port
from strata.processes.children import Child
from tests.processes import LIMIT_S

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Browser:
    """One browser with one window."""

    def __init__(self, driver: str, profile: Path, flags: tuple[str, ...]) -> None:
        self._root = driver
        options: dict[str, Any] = {"args": [*FLAGS, *flags, f"--user-data-dir={profile}"]}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._send("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._root = f"{driver}/session/{session['sessionId']}"

    def open(self, url: str) -> None:
        self._send("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        """Run a function with this body in the page; return its result."""
        return self._send("POST", "/execute/sync", {"script": script, "args": []})

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def wait(self, what: str, found: Callable[[], bool]) -> None:
        """Return once `found()` is true; fail with the page's text after the time limit."""
        deadline = time.monotonic() + LIMIT_S
        while not found():
            assert time.monotonic() < deadline, f"{what} never came; the page says:\n{self.text()}"

    def complaints(self) -> list[str]:
        """Return the browser's console messages since the last call: rejected requests and errors."""
        return [str(entry["message"]) for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def devtools(self, command: str, **parameters: Any) -> Any:
        """Run a command of Chromium's DevTools protocol: set a phone's size or a colour scheme, read counters."""
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def shoot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("GET", "/screenshot")))

    def close(self) -> None:
        self._send("DELETE", "")

    def _send(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)["value"]


@contextmanager
def browsing(chromedriver: str, folder: Path, *flags: str) -> Iterator[Browser]:
    """Provide a browser for the body; the browser and its driver end with it."""
    port = free_port()
    driver = Child.start([chromedriver, f"--port={port}"], log=folder / "chromedriver.log")
    try:
        deadline = time.monotonic() + LIMIT_S
        while "was started successfully" not in driver.tail():
            assert time.monotonic() < deadline, driver.tail()
        browser = Browser(f"http://127.0.0.1:{port}", folder / "profile", flags)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.stop()
