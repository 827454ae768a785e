"""Configurations of headers with a key more or less."""

from __future__ import annotations

from typing import Any

from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.headers.anygguf import config_from_gguf_any, config_from_hf
from kvcli.runtime.headers.shapes import Given


def gguf(arch: str, given: Given | None = None, drop: str = "", **keys: Any) -> ModelConfig:
    """A config from keys; a double underscore in a name stands for a dot: attention__head_count."""
    base = {
        "block_count": 4,
        "embedding_length": 256,
        "feed_forward_length": 512,
        "context_length": 4096,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "vocab_size": 1000,
    }
    base |= {name.replace("__", "."): value for name, value in keys.items()}
    base.pop(drop, None)
    metadata = {"general.architecture": arch} | {f"{arch}.{name}": value for name, value in base.items()}
    return config_from_gguf_any(metadata, {}, given)


def hf(given: Given | None = None, drop: str = "", **keys: Any) -> ModelConfig:
    base = {
        "model_type": "x",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "intermediate_size": 512,
        "max_position_embeddings": 4096,
    }
    base |= keys
    base.pop(drop, None)
    return config_from_hf(base, given)


def token_bytes(config: ModelConfig) -> int:
    return KVLayout.build(config, "f16", "f16").token_bytes()


def windows(config: ModelConfig) -> list[int]:
    return [layer.window for layer in config.layers]
