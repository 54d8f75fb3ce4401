"""Memory for data files: reserved, used again, and below a limit whatever happens."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.keeper.pages import NoRoom, PagePool, Pages, close_all

MIB = 2**20


@pytest.fixture(autouse=True)
def _leases_are_no_signals() -> Iterator[None]:
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGIO, before)


def pool_of(limit: int = 64 * MIB, free: int = 2**40) -> PagePool:
    return PagePool(limit, lambda: free, 0)


def reserve(pool: PagePool, nbytes: int, pages: Pages | None = None) -> Pages:
    taken = pool.take(nbytes) if pages is None else None
    pages = taken or pages
    assert pages is not None
    try:
        start, gave_way = pool.claim(pages, nbytes)
    except NoRoom:
        if taken is not None:
            pool.give_back(taken)

        raise

    close_all(gave_way)
    if pages.nbytes > start:
        pool.fill(pages, start, pages.nbytes)

    return pages


def blocks(pages: Pages) -> int:
    return os.fstat(pages.number).st_blocks * 512


def test_what_is_reserved_has_its_pages() -> None:
    pool = pool_of()
    pages = reserve(pool, 3 * MIB + 1)
    assert blocks(pages) == pages.nbytes == 3 * MIB + 4096 == pool.lent_bytes == pool.used_bytes


def test_a_file_that_was_given_back_is_lent_with_its_pages() -> None:
    pool = pool_of()
    pool.most_idle_bytes = 8 * MIB
    first = reserve(pool, 4 * MIB)
    assert first.is_zero
    pool.give_back(first)
    assert (pool.idle_bytes, pool.lent_bytes) == (4 * MIB, 0)
    again = reserve(pool, 4 * MIB)
    assert again is first
    assert not again.is_zero
    assert pool.reused_bytes == 4 * MIB
    assert blocks(again) == 4 * MIB == pool.used_bytes


def test_the_best_fit_is_lent_and_a_smaller_one_grows() -> None:
    pool = pool_of()
    pool.most_idle_bytes = 64 * MIB
    made = [reserve(pool, size * MIB) for size in (1, 4, 16)]
    for pages in made:
        pool.give_back(pages)

    assert pool.take(4 * MIB) is made[1]
    grown = reserve(pool, 8 * MIB)
    assert grown is made[0], "16 MiB would be a waste"
    assert blocks(grown) == 8 * MIB


@pytest.mark.parametrize("writing", [True, False])
def test_a_file_that_another_one_has_open_is_neither_lent_nor_counted_as_free(writing: bool) -> None:
    pool = pool_of(8 * MIB)
    pool.most_idle_bytes = 8 * MIB
    pages = reserve(pool, 6 * MIB)
    user = pages.open(writing=writing)
    pool.give_back(pages)
    assert (pool.lingering_bytes, pool.idle_bytes, pool.room_bytes) == (6 * MIB, 0, 2 * MIB)
    with pytest.raises(NoRoom):
        reserve(pool, 4 * MIB)

    os.close(user)
    assert pool.room_bytes == 8 * MIB
    assert reserve(pool, 6 * MIB) is pages


def test_what_readers_let_go_is_kept_ready_no_more_than_is_needed() -> None:
    pool = pool_of()
    pool.most_idle_bytes = 3 * MIB
    made = [reserve(pool, 2 * MIB) for _ in range(3)]
    users = [pages.open(writing=False) for pages in made]
    for pages in made:
        pool.give_back(pages)

    for user in users:
        os.close(user)

    assert pool.room_bytes == 64 * MIB
    close_all(pool.closing())
    assert (pool.used_bytes, pool.idle_bytes) == (2 * MIB, 2 * MIB)


def test_a_file_that_was_made_ready_in_vain_goes() -> None:
    pool = pool_of()
    pool.most_idle_bytes = 3 * MIB
    back, made = reserve(pool, 2 * MIB), reserve(pool, 2 * MIB)
    pool.give_back(back)
    pool.add_ready(made)
    close_all(pool.closing())
    assert (pool.used_bytes, pool.idle_files) == (2 * MIB, 1)


def test_what_is_ready_gives_way_to_what_is_needed_and_its_pages_are_gone() -> None:
    pool = pool_of(10 * MIB)
    pool.most_idle_bytes = 10 * MIB
    idle = [reserve(pool, 3 * MIB) for _ in range(3)]
    numbers = [os.dup(pages.number) for pages in idle]  # as a client has it that has mapped them to write
    for pages in idle:
        pool.give_back(pages)

    pages = reserve(pool, 10 * MIB, pool.make())
    assert blocks(pages) == pool.used_bytes == 10 * MIB
    assert [os.fstat(number).st_blocks for number in numbers] == [0, 0, 0]
    for number in numbers:
        os.close(number)


def test_beyond_the_limit_is_an_error_with_figures_and_changes_nothing() -> None:
    pool = pool_of(4 * MIB)
    pages = reserve(pool, 3 * MIB)
    with pytest.raises(NoRoom) as caught:
        pool.claim(pages, 6 * MIB)

    assert (caught.value.needed, caught.value.free) == (3 * MIB, MIB)
    assert (pages.nbytes, pool.lent_bytes, pool.room_bytes) == (3 * MIB, 3 * MIB, MIB)
    reserve(pool, 4 * MIB, pages)


def test_what_the_machine_needs_itself_is_not_taken() -> None:
    pool = PagePool(2**40, lambda: 10 * MIB, margin=4 * MIB)
    assert pool.room_bytes == 6 * MIB
    with pytest.raises(NoRoom) as caught:
        pool.claim(pool.make(), 7 * MIB)

    assert caught.value.free == 6 * MIB


def test_pages_that_the_system_refuses_are_not_counted() -> None:
    pool = pool_of()
    pages = pool.make()
    start, _ = pool.claim(pages, 2 * MIB)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.posix_fallocate(-1, start, pages.nbytes)

    pool.unclaim(pages, start)
    assert (pages.nbytes, pool.used_bytes) == (0, 0)


def test_pages_after_the_end_go_back_unless_they_are_few() -> None:
    pool = pool_of()
    pages = reserve(pool, 16 * MIB)
    pool.shorten(pages, 15 * MIB)
    assert blocks(pages) == 16 * MIB
    pool.shorten(pages, 5 * MIB + 1)
    assert blocks(pages) == pages.nbytes == pool.lent_bytes == 5 * MIB + 4096


def test_no_more_is_kept_ready_than_the_next_step_needs() -> None:
    pool = pool_of()
    pool.most_idle_bytes = 5 * MIB
    made = [reserve(pool, size * MIB) for size in (1, 2, 4)]
    for pages in made:
        pool.give_back(pages)

    assert pool.idle_bytes <= 5 * MIB
    close_all(pool.closing())
    assert pool.used_bytes == pool.idle_bytes
    assert pool.lacks([4 * MIB, 2 * MIB]) == [2 * MIB]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["reserve", "give back", "grow", "trim"]), st.integers(0, 20)), max_size=30
    )
)
def test_whatever_happens_the_limit_is_kept_and_every_page_is_counted(steps: list[tuple[str, int]]) -> None:
    pool, lent, every = pool_of(4 * MIB), list[Pages](), dict[int, Pages]()
    pool.most_idle_bytes = 2 * MIB
    for what, number in steps:
        if what == "reserve" or (what == "grow" and lent):
            pages = None if what == "reserve" else lent[number % len(lent)]
            try:
                got = reserve(pool, (number + 1) * 2**17, pages)
            except NoRoom:
                got = None
            if got is not None and got not in lent:
                lent.append(got)
        elif what == "give back" and lent:
            pool.give_back(lent.pop(number % len(lent)))
        elif what == "trim":
            pool.trim(number * 2**17)

        close_all(pool.closing())
        assert pool.used_bytes <= 4 * MIB
        every.update({pages.id: pages for pages in lent})
        assert sum(map(blocks, lent)) <= pool.lent_bytes
        assert pool.idle_bytes <= 2 * MIB

    for pages in lent:
        pool.give_back(pages)

    pool.trim(0)
    close_all(pool.closing())
    assert pool.used_bytes == 0
