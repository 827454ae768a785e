"""`--evict window`: the oldest tokens go, the very first too. Models lean on those (arXiv 2309.17453): expect nonsense
once they are gone, unless the model was trained with such a window."""

from __future__ import annotations

from kvcli.runtime.cache.eviction import Pages, Policy, Retention


class Rolling(Retention):
    """The `window` most recent rows, and what else is in the oldest page of those."""

    def start(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.page_size * self.page_size

    def until(self, page: Pages) -> Pages:
        return (page + 1) * self.page_size + self.window - 1

    @property
    def pages_behind(self) -> int:
        return -(-(self.window - 1) // self.page_size)

    @staticmethod
    def room(window: int, page_size: int) -> int:
        return window + page_size

    @staticmethod
    def largest(room: int, page_size: int) -> int:
        return room - page_size


POLICY = Policy(Rolling, forgets="all but the recent ones")
