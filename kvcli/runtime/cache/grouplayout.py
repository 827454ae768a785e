"""`GroupLayout`: the bytes of every cache row and page of layers that share one page list. Pure integers, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from kvcli.codecs import Codec, RecordLayout, SummaryLayout, at_least_16
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.config import CHUNKED, LATENT, SLIDING, WINDOWED

CHUNK_BYTES = 2 << 20  # the pool commits memory in steps of at most this, and at least one page
RUN_BYTES = 1 << 20  # where chunks are by layer: in steps of at least this of each layer
CENTRE_BYTES = 4  # an element of the mean of keys is a float32
MEAN_ROWS = 16  # whose keys share a mean in it


@dataclass(frozen=True)
class GroupLayout:
    """Layers that share one page list: same kind, heads, dims and window. `layers` are model layer numbers. `window`:
    see `LayerConfig`."""

    kind: str
    layers: tuple[int, ...]
    kv_heads: int
    dim_k: int
    dim_v: int
    window: int
    codec_k: Codec
    codec_v: Codec
    page_size: int
    sinks: int = 1  # in a sealed group: pages at the start of a sequence that stay in 16 bits
    tail: int = 1  # in a sealed group: 1 = a query's own page is read in 16 bits, 0 = rows are sealed one by one
    retention: Retention | None = None  # what stays where old rows are evicted; None = they are not
    limit = None  # there may be any number of pages
    by_layer: bool = False  # a chunk of the pool has its pages' records of one layer, then those of the next
    joined: bool = False  # values are parts of keys (`LayerConfig.turned`); of these `dim_k` dims stand beside them
    summarized: bool = False  # each page has a summary beside it, by which queries choose what they read

    @cached_property
    def record(self) -> RecordLayout:
        """What each page has of one layer and head."""
        joined = self.joined or self.kind == LATENT
        return RecordLayout.of(
            self.page_size, self.kv_heads, self.dim_k, self.dim_v, self.codec_k, self.codec_v, joined
        )

    @property
    def types(self) -> tuple[str, str]:
        """The cache types of keys and of values. What RoPE turns of keys that are values, too, has at least 16 bits
        whatever these are."""
        return (self.codec_v if self.record.joined else self.codec_k).name, self.codec_v.name

    def apart(self) -> GroupLayout:
        """These layers with keys and values stored apart."""
        return replace(self, joined=False, dim_k=self.dim_v, codec_k=self.codec_v) if self.joined else self

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's records in a page."""
        return self.kv_heads * self.record.record_bytes

    @property
    def page_bytes(self) -> int:
        return len(self.layers) * self.layer_bytes

    @property
    def summary_bytes(self) -> int:
        """Bytes of the summary of a page, in all layers: means of its keys; 0 where there is none."""
        return len(self.layers) * self.summary.bytes if self.summarized else 0

    @property
    def summary(self) -> SummaryLayout:
        """What is told of the keys of a page and layer."""
        return SummaryLayout(self.kv_heads, self.page_size // MEAN_ROWS, self.dim_k)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that a page takes, with its summary."""
        return self.page_bytes + self.summary_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's rows and scales in all layers of the group, without page rounding."""
        return len(self.layers) * self.kv_heads * self.record.token_bytes

    @property
    def static_bytes(self) -> int:
        """Bytes per sequence that stand outside the pages: the scales of fp8, the means of centred keys."""
        means = self.dim_k * CENTRE_BYTES if self.codec_k.centred else 0
        each = means + self.codec_k.static_bytes + (self.codec_v.static_bytes if self.dim_v else 0)
        return len(self.layers) * self.kv_heads * each

    @property
    def reach(self) -> int:
        """The sliding window that kernels apply, 0 = none; chunks are told apart by the page list."""
        return self.window if self.kind == SLIDING else 0

    @property
    def pages_per_chunk(self) -> int:
        """Pages that the pool commits at a time."""
        return -(-RUN_BYTES // self.layer_bytes) if self.by_layer else max(1, CHUNK_BYTES // self.page_bytes)

    @property
    def layer_stride(self) -> int:
        """Bytes from a page's records of one layer to those of the next."""
        return self.layer_bytes * self.pages_per_chunk if self.by_layer else self.layer_bytes

    def committed_bytes(self, pages: int) -> int:
        """Bytes that the pool has committed once `pages` pages were in use at a time."""
        return -(-pages // self.pages_per_chunk) * self.pages_per_chunk * self.held_bytes

    @property
    def sealed(self) -> bool:
        """Whether full pages are encoded, which needs open ones beside them."""
        return self.codec_k.sealed or self.codec_v.sealed

    def open_pages(self, tokens: int, chunk: int) -> int:
        """Most 16-bit pages of a sequence of `tokens` in a sealed group: the sinks, and those of the step at hand."""
        if not self.sealed:
            return 0
        sinks, whole, keeps = self.sinks, -(-tokens // self.page_size), self.retention
        if keeps:
            sinks = min(sinks, self.kept_pages + keeps.pages_behind)
        return min(whole, sinks + -(-chunk // self.page_size))

    def open_pages_kept(self, tokens: int) -> int:
        """16-bit pages of a sequence of `tokens` between steps: the sinks, and the page being filled."""
        if not self.sealed:
            return 0
        being_filled = bool(self.tail and tokens % self.page_size and tokens // self.page_size >= self.sinks)
        evicted = max(0, min(self.sinks, self.first_page(tokens)) - self.kept_pages) if self.retention else 0
        return min(-(-tokens // self.page_size), self.sinks) - evicted + being_filled

    def sealed_rows(self, length: int) -> int:
        """How many of the first `length` rows are sealed, or would be if they were not sinks."""
        return length // self.page_size * self.page_size if self.tail else length

    def newly_sealed(self, start: int, end: int) -> tuple[int, int]:
        """The rows [first, last) that are sealed as rows [start, end) come; there are none where first >= last."""
        first, last = (max(self.sealed_rows(n), self.sinks * self.page_size) for n in (start, end))
        return first, last

    @cached_property
    def open_class(self) -> GroupLayout | None:
        """These layers in 16 bits, for the sinks and for pages that are being filled; None if not sealed."""
        if not self.sealed:
            return None
        types = at_least_16(self.codec_k), at_least_16(self.codec_v)
        return replace(self, codec_k=types[0], codec_v=types[1], summarized=False)

    def pages(self, tokens: int, chunk: int) -> int:
        """Most pages that a sequence of `tokens` holds at once when it is fed in chunks of at most `chunk` tokens.

        A window, of a sliding group or of a retention, needs the pages behind the first query of a chunk, and those of
        the chunk. Kept pages stand before it.
        """
        whole = -(-tokens // self.page_size)
        if self.sealed:  # only full pages are sealed, and the sinks never
            whole = max(0, -(-self.sealed_rows(tokens) // self.page_size) - self.sinks)
        of_chunk = -(-chunk // self.page_size)
        if self.retention:
            kept = self.kept_pages - min(self.kept_pages, self.sinks if self.sealed else 0)
            return min(whole, kept + self.pages_behind + of_chunk)
        return whole if self.kind not in WINDOWED else min(whole, self.pages_behind + of_chunk)

    @property
    def pages_behind(self) -> int:
        """Most pages, of a sliding window or that of a retention, behind that of a step's first query."""
        return self.retention.pages_behind if self.retention else -(-(self.window - 1) // self.page_size)

    def shared_pages(self, tokens: int) -> tuple[int, int]:
        """Pages that sequences with the same first `tokens` hold in common: of the group, and sinks in 16 bits."""
        if self.kind in WINDOWED:
            return 0, 0
        whole = tokens // self.page_size
        if self.retention:  # each sequence has a window of its own
            whole = min(whole, self.kept_pages)
        sinks = min(whole, self.sinks) if self.sealed else 0
        return whole - sinks, sinks

    @property
    def kept_pages(self) -> int:
        """Pages at the start of a sequence that stay where others are evicted."""
        return self.retention.kept_pages if self.retention else 0

    @property
    def windowed(self) -> bool:
        """Whether a sequence lets go of pages as it grows."""
        return self.kind in WINDOWED or self.retention is not None

    def first_page(self, position: int) -> int:
        """The oldest page that a query at `position`, or any later one, can see, kept pages aside."""
        if self.retention:
            return self.retention.start(position) // self.page_size
        return self.first_row(position) // self.page_size

    def first_row(self, position: int) -> int:
        """The oldest row that a query at `position` sees in a layer with a window or chunks; 0 in others."""
        if self.kind == CHUNKED:
            return position // self.window * self.window
        return max(0, position - self.window + 1) if self.kind == SLIDING else 0

    def chunk_start(self, position: int) -> int:
        """Where the chunk of a query at `position` begins; 0 in layers without chunks."""
        return self.first_row(position) if self.kind == CHUNKED else 0

    def held_pages(self, tokens: int) -> list[int]:
        """Numbers of the pages that a sequence of `tokens` holds between steps: kept ones, and those of the window."""
        first = self.first_page(tokens)
        return [*range(min(first, self.kept_pages)), *range(first, -(-tokens // self.page_size))]

    def rows_in_use(self, number: int, tokens: int) -> int:
        """Rows of page `number` that the token behind `tokens` sees, or a later one may."""
        first, end, window = number * self.page_size, min((number + 1) * self.page_size, tokens), 0
        if self.retention:
            window = self.retention.start(tokens)
        else:
            window = self.first_row(tokens)
        kept = min(self.retention.keep, window, end) - first if self.retention else 0
        return max(0, kept) + max(0, end - max(first, window))

    def rows_seen(self, tokens: int) -> int:
        """Rows that the last of `tokens` sees."""
        if self.retention:
            return tokens - self.retention.gap(max(0, tokens - 1))
        return tokens - self.first_row(max(0, tokens - 1))
