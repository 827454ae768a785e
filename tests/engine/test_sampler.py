"""Sampling against closed forms: what filters keep, what penalties and bias do, which values are refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvcli.errors import KVError, ModelError, UsageError
from kvcli.options import SampleOptions
from kvcli.runtime.engine import samplesettings
from kvcli.runtime.engine.sampler import Sampler

OFF = SampleOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
PROBABILITIES = [0.05, 0.4, 0.1, 0.25, 0.2]


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def kept(options: SampleOptions, logits: torch.Tensor, history: list[int] | None = None) -> dict[int, float]:
    ids, probabilities = Sampler(options, {}, len(logits)).distribution(logits, history or [])
    assert ids.tolist() == sorted(ids.tolist())
    assert probabilities.sum().item() == pytest.approx(1)
    return dict(zip(ids.tolist(), probabilities.tolist(), strict=True))


# --- filters and temperature


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-3])
def test_tiny_temperatures_are_greedy(temperature: float):
    options = replace(OFF, temperature=temperature)
    assert Sampler(options, {}, 5).sample(logits_of(*PROBABILITIES), [], 3) == 1


def test_temperature_is_an_exponent():
    weights = [p**2 for p in PROBABILITIES]
    expected = {i: w / sum(weights) for i, w in enumerate(weights)}
    assert kept(replace(OFF, temperature=0.5), logits_of(*PROBABILITIES)) == pytest.approx(expected, rel=1e-5)


def test_huge_temperature_is_flat():
    assert kept(replace(OFF, temperature=1e30), logits_of(*PROBABILITIES)) == pytest.approx(
        dict.fromkeys(range(5), 0.2)
    )


@pytest.mark.parametrize(
    ("k", "ids"),
    [
        (0, {0, 1, 2, 3, 4}),
        (1, {1}),
        (2, {1, 3}),
        (3, {1, 3, 4}),
        (5, {0, 1, 2, 3, 4}),
        (99, {0, 1, 2, 3, 4}),
    ],
)
def test_top_k(k: int, ids: set[int]):
    assert set(kept(replace(OFF, top_k=k), logits_of(*PROBABILITIES))) == ids


@pytest.mark.parametrize(
    ("p", "ids"),
    [
        (1e-9, {1}),
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.64, {1, 3}),
        (0.66, {1, 3, 4}),
        (0.86, {1, 2, 3, 4}),
        (1.0, None),
    ],
)
def test_top_p(p: float, ids: set[int] | None):
    assert set(kept(replace(OFF, top_p=p), logits_of(*PROBABILITIES))) == (ids or {0, 1, 2, 3, 4})


@pytest.mark.parametrize(
    ("p", "ids"),
    [(0.0, {0, 1, 2, 3, 4}), (0.124, {0, 1, 2, 3, 4}), (0.126, {1, 2, 3, 4}), (0.51, {1, 3}), (1.0, {1})],
)
def test_min_p(p: float, ids: set[int]):
    assert set(kept(replace(OFF, min_p=p), logits_of(*PROBABILITIES))) == ids


def test_order_of_the_filters():
    logits = logits_of(*PROBABILITIES)
    # After top-k 3 the probabilities are 0.4, 0.25, 0.2 of 0.85: two reach 0.76; without it three do.
    assert set(kept(replace(OFF, top_k=3, top_p=0.76), logits)) == {1, 3}
    assert set(kept(replace(OFF, top_p=0.76), logits)) == {1, 3, 4}
    # Filters come before temperature: a high one lets nothing more in.
    assert set(kept(replace(OFF, top_p=0.6, min_p=0.3, temperature=100.0), logits)) == {1, 3}


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros(300)
    assert list(kept(replace(OFF, top_k=3), logits)) == [0, 1, 2]
    assert list(kept(replace(OFF, top_p=0.01), logits)) == [0, 1, 2]
    logits[[17, 250, 299]] = 1.0
    assert list(kept(replace(OFF, top_k=2), logits)) == [17, 250]
    assert list(kept(replace(OFF, top_k=4), logits)) == [0, 17, 250, 299]


@pytest.mark.parametrize("size", [1, 5, 63, 64, 65, 1000, 5003])
@pytest.mark.parametrize("seed", range(3))
def test_filters_against_sorting_everything(size: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator).mul(8).round() / 2  # many ties
    logits[torch.rand(size, generator=generator) < 0.1] = -math.inf
    logits[size // 2] = 1.0
    order = sorted(range(size), key=lambda i: (-logits[i].item(), i))
    for k in (1, 2, 40, 700):
        found = Sampler(replace(OFF, top_k=k), {}, size).distribution(logits, [])[0].tolist()
        assert found == sorted(order[:k])
    softmax = logits.double().softmax(0)
    for p in (0.1, 0.5, 0.9, 0.999):
        mass = softmax[order].cumsum(0)
        n = int((mass < p - 1e-12).sum()) + 1
        assert abs(mass[n - 1].item() - p) > 1e-9  # no case that hangs on rounding
        found = Sampler(replace(OFF, top_p=p), {}, size).distribution(logits, [])[0].tolist()
        assert found == sorted(order[:n])


def test_top_p_over_a_flat_large_vocabulary():
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) / 10
    found = kept(replace(OFF, top_p=0.9), logits)
    mass = sum(logits.double().softmax(0)[list(found)].tolist())
    assert 0.9 <= mass < 0.9 + 1e-4 and len(found) > 1024


# --- greedy


def test_greedy_is_argmax_lowest_id_first():
    greedy = replace(OFF, temperature=0.0)
    for size in (1, 63, 64, 130, 49_152):
        logits = torch.randn(size, generator=torch.Generator().manual_seed(size))
        assert Sampler(greedy, {}, size).sample(logits, [], 0) == int(logits.argmax())
    logits = torch.zeros(500)
    logits[[70, 127, 128, 400]] = 2.0
    assert Sampler(greedy, {}, 500).sample(logits, [], 0) == 70
    assert Sampler(replace(greedy, top_p=0.1, min_p=0.9), {}, 500).sample(logits, [], 0) == 70
    assert kept(greedy, logits) == {70: 1.0}


def test_greedy_looks_after_penalties_and_bias():
    logits = torch.tensor([1.0, 3.0, 2.9])
    greedy = replace(OFF, temperature=0.0)
    assert Sampler(replace(greedy, presence_penalty=0.2), {}, 3).sample(logits, [1], 0) == 2
    assert Sampler(replace(greedy, logit_bias={0: 5.0}), {}, 3).sample(logits, [1], 0) == 0
    assert Sampler(replace(greedy, logit_bias={1: -math.inf, 2: -math.inf}), {}, 3).sample(logits, [], 0) == 0


# --- penalties and bias


def adjusted(options: SampleOptions, logits: torch.Tensor, history: list[int]) -> list[float]:
    """Logits after penalties and bias: log-probabilities, shifted so that token 0 is as given."""
    found = kept(options, logits, history)
    shift = logits[0].item() - math.log(found[0])
    return [math.log(found[i]) + shift for i in range(len(logits))]


def test_repetition_penalty_divides_positive_and_multiplies_negative():
    logits = torch.tensor([0.5, 2.0, -2.0, 0.0, 1.0])
    options = replace(OFF, repeat_penalty=2.0)
    assert adjusted(options, logits, [1, 2, 3, 1, 1]) == pytest.approx([0.5, 1.0, -4.0, 0.0, 1.0], abs=1e-5)


def test_presence_and_frequency_penalties():
    logits = torch.tensor([0.5, 2.0, -2.0, 0.0, 1.0])
    history = [1, 2, 3, 1, 1]
    presence = adjusted(replace(OFF, presence_penalty=0.5), logits, history)
    assert presence == pytest.approx([0.5, 1.5, -2.5, -0.5, 1.0], abs=1e-5)
    frequency = adjusted(replace(OFF, frequency_penalty=0.25), logits, history)
    assert frequency == pytest.approx([0.5, 1.25, -2.25, -0.25, 1.0], abs=1e-5)
    both = replace(OFF, repeat_penalty=2.0, presence_penalty=-0.5, frequency_penalty=0.25)
    assert adjusted(both, logits, history) == pytest.approx([0.5, 0.75, -3.75, 0.25, 1.0], abs=1e-5)


@pytest.mark.parametrize(("last_n", "penalised"), [(0, set()), (1, {3}), (2, {2, 3}), (64, {1, 2, 3}), (-1, {1, 2, 3})])
def test_penalties_look_at_the_last_n_tokens(last_n: int, penalised: set[int]):
    options = replace(OFF, presence_penalty=1.0, repeat_last_n=last_n)
    found = adjusted(options, torch.zeros(4), [1, 2, 3])
    assert found == pytest.approx([-1.0 if i in penalised else 0.0 for i in range(4)], abs=1e-5)


def test_whole_context_is_longer_than_the_default():
    history = [1] + [2] * 100
    assert adjusted(replace(OFF, presence_penalty=1.0), torch.zeros(3), history)[1] == pytest.approx(0)
    whole = replace(OFF, presence_penalty=1.0, repeat_last_n=-1)
    assert adjusted(whole, torch.zeros(3), history)[1] == pytest.approx(-1)


def test_dry_lowers_what_would_continue_a_repetition():
    """After 1 2 3 1 2 a 3 would be the third token of one; CTRL's penalty comes first."""
    logits, history = torch.tensor([0.5, 2.0, -2.0, 2.0, 1.0]), [1, 2, 3, 1, 2]
    dry = replace(OFF, dry_multiplier=0.5, dry_base=3.0, dry_allowed_length=1)
    assert adjusted(dry, logits, history) == pytest.approx([0.5, 2.0, -2.0, 0.5, 1.0], abs=1e-5)
    both = replace(dry, repeat_penalty=2.0, logit_bias={3: 4.0})
    assert adjusted(both, logits, history) == pytest.approx([0.5, 1.0, -4.0, 3.5, 1.0], abs=1e-5)
    for off in (
        {"dry_multiplier": 0.0},
        {"dry_penalty_last_n": 0},
        {"dry_penalty_last_n": 3},
        {"dry_allowed_length": 3},
    ):
        assert adjusted(replace(dry, **off), logits, history) == pytest.approx(logits.tolist(), abs=1e-5)
    assert Sampler(replace(dry, temperature=0.0), {}, 5).sample(logits, history, 5) == 1


