"""What a plan says of mixtures of experts: the weights that a token reads, and what products need beside them."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from expertcases import layer, random, stack
from kernelcases import backend, packed
from torch.utils._python_dispatch import TorchDispatchMode

from kvcli.kernels import ExpertMatrices, QuantTensor
from kvcli.routing import Routing
from kvcli.runtime.config import FULL, LATENT, Block, Experts, Latents, LayerConfig
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.formats.ggufheader import TensorInfo
from kvcli.runtime.headers.shapes import planning_config
from kvcli.runtime.host.memory import CPU
from kvcli.runtime.model import latents
from kvcli.runtime.model.archs import from_gguf
from kvcli.runtime.plan import footprint


class Alive(TorchDispatchMode):
    """Bytes of tensors that are made inside and still there, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in self.seen:
                self._add(each.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        at, nbytes = storage.data_ptr(), storage.nbytes()
        self.seen.add(at)
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._remove, at, nbytes)

    def _remove(self, at: int, nbytes: int) -> None:
        self.seen.discard(at)
        self.now -= nbytes


@pytest.mark.parametrize(("d", "f"), [(64, 128), (128, 32)])
def test_a_mixture_takes_what_is_planned(d: int, f: int):
    """But for copies of rows, which compiled products make."""
    t, made, alive, ops = 40, layer(False, False, d=d, f=f), Alive(), backend("")
    x = random(t, d) * 0.1
    ops.experts(x, made)  # the first time it looks at weights
    with alive:
        ops.experts(x, made)
    config = planning_config(
        "novel", "", [LayerConfig(FULL, 1, 8, 8)], Block(), vocab_size=64, d_model=d, d_ff=0, n_heads=1,
        context_length=64, experts=Experts(made.routing, f),
    )  # fmt: skip
    pairs = t * made.routing.used
    fixed = 80 * (pairs + 3 * made.routing.experts) * max(d, f) // 32  # of these rows in fixed point, which C keeps
    planned = footprint.activation_bytes(config, t) - fixed
    beside, copies = 8 * t * d, 4 * t * made.routing.used * min(d, f)  # residual and normed rows
    assert planned - copies - 8 * t * max(d, f) <= alive.most + beside <= planned
    dense = replace(config, experts=None)
    assert footprint.gpu_workspace_bytes(config, t) > footprint.gpu_workspace_bytes(dense, t)


def test_experts_that_lie_apart_are_counted_as_those_in_one_tensor():
    found = []
    for name in ("mixtral-apart", "mixtral"):
        file = GGUFFile.open(tiny.make(name).path)
        config = from_gguf(file.metadata, {name: x.shape for name, x in file.tensors.items()})
        found.append(
            footprint.weights_of_tensors({n: x for n, x in file.tensors.items() if n != "output.weight"}, config, CPU)
        )
    assert found[0].packed == found[1].packed and found[0].read == found[1].read


def test_interleaved_experts_are_counted_as_the_engine_keeps_them():
    """In whole groups of rows, of gate and up each where they are one tensor, and of heads likewise."""
    config = planning_config(
        "novel", "", [LayerConfig(FULL, 1, 8, 8)], Block(), vocab_size=64, d_model=32, d_ff=0, n_heads=1,
        context_length=64, experts=Experts(Routing(6, 2), 40),
    )  # fmt: skip
    ops = backend("")
    if ops.exact:
        pytest.skip("nothing is interleaved on this processor")
    gate_up, down, keys = stack("Q8_0", 6, 80, 32), stack("Q5_1", 6, 40, 64), stack("Q8_0", 6, 40, 32)
    ops.place_experts(ExpertMatrices((gate_up.part(0, 40), gate_up.part(40, 80))))
    ops.place_experts(ExpertMatrices((down,)))
    ops.place_heads(ExpertMatrices((keys,)))
    there = {"ffn_gate_up_exps": gate_up, "ffn_down_exps": down, "attn_k_b": keys}
    tensors = {
        f"blk.0.{name}.weight": TensorInfo(name, (6, x.rows, x.cols), x.type, 0, x.nbytes) for name, x in there.items()
    }
    counted = footprint.weights_of_tensors(tensors, config, CPU)
    assert counted.packed == ops.interleaved_bytes > sum(x.nbytes for x in there.values())
    mapped = footprint.weights_of_tensors(tensors, config, CPU, interleaved=False)
    assert mapped.packed == sum(x.nbytes for x in there.values())


def test_keys_and_values_of_heads_in_one_tensor_are_counted_as_the_engine_keeps_them():
    """Keys are transposed, in float16."""
    heads, plain, rank, dim_v = 3, 24, 32, 40
    config = planning_config(
        "novel", "", [LayerConfig(LATENT, 1, 8, rank)], Block(), vocab_size=64, d_model=32, d_ff=32, n_heads=heads,
        context_length=64, latents=Latents(plain, dim_v),
    )  # fmt: skip
    ops, both = backend(""), packed("Q8_0", heads * (plain + dim_v), rank)
    if ops.exact:
        pytest.skip("nothing is interleaved on this processor")
    name = "blk.0.attn_kv_b.weight"

    class Both(dict):
        def matrix(self, name: str, rows: int, cols: int) -> QuantTensor:
            return self[name]

    keys, values = latents._of_heads(Both({name: both}), "blk.0.attn_{}_b", heads, (plain, rank, dim_v))
    kept = [ops.place_heads(ExpertMatrices((x,))).parts[0] for x in (keys, values)]
    tensor = TensorInfo(name, (both.rows, rank), both.type, 0, both.nbytes)
    counted = footprint.weights_of_tensors({name: tensor}, config, CPU)
    assert counted.packed == sum(x.nbytes for x in kept) and counted.copies == 0


def test_a_token_reads_the_experts_that_it_has_and_no_layer_that_is_not_run():
    file = GGUFFile.open(tiny.make("glm4moe-ahead").path)
    config = from_gguf(file.metadata, {name: x.shape for name, x in file.tensors.items()})
    counted = footprint.weights_of_tensors(file.tensors, config, CPU)
    run = {name: x.nbytes for name, x in file.tensors.items() if not name.startswith("blk.2.")}
    experts = sum(nbytes for name, nbytes in run.items() if "_exps" in name)
    assert counted.packed == sum(run.values()) < sum(x.nbytes for x in file.tensors.values())
    assert counted.read == counted.packed - run["token_embd.weight"] - experts + experts * 3 // 8
