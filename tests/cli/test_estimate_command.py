"""`kv estimate` from the outside: its options, the forms for programs, exit codes, speed, and no torch."""

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


def test_csv_has_words_of_json(kv_here: KvHere) -> None:
    rows = [line.split(",") for line in ok(kv_here("estimate", *CARD, "--csv")).splitlines()]
    fits = rows[0].index("fits")
    assert {row[fits] for row in rows[1:]} == {"true", "false"}


def test_without_a_model_the_default_is_planned(kv_here: KvHere) -> None:
    assert (
        ok(kv_here("estimate", "--gpu", "rtx3060-12g", "--csv"))
        == ok(kv_here("estimate", "smollm2", "--gpu", "rtx3060-12g", "--csv"))
        != ""
    )
