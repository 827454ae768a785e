"""What planning knows of architectures: those that kv runs, and a few others whose files leave things out. No torch."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture, Windows
from kvcli.runtime.model.archs import ARCHITECTURES

_NORMED = Block(qk_norm=True)  # of which a plan counts the copies

_PLANNED = (
    Architecture(("gemma2",), ("gemma2",), windows=Windows(every=2, size=4096)),
    Architecture(("gemma3n",), ("gemma3n", "gemma3n_text"), _NORMED, Windows(every=5)),
    Architecture(("gpt-oss",), ("gpt_oss",), windows=Windows(every=2)),
    Architecture(("cohere2",), ("cohere2",), windows=Windows(every=4)),
    Architecture(("llama4",), windows=Windows(every=4, size=8192)),
    Architecture(("exaone4",), ("exaone4",), windows=Windows(every=4)),
    Architecture(("olmo2",), ("olmo3",), windows=Windows(every=4)),
    Architecture(("smallthinker",), windows=Windows(every=4)),
    Architecture(("qwen3moe", "qwen3vl", "qwen3vlmoe"), ("qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), _NORMED),
    Architecture(("qwen3next", "qwen35", "qwen35moe"), ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _NORMED),
)
_UNKNOWN = Architecture(())
_KNOWN = ARCHITECTURES + _PLANNED
_OF_GGUF = {name: each for each in _KNOWN for name in each.gguf}
_OF_HF = {name: each for each in _KNOWN for name in each.hf}


def of_gguf(arch: str) -> Architecture:
    """What is known of an architecture by its name in GGUF files (and recipes)."""
    return _OF_GGUF.get(arch, _UNKNOWN)


def of_hf(model_type: str) -> Architecture:
    """What is known of an architecture by its `model_type` in config.json."""
    return _OF_HF.get(model_type, _UNKNOWN)
