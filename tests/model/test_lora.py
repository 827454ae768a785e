"""LoRA adapters beside packed matrices, against the same models with the adapters merged into float32 ones."""

from __future__ import annotations

import json
from pathlib import Path

import adapters
import pytest
import tiny
import torch
from conftest import KvHere
from gpucases import DEVICE
from kernelcases import ISAS, backend, one_thread, packed, same_bits

import kvcli
from kvcli.errors import ModelError
from kvcli.kernels import LowRank, QuantTensor
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.options import CacheOptions, LoadOptions, LoraOption
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.formats.adapter import EMBEDDING, open_all
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.host.memory import CUDA
from kvcli.runtime.model.archs import from_gguf
from kvcli.runtime.model.decoder import Attention
from kvcli.runtime.model.loading import load
from kvcli.runtime.model.weights import Weights
from kvcli.runtime.plan import adapterbytes
from kvcli.runtime.plan.footprint import weights_of_tensors
from kvcli.runtime.promptcache.fingerprint import identity

IDS = torch.randint(3, 370, (75,), generator=torch.manual_seed(6)).tolist()


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def engine(model: Path, *lora: LoraOption, name: str = "auto") -> Engine:
    cache = CacheOptions(type_k="f32", type_v="f32")
    return Engine.open(model, LoadOptions(str(model), 1, name, device="cpu", lora=lora), cache)


def logits(opened: Engine, *steps: int) -> torch.Tensor:
    """Of all rows of IDS, fed in steps of these sizes, then one by one."""
    seq, hidden, done = opened.new_sequence(), [], 0
    for n in (*steps, *(1,) * (len(IDS) - sum(steps))):
        hidden.append(opened.forward(seq, IDS[done : done + n]))
        done += n
    return opened.logits(torch.cat(hidden))


