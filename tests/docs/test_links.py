"""Every relative link of every page leads to an existing file, and to an existing heading if it has a fragment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """The text of a page without its code blocks."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, by the usual rule for Markdown."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (fragment and fragment not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_the_check_reports_a_dead_link(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One, two\n[a](gone.md) [b](#one-two) [c](page.md#three) [d](other:x)\n")
    assert dead_links(page) == ["gone.md", "page.md#three"]


# -- a link whose text names a thing leads to the page about it

NAMING = re.compile(r"(?<!!)\[`([^`\]]+)`\]\(([^)\s]+)\)")


def headed(page: Path) -> set[str]:
    """The code names in a page's headings: the things that the page documents."""
    return {
        name
        for line in re.findall(r"^#+ .+$", prose(page), re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", line)
    }


def misled(page: Path, documented: dict[Path, set[str]]) -> list[str]:
    """The links whose text names a thing, but whose target is not the page with the heading of this thing."""
    found = []
    for text, link in NAMING.findall(prose(page)):
        name = text.partition(" --")[0]
        homes = [home for home, names in documented.items() if name in names]
        path = link.partition("#")[0]
        if homes and ((page.parent / path).resolve() if path else page) not in homes:
            found.append(f"{text} -> {link}")
    return found


def test_a_link_named_after_a_term_leads_to_the_page_of_that_term() -> None:
    documented = {page: headed(page) for page in PAGES}
    assert [(page.name, link) for page in PAGES for link in misled(page, documented)] == []


def test_the_check_reports_a_link_to_the_wrong_page(tmp_path: Path) -> None:
    home, page = tmp_path / "training.md", tmp_path / "run.md"
    home.write_text("# A training: `strata.init`\n")
    page.write_text(
        "[`strata.init`](client.md) [`strata.init`](training.md#x) [`other`](client.md) [here](#y)\n"
    )
    documented = {each: headed(each) for each in (home, page)}
    assert misled(page, documented) == ["strata.init -> client.md"]
