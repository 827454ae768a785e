"""The flags that `run` and `chat` share, through `kv run`."""

from __future__ import annotations

import pytest
from runcases import fixture_kv  # noqa: F401

from kvcli.cli.flags.cache import type_pairs
from kvcli.cli.flags.sampling import parse_logit_bias
from kvcli.cli.flags.shared import parse_tokens
from kvcli.codecs import CODECS
from kvcli.errors import UsageError


def test_flags_reach_the_options(kv):
    kv(
        *("run", "hello", "-m", "gemma-3-270m", "-t", "3", "--backend", "reference", "--force-pretokenizer"),
        *("-c", "32k", "--page-size", "32", "-ub", "128", "-ct", "f16", "-ctv", "bf16", "--offline"),
        *("--kv-tail", "0", "--kv-sink", "3"),
        *(
            "-n",
            "5",
            "--temp",
            "0.5",
            "--top-k",
            "3",
            "--top-p",
            "0.9",
            "--min-p",
            "0.1",
            "-r",
            "X",
            "-r",
            "Y",
        ),
        *("--repeat-penalty", "1.1", "--repeat-last-n", "-1", "--presence-penalty", "0.25"),
        *("--frequency-penalty", "-0.5", "-s", "9", "--ignore-eos", "--logit-bias", "40+1.5"),
        *("--dry-multiplier", "0.8", "--dry-base", "2", "--dry-allowed-length", "3", "--dry-penalty-last-n", "100"),
        *("--dry-sequence-breaker", r"\n\t", "--dry-sequence-breaker", ";"),
    )
    load, cache = kv.opened[-1]
    assert (load.model, load.threads, load.backend, load.force, load.offline) == (
        "gemma-3-270m",
        3,
        "reference",
        True,
        True,
    )
    assert (cache.ctx_size, cache.type_k, cache.type_v, cache.page_size, cache.ubatch) == (
        32768,
        "f16",
        "bf16",
        32,
        128,
    )
    assert (cache.tail, cache.sinks, cache.force_types) == (0, 3, False)
    sample = kv.engine.calls[-1][1]
    assert (sample.max_tokens, sample.temperature, sample.top_k, sample.top_p, sample.min_p) == (
        5,
        0.5,
        3,
        0.9,
        0.1,
    )
    assert (sample.repeat_penalty, sample.repeat_last_n, sample.presence_penalty) == (1.1, -1, 0.25)
    assert (sample.frequency_penalty, sample.seed, sample.ignore_eos) == (-0.5, 9, True)
    assert (sample.stop, sample.logit_bias) == (("X", "Y"), {40: 1.5})
    assert (sample.dry_multiplier, sample.dry_base, sample.dry_allowed_length, sample.dry_penalty_last_n) == (
        0.8,
        2,
        3,
        100,
    )
    assert sample.dry_sequence_breakers == ("\n\t", ";")
    assert (sample.unattended, sample.loop_stop) == (False, False)  # --ignore-eos wants all of the tokens


def test_sequence_breakers_of_dry(kv):
    kv.engine.answers = ["x"] * 2
    for given, found in ((["none"], ()), (["none", "é"], ("é",))):
        kv("run", "hello", *(word for text in given for word in ("--dry-sequence-breaker", text)))
        assert kv.engine.calls[-1][1].dry_sequence_breakers == found


def test_defaults_of_the_flags(kv, monkeypatch):
    kv.engine.answers = ["x"] * 2
    kv("run", "hello")
    load, cache = kv.opened[-1]
    assert (load.model, cache.ctx_size, cache.type_k, cache.type_v) == ("smollm2", 0, "auto", "auto")
    assert (cache.page_size, cache.tail, cache.sinks) == (64, 1, 1)
    sample = kv.engine.calls[-1][1]
    assert (sample.max_tokens, sample.unattended, sample.loop_stop) == (4096, True, True)
    assert (sample.repeat_penalty, sample.repeat_last_n) == (1, 64)
    assert (sample.dry_multiplier, sample.dry_base, sample.dry_allowed_length) == (0, 1.75, 2)
    assert (sample.dry_penalty_last_n, sample.dry_sequence_breakers) == (-1, ("\n", ":", '"', "*"))
    monkeypatch.setenv("KV_MODEL", "other")
    kv("run", "hello", "-ctk", "f16")
    load, cache = kv.opened[-1]
    assert (load.model, cache.type_k, cache.type_v) == ("other", "f16", "f16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        *(("-c", "-1"), ("-c", "1e12"), ("-c", "abc"), ("-c", "999999999999"), ("-c", ""), ("-c", "4.5k")),
        *(("-ctk", "q5_1"), ("-ctv", "iq4_nl"), ("-ct", "nonsense"), ("--page-size", "48"), ("-ub", "-1")),
        *(("--kv-tail", "2"), ("--kv-tail", "-1"), ("--kv-sink", "-1"), ("--kv-sink", "1048577"), ("--kv-sink", "x")),
        ("-ct", "int4", "--kv-tail", "0", "--kv-sink", "0"),
        *(("-ct", "int8,int4"), ("-ct", "int8/"), ("-t", "2000")),
        *(("-t", "-1"), ("--backend", "cuda"), ("-m", ""), ("-n", "-3"), ("-n", "abc"), ("--temp", "-1")),
        *(
            ("--temp", "nan"),
            ("--top-k", "-1"),
            ("--top-p", "0"),
            ("--min-p", "1.5"),
            ("--repeat-penalty", "0"),
        ),
        *(
            *(("--dry-multiplier", "-1"), ("--dry-multiplier", "inf"), ("--dry-base", "0.9"), ("--top-p", "nan")),
            *(("--dry-allowed-length", "0"), ("--dry-penalty-last-n", "-2"), ("--dry-sequence-breaker", "")),
            ("--repeat-last-n", "-2"),
            ("-s", "-2"),
            ("-r", ""),
            ("--logit-bias", "5"),
            ("--logit-bias", "5+inf"),
        ),
        *(("-p", "again"), ("--json", "--jsonl"), ("--presence-penalty", "inf"), ("--nonsense",)),
    ],
    ids=" ".join,
)
def test_nonsense_is_one_clear_line_and_exit_2(kv, args):
    outcome = kv("run", "hello", *args)
    assert outcome.code == 2
    assert kv.opened == []
    lines = outcome.err.splitlines()
    if "--json" in args:
        assert "cannot be used together" in outcome.out
        return
    assert outcome.out == ""
    assert lines[0].startswith("kv: error: ")
    assert len(lines) <= 2  # the hint


