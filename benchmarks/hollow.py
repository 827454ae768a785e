"""Engines without numbers, for what `kv` would launch on a GPU that need not be here.

Tensors have shapes and types and no memory (torch's device "meta"), so a model of any size is opened in a second or
two. Import this before kernels are interpreted: with TRITON_INTERPRET they cannot be compiled.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from kvcli.blockformats import FORMATS
from kvcli.kernels import DeltaLayer, ExpertTensor, MambaLayer, QuantTensor
from kvcli.kernels.gpu import compiled, latentpast, past, states
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.kernels.gpu.chip import Chip, assumed
from kvcli.kernels.gpu.launching import Variant, collecting
from kvcli.kernels.gpu.legs import BoundLegs, Legs
from kvcli.kernels.gpu.mamba import mamba
from kvcli.kernels.gpu.sample import uniforms
from kvcli.options import CacheOptions
from kvcli.runtime.config import LATENT, Latents, ModelConfig, RopeConfig
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.graph import compiling
from kvcli.runtime.engine.graph.batchgraph import BatchGraph
from kvcli.runtime.engine.terms import Terms
from kvcli.runtime.headers.shapes import config_from_recipe
from kvcli.runtime.host.device import Device
from kvcli.runtime.host.memory import CUDA
from kvcli.runtime.hub.recipes import find_recipe
from kvcli.runtime.model.loading import load
from kvcli.runtime.model.weights import Weights
from kvcli.runtime.plan.footprint import WeightBytes
from kvcli.runtime.plan.plan import Budget

META = torch.device("meta")
PROMPT = 4 * past.LEAST_ROWS  # long enough to be read over a past apart
OPTIONAL = ("ffn_gate.weight", "attn_v.weight")  # tensors that models here have where they could do without
HEADS = Latents(128, 128)  # of DeepSeek V2 Lite, before they are compressed: recipes do not say
BETTER = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")  # of which Q4_K_M has every other one as Q6_K


@dataclass(frozen=True)
class Model:
    """A known model (models/NAME.toml) with matrices of one type, or of Q4_K_M's two, two layers of each kind of it.

    `biases`: names of tensors that have one end with these. `softcap`: of scores, which recipes do not say. `head_dim`:
    0 = that of the recipe.
    """

    recipe: str
    quant: str = "Q4_K_M"
    biases: tuple[str, ...] = ()
    softcap: float = 0.0
    head_dim: int = 0

    @property
    def config(self) -> ModelConfig:
        recipe = find_recipe(self.recipe)
        assert recipe is not None and recipe.shape is not None
        found = config_from_recipe(recipe.name, recipe.shape)
        dims = {"dim_k": self.head_dim, "dim_v": self.head_dim} if self.head_dim else {}
        kinds = [replace(x, **dims) for x in dict.fromkeys(found.layers)]
        layers = tuple(replace(x, rope=RopeConfig(1e4, x.dim_k)) for x in kinds for _ in range(2))
        latents = HEADS if any(x.kind == LATENT for x in layers) else None
        return replace(found, layers=layers, attn_softcap=self.softcap, latents=latents)

    def type_of(self, name: str) -> str:
        """How the tensor of that name is stored."""
        if name.endswith("ffn_gate_inp.weight"):
            return "F32"
        if self.quant != "Q4_K_M":
            return self.quant
        odd = name.startswith("blk.") and int(name.split(".")[1]) % 2
        return "Q6_K" if name == "output.weight" or (odd and name.endswith(BETTER)) else "Q4_K"


class HollowWeights(Weights):
    """Whatever tensors are asked for, without memory."""

    def __init__(self, model: Model) -> None:
        super().__init__(SimpleNamespace(tensors={}))  # type: ignore[arg-type]
        self.model = model

    def __contains__(self, name: str) -> bool:
        tied = self.model.recipe in ("llama-3.2-1b", "smollm2") or self.model.recipe.startswith("gemma")
        return name.endswith((*OPTIONAL, *self.model.biases)) or (name == "output.weight" and not tied)

    def _blocks(self, name: str, *shape: int) -> tuple[str, torch.Tensor]:
        form = FORMATS[self.model.type_of(name)]
        width = shape[-1] // form.elements * form.bytes
        return self.model.type_of(name), torch.empty(*shape[:-1], width, dtype=torch.uint8, device=META)

    def matrix(self, name: str, rows: int, cols: int, padded: bool = False) -> QuantTensor:
        return QuantTensor(*self._blocks(name, rows, cols), cols)

    def experts(self, name: str, experts: int, rows: int, cols: int) -> ExpertTensor:
        return ExpertTensor(*self._blocks(name, experts, rows, cols), cols)

    def row(self, name: str, cols: int) -> QuantTensor:
        return self.matrix(name, 1, cols)

    def vector(self, name: str, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=META)


@torch.inference_mode()
def launched_by_states(chip: Chip) -> set[Variant]:
    """Every kernel that layers with a state launch on that card, for LFM2 1.2B, Qwen3.5 27B and Granite 4 H Small."""
    d, kernel = 2048, 3
    vectors = (torch.empty(*shape, device=META) for shape in ((10240, 4), (48,), (48,), (128,)))
    layer = DeltaLayer(16, 48, 128, 128, *vectors, 1e-6, True)
    weight = torch.empty(d, kernel, device=META)
    of_heads = (torch.empty(n, device=META) for n in (128, 128, 128, 8192))
    conv = torch.empty(8448, 4, device=META), torch.empty(8448, device=META)
    space = MambaLayer(128, 64, 1, 128, *conv, *of_heads, 1e-5)
    with assumed(chip), collecting() as found:
        for rows in (1, PROMPT):
            legs = [BoundLegs(Legs.empty(rows, META))]
            states.short_conv(torch.empty(rows, 3 * d, device=META), weight, None, legs)
            states.delta_net(torch.empty(rows, 16480, device=META), layer, legs)
            mamba(torch.empty(rows, 16768, device=META), space, legs)
    return found


@torch.inference_mode()
def launched(model: Model, cache: CacheOptions, chip: Chip) -> set[Variant]:
    """Every kernel that an engine of that model would compile and launch on that card, with what it is compiled for.

    Raises RuntimeError for a model whose tokens take the slow path, but for one over latents, which has no other.
    """
    config, found = model.config, set[Variant]()

    def collect(variants: set[Variant], threads: int) -> None:
        found.update(variants)

    with (
        assumed(chip),
        mock.patch.object(compiling, "compile_all", collect),
        mock.patch.object(compiled, "mark_of", lambda device, *facts: Path(os.devnull, "none")),
        mock.patch.object(past, "library_takes", lambda *heads: True),
        mock.patch.object(latentpast, "library_takes", lambda *heads: True),
    ):
        decoder = load(config, HollowWeights(model), GpuBackend(META))
        budget = Budget(1 << 42, "", 0, 0, CUDA)
        terms = Terms.settle(config, WeightBytes(0, 0, 0, "assumed", ""), cache, budget, 1)
        loaded = SimpleNamespace(
            config=config, device=Device(CUDA), tokenizer=None, decoder=decoder, terms=terms, exact=False, load_s=0.0,
            grain=1, predictor=None,
            sampling_defaults={}, check_weights=lambda: None, facts=(),
        )  # fmt: skip
        engine = Engine(loaded)  # type: ignore[arg-type]
        if engine.slow_path and "latents" not in engine.slow_path:
            raise RuntimeError(f"{model.recipe}: {engine.slow_path}")
        assert engine.kernels is not None
        engine.kernels.need_all()
        engine.steps = None  # long steps are not captured
        with collecting() as more:
            seq = engine.new_sequence()
            if seq.selector is not None:
                seq.selector.expect(2 * PROMPT)
            for rows in (PROMPT, PROMPT):
                engine.forward(seq, [0] * rows)
            if engine.one_by_one == "":
                batch = BatchGraph(decoder, engine.layout, engine.ctx_size, 16)
                batch.dry_run()
                uniforms(batch.tokens, batch.tokens, batch.position, torch.empty(16, device=META))
        found.update(more)
    return found
