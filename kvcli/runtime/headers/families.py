"""What planning knows of architectures: those that kv runs, and a few others whose files leave things out. No torch."""

from __future__ import annotations

from kvcli.runtime.model.architecture import Architecture, Windows
from kvcli.runtime.model.archs import ARCHITECTURES

_PLANNED = (Architecture(("smallthinker",), windows=Windows(every=4)),)
_UNKNOWN = Architecture(())
_KNOWN = ARCHITECTURES + _PLANNED
_OF_GGUF = {name: each for each in _KNOWN for name in each.gguf}
_OF_HF = {name: each for each in _KNOWN for name in each.hf}


# Where one description serves several names, or none is needed to plan.
_GGUF_NAMES = {
    "qwen3_vl_text": "qwen3vl", "qwen3_vl_moe_text": "qwen3vlmoe", "qwen2_vl": "qwen2vl",
    "qwen2_vl_text": "qwen2vl", "qwen2_5_vl_text": "qwen2vl", 
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "kimi_linear": "kimi-linear",
    "nemotron-nas": "deci", "nemotron_h_moe": "nemotron_h_moe",
}  # fmt: skip


def of_gguf(arch: str) -> Architecture:
    """What is known of an architecture by its name in GGUF files (and recipes)."""
    return _OF_GGUF.get(arch, _UNKNOWN)


def gguf_name(model_type: str) -> str:
    """The name in GGUF files of what config.json calls so; the same where none is known."""
    return _GGUF_NAMES.get(model_type) or next(iter(_OF_HF.get(model_type, _UNKNOWN).gguf), model_type)
