"""`--evict shift`: when the context is full, the older half of what stands behind the first tokens goes at once, and no
row is computed again."""

from __future__ import annotations

from kvcli.runtime.cache.eviction import Pages, Policy, Retention


class Halves(Retention):
    """The `window` most recent rows, in whole pages, and up to as many before them: those go together.

    Pages that are forgotten at the same time are a block; the one that `keep` cuts is the first of its block.
    """

    @property
    def _block(self) -> int:
        """Pages that go at once."""
        return -(-self.window // self.page_size)

    @property
    def _full(self) -> int:
        """Pages that a sequence fills before any go."""
        return self.keep // self.page_size + 2 * self._block

    def start(self, position: int) -> int:
        gone = max(0, (position // self.page_size - self._full) // self._block + 1)  # blocks
        return (self.keep // self.page_size + gone * self._block) * self.page_size if gone else 0

    def until(self, page: Pages) -> Pages:
        return (self._full + (page - self.keep // self.page_size) // self._block * self._block) * self.page_size

    @property
    def pages_behind(self) -> int:
        return 2 * self._block - 1

    @property
    def identity(self) -> str:
        return f"shift {super().identity}"

    @staticmethod
    def room(window: int, page_size: int) -> int:
        return -(-window // page_size) * page_size * 2

    @staticmethod
    def largest(room: int, page_size: int) -> int:
        return room // page_size // 2 * page_size

    def __str__(self) -> str:
        return f"{super().__str__()} to {2 * self._block * self.page_size:,}"


POLICY = Policy(Halves, keep=4, free=True, forgets="the older half of all but the first, at once")
