"""The cache as the scheduler sees it: page tables of admitted requests over a shared prefix cache.

    page table   |<------- shared ------->|<------------- private ------------->|
                  tree's pages, locked     one writer: this holding's request

A holding starts with the longest cached prefix of its tokens and grows by private pages. `commit`
hands full, committed pages to the tree, where others find them; `release` does so for the rest and
frees what is left. Pages that the tree has already stay private (the page table that launched steps
read never changes) and are freed at release.

The scheduler decides when: pages below the committed length are never written again, and a holding
is released only when no launched step is left that names its pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenspeed.kv.allocator import PageAllocator
from tokenspeed.kv.prefix import Namespace, Node, PrefixTree
from tokenspeed.kv.specs import CacheGroup


@dataclass(slots=True, eq=False)
class Holding:
    """The pages of one admission of one request. `tables[g][i]` is the page of cache group g for
    positions i * block_size and on; `node` (locked) is where its first `num_shared` pages end.
    """

    node: Node
    num_shared: int
    tables: list[list[int]]
    num_cached_tokens: int
    """Tokens that the prefix cache served at admission."""


class KVManager:
    """Page allocators (one a cache group, each over `num_pages` ids) and the prefix tree."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_pages: int,
        block_size: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.num_pages = num_pages
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_queries = 0
        """Tokens looked up in the prefix cache."""
        self.prefix_hits = 0
        """Tokens found there."""
        self._allocators = [PageAllocator(num_pages) for _ in groups]
        self._tree = PrefixTree(len(groups), block_size)
        self._holdings: set[Holding] = set()

    @property
    def num_available(self) -> int:
        """Pages of each group that can be had at once: free, or cached and not locked."""
        return min(allocator.num_free for allocator in self._allocators) + self._tree.num_evictable

    @property
    def num_entered(self) -> int:
        """Pages that entered the prefix cache so far: while it stays the same, no prefix grows."""
        return self._tree.num_entered

    @property
    def usage(self) -> float:
        """Share of pages that running requests hold, 0 to 1."""
        return 1.0 - self.num_available / self.num_pages

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def acquire(
        self,
        tokens: list[int],
        namespace: Namespace,
        *,
        read_prefix: bool = True,
        is_counted: bool = True,
        num_spare: int = 0,
        num_expected: int = 0,
    ) -> Holding | None:
        """Pages for all of `tokens`, cached ones first; None if fewer than `num_spare` pages would
        be left. At least the last token is never served from the cache: its logits are needed.

        `num_expected` is the length in tokens that the request may reach, `is_counted` whether the
        look-up enters the prefix counters.
        """
        read_prefix = read_prefix and self.enable_prefix_caching
        node = self._tree.match(namespace, tokens, len(tokens) - 1 if read_prefix else 0)
        self._tree.lock(node)
        tables = self._tree.path_pages(node)
        holding = Holding(node, len(tables[0]), tables, len(tables[0]) * self.block_size)
        self._holdings.add(holding)
        if not self.allocate(holding, len(tokens), num_spare=num_spare, num_expected=num_expected):
            self.release(holding)
            return None
        if read_prefix and is_counted:
            self.prefix_queries += len(tokens)
            self.prefix_hits += holding.num_cached_tokens
        return holding

    def num_needed(
        self, tokens: list[int], namespace: Namespace, *, read_prefix: bool = True
    ) -> int:
        """How many available pages `acquire` would take: all but those of a prefix that others
        hold.
        """
        read_prefix = read_prefix and self.enable_prefix_caching
        node = self._tree.match(namespace, tokens, len(tokens) - 1 if read_prefix else 0)
        num_held = self._tree.num_locked(node)
        self._tree.lock(node)
        self._tree.unlock(node)  # a root that was made for this question goes again
        return self.pages_for(len(tokens)) - num_held

    def num_returning(self, holding: Holding) -> int:
        """Pages of each group that can be had once `holding` alone is released."""
        private = len(holding.tables[0]) - holding.num_shared
        return private + self._tree.num_locked_once(holding.node)

    def can_allocate(self, holding: Holding, num_tokens: int, num_spare: int = 0) -> bool:
        """Whether `holding` can cover `num_tokens` positions and leave `num_spare` pages."""
        missing = self.pages_for(num_tokens) - len(holding.tables[0])
        return missing <= 0 or missing + num_spare <= self.num_available

    def allocate(
        self, holding: Holding, num_tokens: int, *, num_spare: int = 0, num_expected: int = 0
    ) -> bool:
        """Grow `holding` to cover `num_tokens` positions, evicting cached prefixes as needed.
        False, and nothing changed, if that cannot be had.
        """
        if not self.can_allocate(holding, num_tokens, num_spare):
            return False
        size = self.pages_for(num_tokens)
        room = max(0, self.pages_for(num_expected) - size)
        missing = size - len(holding.tables[0])
        self._evict(missing - min(allocator.num_free for allocator in self._allocators))
        for allocator, table in zip(self._allocators, holding.tables, strict=True):
            after = table[-1] if table else None
            table += allocator.allocate(max(0, size - len(table)), after, room)
        return True

    def commit(self, holding: Holding, tokens: list[int], num_tokens: int) -> None:
        """The KV of `tokens[:num_tokens]` is final: let others find the full pages of it."""
        num_full = num_tokens // self.block_size
        if not self.enable_prefix_caching or num_full <= holding.num_shared:
            return
        start = holding.num_shared * self.block_size
        if self._tree.has_next(holding.node, tokens[start : start + self.block_size]):
            return  # somebody else was first; `release` enters what goes beyond theirs
        run = tokens[start : num_full * self.block_size]
        pages = [table[holding.num_shared : num_full] for table in holding.tables]
        _, node = self._tree.insert(holding.node, run, pages)
        if node is not holding.node:
            self._tree.lock(node)
            self._tree.unlock(holding.node)
        holding.node, holding.num_shared = node, num_full

    def release(self, holding: Holding, tokens: Sequence[int] = (), num_tokens: int = 0) -> None:
        """Give all pages back; full pages of the committed `tokens[:num_tokens]` to the tree."""
        self._holdings.remove(holding)
        shared, size = holding.num_shared, self.block_size
        num_full = num_tokens // size if self.enable_prefix_caching else 0
        kept = range(0)
        if num_full > shared:
            pages = [table[shared:num_full] for table in holding.tables]
            run = list(tokens[shared * size : num_full * size])
            present, _ = self._tree.insert(holding.node, run, pages)
            kept = range(shared + present, num_full)
        for allocator, table in zip(self._allocators, holding.tables, strict=True):
            allocator.free(table[i] for i in range(shared, len(table)) if i not in kept)
        self._tree.unlock(holding.node)

    def flush(self) -> int:
        """Forget all prefixes that nobody uses now; how many pages of each group that frees."""
        count = self._tree.num_evictable
        self._evict(count)
        return count

    def check(self, live: Iterable[Holding]) -> None:
        """Prove, given all live holdings, that free + used + cached = total in each group, that no
        page has two writers and that the tree's locks are the live holdings'.
        """
        live = list(live)
        assert len(live) == len(self._holdings) and set(live) == self._holdings, "a lost holding"
        cached = self._tree.check(Counter(holding.node for holding in live))
        for holding in live:
            shared = [table[: holding.num_shared] for table in holding.tables]
            assert shared == self._tree.path_pages(holding.node), "a shared page has moved"
        for group, allocator in enumerate(self._allocators):
            private = [holding.tables[group][holding.num_shared :] for holding in live]
            allocator.check([cached[group], *private])

    def _evict(self, count: int) -> None:
        for allocator, pages in zip(self._allocators, self._tree.evict(count), strict=True):
            allocator.free(pages)
