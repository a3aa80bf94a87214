"""PagePool: the only owner of page ids. Leases: how everyone else holds pages.

A page is `page_size` positions of keys and values in every layer. The pool knows counts and order, nothing of tokens,
requests or bytes. A page is always in exactly one of four places:

    free        nobody holds it
    leased      one or more leases hold it
    idle        no lease holds it, but the prefix tree keeps it: still a cache hit, and next to be evicted
    retiring    given up by all while a step that may still touch it has not retired; then free

The hardest invariant is the order of the idle pages, which is also the eviction order. A lease gives its pages back
from its end to its start, and it can only hold a page of the tree together with all pages before it:

    lease A   [ 4 ][ 7 ][ 2 ]                idle, oldest first:   ... 2 7 4 ...
    lease B   [ 4 ][ 7 ][ 9 ][ 5 ]           then, with A given back too:  2 5 9 7 4

So a page stands before every page that its own contents depend on, the first idle page is always a leaf of the tree,
and evicting is: take the first. Least recently used leaf, O(1), without a clock.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable


class Lease:
    """Pages held for one request, in order of position. Opaque: made by the pool or the tree, given back once.

    `pages` (array of int32) may be read by the runner; only the pool and the tree change it. A page from `fresh` on is
    one that the runner has not seen since it last set `fresh`. The rest belongs to the prefix tree.
    """

    __slots__ = ("fresh", "namespace", "node", "num_inserted", "pages", "pool", "source")

    def __init__(self, pool: PagePool, namespace: str = ""):
        self.pool = pool
        self.namespace = namespace
        self.pages = array("i")
        self.fresh = 0
        self.node = None  # the deepest tree node whose page is pages[num_inserted / page_size - 1]
        self.num_inserted = 0  # tokens of whole pages that the tree has on this lease's path
        self.source = -1  # held until it has been copied into the last matched page

    def extend(self, num_tokens: int) -> bool:
        """Hold pages for `num_tokens` positions. False, and nothing changed, if the pool cannot give them now."""
        missing = -(-num_tokens // self.pool.page_size) - len(self.pages)
        if missing > 0:
            pages = self.pool.allocate(missing)
            if pages is None:
                return False
            self.pages.extend(pages)
        return True

    def copied(self) -> None:
        """The copy from `source` has run: let go of it."""
        if self.source >= 0:
            self.pool.release((self.source,))
            self.source = -1

    def give_up_copy(self) -> None:
        """Do without the copy: let go of `source` and of the page it was for, so keep whole matched pages only."""
        if self.source >= 0:
            self.copied()
            self.pool.release((self.pages.pop(),))

    def release(self) -> None:
        """Give every page back. The lease is empty afterwards."""
        self.copied()
        self.pool.release(reversed(self.pages))
        self.pages = array("i")
        self.node, self.num_inserted, self.fresh = None, 0, 0


class PagePool:
    """Counts who holds each page and decides which one is reused next. Not thread-safe: the scheduler's thread only."""

    def __init__(self, num_pages: int, page_size: int, on_evict: Callable[[int], None] | None = None):
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_evict = on_evict  # told which idle page is about to be reused; the tree forgets it
        self._refs = [0] * num_pages  # leases that hold the page
        self._kept = [False] * num_pages  # whether the tree has the page
        self._busy = [0] * num_pages  # the newest step that may touch the page though nobody holds it
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: dict[int, None] = {}  # in eviction order
        self._retiring: deque[int] = deque()
        self._newest_step = 0
        self._retired_step = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that can be allocated, some of them perhaps only once the step in flight has retired."""
        return len(self._free) + len(self._idle) + len(self._retiring)

    @property
    def num_leased(self) -> int:
        return self.num_pages - self.num_available

    @property
    def returning(self) -> bool:
        """Whether waiting for the step in flight would give more pages."""
        return bool(self._retiring) or self._is_busy(next(iter(self._idle), None))

    def begin_step(self, step_id: int) -> None:
        """Step `step_id` is planned. Pages released from now on may be touched by it. Ids ascend from 1."""
        self._newest_step = step_id

    def retire_step(self, step_id: int) -> None:
        """Step `step_id` and all before it will touch no page any more."""
        self._retired_step = step_id
        retiring = self._retiring
        while retiring and not self._is_busy(retiring[0]):
            self._free.append(retiring.popleft())

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages held once, or None if there are not enough that can be used now. Evicts idle pages at need."""
        free = self._free
        if count > len(free) + len(self._idle):
            return None
        while len(free) < count:
            page = next(iter(self._idle))
            if self._is_busy(page):
                return None
            if self.on_evict is not None:
                self.on_evict(page)
            self.forget(page)
        pages = [free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def acquire(self, page: int) -> None:
        """Hold once more a page that is leased or idle."""
        if self._refs[page] == 0:
            del self._idle[page]
        self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Give up one hold of each page, in this order: a page before those it depends on."""
        refs, busy, step = self._refs, self._busy, self._newest_step
        for page in pages:
            refs[page] -= 1
            busy[page] = step
            if refs[page] == 0:
                if self._kept[page]:
                    self._idle[page] = None
                else:
                    self._give_back(page)

    def keep(self, page: int) -> None:
        """The tree takes a leased page in."""
        self._kept[page] = True

    def forget(self, page: int) -> None:
        """The tree gives a page up."""
        self._kept[page] = False
        if self._refs[page] == 0:
            del self._idle[page]
            self._give_back(page)

    def _give_back(self, page: int) -> None:
        (self._retiring if self._is_busy(page) else self._free).append(page)

    def _is_busy(self, page: int | None) -> bool:
        return page is not None and self._busy[page] > self._retired_step

    def check(self, leases: Iterable[Lease] = (), kept: Iterable[int] = ()) -> None:
        """Exact integrity check: given every live lease and every page of the tree, is each page where it must be?

        Raises RuntimeError. Linear in pages, with small constants; cheap enough for every time the engine falls idle.
        """
        refs = [0] * self.num_pages
        for lease in leases:
            for page in lease.pages:
                refs[page] += 1
            if lease.source >= 0:
                refs[lease.source] += 1
        kept = set(kept)
        leased = {page for page, count in enumerate(refs) if count}
        free, idle, retiring = set(self._free), set(self._idle), set(self._retiring)
        places = (free, leased, idle, retiring)
        for holds, what in (
            (refs == self._refs, "holds do not match the live leases"),
            (kept == {p for p, k in enumerate(self._kept) if k}, "kept pages do not match the tree"),
            (idle == kept - leased, "idle pages are not those kept and not leased"),
            (len(free) == len(self._free) and len(retiring) == len(self._retiring), "a page is free twice"),
            (sum(map(len, places)) == self.num_pages == len(set().union(*places)), "a page is lost or in two places"),
        ):
            if not holds:
                raise RuntimeError(f"page accounting is broken: {what}")
