"""Tiny random models of every architecture: one of transformers, and the GGUF file that a converter would write."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tinyvocab
import torch
from safetensors.torch import save_file
from tinyreference import Headed, reference_of
from tinyshapes import CONTEXT, WINDOW, Variant, tied
from tinystates import EVEN_STATES
from tinytensors import next_layer, of_key_heads, rope_of, sizes_of, tensors_of
from tinyvariants import BESIDE, VARIANTS, family_of

__all__ = [
    "BESIDE", "CONTEXT", "FILES_ALONE", "VARIANTS", "WINDOW", "Tiny", "Variant", "build", "folder", "make", "make_even",
    "next_layer", "path_of", "write",
]  # fmt: skip

_EACH_LAYER = (
    "attention.head_count_kv",
    "attention.recurrent_layers",
    "layer_types",
    "no_rope_layers",
    "attention.sliding_window_pattern",
)
BORROWED = ("internlm2", "exaone")  # transformers has them as remote code alone; they are llamas by other names
FILES_ALONE = (
    *BORROWED,
    "deepseek2-old",
    "glm4moe-ahead",
    "mixtral-apart",
    "qwen3next-apart",
)  # of which transformers writes no folder that is like the file
_ALWAYS_TIED = ("gemma", "gemma2", "gemma3", "cohere2", "command-r")


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
    """The variant of that name (a key of VARIANTS, or of BESIDE); its file is written once."""
    return build(BESIDE.get(name) or VARIANTS[name], path_of(name))


def path_of(name: str) -> Path:
    """Where `make` writes the variant of that name."""
    return Path(_folder().name) / f"{name}.gguf"


def build(variant: Variant, path: Path) -> Tiny:
    tokenizer, _ = tinyvocab.byte_level()
    n_tokens = len(tokenizer["tokenizer.ggml.tokens"])
    reference = reference_of(variant, n_tokens + variant.padding)
    write(path, variant, reference, tokenizer)
    return Tiny(path, reference, n_tokens)


@functools.cache
def folder(name: str) -> Path:
    """The variant of that name as transformers saves it, with its tokenizer."""
    path, model = Path(_folder().name) / name, make(name).reference
    path.mkdir()
    if isinstance(model, Headed):
        save_file({key: weight.contiguous() for key, weight in model.state_dict().items()}, path / "model.safetensors")
        model.config.save_pretrained(path)
    else:
        model.save_pretrained(path)
    tinyvocab.byte_level()[1].save(str(path / "tokenizer.json"))
    return path


@functools.cache
def make_even(arch: str, quantized: bool, tokens: int = 64) -> Path:
    """A file of 2 layers, sizes that are multiples of 32, 64 rows of the embedding; matrices but V as Q8_0, or F32.

    All else is as in the variant of that name. The vocabulary has `tokens` names and no more: there is no tokenizer.
    """
    known = VARIANTS[arch]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 2, "head_dim": 64 if arch == "gemma3" else 32}
    sizes |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "shared_intermediate_size": 64}
    settings = _of_two(family_of(known).settings | known.settings) | tied(arch in _ALWAYS_TIED, **sizes)
    settings |= EVEN_STATES.get(known.arch, ({}, {}))[0]
    keys = {key: value for key, value in _of_two(known.keys).items() if not key.endswith("feed_forward_length")}
    keys |= EVEN_STATES.get(known.arch, ({}, {}))[1]
    variant = Variant(known.arch, settings, keys, kind=known.kind)
    path = Path(_folder().name) / f"{arch}-even-{quantized}-{tokens}.gguf"
    names = {"tokenizer.ggml.tokens": [f"<{i}>" for i in range(tokens)]}
    write(path, variant, reference_of(variant, 64), names, quantized)
    return path


def _of_two(values: dict[str, Any]) -> dict[str, Any]:
    """Of what is listed for each layer, the first two."""
    return {key: value[:2] if key in _EACH_LAYER else value for key, value in values.items()}


def write(path: Path, variant: Variant, model: Any, tokenizer: dict[str, Any], quantized: bool = False) -> None:
    writer = gguf.GGUFWriter(path, variant.arch)
    sizes = sizes_of(model)
    norms = {"rms_norm_eps": "layer_norm_rms"}
    norms |= dict.fromkeys(("layer_norm_eps", "norm_epsilon", "norm_eps"), "layer_norm")
    if variant.arch in ("lfm2", "lfm2moe"):
        norms["norm_eps"] = "layer_norm_rms"
    if variant.arch.startswith("nemotron_h"):
        norms["layer_norm_epsilon"] = "layer_norm_rms"
    keys: dict[str, Any] = {
        "context_length": CONTEXT,
        "embedding_length": sizes.hidden_size,
        "feed_forward_length": sizes.intermediate_size,
        "block_count": sizes.num_hidden_layers,
        "attention.head_count": sizes.num_attention_heads,
        "attention.head_count_kv": sizes.num_key_value_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
    }
    if rope := rope_of(sizes):
        keys["rope.freq_base"] = float(rope["rope_theta"])
        turned = int(sizes.head_dim * (rope.get("partial_rotary_factor") or 1))
        keys["rope.dimension_count"] = getattr(sizes, "qk_rope_head_dim", 0) or turned
    keys |= {f"attention.{key}_epsilon": getattr(sizes, x) for x, key in norms.items() if hasattr(sizes, x)}
    for key, value in {f"{variant.arch}.{key}": v for key, v in (keys | variant.keys).items()}.items():
        _add(writer, key, value)
    for key, value in tokenizer.items():
        _add(writer, key, value)
    tensors = tensors_of(variant, model)
    if variant.apart:
        tensors = [x for name, weight in tensors for x in of_key_heads(name, weight)]
        tensors = [(name.replace("_exps.", f".{i}."), each) for name, x in tensors for i, each in _experts_of(name, x)]
    for name, weight in tensors:
        values = np.ascontiguousarray(weight.numpy(), dtype=np.float32)
        if (
            quantized
            and weight.dim() > 1
            and not any(x in name for x in ("attn_v", "gate_inp", "conv", "ssm_norm"))
            and (name.endswith(".weight"))
        ):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _experts_of(name: str, weight: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return list(enumerate(weight)) if "_exps." in name else [(0, weight)]


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Any] = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        np.float64: writer.add_float32,
        list: writer.add_array,
    }
    adders[type(value)](key, value)
