"""PrefixTree: which pages hold the keys and values of which token prefixes.

A node is one page. Its key is the page's tokens: `page_size` of them, or fewer in a leaf whose page was not full when
its request stopped. Children are found by whole keys in a dict, so a match costs one lookup a page; only where that
ends are single tokens compared. The tree knows tokens and page ids; it does not know requests, steps or bytes.

A match is token-granular. Where it ends inside a page, the pages before are shared and the last one is copied, because
the request is about to write its own tokens behind the common ones (page_size 4, two requests of one namespace):

    tree      [ the cat sat on ] -> [ the mat and purred ]       pages 4, 7
    request     the cat sat on        the mat or  ...
    match     |<----- shared ----->|<- copied ->|                6 tokens: lease [4, 9], page 7 copied into 9 first
    later     [ the cat sat on ] -> [ the mat and purred ]       7
                                 \\> [ the mat or not     ]       9

Invariants, each checked by check():
  - A page is in at most one node. A slot of a page that the tree has is never written again: the lease that a page was
    allocated for writes behind the node's key, everyone else copies.
  - No key is a proper prefix of a sibling: the longer one serves its matches too, the shorter is dropped or grows.
    Hence, in a node's sorted keys, a key's prefix and the sibling with the longest common prefix stand next to it.
  - A lease that holds a node's page holds those of all its ancestors (insert() exchanges a lease's own page for the
    tree's where both have the same tokens). This gives the pool its eviction order: see pages.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from .pages import Lease, PagePool

Key = tuple[int, ...]


class Node:
    __slots__ = ("children", "key", "keys", "namespace", "page", "parent")

    def __init__(self, parent: Node | None, key: Key, page: int, namespace: str):
        self.parent = parent  # None: a root
        self.key = key
        self.page = page
        self.namespace = namespace
        self.children: dict[Key, Node] = {}
        self.keys: list[Key] = []  # the children's, sorted

    def add(self, child: Node) -> None:
        self.children[child.key] = child
        self.keys.insert(bisect_left(self.keys, child.key), child.key)

    def remove(self, child: Node) -> None:
        del self.children[child.key]
        del self.keys[bisect_left(self.keys, child.key)]

    def closest(self, key: Key) -> tuple[Node | None, int]:
        """The child whose key has the longest common prefix with `key`, and its length."""
        best, longest = None, 0
        at = bisect_left(self.keys, key)
        for candidate in self.keys[max(at - 1, 0) : at + 1]:
            common = common_prefix(candidate, key)
            if common > longest:
                best, longest = self.children[candidate], common
        return best, longest


def common_prefix(a: Key, b: Key) -> int:
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))


class PrefixTree:
    """One tree a namespace. Belongs to one pool; the scheduler's thread only."""

    def __init__(self, pool: PagePool):
        self.pool = pool
        self._roots: dict[str, Node] = {}
        self._nodes: dict[int, Node] = {}  # by page
        pool.on_evict = self._unlink

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, namespace: str, tokens: Sequence[int], limit: int) -> tuple[Lease, int]:
        """Lease the longest known prefix of tokens[:limit]; gives (lease, number of tokens it covers).

        If lease.source >= 0 the last leased page must be filled by copying page `source` before it is used; call
        lease.copied() once that has run.
        """
        pool, size = self.pool, self.pool.page_size
        lease = Lease(pool, namespace)
        node = self._roots.get(namespace)
        if node is None:
            return lease, 0
        end = 0
        while end + size <= limit:
            child = node.children.get(tuple(tokens[end : end + size]))
            if child is None:
                break
            pool.acquire(child.page)
            lease.pages.append(child.page)
            lease.node = node = child
            end += size
        lease.num_inserted = end
        child, common = node.closest(tuple(tokens[end : min(end + size, limit)]))
        if child is not None:
            pool.acquire(child.page)
            if lease.extend(end + common):
                lease.source = child.page
                end += common
            else:
                pool.release((child.page,))
        return lease, end

    def insert(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Make the lease's computed tokens findable. tokens[0] is position lease.num_inserted; all are computed.

        Whole pages become nodes that later inserts of this lease go on from. Tokens that do not fill their page become
        a leaf which that page's next insert makes grow. Where the tree has the same tokens already, the lease takes the
        tree's page and gives its own back.
        """
        if not tokens or lease.source >= 0:  # before its copy has run a lease has nothing that the tree lacks
            return
        size = self.pool.page_size
        node = lease.node or self._roots.setdefault(lease.namespace, Node(None, (), -1, lease.namespace))
        for start in range(0, len(tokens), size):
            index = lease.num_inserted // size
            key = tuple(tokens[start : start + size])
            child = self._place(node, key, lease.pages[index])
            if len(key) < size:
                break
            if child.page != lease.pages[index]:
                self._exchange(lease, index, child.page)
            lease.node = node = child
            lease.num_inserted += size

    def lacks(self, lease: Lease, own: Sequence[int], tokens: Sequence[int], pages: int) -> bool:
        """Whether `tokens` have at least so many whole pages in common with `own` that the tree does not have yet but
        will have from `lease`, whose tokens `own` are."""
        begin, size = lease.num_inserted, self.pool.page_size
        end = begin + pages * size
        if end > len(own) or own[begin:end] != tokens[begin:end] or own[:begin] != tokens[:begin]:
            return False
        node = lease.node or self._roots.get(lease.namespace)
        return node is None or tuple(own[begin : begin + size]) not in node.children

    def drop(self, namespace: str) -> None:
        """Forget a namespace. No live lease may have been matched in or inserted into it."""
        stack = [self._roots.pop(namespace)] if namespace in self._roots else []
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                del self._nodes[node.page]
                self.pool.forget(node.page)

    def _place(self, node: Node, key: Key, page: int) -> Node:
        """The child of `node` that serves `key`: the one with that key, a longer one, or `page` as a new leaf."""
        if key in node.children:
            return node.children[key]
        at = bisect_left(node.keys, key)
        if at < len(node.keys) and node.keys[at][: len(key)] == key:
            return node.children[node.keys[at]]
        if at and key[: len(node.keys[at - 1])] == node.keys[at - 1]:
            shorter = node.children[node.keys[at - 1]]
            node.remove(shorter)
            del self._nodes[shorter.page]
            if shorter.page != page:
                self.pool.forget(shorter.page)
        child = Node(node, key, page, node.namespace)
        node.add(child)
        self._nodes[page] = child
        self.pool.keep(page)
        return child

    def _exchange(self, lease: Lease, index: int, page: int) -> None:
        self.pool.acquire(page)
        self.pool.release((lease.pages[index],))
        lease.pages[index] = page
        lease.fresh = min(lease.fresh, index)

    def _unlink(self, page: int) -> None:
        """The pool is about to reuse an idle page: always a leaf, by the pool's order."""
        node = self._nodes.pop(page)
        parent = node.parent
        parent.remove(node)
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]

    def nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def check(self, leases: Sequence[Lease] = ()) -> None:
        """Exact integrity check of tree and pool together, given every live lease. Raises RuntimeError."""
        self.pool.check(leases, self._nodes)
        rank = {page: i for i, page in enumerate(self.pool._idle)}
        size = self.pool.page_size
        seen = 0
        for node in self.nodes():
            seen += 1
            keys = node.parent.keys
            at = bisect_left(keys, node.key)
            parent_page = node.parent.page
            for holds, what in (
                (self._nodes.get(node.page) is node, f"page {node.page} is in two nodes"),
                (node.parent.children.get(node.key) is node and keys[at] == node.key, "a key is out of order"),
                (len(node.key) == size or not node.children, "a page that is not full has children"),
                (at + 1 == len(keys) or keys[at + 1][: len(node.key)] != node.key, "a key is a prefix of a sibling"),
                (
                    parent_page not in rank or (node.page in rank and rank[node.page] < rank[parent_page]),
                    f"page {parent_page} would be evicted before its child {node.page}",
                ),
            ):
                if not holds:
                    raise RuntimeError(f"prefix tree is broken: {what}")
        if seen != len(self._nodes):
            raise RuntimeError(f"prefix tree is broken: {len(self._nodes) - seen} nodes are out of reach")
        for lease in leases:
            node, index = lease.node, lease.num_inserted // size
            while index:
                index -= 1
                if node is None or node.page != lease.pages[index]:
                    raise RuntimeError("prefix tree is broken: a lease does not hold its path")
                node = node.parent
