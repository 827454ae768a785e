"""One token at a time on a GPU, by the kernels of the graph, against the backend in plain torch.

Without a GPU the kernels are interpreted, launch after launch, and prompts come from the reference, which writes to the
same pages; with one they are captured and replayed.
"""

from __future__ import annotations

from itertools import islice

import adapters
import pytest
import tiny
import torch
from gpucases import COMPILED, DEVICE, MORE
from gpumodels import CONTEXT, LIMITS, PAGE, VOCAB, Model, alike, divergence, ids
from kernelcases import one_thread

from kvcli.errors import KVError
from kvcli.kernels import paged
from kvcli.kernels.gpu import combine, latentcombine, products, shares
from kvcli.kernels.gpu.formats import PLAIN, DeviceMatrix
from kvcli.kernels.gpu.language import AFTER, SERIAL
from kvcli.kernels.gpu.matvec import RESIDUAL
from kvcli.kernels.gpu.seal import seal_step
from kvcli.options import LoraOption, SampleOptions
from kvcli.runtime.cache import layout
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.config import SLIDING
from kvcli.runtime.engine.graph import nexttoken, tokengraph
from kvcli.runtime.engine.graph import pages as graph_pages
from kvcli.runtime.engine.sampler import Sampler
from kvcli.runtime.engine.tokenstream import DeviceRows, DeviceTokens, graph_tokens, host_tokens
from kvcli.runtime.plan import footprint, graphs


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(nexttoken, "SMALLEST_BUCKET", 32)
    if DEVICE == "cpu":  # the interpreter takes its time for each step of each program
        monkeypatch.setattr(products, "tiles", _few_programs)
    with one_thread(), torch.inference_mode():
        yield


def _few_programs(matrix: DeviceMatrix, role: int) -> products.Tiles:
    n = matrix.cols if matrix.format.kind == PLAIN else max(16, matrix.groups)
    return products.Tiles(32 if role == RESIDUAL else 64, 1 << (n - 1).bit_length(), 32, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("types", "retention"), [("int4", None), ("fp8", Rolling(20, 32, PAGE))])
def test_layers_are_sealed_at_once_as_each_alone(types, retention):
    model = Model("llama", types, retention=retention)
    model.feed(ids(2 * PAGE - 1))
    model.token(3)
    graph = model.graph
    assert graph is not None
    graph.position.fill_(2 * PAGE - 1)
    pages = [model.pool.page(g, held.closed.pages[1]) for g, held in enumerate(model.seq._lists)]
    assert [layers for _, layers, _ in graph._pages.sealed_runs()] == [sum(len(page) for page in pages)] == [2]
    sealed = []
    for at_once in (True, False):
        for page in pages:
            page.fill_(0xA5)
        if at_once:
            graph._launch_sealing()
        else:
            for layer in graph._pages.layers.values():
                seal_step(layer)
        sealed.append([page.cpu().clone() for page in pages])
    for page, other in zip(*sealed, strict=True):
        assert torch.equal(page, other) and not (page == 0xA5).all(1).any()


