"""The tensors of a safetensors model as those of a GGUF file of it: llama.cpp's names, and what its converter does.

Names are those of the `gguf` package. On the way rows of queries and keys are put in the order of neighbours where a
family's files have that, 1 is added to the norms of Gemma, experts become one tensor, and vectors float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvcli.errors import ModelError
from kvcli.runtime.formats.adapter import EMBEDDING
from kvcli.runtime.formats.packedweights import Source
from kvcli.runtime.formats.packing import pack, packed_types
from kvcli.runtime.headers import families, hfdelta, hfexperts, hfmamba
from kvcli.runtime.headers.hfconfig import HFConfig
from kvcli.runtime.headers.hfrope import factor_tensors
from kvcli.runtime.headers.presented import Presented
from kvcli.runtime.model.archs import RUNNABLE
from kvcli.words import listed

_ONE_MORE = ("gemma", "gemma2", "gemma3", "nemotron")  # norms multiply by 1 + w, and files hold that
# transformers itself turns neighbours in these, so that nothing is to be reordered.
_NEIGHBOURS = (
    "cohere",
    "cohere2",
    "glm",
    "glm4",
    "llama4_text",
    "ernie4_5",
    "helium",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_k2",
    "mistral4",
)
# What a model that also sees, hears or predicts several tokens has beside its language model.
_ELSEWHERE = re.compile(
    r"(model\.)?(vision|visual|audio|image|sound|multi_modal|mm_|embed_(audio|vision)|talker|code2wav|token2wav|projector|"
    r"connector|mlp1\.|mtp\.|vit\.|aligner)"
)
_COMPUTED = re.compile(
    r"(rotary_emb\.inv_freq|\.attn\.(bias|masked_bias)|attention\.(bias|masked_bias|rotary_emb\..*))$"
)
_COUNTED = re.compile(r"(?:model\.|transformer\.|backbone\.)?(?:encoder\.)?(?:layers|h|blocks)\.(\d+)\.")
_OTHER_CONFIG = "config.json belongs to other weights, or was edited: download the whole model again"
_SPELLED = (
    (re.compile(r"^(model\.language_model\.|language_model\.model\.|model\.text_model\.)"), "model."),
    (re.compile(r"^language_model\."), ""),
    (re.compile(r"(layer_scalar|correct_output_scale|\d\.experts\.(?:gate_up|down)_proj)$"), r"\1.weight"),
    (re.compile(r"e_score_correction_bias$"), "e_score_correction.bias"),
    (re.compile(r"\.expert_bias$"), ".expert_bias.bias"),
    (re.compile(r"\.(linear_attn|mamba)\.dt_bias$"), r".\1.dt_proj.bias"),
    (re.compile(r"\.mixer\.dt_bias$"), ".mixer.dt.bias"),
    (re.compile(r"^backbone\.layers\.(\d+)\.mixer\.experts\."), r"model.layers.\1.mlp.experts."),
    (re.compile(r"\.feed_forward\.experts\.(\d+)\.(w[123])\."), r".block_sparse_moe.experts.\1.\2."),
)
# Tensors that the `gguf` package has no names for, in a layer.
_OTHER_NAMES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
# Those of a layer that predicts further tokens, which it has beside a block of the model.
_NEXT_NAMES = {
    **{f"{name}.weight": f"nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")},
    "embed_tokens.weight": "nextn.embed_tokens.weight", "shared_head.norm.weight": "nextn.shared_head_norm.weight",
    "shared_head.head.weight": "nextn.shared_head_head.weight",
}  # fmt: skip
# What Qwen's folders call the same, apart from the layers of the model.
_QWEN_NEXT = {
    "fc.weight": "eh_proj.weight", "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight", "norm.weight": "shared_head.norm.weight",
}  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def present(sources: Mapping[str, Source], data: Mapping[str, Any], config: HFConfig) -> dict[str, Presented]:
    """All tensors by their names in GGUF files. `data`: the whole config.json.

    Raises ModelError for a tensor without a name there, and for one that is missing.
    """
    arch = families.gguf_name(config.model_type)
    names = _names(arch, config.n_layers + _ahead(config))
    tied = data.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    found: dict[str, Presented] = {}
    experts: dict[str, dict[int, Presented]] = {}
    embedding: Source | None = None
    for original, source in sources.items():
        spelled = _of_next(_spelled(original), config)
        if _left_out(spelled, config) or (spelled == "lm_head.weight" and tied):
            continue
        if parts := {part.name: part for part in hfexperts.together(spelled, source, config)}:
            found |= parts
            continue
        one = hfexperts.alone(spelled)
        name = names(one[0] if one else spelled)
        if name is None:
            raise ModelError(f"tensor {original} has no name in a GGUF file of {arch}", "kv cannot convert this model")
        if one:
            experts.setdefault(name, {})[one[1]] = Presented.of(name, source)
            continue
        if name in found:
            raise ModelError(f"tensor {original} is in the folder twice, under two names")
        if name.endswith(".attn_kv_b.weight"):
            found |= {part.name: part for part in _of_heads(Presented.of(name, source), config)}
            continue
        embedding = source if name == EMBEDDING else embedding
        found[name] = _as_in_files(Presented.of(name, source), arch, config)
    found |= {name: hfexperts.stacked(name, parts, config) for name, parts in experts.items()}
    if embedding and tied and arch == "falcon-h1":  # a head of its own: it has another multiplier
        found["output.weight"] = _as_in_files(Presented.of("output.weight", embedding), arch, config)
    found |= {f"{name}.weight": _vector(f"{name}.weight", values) for name, values in factor_tensors(config).items()}
    if "output.weight" not in found and tied is False:
        raise ModelError("the folder has no lm_head.weight, and its config.json does not tie it to the embedding")
    _check_vocabulary(found, config)
    return found


def _check_vocabulary(found: Mapping[str, Presented], config: HFConfig) -> None:
    """Raises ModelError where config.json counts other tokens than the embedding has rows."""
    rows, tokens = found[EMBEDDING].shape[0] if EMBEDDING in found else None, config.count("vocab_size")
    if rows not in (None, tokens):
        raise ModelError(
            f"{config.called('vocab_size')} in config.json is {tokens}, and the embedding has {rows} rows",
            _OTHER_CONFIG,
        )


def check_runs(config: HFConfig) -> None:
    """Raises ModelError for a family that kv does not run: nothing else that is odd about it matters."""
    if (arch := families.gguf_name(config.model_type)) not in RUNNABLE:
        what = f"kv neither runs nor converts models of the architecture '{arch}'"
        raise ModelError(what, f"it runs {listed(RUNNABLE)}")


def _names(arch: str, n_layers: int) -> Callable[[str], str | None]:
    """From names in the folder to those of llama.cpp."""
    import gguf

    known = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(known, n_layers)

    def name_of(spelled: str) -> str | None:
        layer = _LAYER.fullmatch(spelled)
        if layer and layer[2] in _OTHER_NAMES:
            return f"blk.{layer[1]}.{_OTHER_NAMES[layer[2]]}"
        if layer and layer[2] in _NEXT_NAMES:
            return f"blk.{layer[1]}.{_NEXT_NAMES[layer[2]]}"
        if spelled.endswith(".sinks"):  # of attention, without a suffix
            spelled += ".weight"
        return table.get_name(spelled, try_suffixes=(".weight", ".bias"))

    return name_of


def _spelled(name: str) -> str:
    for pattern, spelling in _SPELLED:
        name = pattern.sub(spelling, name)
    return name


def _ahead(config: HFConfig) -> int:
    """How many layers predict further tokens, as far as kv runs them: of Qwen's the first one alone."""
    if config.count("mtp_num_hidden_layers", default=0) and hfdelta.is_delta(config):
        return 1
    return config.count("num_nextn_predict_layers", default=0)


