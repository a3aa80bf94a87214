"""PagePool and PrefixTree driven at random against a naive model that writes every slot of every page.

The model's "keys and values" of a position are the tokens up to it, so a wrong page, a missing copy, a page reused too
early or a slot overwritten shows as a wrong prefix. Every invariant is checked after every operation.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenmill.cache.pages import Lease, PagePool
from tokenmill.cache.prefix import PrefixTree

PAGE = 4
PAGES = 14
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=18)


class Sequence:
    def __init__(self, namespace: str, tokens: list[int], lease: Lease, computed: int):
        self.namespace, self.tokens, self.lease, self.computed = namespace, tokens, lease, computed


def path_tokens(node) -> tuple[int, ...]:
    return () if node.parent is None else path_tokens(node.parent) + node.key


class CacheMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES, PAGE)
        self.tree = PrefixTree(self.pool)
        self.live: list[Sequence] = []
        self.memory: dict[tuple[int, int], tuple] = {}  # (page, offset) -> (namespace, tokens up to here)
        self.step = self.retired = 0
        self.given_back: dict[int, int] = {}  # page -> newest step when somebody last let go of it

    def note_release(self, lease):
        for page in [*lease.pages, lease.source]:
            self.given_back[page] = self.step

    def check_new(self, pages):
        for page in pages:
            assert self.given_back.get(page, 0) <= self.retired, "a page was reused before its step retired"

    # ---- what a scheduler does

    @rule(namespace=st.sampled_from("ab"), tokens=TOKENS)
    def start(self, namespace, tokens):
        limit = len(tokens) - 1
        paths = [path_tokens(n) for n in self.tree.nodes() if n.namespace == namespace]
        common = [sum(1 for _ in self.equal_prefix(path, tokens[:limit])) for path in paths]
        expected = max(common, default=0)
        lease, matched = self.tree.match(namespace, tokens, limit)
        assert matched <= limit
        if lease.source < 0 and expected % PAGE:
            assert matched in (expected, expected // PAGE * PAGE)  # no page for the copy
        else:
            assert matched == expected
        if lease.source >= 0:
            self.check_new(lease.pages[-1:])
        assert len(lease.pages) == -(-matched // PAGE)
        sequence = Sequence(namespace, tokens, lease, matched)
        self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data, count):
        s = data.draw(st.sampled_from(self.live))
        end = min(s.computed + count, len(s.tokens))
        before = len(s.lease.pages)
        if not s.lease.extend(end):
            assert len(s.lease.pages) == before
            return
        self.check_new(s.lease.pages[before:])
        if s.lease.source >= 0:  # as late as the step that computes runs
            copy = s.lease.pages[s.computed // PAGE]
            for offset in range(PAGE):
                self.memory[copy, offset] = self.memory.get((s.lease.source, offset))
        kept = {n.page: len(n.key) for n in self.tree.nodes()}
        for p in range(s.computed, end):
            page, offset = s.lease.pages[p // PAGE], p % PAGE
            assert offset >= kept.get(page, 0), "a slot that the tree has was written again"
            self.memory[page, offset] = (s.namespace, tuple(s.tokens[: p + 1]))
        s.computed = end
        s.lease.copied()
        self.check_contents(s)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), whole_pages=st.booleans())
    def insert(self, data, whole_pages):
        s = data.draw(st.sampled_from(self.live))
        end = s.computed // PAGE * PAGE if whole_pages else s.computed
        before = list(s.lease.pages)
        self.tree.insert(s.lease, s.tokens[s.lease.num_inserted : end])
        for index, page in enumerate(before):
            if s.lease.pages[index] != page:
                self.given_back[page] = self.step
                assert s.lease.fresh <= index
        s.lease.fresh = len(s.lease.pages)
        self.check_contents(s)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data, keep):
        s = data.draw(st.sampled_from(self.live))
        if keep:
            self.tree.insert(s.lease, s.tokens[s.lease.num_inserted : s.computed])
        self.note_release(s.lease)
        s.lease.release()
        self.live.remove(s)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=TOKENS)
    def go_on(self, data, tokens):
        s = data.draw(st.sampled_from(self.live))
        if len(s.tokens) < 40:
            s.tokens = s.tokens + tokens

    @precondition(lambda self: not any(s.namespace == "b" for s in self.live))
    @rule()
    def drop(self):
        self.tree.drop("b")
        assert not [n for n in self.tree.nodes() if n.namespace == "b"]

    @precondition(lambda self: self.step - self.retired < 2)
    @rule()
    def begin_step(self):
        self.step += 1
        self.pool.begin_step(self.step)

    @precondition(lambda self: self.retired < self.step)
    @rule()
    def retire_step(self):
        self.retired += 1
        self.pool.retire_step(self.retired)

    # ---- what must always be so

    @staticmethod
    def equal_prefix(a, b):
        for x, y in zip(a, b):
            if x != y:
                return
            yield x

    def check_contents(self, s):
        for p in range(s.computed // PAGE * PAGE if s.lease.source >= 0 else s.computed):
            assert self.memory[s.lease.pages[p // PAGE], p % PAGE] == (s.namespace, tuple(s.tokens[: p + 1]))

    @invariant()
    def accounts_are_exact(self):
        self.tree.check([s.lease for s in self.live])

    @invariant()
    def every_slot_holds_its_prefix(self):
        for s in self.live:
            self.check_contents(s)
        for node in self.tree.nodes():
            tokens = path_tokens(node)
            for offset in range(len(node.key)):
                end = len(tokens) - len(node.key) + offset + 1
                assert self.memory[node.page, offset] == (node.namespace, tokens[:end])

    def teardown(self):
        for s in self.live:
            s.lease.release()
        self.pool.retire_step(self.step)
        self.tree.check()
        assert self.pool.num_available == PAGES and self.pool.num_leased == 0
        pages = self.pool.allocate(PAGES)  # everything can be evicted, leaves first
        assert pages is not None and len(self.tree) == 0


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
