"""`HFConfig`: the config.json of a model, read with checks, under one name for each size. No torch, no transformers.

Makers spell sizes in several ways, nest the language model of a model that also sees or hears, and leave out what the
class of transformers assumes; `hfdefaults.json` (written by tests/support/hfdefaults.py) has these assumptions. A key
that may change the shape and is not read is refused by its name.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcli.errors import ModelError
from kvcli.runtime.headers.shapes import Given, flag_of

MAX_LAYERS = 4096

# One name for each size, and its other spellings.
_SPELLINGS = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num"),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "ffn_dim", "block_ff_dim"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length", "model_max_length"),
    "sliding_window": ("attention_window_size",),
    "sliding_window_pattern": ("_sliding_window_pattern", "global_attn_every_n_layers"),
    "layer_types": ("layers_block_type",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts",
    ),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
    "shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    "first_k_dense_replace": ("num_dense_layers",),
    "mamba_d_state": ("ssm_state_size", "state_size"),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_n_groups": ("n_groups", "mamba_ngroups"),
    "mamba_expand": ("expand",),
    "rms_norm_eps": ("norm_eps",),
    "layer_norm_eps": ("layer_norm_epsilon", "norm_epsilon"),
    "hidden_act": ("hidden_activation", "activation_function"),
    "linear_conv_kernel_dim": ("short_conv_kernel_size",),
}  # fmt: skip
_NAME_OF = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings}
# Tables whose sizes stand beside the others under their own names.
_TABLES = ("attn_config", "ffn_config")
# Where models that also see or hear have their language model.
_NESTS = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config", "text_model")
_NOT_LANGUAGE = ("vision", "audio", "image", "speech", "talker", "draft")

# The language model's `model_type` where a text_config does not say it.
NESTED_TYPES = {
    "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "llama4": "llama4_text",
    "mistral3": "mistral", "mllama": "mllama_text_model", "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text", "glm4v": "glm4v_text", "glm4v_moe": "glm4v_moe_text", "llava": "llama",
    "llava_next": "llama", "paligemma": "gemma", "idefics3": "llama", "smolvlm": "llama",
}  # fmt: skip

# Words of keys that may change the shape, and keys with such words that do not, or that others imply.
_SHAPE_WORDS = re.compile(
    r"layer|head|window|sliding|chunk|(^|_)kv_|rank|state|ssm|mamba|(^|_)conv|recurr|linear_|cache|attn|attention|block|"
    r"index|lru|share|compress|hybrid|local|global|loop"
)
_HARMLESS = re.compile(
    r"dropout|_init|initializer|bias|layer_?norm|layerdrop|_pdrop|norm_|use_cache|output_attentions|output_hidden_states|"
    r"chunk_size_feed_forward|laurel|per_layer_config|indexer_rope|cross_attention|_act$|implementation|kernel|residual|time_step|multiplier|softmax|_proj|"
    r"alpha_factor|beta_factor|moe_|mlp_|expert|_theta|rope|cache_dtype|shared_expert|layer_input|label|token|"
    r"softcap|scale|temperature|num_logits_to_keep|deepstack|drafter|mtp|nextn|^parallel_attn$|attention_gate|"
    r"qk_head_dim|architecture|bidirectional|altup|use_qk_norm|^alibi$|pruned_heads|index_topk|index_n_heads|quantiz|"
    r"is_decoder|tie_|safe_serialization|attn_output_gate|attn_type|attention_softmax_in_fp32|key_query|attn_impl|"
    r"mamba_(d_head|n_heads|headdim|chunk_size|dt_rank)|use_mamba|attention_type$|output_gate|image|vision|audio|"
    r"mamba_use_mlp|head_dim_scale|lm_head|first_last|multi_query_attention|gated_attention|attn_temperature|decoder_sparse|"
    r"vocab|ngram|causal|attention_mask|rescale|nope|layer_scale|skip_|interleave|^chunk_size$|^block_size$|^block_(multiple|ffn|auto)"
)


def name_of(key: str) -> str:
    """The one name of a size."""
    return _NAME_OF.get(key, key)


def spread(pattern: str, n_layers: int) -> str:
    """`first|repeated|last` for so many layers: 'F|SSF|F' is FSSFSSF for seven."""
    first, repeated, last = pattern.split("|")
    middle = (repeated * n_layers)[: max(0, n_layers - len(first) - len(last))]
    return (first + middle + last)[:n_layers] if n_layers else ""


@functools.cache
def _table() -> dict[str, Any]:
    """Rows by `model_type`; None for a type whose shape kv cannot tell."""
    return json.loads(Path(__file__).with_name("hfdefaults.json").read_text(encoding="utf-8"))["types"]


def language_model(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model; its `model_type` is always there."""
    for name in _NESTS:
        if isinstance(inner := data.get(name), Mapping):
            return _typed(language_model(inner), data)
    if not _has_layers(data):
        nested = {
            name: each
            for name, each in data.items()
            if isinstance(each, Mapping) and _has_layers(each) and not any(word in name for word in _NOT_LANGUAGE)
        }
        if len(nested) == 1:
            return _typed(language_model(next(iter(nested.values()))), data)
    return data


