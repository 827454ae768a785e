"""`import kvcli`: answers, streaming, sequences, caches, estimates and errors, on tiny models."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import tiny
from conftest import PACKAGE_ROOT
from speaking import make_speaking

import kvcli
from kvcli.cli.wording import FLAGS
from kvcli.options import EvictOptions, LoadOptions

LONG = "the pages of a cache, " * 20
ON = {"temperature": 0.0, "ignore_eos": True, "loop_stop": False}


@pytest.fixture(scope="module")
def model() -> Iterator[kvcli.Model]:
    with kvcli.load(make_speaking(), device="cpu", threads=1) as opened:
        yield opened


def isolated(code: str) -> str:
    """What Python prints that runs this code, with this kvcli."""
    start = f"import sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r})\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_importing_takes_nothing_along() -> None:
    code = "import kvcli; print([name for name in ('torch', 'numpy', 'typing', 'kvcli.api') if name in sys.modules])"
    assert isolated(f"before = set(sys.modules)\n{code.replace('sys.modules]', 'set(sys.modules) - before]')}") == "[]"


def test_estimates_need_no_torch() -> None:
    path = tiny.make("llama").path
    code = f"import kvcli; kvcli.estimate({str(path)!r}, ctx=64, memory='1G'); print('torch' in sys.modules)"
    assert isolated(code) == "False"


def test_every_public_name_is_there() -> None:
    for name in kvcli.__all__:
        assert getattr(kvcli, name) is not None
    assert set(kvcli.__all__) <= set(dir(kvcli))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kvcli.nonsense  # noqa: B018


def test_an_answer_is_the_same_streamed_and_at_once(model: kvcli.Model) -> None:
    whole = model.generate("the pages", max_tokens=12, **ON)
    assert whole.finish_reason == "length" and len(whole.ids) == 12
    streamed = model.generate("the pages", max_tokens=12, **ON)
    pieces = list(streamed)
    assert len(pieces) > 1 and "".join(pieces) == streamed.text == whole.text
    assert list(streamed) == [] and streamed.done
    assert streamed.usage.completion_tokens == 12 and streamed.timings.decode_tokens == 11
    assert streamed.losses == () and streamed.sampling.temperature == 0.0


def test_generate_equals_the_engine(model: kvcli.Model) -> None:
    ids = model.tokenize("the pages", bos=True)
    assert model.generate(ids, max_tokens=5, **ON).ids == model.generate("the pages", max_tokens=5, **ON).ids
    expected, history = [], list(ids)
    for _ in range(5):
        logits = tiny.make("llama").logits(history)[-1]
        expected.append(int(logits.argmax()))
        history.append(expected[-1])
    assert model.generate(ids, max_tokens=5, **ON).ids == expected, "as transformers has it"


def test_a_chat_is_the_template_and_reuses_what_was_said(model: kvcli.Model) -> None:
    messages = [{"role": "user", "content": "pages"}]
    first = model.chat(messages, max_tokens=6, **ON)
    assert first.ids == model.generate("user: pages\nassistant: ", max_tokens=6, **ON).ids
    assert model.chat("pages", max_tokens=6, **ON).text == first.text
    messages += [{"role": "assistant", "content": "tokens"}, {"role": "user", "content": "more"}]
    second = model.chat(messages, max_tokens=1, **ON)
    assert second.usage.cache_read_tokens >= len(model.tokenize("user: pages\nassistant: ", bos=True)) - 1


def test_thinking_is_apart_and_templates_take_variables(model: kvcli.Model) -> None:
    limits = {"max_tokens": 30, **ON}
    plain = model.chat("pages", assistant="<think>Hm.</think> So", **limits)
    assert (plain.reasoning, plain.text[:2]) == ("Hm.", "So") and len(plain.ids) == 30
    ended = model.chat("pages", assistant="<think>", reasoning_budget=4, **limits)
    assert ended.reasoning and ended.text and 4 < ended.usage.reasoning_tokens < 16
    assert model.chat("pages", assistant="<think>", reasoning="off", **limits).reasoning == ""
    parts = list(model.chat("pages", assistant="<think>", reasoning_budget=4, **limits).parts())
    said = {kind: "".join(piece for each, piece in parts if each == kind) for kind in ("reasoning", "text")}
    assert said == {"reasoning": ended.reasoning, "text": ended.text}
    assert [kind for kind, _ in parts] == sorted(kind for kind, _ in parts), "thinking comes first"
    assert model.chat("pages", template_vars={"messages": []}, **limits).prompt_tokens < plain.prompt_tokens
    assert model.generate("a", **limits).reasoning == ""
    wrong = {"reasoning": "maybe", "reasoning_budget": -2, "template_vars": ["tools"], "assistant": 3}
    for name, value in wrong.items():
        with pytest.raises(kvcli.UsageError, match=f"`{name}` must be"):
            model.chat("pages", **{name: value})


def test_log_probabilities_of_tokens(model: kvcli.Model) -> None:
    answer = model.generate("the pages", logprobs=2, max_tokens=5, **ON)
    assert [each.chosen.id for each in answer.logprobs] == answer.ids
    assert all(each.top[0].logprob >= each.top[1].logprob for each in answer.logprobs)
    assert model.generate("the pages", max_tokens=1, **ON).logprobs == []


def test_text_and_ids(model: kvcli.Model) -> None:
    ids = model.tokenize("the pages")
    assert model.detokenize(ids) == "the pages"
    assert model.tokenize("") == []


def test_sampling_options_and_single_fields(model: kvcli.Model) -> None:
    options = kvcli.SampleOptions(temperature=3.0, top_k=0, top_p=1.0, min_p=0.0, seed=3, max_tokens=8)
    one, other = (model.generate("a", sampling=options).ids for _ in range(2))
    assert one == other and len(one) <= 8
    assert len(model.generate("a", sampling=options, max_tokens=2).ids) <= 2
    with model.generate("a", max_tokens=1) as answer:
        assert answer.sampling.seed >= 0, "a seed that was drawn is told"
    with pytest.raises(kvcli.UsageError, match="temprature"):
        model.generate("a", temprature=1)


def test_one_answer_at_a_time(model: kvcli.Model) -> None:
    running = model.generate("the pages", max_tokens=30, **ON)
    next(running)
    with pytest.raises(kvcli.UsageError, match="writing another answer"):
        model.generate("a")
    text = "".join(running._pieces)
    running.close()
    assert running.finish_reason == "interrupted" and running.text.startswith(text) and len(running.ids) < 30
    next(model.generate("the pages", max_tokens=30, **ON))  # nobody has it any more
    with model.generate("a", max_tokens=1, **ON) as answer:
        assert not answer.done
    assert answer.done


def test_sequences_and_forks(model: kvcli.Model) -> None:
    with model.new_sequence() as mine:
        answer = model.generate(LONG, sequence=mine, max_tokens=4, **ON)
        assert len(mine) == 0 and answer.text and mine.tokens[: answer.prompt_tokens] == model.tokenize(LONG, bos=True)
        length = len(mine)
        twin = model.fork(mine)
        again = model.generate(twin.tokens, sequence=twin, max_tokens=2, **ON)
        assert again.usage.cache_read_tokens == length - 1 and len(mine) == length
        twin.close()
        assert len(twin) == 0 and len(mine) == length
    assert len(mine) == 0


@pytest.mark.parametrize("cache_type", ["f16", "int4", "int8/int4"])
def test_a_cache_is_saved_and_loaded(cache_type: str, tmp_path: Path) -> None:
    file = tmp_path / "a.kv"
    cache = kvcli.CacheOptions(page_size=16)
    with kvcli.load(make_speaking(), cache_type=cache_type, device="cpu", threads=1, cache=cache) as first:
        expected = first.generate(LONG, max_tokens=8, **ON).ids
        first.save_cache(file)
        with first.new_sequence() as empty, pytest.raises(kvcli.UsageError, match="less than a page"):
            first.save_cache(file, empty)
    with kvcli.load(make_speaking(), cache_type=cache_type, device="cpu", threads=1, cache=cache) as second:
        read = second.load_cache(file)
        answer = second.generate(LONG, sequence=read, max_tokens=8, **ON)
        assert answer.ids == expected and answer.timings.prefill_tokens <= 16
        with pytest.raises(kvcli.CacheFileError, match=r"cannot open .*: No such file"):
            second.load_cache(tmp_path / "none.kv")
    other = kvcli.CacheOptions(page_size=32)
    with kvcli.load(make_speaking(), cache_type=cache_type, device="cpu", threads=1, cache=other) as third:
        if cache_type == "f16":  # whose sums do not depend on pages
            again = third.load_cache(file)
            assert third.generate(LONG, sequence=again, max_tokens=8, **ON).ids == expected
        else:
            with pytest.raises(kvcli.CacheFileError, match="page size 16, this run has 32"):
                third.load_cache(file)
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(kvcli.CacheFileError):
            third.load_cache(file)


def test_what_a_model_says_of_itself(model: kvcli.Model) -> None:
    assert (model.ctx, model.cache_type, model.device) == (tiny.CONTEXT, ("f16", "f16"), "cpu")
    assert model.name and isinstance(model.notices, list)
    assert 0 < model.estimate(64).total <= model.estimate().total


def test_a_closed_model_is_closed() -> None:
    model = kvcli.load(make_speaking(), device="cpu", threads=1)
    answer = model.generate("the pages", max_tokens=20, **ON)
    next(answer)
    model.close()
    model.close()
    assert answer.finish_reason == "interrupted"
    for call in (model.new_sequence, model.estimate, lambda: model.generate("a"), lambda: model.tokenize("a")):
        with pytest.raises(kvcli.UsageError, match="the model is closed"):
            call()


def test_eviction_goes_on_beyond_the_context() -> None:
    cache = kvcli.CacheOptions(page_size=16)
    with kvcli.load(
        make_speaking(), ctx=96, evict="sink", window=32, keep=4, device="cpu", threads=1, cache=cache
    ) as model:
        answer = model.generate("the pages", max_tokens=200, **ON)
        assert len(answer.ids) == 200 and "evicted" in answer.losses[0]
        with pytest.raises(kvcli.ContextOverflow, match="more than the context of 96") as caught:
            model.generate(LONG)
        assert "`ctx=" in caught.value.hint and "--" not in caught.value.hint


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"ctx": -1}, "`ctx` must be 0"),
        ({"cache_type": "int3"}, "`cache_type`: 'int3' is not a cache type"),
        ({"device": "gpu"}, "`device` must be auto, cpu, cuda or cuda:N, not 'gpu'"),
        ({"threads": -1}, "`threads` must be 0"),
        ({"backend": "fast"}, "`backend` must be auto, native or reference"),
        ({"memory_limit": "much"}, "`memory_limit` must be a size"),
        ({"evict": "h2"}, "`evict` must be one of"),
        ({"window": 64}, "`window` needs `evict`"),
        ({"evict": "window", "keep": 4}, "`keep` needs `evict=shift` or `evict=sink`"),
        ({"evict": "sink", "keep": -1}, "`keep=-1` means a whole prompt"),
        ({"cache": kvcli.CacheOptions(page_size=7)}, "`page_size` must be 16, 32, 64 or 128"),
        ({"cache_type": "int4", "cache": kvcli.CacheOptions(tail=0, sinks=0)}, "`tail=0` and `sinks=0`"),
        ({"cache": kvcli.CacheOptions(ubatch=-1)}, "`ubatch` must be 0 or more"),
        ({"cache": kvcli.CacheOptions(sequences=0)}, "`sequences` must be 1 or more"),
        ({"ctx": "8k"}, "`ctx` must be a whole number, not '8k'"),
        ({"ctx": True}, "`ctx` must be a whole number, not True"),
        ({"cache_type": ("int8", "int4")}, "`cache_type` must be a text, not ('int8', 'int4')"),
        ({"memory_limit": 0.5}, "`memory_limit` must be a text, not 0.5"),
        ({"cache": "int8"}, "`cache` must be of kvcli.CacheOptions, not 'int8'"),
        ({"prompts": None}, "`prompts` must be of kvcli.PromptCacheOptions"),
    ],
)
def test_errors_name_fields(changes: dict[str, object], text: str) -> None:
    with pytest.raises(kvcli.UsageError) as caught:
        kvcli.load(make_speaking(), **changes)  # type: ignore[arg-type]
    assert caught.value.message.startswith(text)
    assert "--" not in caught.value.message + caught.value.hint


def test_errors_of_answers_name_fields(model: kvcli.Model) -> None:
    for changes, text in (
        ({"temperature": -1}, "`temperature` must be 0 or more, not -1"),
        ({"top_p": 0}, "`top_p` must be"),
        ({"logit_bias": {1 << 20: 1.0}}, "`logit_bias` names token"),
        ({"logit_bias": {"the": 1.0}}, "`logit_bias` is by token ids"),
        ({"logit_bias": [1]}, "`logit_bias` must be a dict"),
        ({"max_tokens": "5"}, "`max_tokens` must be a whole number"),
        ({"max_tokens": -2}, "`max_tokens` must be -1 (no limit), 0 or more"),
        ({"stop": 3}, "`stop` must be a text or a list of texts"),
        ({"ignore_eos": "no"}, "`ignore_eos` must be true or false"),
        ({"sampling": {"seed": 1}}, "`sampling` must be of kvcli.SampleOptions"),
        ({"sequence": 3}, "`sequence` must be one of Model.new_sequence"),
        ({"temprature": 1}, "there is no option `temprature`"),
    ):
        with pytest.raises(kvcli.UsageError) as caught:
            model.generate("a", **changes)
        assert caught.value.message.startswith(text)
    with pytest.raises(kvcli.UsageError, match="the prompt is empty"):
        model.generate([])
    with pytest.raises(kvcli.UsageError, match="outside the vocabulary"):
        model.generate([1 << 20])
    for prompt in (None, 3, b"abc", [1.5], ["a"]):
        with pytest.raises(kvcli.UsageError, match="`prompt` must be a text or token ids"):
            model.generate(prompt)  # type: ignore[arg-type]
    for messages in (None, [], {"role": "user", "content": "hi"}, ["hi"], [{"content": "hi"}]):
        with pytest.raises(kvcli.UsageError, match="`messages` must be a text, or a list"):
            model.chat(messages)  # type: ignore[arg-type]
    for ids in ([-1], [1 << 30], "abc", 3):
        with pytest.raises(kvcli.UsageError, match=r"outside the vocabulary|must be token ids"):
            model.detokenize(ids)  # type: ignore[arg-type]
    with pytest.raises(kvcli.UsageError, match="must be 1 or more"):
        model.estimate(0)


def test_a_stop_text_is_one_text(model: kvcli.Model) -> None:
    options: dict[str, object] = {"temperature": 0, "max_tokens": 12}
    text = model.generate("the pages of", **options).text
    assert len(text) > 4
    assert model.generate("the pages of", **options, stop=text[2:5]).text == text[: text.index(text[2:5])]


def test_a_model_can_be_asked_while_it_answers(model: kvcli.Model) -> None:
    with model.generate("the pages", max_tokens=20) as answer:
        next(answer)
        assert model.detokenize(model.tokenize("pages")) == "pages" and repr(model).startswith("<Model ")


def test_a_model_without_a_template_does_not_chat() -> None:
    with kvcli.load(tiny.make("llama").path, device="cpu", threads=1) as model:
        with pytest.raises(kvcli.ModelError, match="no chat template"):
            model.chat("hi")
        assert model.generate("hi", max_tokens=1).text is not None


def test_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(kvcli.ModelError, match="no such file"):
        kvcli.load(tmp_path / "none.gguf")
    with pytest.raises(kvcli.ModelError, match="no model named"):
        kvcli.load("nonsense")


def test_a_draft_model_guesses() -> None:
    path = str(tiny.make("llama").path)
    with kvcli.load(path, draft=path, ctx=64, device="cpu") as model:
        asked = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
        guessed = model.generate([5, 6, 7], **asked)
        assert guessed.sampling.spec == "draft"
        assert guessed.text == model.generate([5, 6, 7], spec="off", **asked).text
        assert "draft: weights" in {row.name for row in model.estimate().rows}
    more, alone = kvcli.estimate(path, memory="2G", draft=path).best, kvcli.estimate(path, memory="2G").best
    assert more is not None and alone is not None and more.total_bytes > alone.total_bytes


def test_an_estimate() -> None:
    path = str(tiny.make("llama").path)
    found = kvcli.estimate(path, memory="2G", cache_type=["f16", "int4"], ctx=256)
    f16, int4 = found.choices
    assert [f16.cache_type, int4.cache_type] == ["f16", "int4"] and f16.ctx == 256 and f16.fits
    assert int4.token_bytes < f16.token_bytes and found.best == f16
    assert found.trained_ctx == tiny.CONTEXT and found.free_bytes == 2 << 30
    assert kvcli.estimate(path, memory="2G").choices[0].ctx == tiny.CONTEXT
    with pytest.raises(kvcli.UsageError, match="`cache_type`"):
        kvcli.estimate(path, cache_type="int3")
    with pytest.raises(kvcli.UsageError, match="only one of `gpu` and `device`"):
        kvcli.estimate(path, gpu="rtx4090", device="cpu")


def test_every_option_has_a_flag() -> None:
    """What an error may name in backticks, the command line has another word for."""
    names = set(inspect.signature(kvcli.load).parameters) - {"cache", "prompts", "progress"}
    names |= {each.name for each in fields(kvcli.CacheOptions)} - {"ctx_size", "evict"}
    names |= {each.name for each in fields(EvictOptions)} - {"policy"}
    names |= {each.name for each in fields(LoadOptions)} - {"force", "chat_anyway", "chat"}
    names |= {each.name for each in fields(kvcli.SampleOptions)} - {"sequence", "unattended", "dry_sequence_breakers"}
    assert names <= set(FLAGS) | {"loop_stop", "ignore_eos"}
    from kvcli.cli.main import _command

    params = [param for command in _command([]).commands.values() for param in command.params]
    known = {name for param in params for name in (*param.opts, *param.secondary_opts)}
    assert {flag.split()[0] for flag in FLAGS.values()} <= known  # some with a value
