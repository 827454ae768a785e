"""Experts of a safetensors model as GGUF files have them: a tensor [experts, rows, columns] for each matrix of a layer.

In folders each expert is by itself, or all are together with gates and what they gate in one tensor: the one half and
then the other, or in turn (gpt-oss); as rows, or (Llama 4, gpt-oss) as columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from kvcli.errors import ModelError
from kvcli.runtime.formats.elements import STORAGE
from kvcli.runtime.formats.packedweights import Source
from kvcli.runtime.headers.hfconfig import HFConfig
from kvcli.runtime.headers.presented import Presented

_ALONE = re.compile(r"(.*\.experts|model\.altup(?:_unembed)?_projections)\.(\d+)\.(.*)")
_TOGETHER = re.compile(r"model\.layers\.(\d+)\.(?:mlp|feed_forward|block_sparse_moe)\.(.+)")
_SHARED = re.compile(r"model\.layers\.(\d+)\.shared_mlp\.(.+)")
_GATE_UP = ("experts.gate_up_proj", "experts.gate_up_proj_bias", "input_linear.weight")
_DOWN = ("experts.down_proj", "experts.down_proj_bias", "output_linear.weight")
_AS_COLUMNS = ("llama4_text", "gpt_oss", "qwen3_vl_moe_text")


def alone(spelled: str) -> tuple[str, int] | None:
    """Of a tensor of one expert, or of one of Gemma 3n's streams, the name without its number, and this; None for any
    other."""
    found = _ALONE.fullmatch(spelled)
    return (f"{found[1]}.{found[3]}", int(found[2])) if found else None


def together(spelled: str, source: Source, config: HFConfig) -> Iterator[Presented]:
    """The tensors of GGUF files that a tensor of all experts, or of shared ones, holds; none for any other."""
    routed, shared = _TOGETHER.fullmatch(spelled), _SHARED.fullmatch(spelled)
    found = routed or shared
    if not found or found[2] not in (*_GATE_UP, *_DOWN):
        return
    end = "bias" if found[2].endswith("_bias") else "weight"
    of_all = "_exps" if routed else "_shexp" if config.count("num_experts", default=0) else ""  # or there are no others
    name = f"blk.{found[1]}.ffn_{{}}{of_all}.{end}".format
    down = found[2] in _DOWN
    whole = Presented.of(name("down"), source)
    if end == "weight" and source.type in STORAGE and _as_columns(source.shape, down, config):
        whole = whole.then(lambda x: np.swapaxes(x, -1, -2), (*source.shape[:-2], source.shape[-1], source.shape[-2]))
    if down:
        yield whole
        return
    for i, part in enumerate(("gate", "up")):
        yield _half(whole, name(part), i, -1 if end == "bias" else -2, config.model_type == "gpt_oss")


def _as_columns(shape: tuple[int, ...], down: bool, config: HFConfig) -> bool:
    """Whether rows of a GGUF file are columns here: told by where the model's width stands, if that tells it."""
    hidden, (rows, columns) = config.count("hidden_size"), shape[-2:]
    fits, turned = (rows, columns) if down else (columns, rows)
    return turned == hidden and (fits != hidden or config.model_type in _AS_COLUMNS)


def _half(whole: Presented, name: str, part: int, axis: int, in_turn: bool) -> Presented:
    n = whole.shape[axis]
    if n % 2:
        raise ModelError(f"{name}: gates and what they gate are {n} rows, which are no two halves")
    which = slice(part, None, 2) if in_turn else slice(part * n // 2, (part + 1) * n // 2)
    index = (..., which) if axis == -1 else (..., which, slice(None))
    shape = (*whole.shape[:axis], n // 2, *whole.shape[len(whole.shape) + axis + 1 :])
    return whole.then(lambda values: values[index], shape, name)


def stacked(name: str, parts: Mapping[int, Presented], config: HFConfig) -> Presented:
    """All experts of a layer (or streams of a model) as one tensor, read one after the other."""
    streams, shapes = name.startswith("altup"), {part.shape for part in parts.values()}
    n = config.count("altup_num_inputs") - 1 if streams else config.count("num_experts")
    if sorted(parts) != list(range(n)) or len(shapes) != 1:
        what = "streams" if streams else "experts"
        raise ModelError(f"{name}: there are {len(parts)} {what}, {n} of one shape are needed", "it is incomplete")
    shape = shapes.pop()
    return Presented(name, (n, *shape), parts[0].type, _reader(parts, n), False)


def _reader(parts: Mapping[int, Presented], n: int) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        first = parts[0].read()
        whole = np.empty((n, *first.shape), first.dtype)
        whole[0] = first
        for i in range(1, n):
            whole[i] = parts[i].read()
        return whole

    return read
