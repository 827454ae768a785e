"""How rows of keys and values are stored: the registry of cache types, and where things stand in a record.

A cache type is one row of `CODECS`. Everything else that knows of it is derived from that row: sizes, the numbers that
kernels compute with, what the command line lists, what the guard against weak key types expects, and what tests run.
Beside the row a type needs code only for bits that no other type has: an unpacking in kernels/cpu/cpu_codecs.h and one
in kernels/gpu/tiles.py and seal.py. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvcli.errors import UsageError

NONE, HEAD, ROW = "none", "head", "row"  # what has a scale of its own
ALIGN = 128  # bytes a record is rounded up to


class Numbers(NamedTuple):
    """What kernels know of a cache type.

    Elements are floats with `mantissa` explicit bits of `bits`, clamped to +-`largest`; or, where `mantissa` is 0,
    codes from `lowest` to 2**bits - 1 on an even grid around the middle of these, with the best of `tries` scales.
    """

    bits: int
    mantissa: int
    packing: int
    lowest: int
    tries: int
    largest: float


@dataclass(frozen=True)
class Codec:
    """One cache type, for keys or for values.

    `bits`, `mantissa`, `largest`, `lowest`, `tries`: see `Numbers`. `scale`: NONE, a float16 scale for each ROW (token
    and head), or a float32 scale for each (sequence, layer and) HEAD, fixed by the first page. Rows are padded to whole
    multiples of `packing` elements. `error`: root mean square error of Gaussian rows, relative. `aliases` are other
    spellings, `foreign` formats of other programs of about the same size.
    """

    name: str
    help: str
    bits: int
    scale: str = NONE
    mantissa: int = 0
    largest: float = 0.0
    lowest: int = 0
    tries: int = 0
    packing: int = 1
    error: float = 0.0
    aliases: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def sealed(self) -> bool:
        """Whether full pages are encoded, which leaves an open tail and the sinks in 16 bits."""
        return self.bits < 16

    @property
    def grid(self) -> bool:
        """Whether elements are codes on an even grid, not floats."""
        return self.mantissa == 0

    @property
    def centred(self) -> bool:
        """Whether keys lack a mean, kept once per (sequence, layer, head): a grid has no levels to spare for it."""
        return self.grid

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales of each row."""
        return 2 if self.scale == ROW else 0

    @property
    def static_bytes(self) -> int:
        """Bytes per (sequence, layer, head) outside the pages."""
        return 4 if self.scale == HEAD else 0

    @property
    def numbers(self) -> Numbers:
        """What kernels know of it."""
        return Numbers(self.bits, self.mantissa, self.packing, self.lowest, self.tries, self.largest)

    def row_bytes(self, dim: int) -> int:
        """Bytes of one (token, head) row of `dim` elements without its scale; padding counts."""
        padded = -(-dim // self.packing) * self.packing
        return padded * self.bits // 8


CODECS: dict[str, Codec] = {
    row.name: row
    for row in (
        Codec("f32", "exact", 32, mantissa=23, largest=3.4028234663852886e38),
        Codec("f16", "16 bits, as most models compute", 16, mantissa=10, largest=65504.0),
        Codec("bf16", "16 bits, a larger range", 16, mantissa=7, largest=3.3895313892515355e38),
        Codec("fp8", "8-bit floats (e4m3)", 8, HEAD, mantissa=3, largest=448.0, error=0.026, aliases=("fp8_e4m3",)),
        Codec("fp8_e5m2", "8-bit floats, a larger range", 8, HEAD, mantissa=2, largest=57344.0, error=0.053),
        Codec("int8", "8-bit integers, next to lossless", 8, ROW, lowest=1, tries=1, error=0.0065, foreign=("q8_0",)),
        Codec("int6", "6-bit integers", 6, ROW, tries=15, packing=4, error=0.026),
        Codec("int5", "5-bit integers", 5, ROW, tries=15, packing=8, error=0.051),
        Codec("int4", "4-bit integers, the smallest", 4, ROW, tries=15, packing=4, error=0.1, foreign=("q4_0",)),
    )
}
_OTHER_NAMES = {other: row.name for row in CODECS.values() for other in (*row.aliases, *row.foreign)}


def codec(name: str) -> Codec:
    """The cache type of that name, or of which it is an alias, in any case. Raises UsageError if there is none."""
    lower = name.lower()
    found = CODECS.get(_OTHER_NAMES.get(lower, lower))
    if found is None:
        raise UsageError(f"unknown cache type '{name}'", f"cache types: auto, {', '.join(CODECS)}")
    return found


def canonical(name: str) -> str:
    """The cache type's own name: aliases resolved, "auto" is f16. Raises UsageError if there is none."""
    return "f16" if name.lower() == "auto" else codec(name).name


def alias_note(name: str) -> str:
    """What to tell of a name that other programs use for another format; "" for our own names."""
    if name == "auto" or name not in codec(name).foreign:
        return ""
    return f"{name} means {codec(name).name} here: about the same size, a different format"


def at_least_16(spec: Codec) -> Codec:
    """The type itself, or f16 for one of fewer than 16 bits."""
    return CODECS["f16"] if spec.sealed else spec


class Section(NamedTuple):
    """A part of a record: `bytes` for each `rows` rows. 1 = for each row, the page size = once."""

    name: str
    bytes: int
    rows: int = 1


@dataclass(frozen=True)
class RecordLayout:
    """One (page, KV head) record: `page_size` rows of keys and of values in `sections`, one behind the other.

    The sections "k" and "v" are there always, "k_scales" and "v_scales" (float16) where rows have scales. Sizes and
    offsets are in bytes. `joined`: a value is a part of its key, too, behind what is stored as that: queries have
    dim_k + dim_v elements (latent attention, arXiv 2405.04434).
    """

    page_size: int
    kv_heads: int
    dim_k: int
    dim_v: int
    codec_k: Codec
    codec_v: Codec
    sections: tuple[Section, ...]
    joined: bool = False

    @classmethod
    def of(
        cls,
        page_size: int,
        kv_heads: int,
        dim_k: int,
        dim_v: int,
        codec_k: Codec,
        codec_v: Codec,
        joined: bool = False,
    ) -> RecordLayout:
        """The record of these types: keys, values, then what scales they have."""
        sections = [Section("k", codec_k.row_bytes(dim_k)), Section("v", codec_v.row_bytes(dim_v))]
        for name, each, dim in (("k_scales", codec_k, dim_k), ("v_scales", codec_v, dim_v)):
            if dim and each.scale_bytes:
                sections.append(Section(name, each.scale_bytes))
        return cls(page_size, kv_heads, dim_k, dim_v, codec_k, codec_v, tuple(sections), joined)

    @property
    def dim_q(self) -> int:
        """Elements of a query."""
        return self.dim_k + self.dim_v if self.joined else self.dim_k

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """Where each section begins, and its bytes for each of its rows."""
        places, at = {}, 0
        for section in self.sections:
            places[section.name] = at, section.bytes
            at += self.page_size // section.rows * section.bytes
        return places

    @cached_property
    def record_bytes(self) -> int:
        """All sections, rounded up to ALIGN."""
        used = sum(self.page_size // section.rows * section.bytes for section in self.sections)
        return -(-used // ALIGN) * ALIGN

    @property
    def token_bytes(self) -> int:
        """Bytes that each row takes, without rounding."""
        return sum(section.bytes for section in self.sections if section.rows == 1)

    @property
    def k_row_bytes(self) -> int:
        return self._places["k"][1]

    @property
    def v_row_bytes(self) -> int:
        return self._places["v"][1]

    @property
    def v_offset(self) -> int:
        """Where the rows of values begin."""
        return self._places["v"][0]

    @property
    def k_scales(self) -> int:
        """Where the scales of keys begin; 0 = there are none."""
        return self._places.get("k_scales", (0, 0))[0]

    @property
    def v_scales(self) -> int:
        """Where the scales of values begin; 0 = there are none."""
        return self._places.get("v_scales", (0, 0))[0]


@dataclass(frozen=True)
class SummaryLayout:
    """What tells of the keys of one layer of a page: the mean of each run of rows, `means` a page and KV head.

    Codes of 8 bits, int8 [kv_heads, means, pitch], of which the first `dim` of each mean count and the others are 0;
    then their scales, float32 [kv_heads, means]. A mean is its scale times its codes. Sizes are in bytes.
    """

    kv_heads: int
    means: int
    dim: int

    @property
    def pitch(self) -> int:
        """From one mean's codes to the next: kernels read 16 bytes at a time."""
        return -(-self.dim // 16) * 16

    @property
    def scales(self) -> int:
        """Where the scales begin."""
        return self.kv_heads * self.means * self.pitch

    @property
    def bytes(self) -> int:
        """Of one layer."""
        return -(-(self.scales + 4 * self.kv_heads * self.means) // 16) * 16
