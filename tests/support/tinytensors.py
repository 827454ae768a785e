"""The tensors of a tiny model of transformers by the names and values that a converter would write into a GGUF file."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import gguf
import tinyvocab
import torch
from tinydense import LONG
from tinyreference import reference_of
from tinyshapes import Variant
from tinyvariants import family_of


def sizes_of(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    config.allow_global_per_layer_attribute_access = True  # of those that differ, too
    return config


def rope_of(config: Any) -> dict[str, Any]:
    rope: dict[str, Any] = getattr(config, "rope_parameters", {})
    return rope.get("full_attention", rope)


def tensors_of(variant: Variant, model: Any) -> list[tuple[str, torch.Tensor]]:
    """Names and values as in GGUF files: llama's q and k rows in interleaved order, gemma's norms with their 1."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == variant.arch)
    sizes = sizes_of(model)
    names = gguf.get_tensor_name_map(arch, sizes.num_hidden_layers)
    found: list[tuple[str, torch.Tensor]] = []
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and getattr(sizes, "tie_word_embeddings", False) and variant.arch != "falcon-h1":
            continue
        for part, heads in (("q", sizes.num_attention_heads), ("k", sizes.num_key_value_heads)):
            if family_of(variant).halves and f".{part}_proj." in name:
                weight = _interleaved(weight, heads)
        if family_of(variant).one_more and name.endswith("norm.weight") and "linear_attn" not in name:
            weight = weight + 1
        if "linear_attn" in name:
            tiled = variant.arch != "qwen3next"
            name, weight = _of_delta(name, weight, sizes.linear_value_head_dim, tiled)
        if variant.arch == "falcon-h1":
            weight = _multiplied(name, weight, sizes)
        if variant.arch.startswith("nemotron_h"):
            name = name.replace("model.", "backbone.", 1)
        if ".mamba." in name or (".mixer." in name and "_proj" not in name):
            name, weight = _of_mamba(name, weight)
        if found_stream := re.fullmatch(r"(model\.altup\w+)\.0\.weight", name):
            streams = [x for key, x in model.state_dict().items() if key.startswith(f"{found_stream[1]}.")]
            name, weight = f"{found_stream[1]}.weight", torch.stack(streams)
        elif name.startswith("model.altup"):
            continue
        if name.endswith("expert_bias"):
            name += ".bias"
        if name.startswith("backbone."):
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if name.endswith("conv.conv.weight"):
            weight = weight.squeeze(1)
        if name.endswith(("layer_scalar", "correct_output_scale")) or re.search(
            r"\d\.experts\.(gate_up|down)_proj$", name
        ):
            name += ".weight"
        if (
            experts := _of_clamped(name, weight)
            if variant.arch == "gpt-oss"
            else _of_experts(variant.arch, name, weight, not getattr(sizes, "num_local_experts", 1))
        ):
            found += experts
            continue
        if name.endswith("kv_b_proj.weight") and "attention.key_length_mla" in variant.keys:
            found += _of_heads(name, weight, sizes)
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, f"GGUF has no name for {name}"
        found.append((known, weight))
    if variant.keys.get("nextn_predict_layers"):
        found += _of_next(variant, sizes)
    scaling = variant.settings.get("rope_scaling", {})
    if scaling.get("rope_type") == "llama3":
        frequencies, dim = model.model.rotary_emb.inv_freq.double(), sizes.head_dim
        plain = rope_of(sizes)["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        assert (plain / frequencies).max() > 7.9, "no frequency is scaled"
        found.append(("rope_freqs.weight", (plain / frequencies).float()))
    if variant.arch == "gemma4":
        found.append(("rope_freqs.weight", torch.tensor([1.0] * 3 + [1e30] * 9)))
    if scaling is LONG:
        found += [(f"rope_factors_{x}.weight", torch.tensor(LONG[f"{x}_factor"])) for x in ("long", "short")]
    return found


def next_layer(variant: Variant) -> tuple[Any, dict[str, torch.Tensor]]:
    """What the layer of a variant that predicts further tokens is made of: a model of transformers with one layer more,
    whose last one it is, with the norm behind it; and, by their names in files, what stands before it."""
    n = variant.settings["num_hidden_layers"]
    n_tokens = len(tinyvocab.byte_level()[0]["tokenizer.ggml.tokens"])
    settings = variant.settings | {"num_hidden_layers": n + 1}
    if kinds := settings.get("layer_types"):
        settings["layer_types"] = [*kinds, "full_attention"]
    model = reference_of(replace(variant, settings=settings), n_tokens)
    d, generator = sizes_of(model).hidden_size, torch.Generator().manual_seed(9)
    norms = {x: 1 + 0.2 * torch.randn(d, generator=generator) for x in ("enorm", "hnorm")}
    return model, norms | {"eh_proj": 1.5 * (2 * d) ** -0.5 * torch.randn(d, 2 * d, generator=generator)}


def _of_next(variant: Variant, sizes: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of that layer."""
    model, before = next_layer(variant)
    prefix = f"blk.{sizes.num_hidden_layers}."
    keys = {key: value for key, value in variant.keys.items() if key != "nextn_predict_layers"}
    block = [each for each in tensors_of(replace(variant, keys=keys), model) if each[0].startswith(prefix)]
    norm = ("shared_head_norm", model.model.norm.weight.data + family_of(variant).one_more)
    return [*block, *((f"{prefix}nextn.{part}.weight", x) for part, x in (*before.items(), norm))]


def _of_heads(name: str, weight: torch.Tensor, sizes: Any) -> list[tuple[str, torch.Tensor]]:
    """The matrices of each head, as files have had them since 2025."""
    layer = name.split(".")[2]
    keys, values = weight.unflatten(0, (sizes.num_attention_heads, -1)).split(
        [sizes.qk_nope_head_dim, sizes.v_head_dim], 1
    )
    return [(f"blk.{layer}.attn_k_b.weight", keys.mT.contiguous()), (f"blk.{layer}.attn_v_b.weight", values)]


def _of_delta(name: str, weight: torch.Tensor, dim: int, tiled: bool) -> tuple[str, torch.Tensor]:
    """Of a gated delta network: value heads 0 and 2, which read the first key head and the second one, stand before 1
    and 3."""
    part, order = name.rpartition("linear_attn.")[2], torch.tensor([0, 2, 1, 3])
    wide = torch.cat([h * dim + torch.arange(dim) for h in order])
    if not tiled:  # neighbours stay neighbours
        pass
    elif part in ("in_proj_qkv.weight", "conv1d.weight"):
        weight = torch.cat([weight[:32], weight[32:][wide]])
    elif part == "in_proj_z.weight":
        weight = weight[wide]
    elif part == "out_proj.weight":
        weight = weight[:, wide]
    elif part != "norm.weight":
        weight = weight[order]
    if part == "conv1d.weight":
        weight = weight.squeeze(1)
    if part == "A_log":
        weight = -weight.exp()
    return name.replace("dt_bias", "dt_proj.bias"), weight


def of_key_heads(name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Of queries, keys, values and gates of two key heads, each kind by itself; any other tensor as it is."""
    if not name.endswith(".ssm_in.weight") or len(weight) != 128:
        return [(name, weight)]
    *channels, gates = (x.flatten(0, 1) for x in weight.unflatten(0, (2, -1)).split([8, 8, 24, 24], 1))
    return [(name.replace("ssm_in", "attn_qkv"), torch.cat(channels)), (name.replace("ssm_in", "attn_gate"), gates)]


def _of_mamba(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Of Mamba-2."""
    part = re.split(r"mamba\.|mixer\.", name)[-1]
    if part in ("A_log", "D"):
        weight = (-weight.exp() if part == "A_log" else weight)[:, None]
    elif part == "norm.weight":
        weight = weight.view(2, -1)
    elif part == "conv1d.weight":
        weight = weight.squeeze(1)
    return name.replace("mixer.dt_bias", "mixer.dt.bias").replace("dt_bias", "dt_proj.bias"), weight


def _multiplied(name: str, weight: torch.Tensor, sizes: Any) -> torch.Tensor:
    """Of Falcon-H1, whose files have its multipliers in the matrices."""
    gates, down = sizes.mlp_multipliers
    factors = {
        "embed_tokens": sizes.embedding_multiplier, "lm_head": sizes.lm_head_multiplier, "gate_proj": gates,
        "q_proj": sizes.attention_in_multiplier, "v_proj": sizes.attention_in_multiplier, "down_proj": down,
        "k_proj": sizes.attention_in_multiplier * sizes.key_multiplier, "o_proj": sizes.attention_out_multiplier,
        "out_proj": sizes.ssm_out_multiplier, "in_proj": sizes.ssm_in_multiplier,
    }  # fmt: skip
    part = name.split(".")[-2]
    weight = weight * factors.get(part, 1.0)
    if part == "in_proj":  # gates, what heads take in, keys, queries, time steps
        inner, states = sizes.mamba_d_ssm, sizes.mamba_n_groups * sizes.mamba_d_state
        parts = weight.split([inner, inner, states, states, sizes.mamba_n_heads])
        weight = torch.cat([each * x for each, x in zip(parts, sizes.ssm_multipliers, strict=True)])
    return weight


_ROUTER = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}  # of Gemma 4


def _of_experts(arch: str, name: str, weight: torch.Tensor, alone: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Names and values of what files have of a tensor of experts; nothing of any other."""
    if (found := re.fullmatch(r"model\.layers\.(\d+)\.router\.(.+)", name)) and found[2] in _ROUTER:
        return [(f"blk.{found[1]}.{_ROUTER[found[2]]}", weight)]
    if found := re.fullmatch(r"backbone\.layers\.(\d+)\.mixer\.experts\.(up|down)_proj", name):  # without gates
        return [(f"blk.{found[1]}.ffn_{found[2]}_exps.weight", weight)]
    if not (
        found := re.fullmatch(r"model\.layers\.(\d+)\.(?:mlp|feed_forward|block_sparse_moe|shared_mlp)\.(.+)", name)
    ):
        return []
    block, part = f"blk.{found[1]}.", found[2]
    kind = "_exps" if part.startswith("experts") else "" if alone else "_shexp"
    if re.fullmatch(r"(gate|router|gate\.wg)\.weight", part):
        return [(block + "ffn_gate_inp.weight", weight)]
    if part.endswith("e_score_correction_bias"):
        return [(block + "exp_probs_b.bias", weight)]
    if part == "shared_expert_gate.weight":
        return [(block + "ffn_gate_inp_shexp.weight", weight[0])]
    if arch == "llama4" and part.startswith("experts."):
        weight = weight.mT
    if part in ("experts.gate_up_proj", "input_linear.weight"):
        halves = zip(("gate", "up"), weight.chunk(2, dim=-2), strict=True)
        return [(f"{block}ffn_{each}{kind}.weight", half) for each, half in halves]
    if part in ("experts.down_proj", "output_linear.weight"):
        return [(f"{block}ffn_down{kind}.weight", weight)]
    if shared := re.fullmatch(r"(?:shared_experts?|shared_mlp)\.(gate|up|down)_proj\.weight", part):
        return [(f"{block}ffn_{shared[1]}_shexp.weight", weight)]
    return []


def _of_clamped(name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The same of gpt-oss, whose matrices transformers has as columns, gates and what they gate in turn."""
    if found := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.sinks", name):
        return [(f"blk.{found[1]}.attn_sinks.weight", weight)]
    if not (found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?", name)):
        return []
    block, end = f"blk.{found[1]}.ffn_{{}}_exps.".format, "bias" if found[3] else "weight"
    rows = weight if found[3] else weight.mT
    if found[2] == "down":
        return [(block("down") + end, rows)]
    pick = (lambda x, i: x[:, i::2]) if found[3] else (lambda x, i: x[:, i::2, :])
    return [(block(part) + end, pick(rows, i)) for i, part in enumerate(("gate", "up"))]


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
