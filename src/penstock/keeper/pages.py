"""The memory of data files: memfds whose pages are reserved before anything is written, and used again.

Fresh pages cost three times what copying into them does. So a file that has lost its name goes into a pool
with its pages, if no other process can still have it open or mapped. The system knows that: it grants a
lease on a file only to the last one that has it open. What a reader has still mapped lingers until then.
"""

from __future__ import annotations

__all__ = ("STEP_BYTES", "NoRoom", "PagePool", "Pages", "close_all")

import fcntl
import os
from collections.abc import Callable, Iterable
from itertools import count
from typing import Final

STEP_BYTES: Final = 64 * 2**20
"""So much is reserved at once. In between it is looked whether the machine still has room."""

_PAGE: Final = 4096
_LEAST_MARGIN: Final = 2**24
_LITTLE: Final = 2**20  # not worth giving back, or looking for a better fit


class NoRoom(Exception):
    """There is no room for so many more bytes.

    Attributes:
        needed: The bytes.
        free: What there is.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"the keeper has no room for {needed} more bytes; {free} are free")
        self.needed, self.free = needed, free


class Pages:
    """A memfd, and how many bytes of it have pages.

    Each user opens it anew, so that leases say whether one has it open. What it was made by does not count
    there: by that clients map the pages to write, as long as they live.
    """

    __slots__ = ("id", "is_dropped", "is_zero", "n_reserving", "nbytes", "number", "source")

    def __init__(self, page_id: int) -> None:
        self.source = os.memfd_create("penstock-keeper", os.MFD_CLOEXEC)
        try:
            self.number = os.open(f"/proc/self/fd/{self.source}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            os.close(self.source)
            raise

        self.id = page_id
        self.nbytes = 0
        self.is_zero = True  #: whether nothing was ever written there
        self.n_reserving = 0  #: calls in worker threads that use the descriptor now
        self.is_dropped = False  #: whether it is to be given back when they have ended

    def open(self, *, writing: bool) -> int:
        """Return a new descriptor of the file."""
        flags = os.O_RDWR if writing else os.O_RDONLY
        return os.open(f"/proc/self/fd/{self.number}", flags | os.O_CLOEXEC)

    def open_for_writing(self) -> tuple[int, int]:
        """Return a new descriptor that says that the file is in use, and one to map it by."""
        return self.open(writing=True), os.dup(self.source)

    def is_open_elsewhere(self) -> bool:
        """True if another process may have it open or mapped; also where the system does not say."""
        try:
            fcntl.fcntl(self.number, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self.number, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return True

        return False


class PagePool:
    """Hands out pages, takes them back, and stays below a limit. Its methods do not block, but for `fill`.

    Args:
        limit: The most bytes of all pages.
        free: Says how many bytes the machine and the control groups still have. Quick.
        margin: Bytes of these that are left to others.
    """

    def __init__(self, limit: int, free: Callable[[], int], margin: int = _LEAST_MARGIN) -> None:
        self.limit = limit
        # Another keeper has other ones: a client would write into the memory of one that has ended.
        self._ids = count(int.from_bytes(os.urandom(5), "little") << 20)
        self._free, self._margin = free, margin
        self._idle: list[Pages] = []  # the one that was given back last is the last
        self._lingering: list[Pages] = []
        self._closing: list[Pages] = []
        self.lent_bytes = 0  #: in files that have a name, and in reservations under way
        self.most_idle_bytes = 0  #: more than this is not kept ready
        self.reused_bytes = 0  #: that files got so far from the pool
        self.fresh_bytes = 0  #: that the system has made so far, for files and to have some ready

    @property
    def idle_files(self) -> int:
        """The number of files that are ready."""
        return len(self._idle)

    @property
    def idle_bytes(self) -> int:
        """Bytes of files that are ready."""
        return _sum(self._idle)

    @property
    def lingering_bytes(self) -> int:
        """Bytes of files without a name that others still have open."""
        return _sum(self._lingering)

    @property
    def used_bytes(self) -> int:
        """All bytes that have pages, or are about to."""
        return self.lent_bytes + self.idle_bytes + self.lingering_bytes + _sum(self._closing)

    @property
    def room_bytes(self) -> int:
        """The bytes that can be lent."""
        self._look_at_lingering()
        gives_way = self.idle_bytes + _sum(self._closing)
        below_limit = self.limit - (self.used_bytes - gives_way)
        return max(0, min(below_limit, gives_way + max(0, self._free() - self._margin)))

    def make(self) -> Pages:
        """Return a new file, without pages.

        Raises:
            OSError: If there can be no more files.
        """
        return Pages(next(self._ids))

    def take(self, expected: int) -> Pages:
        """Return a file for about so many bytes: one that is ready and fits, or a new one.

        Raises:
            OSError: If there can be no more files.
        """
        fitting = [pages for pages in self._idle if pages.nbytes <= expected + expected // 4 + _LITTLE]
        if not fitting:
            return self.make()

        large_enough = [pages for pages in fitting if pages.nbytes >= expected]
        best = min(large_enough, key=_nbytes) if large_enough else max(fitting, key=_nbytes)
        self._idle.remove(best)
        self.lent_bytes += best.nbytes
        self.reused_bytes += best.nbytes
        return best

    def claim(self, pages: Pages, nbytes: int) -> tuple[int, list[Pages]]:
        """Claim room for the first bytes of a file.

        Returns:
            From where on pages are missing, up to `nbytes`; and the files that gave way, to be closed before.

        Raises:
            NoRoom: If there is none, and nothing can give way.
        """
        start, end = pages.nbytes, -(-nbytes // _PAGE) * _PAGE
        more = end - start
        if more <= 0:
            return start, []

        self._look_at_lingering()
        gave_way = self.closing()
        free = self._free() - self._margin + _sum(gave_way)
        while self._idle and (self.used_bytes + more > self.limit or free < more):
            first = self._idle.pop(0)
            free += first.nbytes
            gave_way.append(first)

        room = min(self.limit - self.used_bytes, free)
        if room < more:
            self._closing += gave_way
            raise NoRoom(more, max(0, room))

        self.lent_bytes += more
        pages.nbytes = end
        return start, gave_way

    def unclaim(self, pages: Pages, nbytes: int) -> None:
        """Take back what was claimed beyond the first bytes, and could not be reserved."""
        self.lent_bytes -= pages.nbytes - nbytes
        pages.nbytes = nbytes

    @staticmethod
    def fill(pages: Pages, start: int, end: int) -> None:
        """Have the system make pages, which are this process's own. Blocking.

        Raises:
            OSError: If it has none.
        """
        os.posix_fallocate(pages.number, start, end - start)

    def shorten(self, pages: Pages, nbytes: int) -> None:
        """Give back pages after the first bytes, unless they are few."""
        end = -(-nbytes // _PAGE) * _PAGE
        if pages.nbytes - end > max(nbytes // 8, _LITTLE):
            os.ftruncate(pages.number, end)
            self.unclaim(pages, end)

    def give_back(self, pages: Pages) -> None:
        """Take back a file that has no name any more."""
        if pages.n_reserving:
            pages.is_dropped = True
            return

        pages.is_dropped = pages.is_zero = False
        self.lent_bytes -= pages.nbytes
        if pages.is_open_elsewhere():
            self._lingering.append(pages)
        else:
            self._idle.append(pages)
            self.trim(self.most_idle_bytes)

    def add_ready(self, pages: Pages) -> None:
        """Put a lent file that was never written into the pool, be it whole or not."""
        self.lent_bytes -= pages.nbytes
        (self._idle if pages.nbytes else self._closing).insert(0, pages)
        self._shrink(self.most_idle_bytes)  # others may have been given back while it was made

    def take_ready(self, pages: Pages) -> bool:
        """Take a file out of the pool, to make more pages of it; return whether it was there."""
        if pages not in self._idle:
            return False

        self._idle.remove(pages)
        self.lent_bytes += pages.nbytes
        return True

    def trim(self, most: int) -> None:
        """Keep at most so many bytes ready. The smallest files go first."""
        self._look_at_lingering()
        self._shrink(most)

    def lacks(self, sizes: Iterable[int]) -> list[int]:
        """Return those of some sizes for which no file is ready, the largest first."""
        ready = sorted([pages.nbytes for pages in self._idle])
        missing: list[int] = []
        for size in sorted(sizes, reverse=True):
            if ready and ready[-1] >= size:
                ready.pop()
            else:
                missing.append(size)

        return missing

    def closing(self) -> list[Pages]:
        """Return what is to be closed; the caller closes it with `close_all`."""
        found, self._closing = self._closing, []
        return found

    def _look_at_lingering(self) -> None:
        for pages in [each for each in self._lingering if not each.is_open_elsewhere()]:
            self._lingering.remove(pages)
            self._idle.append(pages)
            self._shrink(self.most_idle_bytes)

    def _shrink(self, most: int) -> None:
        while self._idle and self.idle_bytes > most:
            smallest = min(self._idle, key=_nbytes)
            self._idle.remove(smallest)
            self._closing.append(smallest)


def close_all(files: Iterable[Pages]) -> None:
    """Give the pages of files back to the system. Blocking: it takes half as long as to copy them.

    They are cut off first: a client may have mapped them, as long as it lives, for its next save.
    """
    for pages in files:
        os.ftruncate(pages.number, 0)
        os.close(pages.number)
        os.close(pages.source)


def _nbytes(pages: Pages) -> int:
    return pages.nbytes


def _sum(files: Iterable[Pages]) -> int:
    return sum([pages.nbytes for pages in files])