def _of_next(name: str, config: HFConfig) -> str:
    """Of a tensor of Qwen's first layer that predicts further tokens, the name that others have for it."""
    if not name.startswith("mtp.") or not hfdelta.is_delta(config) or not _ahead(config):
        return name
    part = name.removeprefix("mtp.").removeprefix("layers.0.")
    return f"model.layers.{config.n_layers}.{_QWEN_NEXT.get(part, part)}" if part[:7] != "layers." else name


def _left_out(name: str, config: HFConfig) -> bool:
    """Whether a tensor is no part of the language model, or is computed from the config.

    Raises ModelError for one of a layer that config.json does not count.
    """
    if _ELSEWHERE.match(name) or _COMPUTED.search(name):
        return True
    layer, n_layers = _COUNTED.match(name), config.n_layers
    if layer is None or int(layer[1]) < n_layers + _ahead(config):
        return False
    raise ModelError(
        f"{config.called('num_hidden_layers')} in config.json is {n_layers}, and the folder has the tensor {name}",
        _OTHER_CONFIG,
    )


def _as_in_files(tensor: Presented, arch: str, config: HFConfig) -> Presented:
    """What llama.cpp's converter does to it."""
    if arch in _ONE_MORE and tensor.name.endswith("norm.weight"):
        return tensor.then(lambda values: values + np.float32(1))
    if tensor.name.endswith(("shortconv.conv.weight", "ssm_conv1d.weight")):  # of one channel each
        tensor = tensor.then(lambda values: values.reshape(len(values), -1), (tensor.shape[0], tensor.shape[-1]))
    if hfdelta.is_delta(config):
        return hfdelta.as_in_files(tensor, config)
    if ".ssm_" in tensor.name:
        tensor = hfmamba.as_in_files(tensor, config)
    if arch == "falcon-h1":
        return hfmamba.multiplied(tensor, config)
    part = re.search(r"\.attn_([qk])\.(weight|bias)$", tensor.name)
    if part and families.of_gguf(arch).block.rope_pairs and config.model_type not in _NEIGHBOURS:
        heads = config.count("num_attention_heads")
        if part[1] == "k":
            heads = config.count("num_key_value_heads", default=heads)
        return tensor.then(lambda rows: as_neighbours(rows, heads))
    return tensor


