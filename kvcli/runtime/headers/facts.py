"""What a model's file says about itself, as plain data for `kv inspect`. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kvcli.blockformats import FORMATS
from kvcli.runtime.config import RECURRENT, LayerConfig, ModelConfig
from kvcli.runtime.formats.modelfile import ModelFile
from kvcli.runtime.headers.titles import title_of
from kvcli.runtime.hub import hubnames
from kvcli.runtime.hub.runnable import judge
from kvcli.runtime.plan.footprint import Tensor
from kvcli.runtime.text.template import ChatTemplate, template_note

_F16_BYTES = 2
FILE_TYPES = {  # values of general.file_type
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}  # fmt: skip


@dataclass(frozen=True)
class QuantShare:
    """How much of the weights one block type stores. `bits` are bits per weight."""

    type: str
    tensors: int
    weights: int
    nbytes: int
    bits: float


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep the same kind of rows, or a state. `row_bytes` is what one layer keeps for one token at f16,
    `state_bytes` what it keeps of a sequence whatever its length. `turned`: see `LayerConfig`."""

    kind: str
    layers: int
    kv_heads: int
    dim_k: int
    dim_v: int
    window: int
    row_bytes: int
    state_bytes: int = 0
    turned: int = 0


@dataclass(frozen=True)
class TokenizerFacts:
    """The tokenizer as the file names it. `bos` and `eos` are (id, text) or None."""

    model: str
    pre: str
    tokens: int
    bos: tuple[int, str] | None
    eos: tuple[int, str] | None
    adds_bos: bool | None  # None: the file does not say


@dataclass(frozen=True)
class ModelFacts:
    """All that `kv inspect` prints. `problem`: why kv cannot run the file, "" = it can; then there is a `config`."""

    path: Path
    parts: int  # files that the model lies in, of which `path` is the first
    file_bytes: int
    title: str
    arch: str
    license: str
    parameters: int
    weight_bytes: int
    quants: tuple[QuantShare, ...]
    config: ModelConfig | None
    problem: str
    groups: tuple[LayerGroup, ...]
    tokenizer: TokenizerFacts | None
    template: ChatTemplate | None  # None: a base model
    template_note: str  # where it is not in the file
    sampling: Mapping[str, Any]  # general.sampling.*: the model's own defaults

    @property
    def token_bytes(self) -> int:
        """What one more token adds to the cache at f16 while no window is full."""
        return sum(group.layers * group.row_bytes for group in self.groups)

    @property
    def late_token_bytes(self) -> int:
        """What one more token adds to the cache at f16 once every window is full."""
        return sum(group.layers * group.row_bytes for group in self.groups if not group.window)


def read_facts(file: ModelFile) -> ModelFacts:
    """The facts of an open file; vocabulary-only files and unknown architectures are fine.

    Raises ModelError for a chat template that is not text.
    """
    metadata = file.metadata
    config, problem = judge(metadata, file.tensors)
    return ModelFacts(
        path=file.path,
        parts=len(file.paths),
        file_bytes=file.size,
        title=title_of(file.path, file.size, metadata),
        arch=str(metadata.get("general.architecture", "")),
        license=str(metadata.get("general.license", "")),
        parameters=sum(prod(tensor.shape) for tensor in file.tensors.values()),
        weight_bytes=sum(tensor.nbytes for tensor in file.tensors.values()),
        quants=_quants(file),
        config=config,
        problem=problem,
        groups=layer_groups(config) if config else (),
        tokenizer=_tokenizer(metadata),
        template=ChatTemplate.from_gguf(metadata, "", "", file.path.name),
        template_note=template_note(metadata, file.path.name),
        sampling=_sampling(metadata),
    )


def weight_type(name: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Q4_K_M, as a GGUF file of that name is called, or says itself; else the format that most bytes of its weights
    have, which may be that of the embedding alone. "" = there are none."""
    if named := hubnames.quant_of(name if name.endswith(".gguf") else ""):
        return named
    said = metadata.get("general.file_type")
    if isinstance(said, int) and said in FILE_TYPES:
        return FILE_TYPES[said]
    nbytes = Counter[str]()
    for tensor in tensors.values():
        nbytes[tensor.type] += tensor.nbytes
    return max(nbytes, key=lambda kind: nbytes[kind], default="")


def _quants(file: ModelFile) -> tuple[QuantShare, ...]:
    shares = []
    for kind in {tensor.type for tensor in file.tensors.values()}:
        members = [tensor for tensor in file.tensors.values() if tensor.type == kind]
        block = FORMATS[kind]
        weights = sum(prod(tensor.shape) for tensor in members)
        nbytes = sum(tensor.nbytes for tensor in members)
        shares.append(QuantShare(kind, len(members), weights, nbytes, 8 * block.bytes / block.elements))
    return tuple(sorted(shares, key=lambda share: -share.nbytes))


def layer_groups(config: ModelConfig) -> tuple[LayerGroup, ...]:
    """The layers of a model by what they keep, in order of first appearance."""
    counts: dict[tuple[Any, ...], int] = {}
    for layer in config.layers:
        key = (
            layer.kind,
            layer.kv_heads,
            layer.dim_k,
            layer.dim_v,
            layer.window,
            f16_row_bytes(layer),
            layer.state_bytes,
            layer.turned,
        )
        counts[key] = counts.get(key, 0) + 1
    return tuple(LayerGroup(key[0], count, *key[1:]) for key, count in counts.items())


def f16_row_bytes(layer: LayerConfig) -> int:
    """Bytes a layer keeps for one token in 16 bit: keys and values of each KV head, or what is both once."""
    if layer.kind == RECURRENT or layer.shares_kv_with is not None:
        return 0
    return layer.kv_heads * ((layer.turned or layer.dim_k) + layer.dim_v) * _F16_BYTES


def _tokenizer(metadata: Mapping[str, Any]) -> TokenizerFacts | None:
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(model, str) or tokens is None:
        return None
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token")
    return TokenizerFacts(
        model=model,
        pre=str(metadata.get("tokenizer.ggml.pre", "")),
        tokens=len(tokens),
        bos=_special(metadata, "bos", tokens),
        eos=_special(metadata, "eos", tokens),
        adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
    )


def _special(metadata: Mapping[str, Any], role: str, tokens: Any) -> tuple[int, str] | None:
    number = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        return None
    text = tokens[number]
    return number, text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "general.sampling."
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