# Those that have most of what the others do not have, and those that have one thing more.
FAMILIES = ("llama", "gemma3", "starcoder2", "cohere2", "gpt-oss", "granitehybrid-dense")
MORE_FAMILIES = ("qwen2", "glm4", "gemma2", "granite", "olmo2", "mixtral")
SLOW_FAMILIES = (  # in the interpreter, or much like others
    "falcon-h1", "nemotron_h", "nemotron_h_moe", "qwen3", "phi3", "mistral3", "hunyuan-dense", "arcee", "qwen2moe",
    "granitemoe-shared", "glm4moe", "qwen35",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "types", "quantized"),
    [
        *((arch, "f16", arch != "llama") for arch in FAMILIES),
        *(pytest.param(arch, "f16", True, marks=MORE) for arch in MORE_FAMILIES),
        *(pytest.param(arch, "f16", True, marks=COMPILED) for arch in SLOW_FAMILIES),
        ("llama", "int8", True),
        pytest.param("gemma3", "int4", False, marks=COMPILED),
    ],
)
def test_logits_are_those_of_the_cpu(arch, types, quantized):
    """Across the ends of pages: of the first one, which fixes the mean of keys, and of others, which are sealed."""
    ours, theirs = Model(arch, types, quantized), Model(arch, types, quantized, reference=True)
    assert ours.graph is not None and tokengraph.unsupported(ours.decoder) == ""
    sealed = [g for g in ours.layout.groups if g.sealed]
    assert bool(sealed) == (types != "f16")
    alike(ours, theirs, iter(ids(60)), ((15, 2), (30, 2)) if sealed else ((31, 2),), LIMITS[types])
    assert ours.seq.length == (49 if sealed else 33) and ours.seq.tokens == theirs.seq.tokens


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma3", *(pytest.param(x, marks=MORE) for x in ("llama", "phi3"))])
def test_an_adapter_beside_packed_matrices(arch, tmp_path):
    """Of every matrix; q, k and v are stacked, of two formats in all but phi3, and gates are paired."""
    file = tiny.make_even(arch, arch != "llama")
    lora = (LoraOption(str(adapters.write(tmp_path / "a.gguf", file, adapters.matrices(file))), 0.5),)
    ours, theirs = (Model(arch, "f16", arch != "llama", reference, lora=lora) for reference in (False, True))
    plain = Model(arch, "f16", arch != "llama", reference=True)
    prompt, token = ids(31), 5
    expected, without, found = theirs.feed(prompt), plain.feed(prompt), ours.feed(prompt)
    assert divergence(expected, without) > 0.001 and divergence(expected, found) < LIMITS["f16"]
    expected, without, found = theirs.token(token), plain.token(token), ours.token(token)
    assert divergence(expected, without) > 0.001 and divergence(expected, found) < LIMITS["f16"]
    by_prompt = ours.feed([6], ours.decoder)
    assert divergence(theirs.token(6), by_prompt) < LIMITS["f16"]


@pytest.mark.slow
def test_a_model_whose_every_layer_slides(monkeypatch):
    """A llama with one window: pages that fell out of it are gone while tokens go on, and its rows are sealed."""
    monkeypatch.setattr(layout, "SMALL_WINDOW", 8)
    keys = {"llama.attention.sliding_window": 20}
    ours, theirs = Model("llama", "int8", True, keys=keys), Model("llama", "int8", True, reference=True, keys=keys)
    assert [(g.kind, g.window, g.sealed) for g in ours.layout.groups] == [(SLIDING, 20, True)]
    alike(ours, theirs, iter(ids(60)), ((47, 2),), LIMITS["int8"])
    assert ours.seq.pages(0) < 3, "49 rows take four pages, of which the window sees two"


def test_rows_that_pad_the_vocabulary_have_no_logits():
    """The tied matrix is one copy, of an odd number of rows."""
    ours, whole = Model("gemma3", "f16", tokens=VOCAB - 3), Model("gemma3", "f16", reference=True)
    prompt, token = ids(9), 2
    assert ours.decoder.weights.head[0] is ours.decoder.weights.embedding[0]
    assert divergence(whole.feed(prompt)[:-3], ours.feed(prompt)) < LIMITS["f16"]
    found = ours.token(token)
    assert found.shape == (VOCAB - 3,) and divergence(whole.token(token)[:-3], found) < LIMITS["f16"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "types"),
    [
        ("llama", "f16"),
        ("gemma3", "int4"),
        *(pytest.param(x, "f16", marks=MORE) for x in ("olmo2", "starcoder2", "cohere2", "qwen2moe")),
    ],
)
def test_prompts_without_a_graph(arch, types):
    ours, theirs = Model(arch, types, True), Model(arch, types, True, reference=True)
    text, first = ids(34), 28
    assert divergence(theirs.feed(text[:first]), ours.feed(text[:first])) < LIMITS[types]
    assert divergence(theirs.feed(text[first:]), ours.feed(text[first:], ours.decoder)) < LIMITS[types]


