"""What `kv estimate` recommends, checks and refuses: types, contexts and exit codes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from conftest import KvHere
from estimatecases import CARD, fixture_own_folders, fixture_small, ok, small_file  # noqa: F401

from kvcli.api import planning
from kvcli.codecs import CODECS


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
    assert code == 0 and out.endswith(" f16 -c 204800\n"), "what was asked for, if it can run"
    assert "a context of 204,800 needs RoPE scaling: the model is trained on 131,072" in err
    code, out, err = kv_here("estimate", "llama-3.1-8b", "--vram", "80G", "-c", "10m", "--print-args")
    assert (code, out) == (4, "") and "a context of 10,485,760 does not fit with any type, one of 131,072 does" in err
    code, out, err = kv_here("estimate", "llama-3.1-8b", "--gpu", "rtx3060-12g", "-c", "1k,2k", "--print-args")
    assert (code, out) == (2, "") and "one context" in err
    for model in ([], ["-m", "llama-3.1-8b"]):
        code, out, err = kv_here("estimate", *model, "--vram", "80G", "--print-args", "tgi")
        assert (code, out) == (2, "") and "'tgi' behind --print-args is neither one of kv, vllm, sglang" in err


def test_no_cache_type_is_forgotten() -> None:
    """Each stands in the usual comparison, or takes as many bytes as one that does; the ladder has all sizes."""
    sizes = {(CODECS[k].bits, CODECS[k].scale) for k, v in planning.USUAL_PAIRS if k == v}
    assert {(each.bits, each.scale) for each in CODECS.values()} == sizes
    ladder = [planning.label(pair) for pair in planning.LADDER]
    assert ladder == ["f16", "int8", "int8/int4", "int5", "int4"]
    assert [CODECS[k].bits + CODECS[v].bits for k, v in planning.LADDER] == [32, 16, 12, 10, 8]


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
    by_hand = ("--layers", "2", "--kv-heads", "2", "--head-dim", "64", "-c", "1k")
    code, out, err = kv_here("estimate", *by_hand, "--print-args")
    assert (code, out) == (0, "--cache-type-k f16 --cache-type-v f16 -c 1024\n")
    assert err == "kv: a shape by hand names no model: kv run needs -m MODEL beside these options\n"


def test_print_args_names_only_types_that_run(kv_here: KvHere) -> None:
    code, out, _ = kv_here("estimate", *CARD, "--print-args")
    args = out.split()
    assert code == 0 and args[args.index("--cache-type-k") + 1] in CODECS
    assert 0 < int(args[args.index("-c") + 1]) <= 65536


def test_check(kv_here: KvHere) -> None:
    assert ok(kv_here("estimate", *CARD, "-ct", "int8", "--check")) == ""
    code, out, err = kv_here("estimate", *CARD, "--check")  # f16 is what kv run takes
    assert (code, out) == (4, "") and "the largest context that fits is 44," in err
    needed = "13,942 MiB"  # the total
    assert (
        "a context of 65,536 tokens does not fit with f16: 14,453 MiB are needed (with a margin of 512), 11,876" in err
    )
    assert needed.split()[0] in ok(kv_here("estimate", *CARD))


def test_largest_context_is_offered_and_true(kv_here: KvHere) -> None:
    row = json.loads(ok(kv_here("estimate", *CARD, "--json", "-ct", "int8")))["types"][0]
    largest = row["max_ctx_size"]
    assert 65536 < largest < 131072 and largest % 64 == 0
    assert kv_here("estimate", *CARD[:1], "-c", str(largest), *CARD[3:], "-ct", "int8", "--check")[0] == 0
    assert kv_here("estimate", *CARD[:1], "-c", str(largest + 64), *CARD[3:], "-ct", "int8", "--check")[0] == 4


def test_beyond_the_training_context(kv_here: KvHere) -> None:
    code, out, err = kv_here("estimate", "llama-2-7b", "-c", "8k", "--vram", "80G")
    assert code == 0 and "needs RoPE scaling" in err
    assert "-c 4096" in out and "-c 8192" not in out


def test_what_fits_is_judged_by_what_the_model_is_trained_on(kv_here: KvHere) -> None:
    """f16 does not fit at a million tokens, and need not: nobody should go beyond the trained ones."""
    args = ("estimate", "llama-3.1-8b", "--vram", "80G", "-c", "1000000")
    code, out, err = kv_here(*args)
    assert code == 0 and "needs RoPE scaling" in err and "to stay at f16" not in out
    assert "recommend  --cache-type-k f16 --cache-type-v f16 -c 131072\n" in out
    assert (
        "           highest precision up to 16 bits that fits the 131,072 tokens that the model is trained on\n" in out
    )
    assert "fits  into memory; 1,000,000 tokens are more than the 131,072 of training\n" in out
    assert kv_here(*args, "--print-args")[:2] == (0, _META + " --cache-type-k int8 --cache-type-v int8 -c 1000000\n")


_META = "-m bartowski/Meta-Llama-3.1-8B-Instruct-GGUF"


def test_names_that_kv_does_not_run(kv_here: KvHere) -> None:
    """Planned all the same, with a word; no flags are printed for what cannot run."""
    card = ("--gpu", "h200")
    reason = "its architecture, falcon, is not one that kv runs"
    out = ok(kv_here("estimate", "falcon-7b", *card))
    assert f"runs       no: {reason}\n" in out and "a plan only: kv does not run this model" in out
    code, out, err = kv_here("estimate", "falcon-7b", *card, "--print-args")
    assert (code, out) == (3, "") and reason in err and "kv models ls" in err
    model = json.loads(ok(kv_here("estimate", "falcon-7b", *card, "--json")))["model_info"]
    assert (model["runs"], model["problem"], model["run_as"]) == (False, reason, None)
    out = ok(kv_here("estimate", "llama3.1:8b", *card))
    assert "runs       as bartowski/Meta-Llama-3.1-8B-Instruct-GGUF (from the hub)" in out and "plan only" not in out
    code, out, err = kv_here("estimate", "llama3.1:8b", *card, "--print-args")
    assert code == 0 and out.startswith(_META + " --cache") and "is taken from the hub" in err
    code, out, err = kv_here("estimate", "mixtral-8x7b", "--vram", "900G", "--print-args")
    assert (code, out) == (3, "") and "org/repo:Q4_K_M" in err
    model = json.loads(ok(kv_here("estimate", "smollm2", *card, "--json")))["model_info"]
    assert (model["runs"], model["problem"], model["run_as"]) == (True, None, "smollm2")


def test_files_that_kv_does_not_run(tmp_path: Path, kv_here: KvHere) -> None:
    path = tmp_path / "a file.gguf"
    small_file(tmp_path).rename(path)
    args = shlex.split(ok(kv_here("estimate", str(path), "--print-args")))
    assert args[:2] == ["-m", str(path)], "quoted where need be"
    metadata = path.read_bytes()
    path.write_bytes(metadata.replace(b"general.architecture", b"general.architectura"))
    assert kv_here("estimate", str(path))[0] == 3
    path.write_bytes(metadata.replace(b"llama", b"llamb"))
    assert "runs       no: kv does not run the architecture 'llamb'" in ok(kv_here("estimate", str(path)))
    code, out, err = kv_here("estimate", str(path), "--print-args")
    assert (code, out) == (3, "") and "'llamb'" in err


def test_cards_by_their_numbers(kv_here: KvHere) -> None:
    for name in ("4090", "RTX 4090", "geforce rtx4090"):
        assert "NVIDIA RTX 4090 24 GB" in ok(kv_here("estimate", "smollm2", "--gpu", name))
    for name, hint in (("a100", "a100-40g or a100-80g"), ("4095", "rtx4090-24g"), ("m2", "--list-gpus")):
        code, _, err = kv_here("estimate", "smollm2", "--gpu", name)
        assert code == 2 and hint in err and "--vram 24G --bandwidth 800 needs no name" in err


def test_one_card_at_a_time(kv_here: KvHere) -> None:
    for given in (("--gpu", "a10", "--gpu", "h200"), ("--gpu=a10,h200",)):
        code, out, err = kv_here("estimate", "smollm2", *given)
        assert (code, out) == (2, "") and err.startswith("kv: error: --gpu takes one card at a time\n")
    code, _, err = kv_here("estimate", "smollm2", "--gpu", "h200", "-c", "4k", "--ctx-size", "8k")
    assert code == 2 and err.endswith("--ctx-size is given twice\n  put all values in one list: --ctx-size N[,N]\n")


def test_what_does_not_fit_is_exit_4(kv_here: KvHere) -> None:
    code, out, _ = kv_here("estimate", "llama-3.1-70b", "--vram", "24G")
    assert code == 4 and "a smaller model" in out
    assert kv_here("estimate", "llama-3.1-8b", "-c", "131072", "--vram", "6G")[0] == 4
