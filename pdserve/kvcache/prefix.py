"""The prefix index: which sealed page stands for which content key, and what is evicted first.

Pure and without page states: `PageManager` tells it what may be published and what is in use. Pages form
trees by their keys' chains; a parent outlives its children, so that every published page can be reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.errors import InternalError
from pdserve.kvcache.contentkeys import KeyChain, content_keys, page_keys, root_key, tail_key
from pdserve.kvcache.eviction import EvictionOrder

__all__ = ["KeyChain", "PrefixIndex", "content_keys", "page_keys", "root_key", "tail_key"]


class _Node:
    """One published page."""

    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, key: bytes, page: int, parent: _Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[bytes, _Node] = {}


class PrefixIndex:
    """Content key → page, chained. Called by `PageManager` only."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, _Node] = {}
        self._by_page: dict[int, _Node] = {}
        self._order = EvictionOrder()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    @property
    def num_evictable(self) -> int:
        return len(self._order)

    def match(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Pages of the longest published prefix of `keys`. Changes nothing."""
        pages = []
        for key in keys:
            node = self._by_key.get(key)
            if node is None:
                break
            pages.append(node.page)
        return tuple(pages)

    def publish(self, key: bytes, parent_key: bytes | None, page: int) -> bool:
        """Enters a page, in use until `release`. False, and no change, when the key is there already or its
        parent is not (nobody could reach it): the caller keeps a private page."""
        if page in self._by_page:
            raise InternalError("page accounting: a page is published once")
        parent = self._by_key.get(parent_key) if parent_key is not None else None
        if key in self._by_key or (parent_key is not None and parent is None):
            return False
        node = _Node(key, page, parent)
        if parent is not None:
            parent.children[key] = node
        self._by_key[key] = self._by_page[page] = node
        return True

    def unpublish_chain(self, page: int) -> tuple[int, ...]:
        """Removes a page and all pages chained after it; returns them, parents first. () if not published."""
        node = self._by_page.get(page)
        if node is None:
            return ()
        chain = [each.page for each in _walk(node)]
        for each in tuple(_walk(node)):
            del self._by_key[each.key], self._by_page[each.page]
            self._order.acquire(each.page)
        if node.parent is not None:
            del node.parent.children[node.key]
            if not node.parent.children:
                self._order.became_leaf(node.parent.page)
        return tuple(chain)

    def release(self, page: int) -> None:
        """Nobody but the cache holds the page any more: it may be evicted."""
        self._order.release(page, leaf=not self._by_page[page].children)

    def acquire(self, page: int) -> None:
        """Somebody holds the page besides the cache: it may not be evicted."""
        self._order.acquire(page)

    def pop_victims(self) -> tuple[int, ...]:
        """Removes the next page to evict, returned first, and what can not be reached without it; () if none.

        Leaves go first, least recently used first. When no evictable page is a leaf, its children are held
        by others: those pages leave the index and live on with their holders.
        """
        page = self._order.oldest_leaf(self._is_leaf)
        if page is None and (page := self._order.oldest()) is not None:
            page = self._deepest_evictable(page)
        return () if page is None else self.unpublish_chain(page)

    def check_integrity(self) -> str:
        """Proves keys, pages, chains and the eviction order against each other; "" when good."""
        if len(self._by_key) != len(self._by_page):
            return "keys and pages differ in number"
        for page, node in self._by_page.items():
            parent = node.parent
            if self._by_key.get(node.key) is not node or node.page != page:
                return f"page {page}: key and page disagree"
            if parent is not None and (
                self._by_page.get(parent.page) is not parent or parent.children.get(node.key) is not node
            ):
                return f"page {page}: its parent is gone"
        edges = sum(len(node.children) for node in self._by_page.values())
        if edges != sum(node.parent is not None for node in self._by_page.values()):
            return "a child is chained but not published"
        return ""

    def evictable(self, page: int) -> bool:
        return page in self._order

    def _is_leaf(self, page: int) -> bool:
        return not self._by_page[page].children

    def _deepest_evictable(self, page: int) -> int:
        """Follows evictable children, so that as little as possible is lost with the victim."""
        while True:
            children = self._by_page[page].children.values()
            below = next((child.page for child in children if child.page in self._order), None)
            if below is None:
                return page
            page = below


def _walk(top: _Node) -> Iterator[_Node]:
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
