"""What `kv estimate` shows people: the screen, its units, --explain and lists."""

from __future__ import annotations

import json

from conftest import KvHere
from estimatecases import CARD, fixture_own_folders, ok  # noqa: F401


def test_the_screen(kv_here: KvHere) -> None:
    out = ok(kv_here("estimate", *CARD))
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "KV/token   32 × 8 × (128 K + 128 V) × 2 B = 131,072 B (f16)" in lines
    assert "attention  GQA · 32 full layers · 32 query heads · 8 KV heads (4:1)" in lines
    assert any(line.startswith("device     NVIDIA RTX 3060 12 GB · 11,876 of 12,288 MiB free") for line in lines)
    f16, int8 = (next(line.split() for line in lines if line.startswith(name)) for name in ("f16 ", "int8 "))
    assert f16[:6] == ["f16", "128.0", "8,192", "13,942", "-2,066", "no"]
    assert int8[:6] == ["int8", "65.0", "4,704", "11,307", "569", "yes"]
    assert "≤ tok/s  an upper bound from reading memory at 360 GB/s (table)" in lines
    assert any("computed: chunk 4,096" in line for line in lines)
    assert "prefill steps of 4,096 tokens as far as memory goes: 512 with f32 and f16" in lines
    assert not any(line.startswith(("per-sequence state", "tables")) for line in lines), "nothing of a MiB"
    assert "recommend  --cache-type-k int8 --cache-type-v int8 -c 65536" in lines
    assert "assumed: kv doctor measures it" in out


def test_explain_multiplies(kv_here: KvHere) -> None:
    out = ok(kv_here("estimate", *CARD, "--explain", "-ct", "int4"))
    assert "a token: 32 × 8 × 132 = 33,792 B" in out
    assert "a record: 64 × 132, to a multiple of 128 = 8,448 B" in out
    assert "pages: max(0, floor(65,536 / 64) - 1) = 1,023" in out
    assert "pages: min(ceil(65,536 / 64), 1 + ceil(4,096 / 64)) = 65" in out
    out = ok(kv_here("estimate", *CARD, "--explain", "-ct", "int4", "--kv-tail", "0", "--kv-sink", "3"))
    assert "pages: max(0, ceil(65,536 / 64) - 3) = 1,021" in out
    assert "pages: min(ceil(65,536 / 64), 3 + ceil(4,096 / 64)) = 67" in out
    shared = ("--batch-size", "4", "--shared-prefix", "1k")
    _, out, _ = kv_here("estimate", *CARD, "--explain", "-ct", "int4", "-ub", "512", *shared)
    assert "pages: 15 + 4 × (max(0, floor(65,536 / 64) - 1) - 15) = 4,047" in out
    assert "pages: 1 + 3 × (1 - 1) + (min(ceil(65,536 / 64), 1 + ceil(512 / 64)) - 1) = 9" in out
    sliding = ok(kv_here("estimate", "gemma-3-12b", "--vram", "80G", "--explain", "-ct", "f16", "-ub", "512"))
    assert "min(ceil(131,072 / 64), ceil((1,024 - 1) / 64) + ceil(512 / 64)) = 24" in sliding


def test_lists(kv_here: KvHere) -> None:
    presets = ok(kv_here("estimate", "--list-presets"))
    for name, cost in (("llama-3.1-8b", "131,072"), ("deepseek-v3", "70,272"), ("falcon-7b", "8,192")):
        assert any(line.split()[0] == name and cost in line for line in presets.splitlines())
    assert "rtx3060-12g" in ok(kv_here("estimate", "--list-gpus"))


def test_units(kv_here: KvHere) -> None:
    """One for all sizes: weights, cache, what is left, what a file takes."""
    for units, token, sizes in (
        ("MiB", "KiB/token", ("4,691", "8,192", "11,876 of 12,288 MiB free", "4,164 MiB at int8")),
        ("GiB", "KiB/token", ("4.58", "8.00", "11.60 of 12.00 GiB free", "4.07 GiB at int8")),
        ("MB", "kB/token", ("4,919", "8,590", "12,453 of 12,885 MB free", "4,367 MB at int8")),
        ("GB", "kB/token", ("4.92", "8.59", "12.45 of 12.88 GB free", "4.37 GB at int8")),
        ("B", "B/token", ("4,918,535,014", "8,589,934,592", "of 12,884,901,888 B free", "4,366,602,240 B at int8")),
    ):
        out = ok(kv_here("estimate", *CARD, "--units", units))
        assert [each for each in (token, f"tokens, in {units}:", *sizes) if each not in out] == []
        others = {"MiB", "GiB", "MB", "GB"} - {units}
        assert not any(f" {other}" in out.replace("GB/s", "").replace("12 GB ·", "") for other in others), out


def test_ranks_do_not_change_what_the_model_is(kv_here: KvHere) -> None:
    """Sixteen devices repeat eight KV heads: each has one, and the model is GQA all the same."""
    args = ("estimate", "llama-3.1-8b", "--gpu", "h100-80g", "-c", "8k", "--tp", "16")
    out = ok(kv_here(*args))
    assert "attention  GQA · 32 full layers · 32 query heads · 8 KV heads (4:1)" in out
    assert "KV/token   32 × 1 × (128 K + 128 V) × 2 B = 16,384 B (f16), on each of 16" in out
    assert json.loads(ok(kv_here(*args, "--json")))["attention"]["kind"] == "gqa"


def test_whose_tokens_a_second(kv_here: KvHere) -> None:
    args = ("estimate", "llama-3.1-8b", "-c", "4k", "-ct", "f16")
    line = "≤ tok/s  for each sequence, an upper bound from reading memory at 3,350 GB/s (table)"
    assert line in ok(kv_here(*args, "--gpu", "h100", "--batch-size", "8"))
    assert "≤ tok/s  not known: --bandwidth GB/s gives it" in ok(kv_here(*args, "--vram", "80G"))


def test_columns_in_bytes(kv_here: KvHere) -> None:
    """Rows of numbers that are longer than usual end where their heading does."""
    lines = ok(kv_here("estimate", *CARD, "--units", "B")).splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith("source"))
    rows = lines[start : lines.index("", start)]
    column = rows[0].index("source")
    assert len(rows) > 4 and all(row[column - 2 : column] == "  " and row[column] != " " for row in rows)