def test_cache_types_and_their_aliases(kv):
    for given in ("auto", *CODECS, "fp8_e4m3", "q8_0", "q4_0", "Q4_0", "F16", "AUTO"):
        kv("run", "hello", "-ctk", given, "-ctv", "f16")
        cache = kv.opened[-1][1]
        assert (cache.type_k, cache.type_v, cache.force_types) == (given.lower(), "f16", False)
    kv("run", "hello", "-ct", "int4", "--force-cache-type")
    assert (kv.opened[-1][1].type_v, kv.opened[-1][1].force_types) == ("int4", True)
    outcome = kv("run", "hello", "-ctk", "q5_1")
    assert outcome.code == 2 and "'q5_1' is not a cache type" in outcome.err
    assert "available: auto, f32, f16, bf16, fp8" in outcome.err


def test_types_of_keys_and_values_on_one_line(kv):
    """-ctk and -ctv stand above -ct. A cache of 16 bits has neither tail nor sinks."""
    kv("run", "hello", "-ct", "int8/int4", "--kv-tail", "0")
    kv("run", "hello", "-ct", "int8", "-ctk", "f16")
    kv("run", "hello", "-ctv", "int8")
    kv("run", "hello", "--kv-tail", "0", "--kv-sink", "0")
    types = [("int8", "int4"), ("f16", "int8"), ("auto", "int8"), ("auto", "auto")]
    assert [(cache.type_k, cache.type_v) for _, cache in kv.opened] == types


def test_lists_of_types():
    """As `kv run` takes one of each; every type of keys comes with every one of values."""
    assert type_pairs(None, None, None) == []
    assert type_pairs("f16,int8/int4", None, None) == [("f16", "f16"), ("int8", "int4")]
    product = [("f16", "int8"), ("f16", "int4"), ("q8_0", "int8"), ("q8_0", "int4")]
    assert type_pairs(None, "f16,q8_0", "int8,int4") == type_pairs("f32", "f16,q8_0", "int8,int4") == product
    assert type_pairs(None, "int8,int4", None) == [("int8", "int8"), ("int4", "int4")]
    assert type_pairs(None, None, "int8") == [("auto", "int8")]
    assert type_pairs("int8/int4", "f16", None) == [("f16", "int4")]
    assert type_pairs("int8/int4,f16", None, "f32") == [("int8", "f32"), ("f16", "f32")]
    for wrong in (("int8/",), ("int8,",), (None, "int7"), (None, None, "int8/int4")):
        with pytest.raises(UsageError):
            type_pairs(*wrong, *[None] * (3 - len(wrong)))


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("run", "-ub", "abc"), "-ub/--ubatch-size must be a whole number, not 'abc'\n"),
        (("run", "--temp", "warm"), "--temp must be a number, not 'warm'\n"),
        (("run", "--progress", "x"), "--progress must be one of auto, on, off, not 'x'\n"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_a_value_of_the_wrong_form_is_told_in_our_words(kv, args, told):
    outcome = kv(*args)
    assert (outcome.code, outcome.err) == (2, f"kv: error: {told}")


def test_numbers_of_tokens():
    assert [parse_tokens(text, "-c") for text in ("0", "4096", "32k", "1M")] == [0, 4096, 32768, 1 << 20]
    with pytest.raises(UsageError, match="-c must be at most 2,147,483,648"):
        parse_tokens("3000000000", "-c")


def test_logit_biases():
    assert parse_logit_bias(["5-1", "6+.5", "7-inf"]) == {5: -1, 6: 0.5, 7: float("-inf")}


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("-n", "5q"), "-n/--predict must be a number of tokens, not '5q'"),
        (("-n5q",), "-n/--predict must be a number of tokens, not '5q'"),
        (("--max-tokens=5q",), "--max-tokens/--predict must be a number of tokens, not '5q'"),
        (
            ("--predict", "-2"),
            "--predict must be a number of tokens, not '-2'\n  write 4096 or 32k; -1 = no limit\n",
        ),
        (("-c", "4.5k"), "-c/--ctx-size must be a number of tokens, not '4.5k'"),
        (("-t", "-5"), "-t/--threads must be "),
        (("-ub", "abc"), "-ub/--ubatch-size must be a whole number"),
        (("-ub", "-1"), "-ub/--ubatch-size must be 0 or more, not -1\n"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_an_option_is_called_as_the_user_typed_it(kv, args, told):
    outcome = kv("run", "hello", *args)
    assert outcome.code == 2 and outcome.err.startswith(f"kv: error: {told}")


def test_most_new_tokens_may_be_given_in_thousands(kv):
    kv.engine.answers = ["x"] * 3
    for given, number in (("5k", 5120), ("0", 0), ("-1", -1)):
        kv("run", "hello", "-n", given)
        assert kv.engine.calls[-1][1].max_tokens == number