@pytest.mark.parametrize("name", ["native", pytest.param("reference", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("variant", ["llama-untied", "gemma3", "phi3", "qwen2"])
def test_an_adapter_is_as_if_it_were_merged(variant: str, name: str, tmp_path: Path):
    """Every matrix but an embedding that is the head, too: rows change places, and one matrix is q, k and v."""
    model = tiny.make(variant).path
    names = adapters.matrices(model)
    if "output.weight" not in names:
        names.remove(EMBEDDING)
    lora = LoraOption(str(adapters.write(tmp_path / "a.gguf", model, names)), 0.75)
    opened = engine(model, lora, name=name)
    found = logits(opened, 70)
    merged = logits(engine(adapters.merge(tmp_path / "m.gguf", model, names, 0.75), name=name), 70)
    assert (merged - logits(engine(model, name=name), 70)).abs().max() > 0.1
    assert (found - merged).abs().max() <= 1e-4
    assert same_bits(logits(opened, 1, 13, 40), found), "rows depend on themselves alone"


def test_adapters_add_up(tmp_path: Path):
    model = tiny.make("llama").path
    q, down = "blk.0.attn_q.weight", "blk.1.ffn_down.weight"
    one, both = (adapters.write(tmp_path / f"{i}.gguf", model, n) for i, n in enumerate(((q,), (q, down))))
    found = logits(engine(model, LoraOption(str(one), 0.5), LoraOption(str(both), 0.5)), 75)
    merged = adapters.merge(tmp_path / "m.gguf", adapters.merge(tmp_path / "n.gguf", model, (down,), 0.5), (q,))
    assert (found - logits(engine(merged), 75)).abs().max() <= 1e-4
    assert same_bits(logits(engine(model, LoraOption(str(one), 0.0)), 75), logits(engine(model), 75))


def test_an_embedding_that_is_the_head_is_changed_as_the_embedding_alone(tmp_path: Path):
    model = tiny.make("llama").path
    lora = LoraOption(str(adapters.write(tmp_path / "a.gguf", model, (EMBEDDING,))))
    found, plain = engine(model, lora), engine(model)
    merged = engine(adapters.merge(tmp_path / "m.gguf", model, (EMBEDDING,)))
    seqs = [x.new_sequence() for x in (found, merged)]
    hidden = [x.forward(seq, IDS) for x, seq in zip((found, merged), seqs, strict=True)]
    assert (hidden[0] - hidden[1]).abs().max() <= 1e-4
    assert same_bits(found.logits(hidden[0]), plain.logits(hidden[0]))


@pytest.mark.parametrize("name", (*ISAS, "reference"))
@pytest.mark.parametrize(("rank", "kind"), [(1, "F32"), (7, "F16"), (32, "Q8_0")])
def test_products_and_rows(rank: int, kind: str, name: str):
    """Of stacked matrices, of which some have changes, in several formats."""
    ops = backend(name)
    plain = [packed("Q4_0", 37, 96, i) for i in range(3)]
    changes = [LowRank(packed(kind, rank, 96, i), packed(kind, 37, rank, i), 0.5 + i) for i in range(3)]
    weights = plain[0], QuantTensor("Q4_0", plain[1].blocks, 96, tuple(changes[:2])), QuantTensor(
        "Q4_0", plain[2].blocks, 96, (changes[2],)
    )  # fmt: skip
    exact = [w.decode().double() for w in plain]
    for i, change in ((1, changes[0]), (1, changes[1]), (2, changes[2])):
        exact[i] += change.scale * change.b.decode().double() @ change.a.decode().double()
    x = torch.randn(17, 96, generator=torch.manual_seed(rank))
    found, expected = ops.matmul(x, weights), x.double() @ torch.cat(exact).T
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    for m in (1, 5, 9):
        assert same_bits(ops.matmul(x[:m], weights), found[:m])
    assert torch.allclose(ops.matmul(x, weights, add_to=torch.ones(17, 111)), 1 + found, 1e-5, 1e-4)
    part = weights[1].part(10, 20)
    assert same_bits(ops.matmul(x, (part,)), found[:, 47:57])
    ids = torch.tensor([36, 0, 36])
    rows = ops.rows(weights[1], ids, 3.0)
    assert (rows - 3 * exact[1][ids]).abs().max() <= 1e-5 * exact[1].abs().max() * 3


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"arch": "gemma3"}, "is for gemma3 models, and this one is llama"),
        ({"names": ["blk.9.attn_q.weight"]}, "changes 'blk.9.attn_q.weight', which this model does not have"),
        ({"names": ["output_norm.weight"]}, "changes 'output_norm.weight', which is no matrix"),
        ({"names": []}, "has no tensors"),
        ({"more": {"adapter.alora.invocation_tokens": "x"}}, "is an activated LoRA"),
        ({"alpha": float("nan")}, "adapter.lora.alpha must be a number, not nan"),
    ],
)
def test_what_is_refused(how: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = GGUFFile.open(tiny.make("llama").path)
    names = how.get("names", ["blk.0.attn_q.weight"])
    monkeypatch.setattr(adapters, "parts_of", lambda *_: (torch.zeros(5, 48).numpy(), torch.zeros(64, 5).numpy()))
    path = adapters.write(
        tmp_path / "a.gguf", model.path, names, how.get("alpha", 8.0), how.get("arch", ""), **how.get("more", {})
    )
    with pytest.raises(ModelError) as caught:
        open_all([LoraOption(str(path))], model)
    assert message in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("element", "scale"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, 1e40), (1.0, 1e30), (1.0, 9000.0)]
)
def test_numbers_that_are_none_are_the_fault_of_the_adapter(
    element: float, scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = tiny.make("llama").path
    monkeypatch.setattr(
        adapters, "parts_of", lambda *_: (torch.ones(5, 48).numpy(), torch.full((48, 5), element).numpy())
    )
    path = adapters.write(tmp_path / "a.gguf", model, ["blk.0.attn_q.weight"])
    with pytest.raises(ModelError, match=r"the LoRA adapter .*a\.gguf has elements in blk\.0\.attn_q\.weight"):
        kvcli.load(model, ctx=64, lora=f"{path}:{scale}")


def test_parts_of_other_shapes_and_other_files_are_refused(tmp_path: Path):
    model, other = (GGUFFile.open(tiny.make(name).path) for name in ("llama", "phi3"))
    path = adapters.write(tmp_path / "a.gguf", other.path, ["blk.0.attn_qkv.weight"], arch="llama")
    with pytest.raises(ModelError, match="does not have"):
        open_all([LoraOption(str(path))], model)
    path = adapters.write(tmp_path / "b.gguf", model.path, ["blk.0.attn_q.weight"])
    model.tensors["blk.0.attn_q.weight"] = model.tensors["blk.0.attn_k.weight"]
    with pytest.raises(ModelError, match=r"has parts of \[5, 48\] and \[48, 5\] for .*, which is \[16, 48\] in this"):
        open_all([LoraOption(str(path))], model)
    with pytest.raises(ModelError, match="is a model, not a LoRA adapter"):
        open_all([LoraOption(str(model.path))], model)
    with pytest.raises(ModelError, match="no such file"):
        open_all([LoraOption(str(tmp_path / "none.gguf"))], model)


@pytest.mark.parametrize("variant", ["llama-untied", "phi3", "gemma3"])
def test_bytes_are_those_that_the_plan_says(variant: str, tmp_path: Path):
    model = GGUFFile.open(tiny.make(variant).path)
    names = adapters.matrices(model.path)
    opened = open_all([LoraOption(str(adapters.write(tmp_path / "a.gguf", model.path, names)))], model)
    config = from_gguf(model.metadata, {name: t.shape for name, t in model.tensors.items()})
    decoder = load(config, Weights(model, opened), GpuBackend(torch.device(DEVICE)))
    w, placed = decoder.weights, []
    for each in w.sublayers:
        placed += [*each.out, *(each.inner.qkv if isinstance(each.inner, Attention) else each.inner.gate_up)]
    changes = [m.change for m in (*w.embedding, *w.head, *placed) if m.change]
    found = sum(c.a.nbytes + 4 * c.b.numel() for c in changes)
    assert adapterbytes.on_gpu(model.tensors, config, opened) == (found, 0)
    packed, copies = adapterbytes.on_cpu(model.tensors, config, opened)
    assert packed == sum(t.nbytes for t in opened[0].file.tensors.values()) and copies > 0
    plain, changed = (weights_of_tensors(model.tensors, config, CUDA, each) for each in ((), opened))
    assert changed.packed == plain.packed + found and changed.detail == f"{plain.detail}, with 1 adapter"


def test_estimate_counts_adapters(tmp_path: Path, kv_here: KvHere):
    model = tiny.make("llama").path
    path = adapters.write(tmp_path / "a.gguf", model, adapters.matrices(model))

    def weights(*more: str) -> int:
        code, out, err = kv_here("estimate", str(model), "--device", "cpu", "--json", *more)
        assert (code, err) == (0, "")
        return next(each["predicted_bytes"] for each in json.loads(out)["fixed"] if each["name"] == "weights")

    size = sum(tensor.nbytes for tensor in GGUFFile.open(path).tensors.values())
    shown = kv_here("estimate", str(model), "--device", "cpu", "--lora", f"{path}:0.5", "--json")[1]
    told = {"path": str(path), "scale": 0.5, "file_bytes": path.stat().st_size}
    assert json.loads(shown)["model_info"]["lora"] == [told]
    assert weights("--lora", f"{path}:0.5") == weights() + size
    found = kv_here("estimate", str(model), "--device", "cpu", "--print-args", "--lora", f"{path}:0.5")
    assert found[0] == 0 and f"--lora {path}:0.5" in found[1]
    code, _, err = kv_here("estimate", "--layers", "2", "--kv-heads", "2", "--head-dim", "64", "--lora", str(path))
    assert code == 2 and "--lora is counted by the header of a model" in err


def test_run_takes_adapters(tmp_path: Path, kv_here: KvHere):
    model = tiny.make("llama").path
    path = adapters.write(tmp_path / "a.gguf", model, adapters.matrices(model))
    run = (
        "run",
        "hello",
        "--no-stdin",
        "--raw",
        "-m",
        str(model),
        "-n",
        "12",
        "--temp",
        "0",
        "--ignore-eos",
        "--no-cache",
    )
    plain, changed, none, both = (
        kv_here(*run, *more)
        for more in ((), ("--lora", str(path)), ("--lora", f"{path}:0"), ("--lora", f"{path}:0.5") * 2)
    )
    assert plain[0] == changed[0] == 0 and plain[1] == none[1] != changed[1] == both[1]
    for value, code, message in (
        (f"{model}", 3, "is a model, not a LoRA adapter"), (f"{path}:nan", 2, "--lora must be a file"),
        (f"{path}:much", 2, "the scale of --lora must be a number, not 'much'"),
        ("none.gguf:much", 3, "check the path of the adapter"), (str(tmp_path), 3, "not an adapter"),
    ):  # fmt: skip
        found = kv_here(*run, "--lora", value)
        assert found[0] == code and message in found[2] and len(found[2].strip().splitlines()) <= 2


def test_python_takes_adapters(tmp_path: Path):
    model = tiny.make("llama").path
    path = adapters.write(tmp_path / "a.gguf", model, adapters.matrices(model))
    assert kvcli.estimate(str(model), device="cpu", lora=path).weight_bytes > kvcli.estimate(
        str(model), device="cpu"
    ).weight_bytes  # fmt: skip
    texts = []
    for lora in ((), path, [f"{path}:0.5", f"{path}:0.5"]):
        with kvcli.load(str(model), device="cpu", lora=lora) as opened:
            texts.append(opened.generate("hello", temperature=0, max_tokens=12, ignore_eos=True).text)
    assert texts[0] != texts[1] == texts[2]


def test_rows_of_an_adapter_are_not_those_of_the_model(tmp_path: Path):
    """Nor of the same one at another scale."""
    model = tiny.make("llama").path
    path = str(adapters.write(tmp_path / "a.gguf", model, ["blk.0.attn_q.weight"]))

    def weights(*lora: LoraOption) -> str:
        opened = engine(model, *lora)
        return identity(opened.loaded.file, opened.loaded.adapters, opened.config, opened.layout)["weights"]

    found = [weights(), weights(LoraOption(path)), weights(LoraOption(path, 0.5)), weights(*[LoraOption(path)] * 2)]
    assert len(set(found)) == 4 and weights(LoraOption(path, 0.5)) == found[2]
