"""What LoRA adapters take in memory beside the weights that they change. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Protocol

from kvcli.runtime.config import ModelConfig
from kvcli.runtime.formats.adapter import EMBEDDING, Adapter, Pair

_FLOAT = 4  # bytes; on a GPU all is float32
_STACKED = {"attn_q": "attn_qkv", "attn_k": "attn_qkv", "attn_v": "attn_qkv", "ffn_gate": "ffn_up"}


class Tensor(Protocol):
    """What a header says of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def _pairs(adapters: Sequence[Adapter]) -> Iterator[tuple[str, Pair]]:
    for each in adapters:
        yield from each.pairs.items()


def on_cpu(tensors: Mapping[str, Tensor], config: ModelConfig, adapters: Sequence[Adapter]) -> tuple[int, int]:
    """(bytes of the files, which stay mapped; bytes of copies): of rows in another order, and of a turned part."""
    packed = copies = 0
    for name, pair in _pairs(adapters):
        packed += pair.a.nbytes + pair.b.nbytes
        if name == EMBEDDING:
            copies += 2 * _FLOAT * prod(pair.b.shape)
        elif config.block.rope_pairs and name.endswith((".attn_q.weight", ".attn_k.weight", ".attn_qkv.weight")):
            copies += pair.b.nbytes
    return packed, copies


def on_gpu(tensors: Mapping[str, Tensor], config: ModelConfig, adapters: Sequence[Adapter]) -> tuple[int, int]:
    """(bytes of all parts, 0). Of matrices that are stacked, each has columns for the ranks of all."""
    ranks: Counter[str] = Counter()
    packed = 0
    for name, pair in _pairs(adapters):
        ranks[_stack(name)] += pair.rank
        packed += _FLOAT * pair.rank * tensors[name].shape[1]
    return packed + sum(_FLOAT * ranks[_stack(name)] * tensors[name].shape[0] for name in tensors), 0


def _stack(name: str) -> str:
    """What stands for the matrices that are stacked with that one."""
    layer, _, kind = name.removesuffix(".weight").rpartition(".")
    return f"{layer}.{_STACKED.get(kind, kind)}"
