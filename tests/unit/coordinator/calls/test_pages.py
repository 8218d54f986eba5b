"""Pages of a list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.coordinator.calls.pages import MAX_TOKEN, page
from strata.errors import InvalidArgument
from strata.v1.worlds_pb2 import Job


def listed(names: set[str], *, size: int, page_bytes: int) -> list[list[str]]:
    pages, token = [], ""
    while True:
        jobs, token = page(
            names, key=str, make=lambda name: Job(name=name), size=size, token=token, page_bytes=page_bytes
        )
        pages.append([job.name for job in jobs])
        if not token:
            return pages


names = st.sets(st.text(alphabet="ab-", min_size=1, max_size=6), max_size=40)


@given(names, st.integers(0, 7), st.integers(1, 200))
def test_pages_list_every_item_once_and_in_order(names: set[str], size: int, page_bytes: int) -> None:
    pages = listed(names, size=size, page_bytes=page_bytes)
    assert [name for one in pages for name in one] == sorted(names)
    assert all(not size or len(one) <= size for one in pages)
    assert all(
        len(one) == 1 or sum(Job(name=n).ByteSize() + 8 for n in one) <= page_bytes for one in pages if one
    )
    assert all(pages[:-1])


def test_items_added_or_removed_between_pages_move_no_other_item() -> None:
    def ask(names: str, token: str) -> tuple[list[str], str]:
        jobs, after = page(names, key=str, make=lambda name: Job(name=name), size=2, token=token)
        return [job.name for job in jobs], after

    first, token = ask("bdfh", "")
    second, token = ask("acfh", token)  # b and d were removed, a and c added
    assert (first, second, token) == (["b", "d"], ["f", "h"], "")


@pytest.mark.parametrize(("size", "token"), [(-1, ""), (0, "x" * (MAX_TOKEN + 1))])
def test_an_invalid_page_size_or_token_is_refused(size: int, token: str) -> None:
    with pytest.raises(InvalidArgument):
        page("ab", key=str, make=lambda name: Job(name=name), size=size, token=token)