def _has_layers(data: Mapping[str, Any]) -> bool:
    return any(data.get(key) is not None for key in ("num_hidden_layers", *_SPELLINGS["num_hidden_layers"]))


def _typed(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(inner.get("model_type"), str):
        return inner
    kind = outer.get("model_type")
    return {**inner, "model_type": NESTED_TYPES.get(str(kind), kind)}


class HFConfig:
    """The sizes of one language model; `given` stands in for those that are missing (None: nobody could give any)."""

    def __init__(self, data: Mapping[str, Any], given: Given | None) -> None:
        self.given, self.data = given, language_model(data)
        kind = self.data.get("model_type")
        self.model_type = kind if isinstance(kind, str) and kind else "unknown"
        self._spelling: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._read = set(_TABLES)
        said = set()  # null is a word, too
        for key, value in [*self.data.items(), *self._tables()]:
            said.add(name := name_of(key))
            if value is not None and name not in self._values:
                self._values[name], self._spelling[name] = value, key
        defaults = _table().get(self.model_type, {})
        if defaults is None:
            raise ModelError(
                f"kv cannot tell the shape of a model of the type {self.model_type} from its config.json",
                self._by_flags,
            )
        self.kinds = str(defaults.get("kinds", ""))
        self._assumed = {name: value for name, value in defaults.items() if name not in said and name != "kinds"}
        self.n_layers = self._count_layers()
        if self.model_type == "nemotron_h" and self._has_experts():
            self.model_type = "nemotron_h_moe"

    def _has_experts(self) -> bool:
        """Whether any layer of Nemotron H has them; the class assumes some for models without."""
        named = self._values.get("layer_types") or self._values.get("hybrid_override_pattern") or ""
        return "moe" in named if isinstance(named, list) else "E" in str(named)

    @property
    def _by_flags(self) -> str:
        return "kv neither runs nor converts it" if self.given is None else "the shape can be given by flags"

    def spread_kinds(self) -> str:
        """The kinds of the layers as the class has them where the file says nothing."""
        return spread(self.kinds, self.n_layers)

    def _tables(self) -> list[tuple[str, Any]]:
        tables = [self.data.get(name) for name in _TABLES]
        return [item for table in tables if isinstance(table, Mapping) for item in table.items()]

    def _count_layers(self) -> int:
        named = self._values.get("layer_types") or self._values.get("hybrid_override_pattern")
        if "num_hidden_layers" not in self._values and isinstance(named, (list, str)) and 0 < len(named) <= MAX_LAYERS:
            return len(named)
        if not (n_layers := self.count("num_hidden_layers", "layers", limit=MAX_LAYERS)):
            raise ModelError(f"{self.called('num_hidden_layers')} in config.json has the value 0, out of range")
        return n_layers

    def has(self, name: str) -> bool:
        """Whether the file itself says something about it."""
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is, what the class assumes, or the default; from now on the key counts as read."""
        self._read.add(name)
        return self._values.get(name, self._assumed.get(name, default))

    def count(self, name: str, flag: str = "", default: int | None = None, limit: int = 1 << 31) -> int:
        """A whole number from 0 to `limit`. Raises ModelError, for a missing one with the flag that supplies it."""
        return self._checked(name, self._found(name, flag, default), limit)

    def each(self, name: str, flag: str = "", default: int | None = None, limit: int = 1 << 31) -> list[int]:
        """A number for each layer, whether the file has one for all or a list."""
        value = self._found(name, flag, default)
        if not isinstance(value, list):
            return [self._checked(name, value, limit)] * self.n_layers
        if len(value) != self.n_layers:
            raise ModelError(f"{self.called(name)} in config.json must name {self.n_layers} layers, not {len(value)}")
        return [self._checked(name, each, limit) for each in value]

    def _found(self, name: str, flag: str, default: int | None) -> Any:
        value = self.get(name)
        if value is None and flag and self.given is not None:
            value = getattr(self.given, flag)
        if value is None:
            value = default
        if value is None:
            hint = (
                f"{flag_of(flag)} supplies it"
                if flag and self.given is not None
                else "the file is incomplete: download it again"
            )
            raise ModelError(f"config.json lacks the key {name}", hint)
        return value

    def _checked(self, name: str, value: Any, limit: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
            wrong = "out of range" if type(value) is int else "not a whole number"
            raise ModelError(f"{self.called(name)} in config.json has the value {value!r:.40}, {wrong}")
        return value

    def number(self, name: str, default: float | None = None) -> float | None:
        """A finite number, or None where there is none. Raises ModelError."""
        value = self.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
            raise ModelError(f"{self.called(name)} in config.json has the value {str(value)[:40]}, out of range")
        return float(value)

    def values(self, name: str) -> list[Any] | None:
        """A list, or None where there is none. Raises ModelError for anything else."""
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise ModelError(f"{self.called(name)} in config.json is no list")
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """A table, empty where there is none. Raises ModelError for anything else."""
        return self._as_table(name, self.get(name) or {})

    def tables(self, name: str) -> list[Mapping[str, Any]]:
        """A list of tables, one a layer; empty where there is none. Raises ModelError."""
        found = [self._as_table(name, each) for each in self.values(name) or ()]
        if found and len(found) != self.n_layers:
            raise ModelError(f"{self.called(name)} in config.json must name {self.n_layers} layers, not {len(found)}")
        return found

    def _as_table(self, name: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.called(name)} in config.json has {str(value)[:40]!r} where a table is expected")
        return value

    def within(self, table: Mapping[str, Any], name: str, default: int | None = None, limit: int = 1 << 31) -> int:
        """A whole number of such a table. Raises ModelError."""
        value = self._as_table(name, table).get(name)
        if value is None and default is not None:
            return default
        return self._checked(name, value, limit)

    def called(self, name: str) -> str:
        """The name as the file spells it."""
        return self._spelling.get(name, name)

    def seen(self, *names: str) -> None:
        """These keys count as read: others imply them."""
        self._read.update(names)

    def refuse_unread(self) -> None:
        """Raises ModelError for a key that may change the shape and that nobody read."""
        for name, value in self._values.items():
            key = self._spelling[name]
            if name in self._read or value in (False, 0, "", "none") or value == [] or value == {}:
                continue
            if _SHAPE_WORDS.search(key) and not _HARMLESS.search(key) and not key.startswith("_"):
                raise ModelError(
                    f"kv does not know what {key} = {_shown(value)} in config.json does to the shape of the model",
                    self._by_flags,
                )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