def test_logit_bias_comes_after_penalties():
    options = replace(OFF, repeat_penalty=2.0, logit_bias={1: 3.0, 2: -1.0})
    assert adjusted(options, torch.tensor([0.0, 2.0, 1.0]), [1]) == pytest.approx([0.0, 4.0, 0.0], abs=1e-5)
    banned = kept(replace(OFF, top_k=2, logit_bias={1: -math.inf}), logits_of(*PROBABILITIES))
    assert set(banned) == {3, 4}


def test_logits_and_history_are_left_alone():
    logits, history = torch.randn(100), [1, 2, 3]
    before = logits.clone()
    options = SampleOptions(repeat_penalty=1.5, logit_bias={4: 1.0}, seed=0)
    Sampler(options, {}, 100).sample(logits, history, 0)
    assert torch.equal(logits, before) and history == [1, 2, 3]


# --- options


def test_defaults_of_the_program_the_model_and_the_user():
    built_in = Sampler(SampleOptions(), {}, 10).effective
    assert {n: built_in[n] for n in ("temperature", "top_k", "top_p", "min_p")} == {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
    }
    model = {"temp": 0.3, "top_k": 7, "top_p": 0.5, "min_p": 0.0, "other": 1.0}
    assert samplesettings.not_obeyed(model) == samplesettings.not_obeyed({"mirostat": 0, "xtc_threshold": 0.1}) == ""
    assert "have: general.sampling.mirostat" in samplesettings.not_obeyed({"mirostat": 2, "mirostat_tau": 5.0})
    penalised = Sampler(SampleOptions(), {"penalty_repeat": 1.05, "penalty_last_n": -1}, 10).effective
    assert (penalised["repeat_penalty"], penalised["repeat_last_n"]) == (1.05, -1)
    options = SampleOptions(repeat_penalty=1.0, repeat_last_n=0)
    assert Sampler(options, {"penalty_repeat": 1.05}, 10).effective["repeat_penalty"] == 1
    found = Sampler(SampleOptions(top_k=9, seed=4), model, 10).effective
    assert (found["temperature"], found["top_k"], found["top_p"], found["min_p"]) == (0.3, 9, 0.5, 0.0)
    assert found["seed"] == 4 and found["repeat_last_n"] == 64 and found["logit_bias"] == {}
    assert Sampler(SampleOptions(logit_bias={3: 1.0}), {}, 10).effective["logit_bias"] == {3: 1.0}
    assert [built_in[n] for n in ("repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier")] == [
        *(1.0, 0.0, 0.0, 0.0)
    ]


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"temperature": -0.1}, "`temperature` must be 0 or more, not -0.1"),
        ({"temperature": math.nan}, "`temperature`"),
        ({"temperature": math.inf}, "`temperature`"),
        ({"top_k": -1}, "`top_k`"),
        ({"top_p": 0.0}, "`top_p` must be in (0, 1], not 0.0"),
        ({"top_p": 1.01}, "`top_p`"),
        ({"min_p": -0.01}, "`min_p`"),
        ({"min_p": 1.5}, "`min_p`"),
        ({"repeat_penalty": 0.0}, "`repeat_penalty`"),
        ({"repeat_last_n": -2}, "`repeat_last_n`"),
        ({"presence_penalty": math.nan}, "`presence_penalty`"),
        ({"frequency_penalty": -math.inf}, "`frequency_penalty`"),
        ({"dry_multiplier": -0.1}, "`dry_multiplier` must be 0 (off) or more, not -0.1"),
        ({"dry_base": 0.5}, "`dry_base`"),
        ({"dry_allowed_length": 0}, "`dry_allowed_length`"),
        ({"dry_penalty_last_n": -2}, "`dry_penalty_last_n`"),
        ({"seed": -2}, "`seed`"),
        ({"seed": 1 << 64}, "`seed`"),
        ({"logit_bias": {10: 1.0}}, "`logit_bias` names token 10, the vocabulary is 0 to 9"),
        ({"logit_bias": {-1: 1.0}}, "`logit_bias`"),
        ({"logit_bias": {1: math.nan}}, "`logit_bias`"),
        ({"logit_bias": {1: math.inf}}, "`logit_bias`"),
    ],
)
def test_values_out_of_range_name_the_flag(changes: dict[str, object], flag: str):
    with pytest.raises(UsageError) as caught:
        Sampler(replace(SampleOptions(), **changes), {}, 10)
    assert flag in caught.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("temp", -1.0), ("top_k", 2.5), ("top_k", True), ("top_p", "much"), ("min_p", [0.5])),
        *(("penalty_repeat", 0.0), ("penalty_last_n", -2)),
    ],
)
def test_a_model_with_senseless_defaults(key: str, value: object):
    with pytest.raises(ModelError, match=f"general.sampling.{key}"):
        Sampler(SampleOptions(), {key: value}, 10)
    options = SampleOptions(1.0, 1, 0.5, 0.1, 1.0, 64)
    assert Sampler(options, {key: value}, 10).effective["top_k"] == 1  # the user's values stand over them


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_numbers(temperature: float, top_k: int, bad: float):
    logits = torch.randn(100)
    if bad == -math.inf:
        logits[:] = bad
    logits[77] = bad
    with pytest.raises(KVError, match="-inf" if bad == -math.inf else "not a number"):
        Sampler(replace(OFF, temperature=temperature, top_k=top_k), {}, 100).sample(logits, [], 0)


def test_logits_of_another_size():
    with pytest.raises(ValueError, match="not \\[10\\]"):
        Sampler(OFF, {}, 10).sample(torch.zeros(11), [], 0)
