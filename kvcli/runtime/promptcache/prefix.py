"""`PrefixTree`: pages that stay in the pool after the sequence that filled them, found by the tokens of a prompt.

A radix tree over blocks, the tokens of one page each; only a leaf may be shorter. A node holds the pages of its block,
one reference each, so whoever uses them shares them. What was used longest ago goes first, leaves before what is above
them; pages that a sequence holds too stay in the pool until it lets go as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from kvcli.runtime.cache.layout import PageKey
from kvcli.runtime.cache.pagelist import Bases
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.promptcache.prefixpages import common_length, longest, needed

Block = tuple[int, ...]


@dataclass
class _Node:
    """One block. `pages` by arena; all have the number `depth` - 1."""

    block: Block
    parent: _Node | None
    depth: int
    pages: dict[int, int] = field(default_factory=dict)
    bases: Bases = ()
    children: dict[Block, _Node] = field(default_factory=dict)
    used: int = 0


class PrefixTree:
    """A tree of rows that are alike. Not for use from several threads."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._root = _Node((), None, 0)
        self._clock = itertools.count(1)

    def insert(self, seq: Sequence, whole: bool = False, only: Container[PageKey] | None = None) -> None:
        """Share the pages of a sequence for the blocks of its tokens; `whole`: not that of the block being filled,
        which would have to be copied when more rows come; `only`: these of them."""
        size, node, now = self.pool.layout.page_size, self._root, next(self._clock)
        by_number: dict[int, dict[int, int]] = {}
        held = {key: page for key, page in seq.numbered().items() if only is None or key in only}
        for (arena, number), page in held.items():
            by_number.setdefault(number, {})[arena] = page
        length = seq.length if seq.exact is None else seq.exact  # rows behind are of use to nobody else
        length = length // size * size if whole or length < seq.length else length
        for number, at in enumerate(range(0, length, size)):
            block = tuple(seq.tokens[at : at + size])
            node = self._child(node, block)
            node.used, node.bases = now, seq.bases
            for arena, page in by_number.get(number, {}).items():
                if arena not in node.pages:
                    self.pool.retain(arena, page)
                    node.pages[arena] = page

    def _child(self, node: _Node, block: Block) -> _Node:
        """The child with that block; a shorter leaf that it continues goes."""
        child = node.children.get(block)
        if child is None:
            for other in [b for b in node.children if len(b) < len(block) and b == block[: len(b)]]:
                self._remove(node.children[other])
            child = node.children[block] = _Node(block, node, node.depth + 1)
        return child

    def find(self, tokens: list[int]) -> tuple[int, dict[PageKey, int], Bases]:
        """(length, pages, bases) of the longest prefix of `tokens` that a sequence can adopt; length 0 = there is none.

        The pages are the tree's; whoever wants them retains them before the tree is touched again.
        """
        agree, pages, bases = self._match(tokens)
        length = longest(self.pool.layout, agree, dict.fromkeys(pages, agree))
        return length, {key: pages[key] for key in needed(self.pool.layout, length)}, bases

    def valid(self, tokens: list[int]) -> dict[PageKey, int]:
        """The pages in the tree of a prompt, and up to how many tokens each agrees with it."""
        agree, pages, _ = self._match(tokens)
        return dict.fromkeys(pages, agree)

    def common(self, tokens: list[int]) -> int:
        """How many tokens some prompt in the tree has in common with this one before the two part, or either ends."""
        return self._match(tokens)[0]

    def _match(self, tokens: list[int]) -> tuple[int, dict[PageKey, int], Bases]:
        """How many tokens agree with the nodes on the way, the nodes' pages, and the bases of the last one."""
        size, node, at, now = self.pool.layout.page_size, self._root, 0, next(self._clock)
        pages: dict[PageKey, int] = {}
        bases: Bases = ()
        while node.children:
            asked = tokens[at : at + size]
            child = node.children.get(tuple(asked)) or max(
                node.children.values(), key=lambda c: (common_length(list(c.block), asked), len(c.pages))
            )
            same = common_length(list(child.block), asked)
            if same == 0:
                break
            pages.update(((arena, node.depth), page) for arena, page in child.pages.items())
            at, node, bases, child.used = at + same, child, child.bases, now
            if same < size:
                break
        return at, pages, bases

    def evict(self, arena: int) -> bool:
        """Let go of what was used longest ago until a page of the arena is free; whether one is. A checkpoint goes
        alone: rows behind it are of use as long as there is another one."""
        if self.pool.layout.state_arenas and arena == self.pool.layout.state_arenas[1]:
            return self._evict_checkpoint(arena)
        for node in sorted(self._nodes(), key=lambda n: (n.used, -n.depth)):
            held = node.pages.get(arena)
            if held is not None and self.pool.refcount(arena, held) == 1:
                for below in self._below(node):
                    self._remove(below)
                return True
        return False

    def _evict_checkpoint(self, arena: int) -> bool:
        for node in sorted(self._nodes(), key=lambda n: (n.used, n.depth)):
            held = node.pages.get(arena)
            if held is not None and self.pool.refcount(arena, held) == 1:
                self.pool.release(arena, node.pages.pop(arena))
                return True
        return False

    def spare(self, arena: int) -> int:
        """Pages of the arena that nobody else holds."""
        held = (node.pages.get(arena) for node in self._nodes())
        return sum(page is not None and self.pool.refcount(arena, page) == 1 for page in held)

    def clear(self) -> None:
        """Let go of everything."""
        for child in list(self._root.children.values()):
            for node in self._below(child):
                self._remove(node)

    def _nodes(self) -> list[_Node]:
        return [node for child in self._root.children.values() for node in self._below(child)]

    def _below(self, node: _Node) -> list[_Node]:
        """The node and all below it, those below first. A prompt may be thousands of blocks deep."""
        found, waiting = [], [node]
        while waiting:
            found.append(waiting.pop())
            waiting.extend(found[-1].children.values())
        return found[::-1]

    def _remove(self, node: _Node) -> None:
        """Let go of a leaf's pages and forget it."""
        for arena, page in node.pages.items():
            self.pool.release(arena, page)
        node.pages = {}
        if node.parent is not None:
            node.parent.children.pop(node.block, None)

    def holds(self) -> Iterator[tuple[int, int]]:
        """(arena, page) of every reference, for `PagePool.check`."""
        for node in self._nodes():
            yield from node.pages.items()


