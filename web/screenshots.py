"""Takes the pictures of docs/images/dashboard from the pages that `web.fixture` serves; a development tool.

python -m web.screenshots [FOLDER] [PAGE…]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from strata.devcluster.ports import free_port
from strata.processes.children import Child
from tests.e2e.browser import Browser, browsing
from web.fixture import ROOT

PAGES = {
    "jobs": "/",
    "cluster": "/cluster",
    "events": "/events",
    "job": "/jobs/gpt",
    "ranks": "/jobs/gpt/ranks",
    "rank": "/jobs/vision-ft/ranks?rank=5",
    "ranks-1000": "/jobs/llama-70b/ranks",
    "barriers": "/jobs/vision-ft/barriers",
    "data": "/jobs/gpt/data",
    "checkpoints": "/jobs/gpt/checkpoints",
}
SIZES = {"desktop": (1440, 900, 1.0), "phone": (390, 844, 1.0)}
SETTLED_S = 2.5


def size(browser: Browser, width: int, height: int, scale: float) -> None:
    browser.devtools(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=height,
        deviceScaleFactor=scale,
        mobile=width < 600,
    )


def colours(browser: Browser, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.devtools("Emulation.setEmulatedMedia", features=[feature])


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0] if arguments else ROOT / "docs" / "images" / "dashboard")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = arguments[1:] or list(PAGES)
    driver = shutil.which("chromedriver")
    assert driver is not None, "apt-get install chromium chromium-driver"
    with tempfile.TemporaryDirectory() as temporary:
        ports = [free_port() for _ in range(3)]
        command = [sys.executable, "-m", "web.fixture", "--ports", *map(str, ports)]
        fixture = Child.start(command, log=Path(temporary) / "fixture.log")
        try:
            time.sleep(2)
            with browsing(driver, Path(temporary)) as browser:
                take(browser, f"http://127.0.0.1:{ports[0]}", folder, chosen)
        finally:
            fixture.stop()


def take(browser: Browser, origin: str, folder: Path, chosen: list[str]) -> None:
    for name in chosen:
        for kind, (width, height, scale) in SIZES.items():
            for scheme in ("light", "dark"):
                size(browser, width, height, scale)
                colours(browser, scheme)
                browser.open(origin + PAGES[name])
                time.sleep(SETTLED_S)
                whole = int(browser.run("return document.documentElement.scrollHeight"))
                wide = int(browser.run("return document.documentElement.scrollWidth"))
                size(browser, width, min(max(whole, height), 1600), scale)
                time.sleep(0.4)
                browser.shoot(folder / f"{name}-{kind}-{scheme}.png")
                print(f"{name}-{kind}-{scheme}: {wide} wide, {browser.complaints() or 'no complaint'}")


if __name__ == "__main__":
    main(sys.argv[1:])
