"""The pages of the dashboard, and a user's actions on them in a browser."""

from __future__ import annotations

from tests.e2e.browser import Browser

PAGES = {
    "/": "ablation-01",
    "/cluster": "answers you",
    "/events": "node-900-w0 registered",
    "/jobs/gpt": "useful steps",
    "/jobs/gpt/ranks": "Rank 11: slow (thermal)",
    "/jobs/vision-ft/ranks?rank=5": "loader.py:212",
    "/jobs/vision-ft/barriers": "Rank 5 is missing",
    "/jobs/gpt/data": "shards a member",
    "/jobs/gpt/checkpoints": "Used by",
    "/jobs/gpt/events": "Overview",
    "/jobs/bert-base": "Goodput is measured",
    "/jobs/nobody": "no job is called nobody",
    "/nowhere": "Nothing is here",
}
"""Each page with a text that it shows once it is complete."""

PHONE = (390, 844)
DESKTOP = (1440, 900)


def look(browser: Browser, size: tuple[int, int], scheme: str) -> None:
    """Set the window's size and colour scheme."""
    width, height = size
    browser.devtools(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=height,
        deviceScaleFactor=1,
        mobile=width < 600,
    )
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.devtools("Emulation.setEmulatedMedia", features=[feature])


def complete(browser: Browser, path: str, text: str) -> None:
    """Return once the page of `path` shows `text`."""
    browser.wait(f"{path}: {text}", lambda: text in browser.text())


def click(browser: Browser, text: str) -> None:
    """Click the link or button with the text or label `text`; fail if there is none."""
    browser.wait(
        f"something that says {text}", lambda: bool(browser.run(_FIND.format(text=text, then="true")))
    )
    browser.run(_FIND.format(text=text, then="(found.click(), true)"))


_FIND = """
const found = [...document.querySelectorAll("a, button")]
  .find((each) => (each.getAttribute("aria-label") ?? each.textContent).trim().startsWith("{text}"));
return found === undefined ? false : {then};
"""

KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowDown": 40}


def press(browser: Browser, key: str) -> None:
    text = {"text": "\r"} if key == "Enter" else {}
    for kind in ("keyDown", "keyUp"):
        browser.devtools(
            "Input.dispatchKeyEvent",
            type=kind,
            key=key,
            code=key,
            windowsVirtualKeyCode=KEYS[key],
            **(text if kind == "keyDown" else {}),
        )
