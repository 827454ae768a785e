"""Seed-OSS: a Llama with biases of queries, keys and values; the norm before the feed-forward part has another name."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(gguf=("seed_oss",), hf=("seed_oss",), block=Block(ffn_norm="post_attention_norm"))
