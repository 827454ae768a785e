"""What `kv estimate` recommends, checks and refuses: types, contexts and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import KvHere
from estimatecases import CARD, ok, small_file, use_own_folders

from kvcli.runtime.cache.cachetypes import CODEC_SPECS


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return small_file(tmp_path)


def test_the_most_precise_of_the_types_that_were_named(kv_here: KvHere) -> None:
    def recommended(*args: str) -> list[str]:
        lines = ok(kv_here("estimate", "llama-3.1-8b", "--gpu", "rtx3060-12g", "-c", "8k", *args)).splitlines()
        line = next(line for line in lines if line.startswith("recommend"))
        return line.split()[2:5:2]

    assert recommended("-ctk", "int8,f16", "-ctv", "int4,int8") == ["f16", "int8"]
    assert recommended("-ct", "int4,int4/int8,int6/int4") == ["int4", "int8"]
    assert recommended("-ct", "int4/int8,int8/int4,int4") == ["int8", "int4"]
    code, out, _ = kv_here("estimate", *CARD, "-ct", "f16")
    assert code == 4 and "does not fit with f16" in out
    code, out, err = kv_here("estimate", *CARD, "-ct", "f16", "--print-args")
    assert (code, out) == (4, "") and "does not fit with f16, one of" in err
    code, out, err = kv_here("estimate", "llama-3.1-8b", "--vram", "80G", "-c", "200k", "--print-args")
    assert code == 0 and out.endswith("-c 131072\n") and "RoPE scaling" in err  # fits; trained on no more
    code, out, err = kv_here("estimate", *CARD, "-c", "1k,2k", "--print-args")
    assert (code, out) == (2, "") and "one context" in err


def test_a_margin_that_leaves_nothing(kv_here: KvHere) -> None:
    code, out, err = kv_here("estimate", *CARD, "--margin", "100G")
    assert (code, out) == (2, "") and "--margin 100G leaves nothing of 12,288 MiB" in err


def test_print_args_can_be_run(small: Path, kv_here: KvHere) -> None:
    args = ok(kv_here("estimate", str(small), "--print-args", "--page-size", "32", "-ub", "128")).split()
    expected = ["-m", str(small), "--cache-type-k", "f16", "--cache-type-v", "f16", "-c", "512"]
    assert args == [*expected, "--page-size", "32", "-ub", "128"]
    flags = ("--kv-tail", "0", "--kv-sink", "2")
    args = ok(kv_here("estimate", str(small), "--print-args", "-ct", "int4", *flags)).split()
    assert args[-4:] == list(flags) and "int4" in args


def test_print_args_names_only_types_that_run(kv_here: KvHere) -> None:
    args = ok(kv_here("estimate", *CARD, "--print-args")).split()
    assert args[args.index("--cache-type-k") + 1] in CODEC_SPECS
    assert 0 < int(args[args.index("-c") + 1]) <= 65536


def test_check(kv_here: KvHere) -> None:
    assert ok(kv_here("estimate", *CARD, "-ct", "int8", "--check")) == ""
    code, out, err = kv_here("estimate", *CARD, "--check")  # f16 is what kv run takes
    assert (code, out) == (4, "") and "the largest context that fits is 47," in err


def test_largest_context_is_offered_and_true(kv_here: KvHere) -> None:
    row = json.loads(ok(kv_here("estimate", *CARD, "--json", "-ct", "int8")))["types"][0]
    largest = row["max_ctx"]
    assert 65536 < largest < 131072 and largest % 64 == 0
    assert kv_here("estimate", *CARD[:1], "-c", str(largest), *CARD[3:], "-ct", "int8", "--check")[0] == 0
    assert kv_here("estimate", *CARD[:1], "-c", str(largest + 64), *CARD[3:], "-ct", "int8", "--check")[0] == 4


def test_beyond_the_training_context(kv_here: KvHere) -> None:
    code, out, err = kv_here("estimate", "llama-2-7b", "-c", "8k", "--vram", "80G")
    assert code == 0 and "needs RoPE scaling" in err
    assert "-c 4096" in out and "-c 8192" not in out


def test_what_does_not_fit_is_exit_4(kv_here: KvHere) -> None:
    code, out, _ = kv_here("estimate", "llama-3.1-70b", "--vram", "24G")
    assert code == 4 and "a smaller model" in out
    assert kv_here("estimate", "llama-3.1-8b", "-c", "131072", "--vram", "6G")[0] == 4