@pytest.mark.parametrize("arch", ["qwen35", "lfm2", pytest.param("granitehybrid-dense", marks=MORE)])
def test_rows_of_guesses_are_taken_back_from_states(arch):
    """Behind a token of the graph, and before another one, which goes on from what is left."""
    ours, theirs = Model(arch, "f16"), Model(arch, "f16", reference=True)
    text = ids(9)
    for feed in (ours.feed, theirs.feed):
        feed(text[:5])
    assert divergence(theirs.token(text[5]), ours.token(text[5])) < LIMITS["f16"]
    seq = ours.seq
    assert seq.states is not None and seq.states.can_guess()
    seq.certain = 6
    found = ours.feed([*text[6:8], 1, 2, 3], ours.decoder)
    assert divergence(theirs.feed(text[6:8]), found) > 1e-3
    seq.rewind(8)
    seq.certain = None
    seq.states.settle()
    assert divergence(theirs.token(text[8]), ours.token(text[8])) < LIMITS["f16"]
    seq.close()
    ours.pool.check([])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "types", "keep", "prompts", "graphs"),
    [
        ("llama", "int8", 20, ((63, 1), (12, 1), (83, 2)), {64, 128}),
        ("gemma3", "f16", 4, ((46, 2), (150, 1)), {64}),
    ],
)
def test_tokens_go_on_where_old_ones_are_evicted(arch, types, keep, prompts, graphs, monkeypatch):
    """Where the first rows go, where graphs change, and when every slot of the ring has had several pages."""
    monkeypatch.setattr(graph_pages, "PAGES_EACH", 1)
    retention = Rolling(keep, 32, PAGE)
    ours, theirs = (Model(arch, types, False, reference, retention) for reference in (False, True))
    used: set[int] = set()
    launch = ours.graph.launch
    monkeypatch.setattr(ours.graph, "launch", lambda bucket: (used.add(bucket), launch(bucket)))
    alike(ours, theirs, iter(ids(250)), prompts, LIMITS[types])
    assert ours.seq.evicted == retention.gap(ours.seq.length - 1) > 100 and ours.seq.length > CONTEXT
    assert ours.seq.tokens == theirs.seq.tokens and used == graphs


