"""Strings on which tokenizers differ: white space, contractions, digits, scripts, marks, characters that are none."""

from __future__ import annotations

import random

_ATOMS = (
    *(
        "a",
        "b",
        "the",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "▁",
        "▁▁",
        "é",
        "e\u0301",
        "漢字",
        "日本語",
        "한국어",
        "😀",
    ),
    *("\U0001f469\u200d\U0001f467", "\u00a0", "\u3000", "\u200b", "\u200d", "\x00", "\x01", "\x1f", "\x7f", "\x85"),
    *("\u2028", "0", "12", "345", "6789012", "'s", "'LL", "'\u017f", "\u212a", "ⅷ", "²", "½", "٣", "𐐀", "\U000e0100"),
    *("\ufffd", "\u0378", "\U000323b0", "<", "</s>", "<|im_end|>", "<0x41>", "_", "...", "!!", "$", "+", "=", "^", "`"),
    *("~", "|", "¿", "ǅ", "ʰ", "ß", "İ", "ﬁ", "\uff21", "\uff01", "。", "،", "۔", "ก", "ำ", "क", "\u094d", "ष"),
    *("\u0300", "\u20dd", "\uf8ff", "\u0600", "\u061c", "\ufeff", "http://x.y/z?a=b", "camelCase", "SHOUT", "don't"),
    *("  x", "x  ", " \n ", "  \u0378", " \x01 "),
)


def adversarial(count: int, seed: int = 0, extra: tuple[str, ...] = ()) -> list[str]:
    """So many strings, always the same ones; `extra` is mixed in."""
    draw, atoms = random.Random(seed), [*_ATOMS, *extra]
    blocks = ((1, 0x2FF), (0x300, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x323FF))

    def one() -> str:
        form = draw.random()
        if form < 0.75:
            return "".join(draw.choice(atoms) for _ in range(draw.randint(1, 14)))
        if form < 0.9:
            return "".join(chr(draw.randint(*draw.choice(blocks))) for _ in range(draw.randint(1, 12)))
        return "".join(draw.choice(atoms) * draw.randint(1, 6) for _ in range(draw.randint(1, 4)))

    return [one() for _ in range(count)]
