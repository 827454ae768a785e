"""One token at a time on a GPU, by the kernels of the graph, against the backend in plain torch.

Without a GPU the kernels are interpreted, launch after launch; with one they are captured and replayed.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny
import torch
from gpucases import DEVICE, OPS
from kernelcases import one_thread

from kvcli.errors import KVError
from kvcli.kernels import Backend
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.options import SampleOptions
from kvcli.runtime import archs, tokengraph
from kvcli.runtime.config import from_gguf
from kvcli.runtime.decoding import DeviceTokens, host_tokens
from kvcli.runtime.engine import Engine
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.layers import Decoder
from kvcli.runtime.layout import KVLayout
from kvcli.runtime.pages import PagePool
from kvcli.runtime.sampler import Sampler
from kvcli.runtime.sequence import Sequence
from kvcli.runtime.tokengraph import TokenGraph
from kvcli.runtime.weights import Weights

VOCAB, PAGE, CONTEXT = 64, 16, 96
LIMIT = 1e-3  # nats
LONG = ((30, 3), (14, 3))  # rows of a prompt, then single tokens, and once more
COMPILED = pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in Triton's interpreter")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(tokengraph, "SMALLEST_BUCKET", 32)
    with one_thread(), torch.inference_mode():
        yield


class Model:
    """A tiny model, its graph and a sequence; or, as `reference`, in plain torch on the CPU."""

    def __init__(self, arch: str, types: str, quantized: bool, reference: bool = False) -> None:
        file = GGUFFile.open(tiny.make_even(arch, quantized))
        config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
        assert config.vocab_size == VOCAB
        self.layout = KVLayout.build(config, types, types, PAGE)
        ops: Backend = OPS if reference else GpuBackend(torch.device(DEVICE))
        self.decoder: Decoder = archs.build(config, Weights(file), ops)
        self.pool = PagePool(self.layout, device=ops.device)
        self.seq = Sequence(self.pool)
        self.graph = None if reference else TokenGraph(self.decoder, self.layout, CONTEXT)

    def feed(self, ids: list[int]) -> torch.Tensor:
        """Logits [vocab] after rows that come as one step."""
        step = self.seq.reserve(ids)
        hidden = self.decoder.hidden(step)
        self.seq.commit(ids)
        if self.graph:
            self.graph.unbind()
        return self.decoder.logits(hidden[-1:])[0].cpu()

    def token(self, token: int) -> torch.Tensor:
        """Logits after one row more."""
        if self.graph is None:
            return self.feed([token])
        return self.graph.run(self.seq, token).cpu().clone()

    def again(self) -> None:
        """A new sequence, on pages that others have used."""
        self.seq.close()
        self.seq = Sequence(self.pool)


def ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (n,), generator=torch.manual_seed(seed)).tolist()


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """KL divergence of next-token probabilities, in nats; NaN where a logit is not finite."""
    p, q = (x.double().log_softmax(-1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum())


@pytest.mark.parametrize(
    ("arch", "types", "quantized", "steps"),
    [
        pytest.param("llama", "f16", False, LONG, marks=COMPILED),
        ("llama", "int8", True, ((47, 2),)),
        ("gemma3", "f16", True, ((18, 1),)),
        pytest.param("llama", "int8", True, LONG, marks=COMPILED),
        pytest.param("gemma3", "int8", False, LONG, marks=COMPILED),
    ],
)
def test_logits_are_those_of_the_cpu(arch, types, quantized, steps):
    """Across the ends of pages: of the second one, which fixes the mean of keys, and the third; with steps between.

    int8, not int4: where two scales are as good, float32 rounding decides, and one code more or less is much for int4.
    """
    ours, theirs = Model(arch, types, quantized), Model(arch, types, quantized, reference=True)
    assert ours.graph is not None and tokengraph.unsupported(ours.decoder) == ""
    sealed = [g for g in ours.layout.groups if g.sealed]
    assert bool(sealed) == (types == "int8")
    text = iter(ids(60))
    for prompt, count in steps:
        chunk = [next(text) for _ in range(prompt)]
        assert divergence(theirs.feed(chunk), ours.feed(chunk)) < LIMIT
        for _ in range(count):
            token = next(text)
            found = ours.token(token)
            assert divergence(theirs.token(token), found) < LIMIT, ours.seq.length
    assert ours.seq.tokens == theirs.seq.tokens


@COMPILED
def test_same_bits_again_and_another_sequence():
    model, text = Model("llama", "int8", True), ids(36)
    found = []
    for start in (None, [5, 6, 7], None):
        model.again()
        model.feed(start or text[:30])
        found.append([model.token(token) for token in text[30:34]])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    assert not torch.equal(found[0][0], found[1][0])


GREEDY, DRAWN = SampleOptions(temperature=0.0), SampleOptions(4.0, 40, 1.0, 0.0, seed=3)
PENALIZED = SampleOptions(temperature=0.0, repeat_penalty=1.5)


@pytest.mark.parametrize(
    "options", [GREEDY, pytest.param(DRAWN, marks=COMPILED), pytest.param(PENALIZED, marks=COMPILED)]
)
def test_tokens_are_those_of_the_host(options):
    model, prompt, count = Model("llama", "f16", False), ids(14, 5), 3
    sampler = Sampler(options, {}, VOCAB)
    assert model.graph is not None
    graph, history, logits = model.graph, list(prompt), model.feed(prompt)
    for token in host_tokens(logits, history, sampler, model.token):
        history.append(token)
        if len(history) == len(prompt) + count:
            break
    model.again()
    again, logits = list(prompt), model.feed(prompt)
    engine = SimpleNamespace(graph=graph, config=model.decoder.config)
    tokens = Engine.tokens(engine, model.seq, again, sampler, logits.to(DEVICE))  # type: ignore[arg-type]
    for token in tokens:
        again.append(token)
        if len(again) == len(history):
            break
    tokens.close()
    assert again == history
    assert model.seq.tokens in (again, again[:-1])  # no row of a token that nobody has seen


def test_the_end_of_the_context():
    """The last token has no row."""
    model, prompt = Model("llama", "f16", False), ids(CONTEXT - 2, 6)
    found, logits = _device_tokens(model, GREEDY), model.feed(prompt)
    tokens = list(found.iterate(logits.to(DEVICE)))
    found.close()
    assert len(tokens) == 3 and model.seq.tokens == prompt + tokens[:2]


def test_an_error_ends_the_tokens():
    model = Model("llama", "f16", False)
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
    return DeviceTokens(model.graph, model.seq, sampler, DeviceSampler(sampler.effective, VOCAB, DEVICE))
