"""Tiny random models of every architecture: one of transformers, and the GGUF file that a converter would write."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tinyvocab
import torch

from kvcli.runtime.config import Block
from kvcli.runtime.headers import families

CONTEXT, WINDOW = 512, 20


@dataclass(frozen=True)
class Variant:
    """`settings` go to the transformers config, `keys` into the file (after the architecture's name). The embedding has
    `padding` rows more than there are tokens."""

    arch: str
    settings: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    padding: int = 0
    kind: str = ""  # in transformers, where its name is another than the architecture's

    @property
    def block(self) -> Block:
        return families.of_gguf(self.arch).block


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "factor": 4.0}


def _slides(*layers: bool) -> list[str]:
    return ["sliding_attention" if slides else "full_attention" for slides in layers]


VARIANTS = {
    "llama": Variant("llama", {"tie_word_embeddings": True}),
    "llama-untied": Variant("llama", {"tie_word_embeddings": False}),
    "llama-padded": Variant("llama", {"tie_word_embeddings": True}, padding=13),
    "llama-untied-padded": Variant("llama", {"tie_word_embeddings": False}, padding=13),
    "llama-llama3-rope": Variant("llama", {"rope_scaling": _LLAMA3}),
    "llama-linear-rope": Variant(
        "llama", {"rope_scaling": _LINEAR}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    ),
    # Mistral 7B v0.1 and its like: every layer has the same window.
    "llama-sliding": Variant(
        "llama",
        {"sliding_window": WINDOW, "tie_word_embeddings": False},
        {"attention.sliding_window": WINDOW},
        kind="mistral",
    ),
    "gemma3": Variant(
        "gemma3",
        {"layer_types": _slides(True, False, True)},
        {"attention.sliding_window_pattern": [True, False, True]},
    ),
    # As files in circulation are: neither the pattern nor the local RoPE base is named.
    "gemma3-bare": Variant(
        "gemma3", {"num_hidden_layers": 6, "layer_types": _slides(True, True, True, True, True, False)}
    ),
    "qwen2": Variant("qwen2", {"tie_word_embeddings": True}),
    "qwen3": Variant("qwen3", {"tie_word_embeddings": True}),
    "qwen3-untied": Variant("qwen3", {"tie_word_embeddings": False}),
}


# Others than these are as gemma3.
_SIZES = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
    "gemma3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}


@dataclass(frozen=True)
class Tiny:
    path: Path
    reference: torch.nn.Module  # the same weights in transformers, float32
    n_tokens: int  # of the vocabulary

    def logits(self, ids: list[int]) -> torch.Tensor:
        """float32 [n, n_tokens], as transformers has them."""
        with torch.inference_mode():
            return self.reference(torch.tensor([ids])).logits[0][:, : self.n_tokens]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-models-")  # removed when the process ends


@functools.cache
def make(name: str) -> Tiny:
    """The variant of that name (a key of VARIANTS); its file is written once."""
    variant = VARIANTS[name]
    sizes = _SIZES.get(variant.arch, _SIZES["gemma3"])
    tokenizer, _ = tinyvocab.byte_level()
    n_tokens = len(tokenizer["tokenizer.ggml.tokens"])
    reference = _reference(variant, sizes, n_tokens + variant.padding)
    path = Path(_folder().name) / f"{name}.gguf"
    write(path, variant, reference, tokenizer)
    return Tiny(path, reference, n_tokens)


@functools.cache
def make_even(arch: str, quantized: bool, tokens: int = 64) -> Path:
    """A file of 2 layers, sizes that are multiples of 32, 64 rows of the embedding; matrices but V as Q8_0, or F32.

    Layers of gemma3 slide and do not slide. The vocabulary has `tokens` names and no more: there is no tokenizer.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 2, "head_dim": 64 if arch == "gemma3" else 32}
    variant = Variant(arch, {"tie_word_embeddings": arch == "gemma3"})
    if arch == "gemma3":
        variant = Variant(
            arch, {"layer_types": _slides(True, False)}, {"attention.sliding_window_pattern": [True, False]}
        )
    path = Path(_folder().name) / f"{arch}-even-{quantized}-{tokens}.gguf"
    names = {"tokenizer.ggml.tokens": [f"<{i}>" for i in range(tokens)]}
    write(path, variant, _reference(variant, sizes, 64), names, quantized)
    return path


def _reference(variant: Variant, sizes: dict[str, int], vocab_size: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "num_hidden_layers": 3,
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT,
    }
    settings |= {"hidden_size": 48, "intermediate_size": 80}
    settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | sizes
    if variant.arch == "gemma3":
        settings |= {"sliding_window": WINDOW, "query_pre_attn_scalar": sizes["head_dim"]}
    kind = variant.kind or {"gemma3": "gemma3_text"}.get(variant.arch, variant.arch)
    config = AutoConfig.for_model(kind, **settings | variant.settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    for weight in model.parameters():  # larger than transformers' own, or every layer would do next to nothing
        scale = 0.2 if weight.dim() == 1 else 1.5 * weight.shape[1] ** -0.5
        mean = 1.0 if weight.dim() == 1 and variant.arch != "gemma3" else 0.0
        weight.data = mean + scale * torch.randn(weight.shape, generator=generator)
    if variant.padding:
        model.get_output_embeddings().weight.data[-variant.padding :] *= 50  # they would win every draw
    return model


def write(path: Path, variant: Variant, model: Any, tokenizer: dict[str, Any], quantized: bool = False) -> None:
    writer = gguf.GGUFWriter(path, variant.arch)
    sizes, heads = model.config, (model.config.num_attention_heads, model.config.num_key_value_heads)
    base = 1e6 if variant.arch == "gemma3" else 1e4
    keys: dict[str, Any] = {
        "context_length": CONTEXT,
        "embedding_length": sizes.hidden_size,
        "feed_forward_length": sizes.intermediate_size,
        "block_count": sizes.num_hidden_layers,
        "attention.head_count": heads[0],
        "attention.head_count_kv": heads[1],
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        "attention.layer_norm_rms_epsilon": sizes.rms_norm_eps,
        "rope.freq_base": base,
    }
    if variant.arch == "gemma3":
        keys["attention.sliding_window"] = WINDOW
    for key, value in {f"{variant.arch}.{key}": v for key, v in (keys | variant.keys).items()}.items():
        _add(writer, key, value)
    for key, value in tokenizer.items():
        _add(writer, key, value)
    for name, weight in _tensors(variant, model, heads):
        values = np.ascontiguousarray(weight.numpy(), dtype=np.float32)
        if quantized and weight.dim() == 2 and "attn_v" not in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Any] = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


def _tensors(variant: Variant, model: Any, heads: tuple[int, int]) -> list[tuple[str, torch.Tensor]]:
    """Names and values as in GGUF files: llama's q and k rows in interleaved order, gemma's norms with their 1."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == variant.arch)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    found: list[tuple[str, torch.Tensor]] = []
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if variant.block.rope_pairs and ".q_proj." in name:
            weight = _interleaved(weight, heads[0])
        if variant.block.rope_pairs and ".k_proj." in name:
            weight = _interleaved(weight, heads[1])
        if variant.arch == "gemma3" and "norm" in name:
            weight = weight + 1
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, f"GGUF has no name for {name}"
        found.append((known, weight))
    if variant.settings.get("rope_scaling") == _LLAMA3:
        frequencies, dim = model.model.rotary_emb.inv_freq.double(), model.config.head_dim
        plain = 1e4 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        assert (plain / frequencies).max() > 7.9, "no frequency is scaled"
        found.append(("rope_freqs.weight", (plain / frequencies).float()))
    return found


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
