"""The experts of a layer from the tensors of a GGUF file."""

from __future__ import annotations

import torch

from kvcli.kernels import Backend, ExpertLayer, ExpertMatrices, SharedExpert
from kvcli.runtime.config import Experts, ModelConfig
from kvcli.runtime.model.weights import Weights


def load_experts(config: ModelConfig, layer: int, weights: Weights, ops: Backend) -> ExpertLayer:
    """The mixture of experts of model layer `layer`, taken to where the backend computes.

    Raises ModelError for missing or misshapen tensors.
    """
    c = config.experts
    assert c is not None
    name, count, d, gated = f"blk.{layer}.{{}}".format, c.routing.experts, config.d_model, config.block.gated

    def vector(tensor: str) -> torch.Tensor | None:
        found = weights.vector(tensor, count) if tensor in weights else None
        return None if found is None else found.to(ops.device)

    router_norm = weights.vector(name("ffn_gate_inp.scale"), d).to(ops.device) * d**-0.5 if c.beside else None

    return ExpertLayer(
        c.routing,
        config.block.activation,
        ops.place((weights.matrix(name("ffn_gate_inp.weight"), count, d),)),
        ops.place_experts(_first(c, name("ffn"), d, weights, gated), paired=gated),
        ops.place_experts(_matrices(weights, name("ffn_down_exps"), count, d, c.d_ff)),
        vector(name("ffn_gate_inp.bias")),
        vector(name("exp_probs_b.bias")),
        _shared(c, name("ffn"), d, weights, ops, gated) if c.shared_ff else None,
        router_norm,
        config.norm_eps,
        vector(name("ffn_down_exps.scale")),
        c.weighs_input,
        gated,
    )


def _first(c: Experts, name: str, d: int, weights: Weights, gated: bool) -> ExpertMatrices:
    """Gates over what they gate, which files have as two tensors or as one; or matrices without gates."""
    count, f = c.routing.experts, c.d_ff
    if not gated:
        return _matrices(weights, f"{name}_up_exps", count, f, d)
    if f"{name}_gate_up_exps.weight" in weights:
        both = _matrices(weights, f"{name}_gate_up_exps", count, 2 * f, d)
        whole = both.parts[0]
        return ExpertMatrices((whole.part(0, f), whole.part(f, 2 * f)), both.bias)
    pair = [_matrices(weights, f"{name}_{x}_exps", count, f, d) for x in ("gate", "up")]
    biases = [x.bias for x in pair if x.bias is not None]
    return ExpertMatrices(pair[0].parts + pair[1].parts, torch.cat(biases, 1) if len(biases) == 2 else None)


def _matrices(weights: Weights, name: str, count: int, rows: int, cols: int) -> ExpertMatrices:
    bias = weights.vector(f"{name}.bias", count, rows) if f"{name}.bias" in weights else None
    return ExpertMatrices((weights.experts(f"{name}.weight", count, rows, cols),), bias)


def _shared(c: Experts, name: str, d: int, weights: Weights, ops: Backend, gated: bool) -> SharedExpert:
    parts = ("gate", "up") if gated else ("up",)
    gate_up = tuple(weights.matrix(f"{name}_{x}_shexp.weight", c.shared_ff, d) for x in parts)
    down = weights.matrix(f"{name}_down_shexp.weight", d, c.shared_ff)
    gate = f"{name}_gate_inp_shexp.weight"
    return SharedExpert(
        ops.place(gate_up, paired=gated), ops.place((down,)),
        ops.place((weights.row(gate, d),)) if gate in weights else None,
    )  # fmt: skip
