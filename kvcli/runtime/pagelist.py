"""`PageList`: which pages hold the rows of one layer group of a sequence."""

from __future__ import annotations

from kvcli.kernels import Basis, RecordLayout
from kvcli.runtime.grouplayout import GroupLayout

NO_PAGE = -1
PageKey = tuple[int, int]  # (arena, page number): which page of a sequence


class PageList:
    """Pages of one group: `pages[i]` holds positions (first + i) * page_size and on.

    `front`: pages 0, 1, ... that are kept though the window, `pages`, has gone on. In a sealed group a page stands in
    `open` until it is full, then in `pages` (NO_PAGE before); sinks stay open.
    """

    def __init__(self, layers: int) -> None:
        self.first = 0
        self.front: list[int] = []
        self.pages: list[int] = []
        self.open: dict[int, int] = {}  # page number -> page of the open arena
        self.bases = tuple(Basis() for _ in range(layers))


def paged_record(g: GroupLayout) -> RecordLayout:
    """How the kernels see the records of a group (or of its open class)."""
    return RecordLayout(
        g.page_size, g.kv_heads, g.dim_k, g.dim_v, g.codec_k.name, g.codec_v.name,
        g.k_row_bytes, g.v_row_bytes, g.v_offset, g.record_bytes, *g.scale_offsets,
    )  # fmt: skip
