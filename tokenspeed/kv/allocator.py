"""Which pages of one cache group are free. Page ids index the group's tensors in the pool.

A page has one owner at a time: a request's holding, or the prefix tree. Sharing is the tree's
business (it counts readers), so there are no reference counts here. Ids are handed out in
consecutive runs where possible, because attention on a CPU reads consecutive pages without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Hands out page ids 0..num_pages-1 and takes them back.

    The map has one byte a page (0 free, 1 used), so that a run is found by a substring search.
    Runs are looked for from a cursor that moves on (next fit) and jumps over the room that the
    last owner was promised to grow into.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, f"a pool of {num_pages} pages"
        self.num_pages = num_pages
        self.num_free = num_pages
        self._used = bytearray(num_pages)
        self._cursor = 0

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def allocate(self, count: int, after: int | None = None, room: int = 0) -> list[int]:
        """Take `count` pages; the caller has made sure that so many are free.

        Continues behind page `after` as far as that is free, then takes runs, the longest first;
        `room` is how many more pages the owner may want behind them later.
        """
        assert 0 <= count <= self.num_free, f"{count} pages asked, {self.num_free} free"
        pages: list[int] = []
        if after is not None:
            page = after + 1
            while len(pages) < count and page < self.num_pages and not self._used[page]:
                self._used[page] = 1
                pages.append(page)
                page += 1
        length = count - len(pages) + room
        while len(pages) < count:
            wanted = count - len(pages)
            start = self._find_run(length)
            if start < 0:
                length = wanted + (length - wanted) // 2 if length > wanted else length // 2
                continue
            taken = min(length, wanted)
            self._used[start : start + taken] = b"\1" * taken
            self._cursor = start + length
            pages.extend(range(start, start + taken))
        self.num_free -= count
        return pages

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._used[page], f"page {page} freed twice"
            self._used[page] = 0
            self.num_free += 1
        if self.num_free == self.num_pages:
            self._cursor = 0

    def check(self, owners: Iterable[Iterable[int]]) -> None:
        """Prove that free + used = total and that the used pages are the owners', each once."""
        owner_of: dict[int, int] = {}
        for owner, pages in enumerate(owners):
            for page in pages:
                assert page not in owner_of, (
                    f"page {page} has two writers: {owner_of[page]} and {owner}"
                )
                owner_of[page] = owner
        used = {page for page, is_used in enumerate(self._used) if is_used}
        assert used == owner_of.keys(), f"pages without an owner: {used ^ owner_of.keys()}"
        assert len(used) == self.num_used, f"{len(used)} pages used, {self.num_used} counted"

    def _find_run(self, length: int) -> int:
        """First page of a free run of `length` pages, from the cursor on and then from 0; or -1."""
        run = bytes(length)
        start = self._used.find(run, self._cursor)
        return start if start >= 0 else self._used.find(run)