@COMPILED
def test_launching_kernels_ahead_changes_no_bit(monkeypatch):
    found = []
    for pdl, early in ((SERIAL, 0), (AFTER, 0), (AFTER, products.EARLY)):
        monkeypatch.setattr(products, "EARLY", early)
        model = Model("llama", "int8", True)
        assert model.graph is not None
        model.graph.pdl = min(pdl, model.graph.pdl)
        model.feed(ids(20))
        found.append(torch.stack([model.token(token) for token in ids(50, 1)]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@COMPILED
def test_same_bits_again_and_another_sequence():
    model, text, found = Model("llama", "int8", True), ids(33), []
    for start in (text[:32], [5, 6, 7], text[:32]):
        model.again()
        model.feed(start)
        found.append(model.token(text[32]))
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


GREEDY, DRAWN = SampleOptions(temperature=0.0), SampleOptions(4.0, 40, 1.0, 0.0, seed=3)
PENALISED = SampleOptions(temperature=0.0, repeat_penalty=1.5)
DRY = SampleOptions(temperature=0.0, dry_multiplier=5.0, dry_allowed_length=1)  # which the host must apply


@pytest.mark.slow
@pytest.mark.parametrize("options", [GREEDY, DRAWN, PENALISED, DRY])
def test_tokens_are_those_of_the_host(options):
    model, theirs, prompt = Model("llama", "f16"), Model("llama", "f16", reference=True), ids(14, 5)
    sampler, expected, found = Sampler(options, {}, VOCAB), list(prompt), list(prompt)
    for token in host_tokens(theirs.feed(prompt), expected, sampler, theirs.token):
        expected.append(token)
        if len(expected) == len(prompt) + 3:
            break
    assert model.graph is not None
    tokens = graph_tokens(model.graph, VOCAB, model.seq, found, sampler, model.feed(prompt).to(DEVICE))
    for token in tokens:
        found.append(token)
        if len(found) == len(expected):
            break
    tokens.close()
    assert found == expected
    assert model.seq.tokens in (found, found[:-1])  # no row of a token that nobody has seen
    if options is DRAWN:
        _check_rows_of_a_device(model, sampler, prompt, expected)
    assert DeviceRows.possible(sampler) == (options in (GREEDY, DRAWN))


def _check_rows_of_a_device(model: Model, sampler: Sampler, prompt: list[int], expected: list[int]) -> None:
    """Tokens that are read when all of them are chosen, and those of rows that are there together."""
    model.again()
    assert model.graph is not None
    rows, logits = DeviceRows(sampler, VOCAB, DEVICE), model.feed(prompt).to(DEVICE)
    assert rows.drawn(model.graph, model.seq, logits, 2) == expected[len(prompt) : -1]
    assert model.seq.tokens == expected[:-2]
    several = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    each = [sampler.sample(row.cpu(), [], 7 + i) for i, row in enumerate(several)]
    assert list(rows.chosen(several, 7)) == each


@pytest.mark.slow
def test_tokens_go_on_behind_those_that_were_put_in_between():
    """As where thinking is ended: what the device chose ahead is taken back."""
    model, theirs, prompt, between = Model("llama", "f16"), Model("llama", "f16", reference=True), ids(14, 5), [5, 6, 7]
    sampler, expected, found = Sampler(GREEDY, {}, VOCAB), list(prompt), list(prompt)
    logits = theirs.feed(prompt)
    for more in (between, []):
        for _ in range(2):
            expected.append(sampler.sample(logits, expected, len(expected)))
            logits = theirs.token(expected[-1])
        if more:
            expected += more
            logits = theirs.feed(more)
    assert model.graph is not None
    logits = model.feed(prompt)
    for more in (between, []):
        tokens = graph_tokens(model.graph, VOCAB, model.seq, found, sampler, logits.to(DEVICE))
        for token in islice(tokens, 2):
            found.append(token)
        tokens.close()
        if more:
            found += more
            logits = model.feed(found[model.seq.length :])
    assert found == expected


def test_the_plan_counts_what_kernels_have():
    assert footprint.DECODE_PARTS == combine.MOST_PARTS and graphs.LATENT_PARTS == latentcombine.MOST_PARTS
    assert graphs.EDGE_NUMBERS == shares.EDGE_NUMBERS and graphs.CENTRE_ROWS == paged.CENTRE_ROWS


def test_the_end_of_the_context():
    """The last token has no row."""
    model, prompt = Model("llama", "f16"), ids(CONTEXT - 2, 6)
    found, logits = _device_tokens(model, GREEDY), model.feed(prompt)
    tokens = list(found.iterate(logits.to(DEVICE)))
    found.close()
    assert len(tokens) == 3 and model.seq.tokens == prompt + tokens[:2]


@pytest.mark.slow
def test_answers_go_on_beyond_the_context():
    """Where old rows are evicted; the tokens are those of the host."""
    retention, prompt = Rolling(4, 32, PAGE), ids(CONTEXT - 1, 6)
    model, theirs = (Model("llama", "f16", False, reference, retention) for reference in (False, True))
    expected, logits = [], theirs.feed(prompt)
    for _ in range(4):
        expected.append(int(logits.argmax()))
        logits = theirs.token(expected[-1])
    found = _device_tokens(model, GREEDY)
    tokens = list(islice(found.iterate(model.feed(prompt).to(DEVICE)), 4))
    found.close()
    assert tokens == expected and model.seq.length > CONTEXT and model.seq.tokens == prompt + tokens


def test_an_error_ends_the_tokens():
    model = Model("llama", "f16")
    found = _device_tokens(model, GREEDY)
    logits = model.feed(ids(3)).to(DEVICE)
    logits[5] = float("nan")
    with pytest.raises(KVError, match="not a number"):
        next(found.iterate(logits))
    found.close()


def _device_tokens(model: Model, options: SampleOptions) -> DeviceTokens:
    from kvcli.kernels.gpu.sample import DeviceSampler

    sampler = Sampler(options, {}, VOCAB)
    assert model.graph is not None
    return DeviceTokens(model.graph, model.seq, sampler, DeviceSampler([sampler.effective], VOCAB, DEVICE))
