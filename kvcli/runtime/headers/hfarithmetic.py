"""`check_arithmetic`: what a config.json says of a model's arithmetic beside keys that GGUF files have. No torch."""

from __future__ import annotations

from typing import Any

from kvcli.errors import ModelError
from kvcli.runtime.formats.ggufkeys import OTHER_MODEL
from kvcli.runtime.headers import families
from kvcli.runtime.headers.hfconfig import HFConfig
from kvcli.runtime.headers.hflayers import no_rope_layers

# Names of activations in config.json by those in `Block`.
_ACTIVATIONS = {
    "silu": ("silu", "swish"), "gelu": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "relu2": ("relu2",),
    "clamped": ("silu", "swish"),
}  # fmt: skip
# The first config.json of Gemma says "gelu" and means the form with tanh.
_LOOSE = ("gemma",)
# Keys that kv does not obey, and the values with which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "clip_qkv": (),
    "qk_layernorm": (False,),
    "use_bidirectional_attention": (False, "vision"),
    "is_causal": (True,),
    "parallel_residual": (False,),
    "altup_correct_scale": (True,),
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu",),
    "mamba_use_mlp": (True,),
    "moe_latent_size": (),
}


def check_arithmetic(config: HFConfig) -> None:
    """Raises ModelError for a key that would make another model of what kv computes."""
    arch = families.gguf_name(config.model_type)
    meant, said = families.of_gguf(arch).block.activation, config.get("hidden_act")
    loosely = config.model_type in _LOOSE and said == "gelu"
    if said is not None and said not in _ACTIVATIONS[meant] and not loosely:
        raise ModelError(f"config.json: kv's {arch} has the activation {meant}, not {str(said)[:40]!r}", OTHER_MODEL)
    for key, values in _NEUTRAL.items():
        value = config.get(key)
        if value is not None and value not in values:
            raise ModelError(f"kv's {arch} cannot obey {key} = {str(value)[:40]} of config.json", OTHER_MODEL)
    _check_experts(config, arch)
    every = families.of_gguf(arch).no_rope_every
    if every and no_rope_layers(config) != [int((i + 1) % every != 0) for i in range(config.n_layers)]:
        raise ModelError(f"config.json: in kv's {arch} every {every}th layer has no RoPE, and no others", OTHER_MODEL)


def _check_experts(config: HFConfig, arch: str) -> None:
    """Of Llama 4: which layers have experts, and whether queries and keys have norms."""
    but, experts = families.of_gguf(arch).qk_norm_but, config.count("num_experts", default=0)
    if but and config.get("use_qk_norm") is not None and bool(config.get("use_qk_norm")) != (experts != but):
        raise ModelError(f"config.json: kv's {arch} has norms of q and k, but with {but} experts", OTHER_MODEL)
    if (layers := config.values("moe_layers")) is not None:
        every = config.count("interleave_moe_layer_step", default=1)
        if not every or layers != list(range(every - 1, config.n_layers, every)):
            raise ModelError("config.json: moe_layers are not those of interleave_moe_layer_step", OTHER_MODEL)
