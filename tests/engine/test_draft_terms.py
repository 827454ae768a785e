"""What a draft model is refused for, what is planned and told of it, and how many tokens are guessed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import eagles
import pytest
import tiny
from draftcases import WORTH, always_guess, drafts, engine_of, kept
from engines import GREEDY, PROMPT

from kvcli.errors import DoesNotFit, KVError, ModelError, UsageError
from kvcli.options import AttendOptions, CacheOptions, EvictOptions, LoadOptions
from kvcli.runtime.engine import loaded
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.loaded import LoadedModel
from kvcli.runtime.engine.opened import Opened
from kvcli.runtime.engine.spec import drafting
from kvcli.runtime.engine.spec.draftmodel import DraftGuesses
from kvcli.runtime.engine.spec.pace import CPU_COSTS, Drafted, Pace
from kvcli.runtime.headers.eagle import EagleHead
from kvcli.runtime.host.device import Device
from kvcli.runtime.host.memory import CPU, CUDA
from kvcli.runtime.plan import repacked
from kvcli.runtime.plan.footprint import WeightBytes
from kvcli.runtime.plan.plan import engine_budget
from kvcli.runtime.text.modeltext import ModelText


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    always_guess(monkeypatch)


# --- what is refused, and told


def opened(variant: str) -> Opened:
    return Opened(tiny.make(variant).path, LoadOptions(variant))


@pytest.mark.parametrize(
    ("variant", "draft", "options", "error"),
    [
        ("llama", "llama", CacheOptions(160, evict=EvictOptions("h2o", budget="128")), "with `evict=h2o`"),
        ("llama", "llama", CacheOptions(160, attend=AttendOptions(pages=2)), "with `attend=pages:2`"),
    ],
)
def test_models_and_options_that_nothing_can_be_guessed_with(
    variant: str, draft: str, options: CacheOptions, error: str
) -> None:
    with pytest.raises((ModelError, UsageError), match=error):
        LoadedModel(opened(variant), LoadOptions(variant, backend="reference"), options, draft=opened(draft))


def test_states_of_a_draft_model_need_a_cpu() -> None:
    for variant in ("lfm2", "falcon-h1"):
        drafting.check_layers(opened(variant).config, CPU)
        with pytest.raises(ModelError, match="the draft model has layers that keep a state, from which a GPU"):
            drafting.check_layers(opened(variant).config, CUDA)
    drafting.check_layers(opened("llama").config, CUDA)


@pytest.mark.parametrize(
    ("variant", "draft", "mtp", "what"),
    [
        ("llama", "llama", False, "the draft model"),
        ("llama", "a head", False, "the draft model"),
        ("glm4moe-ahead", "", True, "the layer that predicts further tokens"),
    ],
)
def test_what_a_gpu_cannot_compute_of_what_guesses_is_told_before_loading(
    variant: str, draft: str, mtp: bool, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadedModel, "_choose", lambda self, load: Device(CUDA, 0, "a card"))  # the model itself fits
    monkeypatch.setattr(loaded, "engine_budget", lambda *of_card: engine_budget(None))
    monkeypatch.setattr(repacked, "MOST_HEAD_DIM", 4)
    beside = EagleHead(eagles.make(variant)[0]) if draft == "a head" else opened(draft) if draft else None
    with pytest.raises(ModelError, match=f"^{what} cannot be computed on a GPU: a head dim of") as caught:
        LoadedModel(opened(variant), LoadOptions(variant, mtp=mtp), CacheOptions(64), draft=beside)
    assert "device=cpu" in caught.value.hint and caught.value.exit_code == 3


def test_a_model_with_another_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "differing", lambda mine, theirs: "token 3 is 'a', and 'b' in the model")
    with pytest.raises(
        ModelError, match="the draft model has another vocabulary: token 3 is 'a', and 'b' in the model"
    ):
        LoadedModel(opened("llama"), LoadOptions("llama"), CacheOptions(64), draft=opened("llama"))


def test_vocabularies_are_compared() -> None:
    metadata = opened("llama").file.metadata
    tokens, kinds = (list(metadata[f"tokenizer.ggml.{name}"]) for name in ("tokens", "token_type"))

    def differing(**keys: object) -> str:
        changed = {**metadata, **{f"tokenizer.ggml.{name}": value for name, value in keys.items()}}
        mine, theirs = (ModelText.of(each, "a").tokenizer for each in (metadata, changed))
        return drafting.differing(mine, theirs)

    assert differing() == ""
    assert (
        differing(tokens=[*tokens[:50], "other", *tokens[51:]])
        == f"token 50 is 'other', and {tokens[50]!r} in the model"
    )
    more = {"tokens": [*tokens, "[PAD]"], "token_type": [*kinds, 5]}
    assert differing(**more) == ""
    assert (
        differing(**more | {"token_type": [*kinds, 1]}) == f"token {len(tokens)} is '[PAD]', and not there in the model"
    )
    assert differing(eos_token_id=1) == "EOS is token 1, and 2 in the model"


def test_what_is_said_of_a_draft_model() -> None:
    engine = engine_of("llama", "llama", ctx=600)
    assert any("as large as the model" in text for text in engine.notices)
    assert any("trained on 512 tokens: behind them" in text for text in engine.notices)
    sizes = WeightBytes(9 << 20, 0, 9 << 20, "", ""), WeightBytes(2 << 20, 0, 2 << 20, "", "")
    assert drafting.too_large(*sizes) == "" and "9 MiB for each token, and 2" in drafting.too_large(*reversed(sizes))


def test_what_a_draft_model_cannot_do_is_said_to_be_its_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(KVError, match=r"^the draft model: "):
        Opened.draft(path, LoadOptions("a"))


def test_guesses_by_a_draft_model_need_one() -> None:
    engine = engine_of("llama", "llama").beside(CacheOptions(64))
    with pytest.raises(UsageError, match="`spec=draft` needs a model that drafts"):
        engine.request(engine.new_sequence(), PROMPT[:9], replace(GREEDY, spec="draft"))


# --- memory


def test_memory_is_planned_for_both() -> None:
    with_draft = engine_of("llama", "qwen3", "int8")
    terms = with_draft.terms
    alone, theirs = terms.without_draft().plan, drafts(with_draft).plan
    assert terms.plan.total == alone.total + theirs.total
    assert terms.plan.draft_kv_bytes == theirs.kv_bytes > 0 == alone.draft_kv_bytes
    names = {row.name for row in terms.plan.rows}
    assert {"draft: weights", "draft: KV pool"} <= names and "draft: runtime and libraries" not in names
    pools = with_draft.pool.budget_bytes, drafts(with_draft).pool.budget_bytes
    assert None not in pools
    left = terms.budget.bytes - terms.plan.needed
    assert sum(pools) == terms.plan.kv_bytes + theirs.kv_bytes + left  # type: ignore[arg-type]
    assert with_draft.predict(100).total > replace(terms.setting, draft=None).plan(with_draft.layout, 100).total


def test_a_context_that_fits_alone_may_not_fit_with_a_draft_model() -> None:
    path, options = tiny.make("llama").path, CacheOptions(0, page_size=16)
    load = LoadOptions("llama", 1, "reference")
    whole = Engine.open(path, load, options).plan.total
    load = replace(load, memory_limit=str(whole + 1000))
    assert Engine.open(path, load, options).ctx_size == 512
    with pytest.raises(DoesNotFit, match="the model and its draft model need"):
        Engine.open(path, load, options, path)


# --- how many


@pytest.mark.parametrize(
    ("costs", "right", "draft_s", "expected"),
    [
        (CPU_COSTS, 1.0, 0.0, 15), (CPU_COSTS, 0.8, 0.05, 3), (CPU_COSTS, 0.1, 0.05, 0), (CPU_COSTS, 0.9, 1.0, 0),
        ((1.2, 1.3, 1.4), 0.95, 0.05, 15), ((1.2, 1.3, 1.4), 0.8, 0.05, 7),
    ],
)  # fmt: skip
def test_as_many_are_guessed_as_are_worth_it(
    costs: tuple[float, ...], right: float, draft_s: float, expected: int
) -> None:
    pace = Pace(costs)
    judge = Drafted(pace)
    worth = WORTH.__get__(judge)
    assert worth(15) == 0  # a step without guesses is measured first
    pace.took(1, 1, 1.0)
    judge.took(1, draft_s)
    for i in range(300):
        judge.saw(1, (37 * i % 100 + 0.5) / 100 < right)
    pace._account = 0.5
    assert worth(15) == expected and worth(0) == 0
    for _ in range(100):
        pace.took(1, 1, 1.0)
    assert worth(15) == (expected or 3)  # whether that has changed is found out now and then
    pace.spent(100.0)
    assert worth(15) == 0


def test_the_first_guess_waits_until_the_prompt_is_read() -> None:
    """A prefill step before each token, so that nothing waits for long."""
    engine = engine_of("llama", "llama")
    kept(engine).close()
    request = engine.request(engine.new_sequence(), PROMPT[:140], replace(GREEDY, max_tokens=12))
    steps = list[int]()
    while not request.finished:
        engine.step([request])
        guesses = request.guesses
        assert isinstance(guesses, DraftGuesses)
        if request.answering and not request.finished:
            steps.append(guesses.drafted)
    assert steps[:4] == [0, 0, 0, 0] and steps[-1] > 0
    request.seq.close()