class PrefixTrees:
    """The tree of rows that the engine computed, and one of rows over `foreign` ones (`Sequence.foreign`), which would
    be others if it computed them."""

    def __init__(self, pool: PagePool) -> None:
        self.own, self.foreign = PrefixTree(pool), PrefixTree(pool)
        self._page_size = pool.layout.page_size

    def insert(self, seq: Sequence, whole: bool = False, only: Container[PageKey] | None = None) -> None:
        """See `PrefixTree.insert`."""
        (self.foreign if seq.foreign else self.own).insert(seq, whole, only)

    def find(self, tokens: list[int]) -> tuple[int, dict[PageKey, int], Bases, int]:
        """See `PrefixTree.find`; also how many of the rows are foreign. These are found where they are more, by a page
        at least."""
        own, other = self.own.find(tokens), self.foreign.find(tokens)
        return (*other, other[0]) if other[0] >= own[0] + self._page_size else (*own, 0)

    def valid(self, tokens: list[int]) -> list[dict[PageKey, int]]:
        """See `PrefixTree.valid`; of each tree."""
        return [self.own.valid(tokens), self.foreign.valid(tokens)]

    def common(self, tokens: list[int]) -> int:
        """See `PrefixTree.common`."""
        return max(self.own.common(tokens), self.foreign.common(tokens))

    def evict(self, arena: int) -> bool:
        """See `PrefixTree.evict`; foreign rows go first."""
        return self.foreign.evict(arena) or self.own.evict(arena)

    def spare(self, arena: int) -> int:
        """See `PrefixTree.spare`."""
        return self.foreign.spare(arena) + self.own.spare(arena)

    def clear(self) -> None:
        """Let go of everything."""
        self.foreign.clear()
        self.own.clear()

    def holds(self) -> Iterator[tuple[int, int]]:
        """See `PrefixTree.holds`."""
        yield from self.foreign.holds()
        yield from self.own.holds()