def _of_heads(both: Presented, config: HFConfig) -> Iterator[Presented]:
    """The matrices of heads that make queries of latents, [heads, rank, plain], and values, [heads, dim_v, rank]."""
    heads, rank = config.count("num_attention_heads"), config.count("kv_lora_rank")
    plain, dim_v = config.count("qk_nope_head_dim"), config.count("v_head_dim")
    if both.shape != (rows := heads * (plain + dim_v), rank):
        raise ModelError(f"{both.name} has the shape {list(both.shape)}, {[rows, rank]} is needed", _OTHER_CONFIG)

    def of_each(values: np.ndarray) -> np.ndarray:
        return values.reshape(heads, plain + dim_v, rank)

    def keys(values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(of_each(values)[:, :plain].swapaxes(1, 2))

    yield both.then(keys, (heads, rank, plain), both.name.replace("kv_b", "k_b"))
    yield both.then(lambda x: np.ascontiguousarray(of_each(x)[:, plain:]), (heads, dim_v, rank),
                    both.name.replace("kv_b", "v_b"))  # fmt: skip


def as_neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * dim, ...] of a query or key matrix, of which RoPE turns halves of heads together, in the order in
    which it turns neighbours: row j * dim / 2 + i of a head becomes row 2i + j."""
    if rows.shape[0] % (2 * heads):
        raise ModelError(f"a matrix of {rows.shape[0]} rows cannot be cut into {heads} heads with halves")
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2)).reshape(rows.shape)


def _vector(name: str, values: np.ndarray) -> Presented:
    return Presented(name, values.shape, "F32", lambda: values, False)


def quantized(tensors: Mapping[str, Presented], type: str) -> dict[str, Presented]:
    """The tensors with matrices packed as `type` (see `packing`)."""
    types = packed_types({name: (tensor.shape, tensor.type) for name, tensor in tensors.items()}, type)
    return {name: _packed(tensor, types[name]) for name, tensor in tensors.items()}


def _packed(tensor: Presented, type: str) -> Presented:
    if type == tensor.type:
        return tensor
    packed = tensor.then(lambda values: pack(type, values, tensor.type))
    return replace(packed, type=type)
