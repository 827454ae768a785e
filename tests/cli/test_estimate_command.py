"""`kv estimate` from the outside: the screen, the forms for programs, exit codes, speed, and no torch."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PACKAGE_ROOT, KvHere
from estimatecases import CARD, fixture_own_folders, fixture_small, ok  # noqa: F401

from kvcli.runtime.host.memory import gpus
from kvcli.runtime.plan import overheads

MIB = 1 << 20


def test_the_screen(kv_here: KvHere) -> None:
    out = ok(kv_here("estimate", *CARD))
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "KV/token   32 × 8 × (128 K + 128 V) × 2 B = 131,072 B (f16)" in lines
    assert "attention  GQA · 32 full layers · 32 query heads · 8 KV heads (4:1)" in lines
    assert any(line.startswith("device     NVIDIA RTX 3060 12 GB · 11,876 of 12,288 MiB free") for line in lines)
    f16, int8 = (next(line.split() for line in lines if line.startswith(name)) for name in ("f16 ", "int8 "))
    assert f16[:6] == ["f16", "128.0", "8,192", "13,899", "-2,023", "no"]
    assert int8[:6] == ["int8", "65.0", "4,704", "11,263", "613", "yes"]
    assert "≤ tok/s  an upper bound from reading memory at 360 GB/s (table)" in lines
    assert any("computed: chunk 4,096" in line for line in lines)
    assert "prefill steps of 4,096 tokens as far as memory goes: 512 with f32 and f16" in lines
    assert not any(line.startswith(("per-sequence state", "tables")) for line in lines), "nothing of a MiB"
    assert "recommend  --cache-type-k int8 --cache-type-v int8 -c 65536" in lines
    assert "assumed: kv doctor measures it" in out


def test_every_form_has_the_same_numbers(kv_here: KvHere) -> None:
    rows = json.loads(ok(kv_here("estimate", *CARD, "--json")))["types"]
    table = list(csv.DictReader(io.StringIO(ok(kv_here("estimate", *CARD, "--csv")))))
    assert [int(row["kv_bytes"]) for row in table] == [row["kv_bytes"] for row in rows]
    assert [int(row["max_ctx_size"]) for row in table] == [row["max_ctx_size"] for row in rows]
    explained = ok(kv_here("estimate", *CARD, "--explain"))
    for row in rows:
        assert f"KV pool  {row['kv_bytes']:,} B" in explained
        assert f"= {row['predicted_bytes']:,} B" in explained
        assert f"largest context: {row['max_ctx_size']:,} " in explained


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


def test_several_contexts_and_types(kv_here: KvHere) -> None:
    out = ok(
        kv_here(
            "estimate",
            "llama-3.1-8b",
            "--vram",
            "80G",
            "-c",
            "8k,0",
            "-ctk",
            "int8",
            "-ctv",
            "int8,int4",
            "--csv",
        )
    )
    rows = [(row["ctx_size"], row["type_k"], row["type_v"]) for row in csv.DictReader(io.StringIO(out))]
    assert rows == [
        ("8192", "int8", "int8"),
        ("8192", "int8", "int4"),
        ("131072", "int8", "int8"),
        ("131072", "int8", "int4"),
    ]


def test_types_are_those_of_kv_run(kv_here: KvHere) -> None:
    """Pairs as the table prints them; foreign names are told, and neither tail nor sinks in 16 bits."""
    roomy = ("llama-3.1-8b", "--vram", "80G", "-c", "8k")

    def pairs(*flags: str) -> list[tuple[str, str]]:
        table = csv.DictReader(io.StringIO(ok(kv_here("estimate", *roomy, "--csv", *flags))))
        return [(row["type_k"], row["type_v"]) for row in table]

    assert pairs("-ct", "int8/int4,f16") == [("int8", "int4"), ("f16", "f16")]
    assert pairs("-ct", "int8", "-ctk", "f16") == [("f16", "int8")]
    assert pairs("-ctv", "int4") == [("f16", "int4")]
    assert pairs("-ct", "f16,bf16", "--kv-tail", "0", "--kv-sink", "0") == [("f16", "f16"), ("bf16", "bf16")]
    code, _, err = kv_here("estimate", *roomy, "-ct", "q8_0,int8/q4_0")
    assert code == 0 and all(f"{name} means {own} here" in err for name, own in (("q8_0", "int8"), ("q4_0", "int4")))


@pytest.mark.slow
@pytest.mark.skipif(bool(gpus()), reason="a GPU is here")
def test_a_missing_gpu_is_what_it_is_to_other_commands(small: Path, kv_here: KvHere) -> None:
    told = kv_here("estimate", str(small), "--device", "cuda")
    assert told == kv_here("bench", "-m", str(small), "--device", "cuda") and told[0] == 3


def test_sharing_and_ranks(kv_here: KvHere) -> None:
    def kv_bytes(*args: str) -> int:
        return json.loads(
            ok(kv_here("estimate", "llama-3.1-8b", "--vram", "800G", "-c", "4096", "-ct", "f16", "--json", *args))
        )["types"][0]["kv_bytes"]

    page = 64 * 131072
    assert kv_bytes() == 64 * page
    assert kv_bytes("--batch-size", "10") == 640 * page
    assert kv_bytes("--batch-size", "10", "--shared-prefix", "2000") == 364 * page  # 31 + 10 x 33, to chunks of 4
    assert kv_bytes("--tp", "2") == 32 * page
    assert kv_bytes("--tp", "16") == kv_bytes("--tp", "8") == 8 * page


def test_what_was_measured_is_used(small: Path, kv_here: KvHere) -> None:
    overheads.store("cpu", overheads.Overheads(runtime_bytes=77 * MIB, bandwidth=20.0))
    answer = json.loads(ok(kv_here("estimate", str(small), "--json", "--device", "cpu")))
    runtime = next(row for row in answer["fixed"] if row["name"] == "runtime and libraries")
    assert (runtime["predicted_bytes"], runtime["source"]) == (77 * MIB, "measured")
    f16 = next(row for row in answer["types"] if row["type_k"] == "f16")
    read = 2 * (64 * 64 * 2 + 64 * 4) + 100 * 64 * 2 + 512 * 256
    assert f16["limit_tps"] == pytest.approx(20e9 / read, rel=1e-4)
    overheads.state_file().write_text("{")
    assert "kv doctor renews" in kv_here("estimate", str(small), "--device", "cpu")[2]


def test_bandwidth_gives_the_ceiling(kv_here: KvHere) -> None:
    """All weights but the input embedding, and every row of the cache, are read once a token."""
    row = json.loads(ok(kv_here("estimate", *CARD, "--json", "-ct", "int8", "--bandwidth", "360")))["types"][0]
    read = round((8_030_261_248 - 128_256 * 4096) * 4.9 / 8) + 65536 * 66560
    assert row["limit_tps"] == pytest.approx(360e9 / read, rel=1e-3)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no model is named"),
        (("nosuchmodel",), "no model named"),
        (("smollm2", "-m", "smollm2"), "given twice"),
        (("smollm2", "-ct", "int3"), "'int3' is not a cache type"),
        (("smollm2", "-c", "lots"), "--ctx-size"),
        (("smollm2", "--gpu", "voodoo"), "no card named"),
        (("smollm2", "--device", "cuda:99"), "--device"),
        (("smollm2", "--vram", "lots"), "--vram"),
        (("smollm2", "--tp", "4"), "--tp 4"),
        (("smollm2", "--json", "--csv"), "only one of --json and --csv can be given"),
        (("smollm2", "--units", "mb"), "--units must be one of MiB, GiB, MB, GB, B, not 'mb'"),
        (("smollm2", "--batch-size", "0"), "--batch-size must be 1 to 1,048,576, not 0"),
        (("smollm2", "--print-args", "--tp", "3"), "one device and one sequence"),
        (("smollm2", "--print-args", "--batch-size", "2"), "one device and one sequence"),
        (("smollm2", "--page-size", "48"), "--page-size"),
        (("smollm2", "--kv-tail", "2"), "--kv-tail must "),
        (("smollm2", "--kv-sink", "-1"), "--kv-sink must "),
        (("smollm2", "--kv-tail", "0", "--kv-sink", "0"), "--kv-tail 0 and --kv-sink 0 cannot be used together"),
        (("smollm2", "--shared-prefix", "9k"), "--shared-prefix"),
        (("smollm2", "--bandwidth", "0"), "--bandwidth"),
        (("--layers", "2"), "--kv-heads"),
        (("--layers", "2", "--kv-heads", "2", "--head-dim", "64"), "-c N"),
        (("smollm2", "--kv-heads", "-1"), "--kv-heads"),
        (("smollm2", "--params", "many"), "--params"),
    ],
)
def test_usage_errors(args: tuple[str, ...], message: str, kv_here: KvHere) -> None:
    code, out, err = kv_here("estimate", *args)
    assert code in (2, 3)
    assert message in (out + err) and "Traceback" not in err


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


def test_errors_as_json(kv_here: KvHere) -> None:
    code, out, err = kv_here("estimate", "nosuchmodel", "--json")
    assert code == 3 and err == ""
    assert json.loads(out)["error"]["code"] == 3


def test_torch_is_never_imported(small: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from kvcli.cli.main import run_command\n"
        "codes = [run_command(sys.argv[1:]), run_command(['estimate', 'gemma-3-12b', '--explain'])]\n"
        "bad = [m for m in ('torch', 'triton', 'transformers') if m in sys.modules]\n"
        "sys.exit(f'{bad} {codes}' if bad or codes[0] else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(PACKAGE_ROOT), "estimate", str(small)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


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


def test_csv_has_words_of_json(kv_here: KvHere) -> None:
    rows = [line.split(",") for line in ok(kv_here("estimate", *CARD, "--csv")).splitlines()]
    fits = rows[0].index("fits")
    assert {row[fits] for row in rows[1:]} == {"true", "false"}
