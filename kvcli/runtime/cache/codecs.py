"""Cache types: how many bytes a row takes in each, known without torch. The codecs themselves are in kernels/codecs."""

from __future__ import annotations

from dataclasses import dataclass

from kvcli.errors import UsageError


@dataclass(frozen=True)
class CodecSpec:
    """Storage of one cache type, for keys or for values.

    `scale_bytes` are per (token, head), `static_bytes` per (sequence, layer, head) outside the pages. Rows are padded
    to whole multiples of `packing` elements. `centred`: as keys they lack a mean, kept once per (sequence, layer,
    head).
    """

    name: str
    bits: int
    scale_bytes: int = 0
    packing: int = 1
    centred: bool = False
    static_bytes: int = 0

    @property
    def sealed(self) -> bool:
        """Whether full pages are encoded, which leaves an open tail and the sinks in 16 bits."""
        return self.bits < 16

    def row_bytes(self, dim: int) -> int:
        """Bytes of one (token, head) row of `dim` elements without its scale; padding counts."""
        padded = -(-dim // self.packing) * self.packing
        return padded * self.bits // 8


CODEC_SPECS: dict[str, CodecSpec] = {
    spec.name: spec
    for spec in (
        CodecSpec("f32", 32),
        CodecSpec("f16", 16),
        CodecSpec("bf16", 16),
        CodecSpec("fp8", 8, static_bytes=4),
        CodecSpec("fp8_e5m2", 8, static_bytes=4),
        CodecSpec("int8", 8, scale_bytes=2, packing=1, centred=True),
        CodecSpec("int6", 6, scale_bytes=2, packing=4, centred=True),
        CodecSpec("int4", 4, scale_bytes=2, packing=4, centred=True),
    )
}
ALIASES = {"fp8_e4m3": "fp8", "q8_0": "int8", "q4_0": "int4"}  # other spellings, and formats of about the same size
OTHERS_NAMES = ("q8_0", "q4_0")  # of these, formats of other programs


def codec(name: str) -> CodecSpec:
    """The cache type of that name. Raises UsageError if there is none."""
    spec = CODEC_SPECS.get(ALIASES.get(name, name))
    if spec is None:
        raise UsageError(f"unknown cache type '{name}'", f"cache types: auto, {', '.join(CODEC_SPECS)}")
    return spec


def canonical(name: str) -> str:
    """The cache type's own name: aliases resolved, "auto" is f16. Raises UsageError if there is none."""
    return "f16" if name == "auto" else codec(name).name


def alias_note(name: str) -> str:
    """What to tell of a name that other programs use for another format; "" for our own names."""
    if name not in OTHERS_NAMES:
        return ""
    return f"{name} means {ALIASES[name]} here: about the same size, a different format"
