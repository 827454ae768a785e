"""The bytes of everything but the cache: weights as they are kept, activations of a step, kernel scratch,
tables.

Formulas over `ModelConfig`, no torch. They follow the code: `model/loading.py` and `model/decoder.py` for what is kept
and alive, `kernels/cpu/cpu_body.h` for scratch, `kernels/gpu/backend.py` for what a GPU needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from kvcli.blockformats import INTERLEAVED
from kvcli.runtime.cache.statelayout import GUESSED_ROWS
from kvcli.runtime.config import LATENT, RECURRENT, DeltaNet, LayerConfig, Mamba, ModelConfig
from kvcli.runtime.formats.adapter import Adapter
from kvcli.runtime.host.memory import CPU
from kvcli.runtime.plan import adapterbytes, repacked

EXACT, COMPUTED, MEASURED, ASSUMED, CHOSEN = "exact", "computed", "measured", "assumed", "chosen"

_HEADS = frozenset(("output.weight", "lm_head.weight"))
_EMBEDDINGS = ("token_embd.weight", "model.embed_tokens.weight")
_OF_EXPERTS = re.compile(r"_exps\.|\.experts\.|\.ffn_(gate|up|down)\.\d+\.")
_REORDERED = tuple(f".attn_{x}.weight" for x in ("q", "k", "q_b", "kv_a_mqa", "kv_b"))  # for half-split RoPE
_OF_HEADS = tuple(f".attn_{x}_b.weight" for x in ("k", "v", "kv"))  # GPU: float16, see kernels/gpu/backend.py
_ROWS_ALONE = "per_layer_token_embd.weight"  # of which a token reads one row, and nothing else does
_LANES = 16  # floats of the widest vectors; rows are padded to whole ones
_PANEL = 16  # weight rows that a thread decodes at a time
_FIXED_ROWS, _FIXED_BYTES = 256 + 8, 80  # CPU: rows in fixed point that are there at a time, bytes of 32 numbers
_FIXED_PAIRS = 2048  # CPU: the same of pairs of a row and an expert
_QUERY_BLOCK = 16  # queries that share a decoded page
_SLICE_BYTES, _SLICE_ROWS = 256 << 20, 256  # GPU: float16 weights expanded at a time: see kernels/gpu/expand.py
STEP_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024)  # GPU: of steps that have graphs, with memory of their own
_STAGED_ROWS = 16384  # GPU: of the past that are float16 at a time: see kernels/gpu/past.py
_LATENT_CELLS = 16 * _STAGED_ROWS  # GPU: keys of heads that are made of latents at a time
_CHUNK_ROWS = 64  # GPU: of a sequence with states, multiplied with each other: see kernels/gpu/chunks.py
_LIBRARY_BYTES = 32 << 20  # GPU: workspace of the library that multiplies matrices
DECODE_PARTS = 128  # GPU: most parts that the rows of a decoded token are cut into: MOST_PARTS of combine.py
GRAPH_PROGRAMS, GRAPH_QUERIES = 4 * 192, 64  # GPU: that share out what a graph sees, on the largest cards; of each
_GRAPH_OTHERS = 3, 7  # GPU: parts of a row of a graph beside those, with room for every kind: see graph/pages.py
PREFILL_PARTS = 3, 6  # GPU: parts of a prefilled row, see kernels/gpu/attention.py; with kept rows before evicted ones
_SORTED = 10  # GPU: numbers of four bytes that sort a pair of a row and an expert
_LOGIT_COPIES = 4  # logits, and what the sampler makes of them
TOKEN_BYTES = 56  # host: an id as a Python integer and its places in the lists of a sequence
PAGE_BYTES = 1024  # host: the objects that stand for a page
_TOKENIZER_BYTES = (16 << 20, 220)  # host: fixed, and per token of the vocabulary


class Tensor(Protocol):
    """A tensor in a file's table: `formats.gguf.TensorInfo` or `headers.HeaderTensor`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class WeightBytes:
    """Weights in memory. `packed`: as the file stores them, on a GPU as they lie there; `copies`: what the engine
    keeps besides (reordered rows, norms in float32); `read`: what one token reads (no input embedding, only the
    experts that are used); `in_file`: bytes of the file's tensors where `packed` may be others, else 0."""

    packed: int
    copies: int
    read: int
    source: str
    detail: str = ""
    in_file: int = 0

    def part(self, ranks: int) -> WeightBytes:
        """What each of `ranks` devices keeps of them."""
        if ranks == 1:
            return self
        packed, copies, read, in_file = (-(-x // ranks) for x in (self.packed, self.copies, self.read, self.in_file))
        source = ASSUMED if self.source == ASSUMED else COMPUTED
        return WeightBytes(packed, copies, read, source, f"1/{ranks} of all", in_file)


def weights_of_tensors(
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    kind: str,
    adapters: Sequence[Adapter] = (),
    interleaved: bool = True,
) -> WeightBytes:
    """The weights of a file, with adapters. A GPU gets one form of each. On a CPU matrices are `interleaved` where
    that is worth it; the file stays mapped for the others, so copies of these come on top."""
    weights = _weights_on_gpu(tensors, config) if kind != CPU else _weights_on_cpu(tensors, config, interleaved)
    if not adapters:
        return weights
    more, copied = (adapterbytes.on_cpu if kind == CPU else adapterbytes.on_gpu)(tensors, config, adapters)
    detail = f"{weights.detail}, with {len(adapters)} adapter{'s' if len(adapters) > 1 else ''}"
    packed, copies, read = weights.packed + more, weights.copies + copied, weights.read + more
    return replace(weights, packed=packed, copies=copies, read=read, detail=detail)


def next_weights(
    tensors: Mapping[str, Tensor], config: ModelConfig, kind: str, interleaved: bool = True
) -> WeightBytes:
    """Of the layer that predicts further tokens. It reads the model's output matrix where it has none of its own."""
    own = {name: x for name, x in tensors.items() if name.startswith(f"blk.{config.n_layers}.")}
    found = weights_of_tensors(own, replace(config, ahead=()), kind, (), interleaved)
    head = tensors.get("output.weight") or tensors["token_embd.weight"]
    shared = not any(name.endswith("shared_head_head.weight") for name in own)
    return replace(found, read=found.read + head.nbytes * shared)


def _weights_on_cpu(tensors: Mapping[str, Tensor], config: ModelConfig, interleaved: bool) -> WeightBytes:
    packed = copies = read = 0
    for name, tensor in _run(tensors, config):
        looked_up = name == _ROWS_ALONE or (name in _EMBEDDINGS and not _HEADS.isdisjoint(tensors))
        size = 0 if looked_up else _interleaved_bytes(name, tensor, config)
        alone = not interleaved or not size
        packed += tensor.nbytes if alone else size
        if len(tensor.shape) == 1 or name.endswith((".bias", ".conv.weight", ".ssm_conv1d.weight")):
            copies += 4 * prod(tensor.shape)
        elif alone and config.block.rope_pairs and name.endswith(_REORDERED):
            copies += tensor.nbytes
        read += _bytes_read(name, tensor.nbytes, tensors, config)
    return WeightBytes(packed, copies, read, EXACT, "header")


def _interleaved_bytes(name: str, tensor: Tensor, config: ModelConfig) -> int:
    """What a matrix takes where it is interleaved; 0 = it is not."""
    shape, of_heads = tensor.shape, config.latents if name.endswith(".attn_kv_b.weight") else None
    if of_heads and tensor.type in INTERLEAVED:  # keys in float16, and values: see model/latents.py
        each = of_heads.plain + of_heads.dim_v
        heads, values = shape[0] // each, tensor.nbytes * of_heads.dim_v // each
        keys = 2 * heads * of_heads.plain * shape[1]
        return keys + repacked.interleaved_bytes(tensor.type, (heads, of_heads.dim_v, shape[1]), values)
    if "_gate_up_exps." in name:  # two matrices of each expert
        shape = (2, shape[0], shape[1] // 2, *shape[2:])
    return repacked.interleaved_bytes(tensor.type, shape, tensor.nbytes)


def _run(tensors: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """All tensors but those of layers that are not run, and keys and values of layers that read other layers' rows."""
    idle = [f"blk.{config.n_layers + i}." for i in range(len(config.ahead))]
    for i, layer in enumerate(config.layers):
        if layer.shares_kv_with is not None:
            idle += [f"blk.{i}.attn_{x}." for x in ("k", "v", "k_norm")]
    return ((name, tensor) for name, tensor in tensors.items() if not name.startswith(tuple(idle)))


def _weights_on_gpu(tensors: Mapping[str, Tensor], config: ModelConfig) -> WeightBytes:
    """As repacked; a head that is the embedding stands in the file once, and so on the GPU."""
    packed = read = in_file = 0
    for name, tensor in _run(tensors, config):
        size = repacked.device_bytes(tensor.type, tensor.shape, tensor.nbytes)
        if name.endswith(_OF_HEADS):
            size = 2 * prod(tensor.shape)
        packed, in_file = packed + size, in_file + tensor.nbytes
        read += _bytes_read(name, size, tensors, config)
    mib = 1 << 20
    same = round(packed / mib) == round(in_file / mib)
    return WeightBytes(
        packed, 0, read, EXACT, "header" if same else f"repacked; {in_file / mib:,.0f} MiB in the file", in_file
    )


def _bytes_read(name: str, size: int, tensors: Mapping[str, Tensor], config: ModelConfig) -> int:
    """Of a tensor of `size` bytes, those that one token reads."""
    if name == _ROWS_ALONE:
        return size // max(1, config.vocab_size)
    if name in _EMBEDDINGS and not _HEADS.isdisjoint(tensors):
        return 0
    if config.experts and _OF_EXPERTS.search(name):
        return size * config.experts.routing.used // config.experts.routing.experts
    return size


def weights_of_params(params: int, active: int, bits: float, detail: str) -> WeightBytes:
    """Weights known by their number only, at `bits` per weight; `active` of them are read for a token."""
    return WeightBytes(round(params * bits / 8), 0, round(active * bits / 8), COMPUTED, detail)


def activation_bytes(config: ModelConfig, rows: int, queries: int = 1) -> int:
    """The most alive at once while `rows` tokens pass through a layer on a CPU: float32. `queries`: of each token and
    head, 2 with kept rows before evicted ones."""
    width = max((_widest(config, layer, queries) for layer in set(config.layers)), default=0)
    fixed = _FIXED_BYTES * max(min(rows + 8, _FIXED_ROWS) * -(-_longest_row(config) // 32), _fixed_pairs(config, rows))
    return rows * 4 * (width + _beside(config)) + _angle_bytes(config, rows) + fixed


def _beside(config: ModelConfig) -> int:
    """Elements alive per row beside the residual stream and what a sublayer makes of it."""
    tokens = 3 * config.n_layers * config.d_token  # projected, looked up, and their sum
    # Streams as they are and predicted, LAuReL and what goes into it.
    return tokens + ((2 * config.altup.streams + 3) * config.d_model if config.altup else 0)


def _fixed_pairs(config: ModelConfig, rows: int) -> int:
    """Blocks of 32 numbers of what experts read, or heads of latents, with rows that fill tiles of each of them."""
    most = 0
    for used, count, longest in _pairings(config):
        pairs = min(rows * used, _FIXED_PAIRS)
        most = max(most, (pairs + min(3 * count, pairs)) * -(-longest // 32))
    return most


def _pairings(config: ModelConfig) -> Iterator[tuple[int, int, int]]:
    """Matrices that a row is multiplied with, of so many, and the numbers of the longest row."""
    if experts := config.experts:
        yield experts.routing.used, experts.routing.experts, max(config.d_model, experts.d_ff)
    if latents := config.latents:
        rank = max((x.dim_v for x in config.layers if x.kind == LATENT), default=0)
        yield config.n_heads, config.n_heads, max(latents.plain, rank)


def _longest_row(config: ModelConfig) -> int:
    """Numbers of the longest row that a product reads."""
    outputs = [out for layer in set(config.layers) for _, _, out in _projections(config, layer)]
    return max(config.d_model, _dense_width(config), *outputs)


def _angle_bytes(config: ModelConfig, rows: int) -> int:
    """Tables of RoPE, and float64 to make them."""
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    return rows * (sum(4 * r.dim for r in ropes) + 8 * max((r.dim for r in ropes), default=0))


def gpu_workspace_bytes(config: ModelConfig, rows: int, queries: int = 1, captured: int = 0) -> int:
    """The most that a GPU needs besides weights and cache for steps of `rows` tokens, or for a decoded one. `queries`:
    see `activation_bytes`; `captured`: rows of the largest graph, 0 = that of one sequence."""
    d, f = max(1, config.d_model), max(1, _dense_width(config))
    expanded = max(2 * cols * min(n, _slice_rows(cols)) for n, cols in ((config.vocab_size, d), (2 * f, d), (d, f)))
    staged = min(config.context_length, _STAGED_ROWS)
    past = max((staged * 2 * x.kv_heads * (x.dim_k + x.dim_v) for x in config.layers if x.kind != RECURRENT), default=0)
    captured = captured or min(rows, STEP_ROWS[-1])
    steps = gpu_step_bytes(config, rows, queries) + gpu_step_bytes(config, captured, queries, True)
    return steps + expanded + past + _unabsorbed_bytes(config) + _LIBRARY_BYTES


def _unabsorbed_bytes(config: ModelConfig) -> int:
    """Keys and values of all heads, made of latents, some at a time: see kernels/gpu/latentpast.py."""
    rotary = max((x.dim_k for x in config.layers if x.kind == LATENT), default=0)
    if config.latents is None or not rotary:
        return 0
    width = max(config.latents.plain + rotary, config.latents.dim_v)
    return 2 * min(config.context_length * config.n_heads, _LATENT_CELLS) * 4 * width


def gpu_step_bytes(config: ModelConfig, rows: int, queries: int, captured: bool = False) -> int:
    """What is alive at once of a step of so many rows, or of the graphs of so many or fewer."""
    d, f = config.d_model, _dense_width(config)
    width = partials = 0
    for layer in set(config.layers):
        mlp = 3 * d // 2 + max(2 * f + f // 2, f // 2 + d, _mixture_on_gpu(config))
        for q, kv, out in _projections(config, layer, gpu=True):
            # Rows that products read are float16, with the float32 ones beside them where those are not a norm's.
            width = max(width, mlp, 3 * d // 2 + queries * q // 2 + q + kv + max(out, 3 * out // 2 + d))
        if layer.kind != RECURRENT:
            parts = max(DECODE_PARTS, rows * PREFILL_PARTS[queries - 1])
            parts = graph_parts(config, layer, rows, queries) if captured else parts
            partials = max(partials, 4 * config.n_heads * parts * (layer.dim_v + 2))
    return rows * 4 * (width + _beside(config)) + _angle_bytes(config, rows) + partials


def graph_parts(config: ModelConfig, layer: LayerConfig, rows: int, queries: int) -> int:
    """Parts of all rows of a graph, for each head: fewer rows are cut into more of them, to keep a card busy."""
    block = max(1, GRAPH_QUERIES * layer.kv_heads // max(1, config.n_heads))
    shares = min(rows * DECODE_PARTS, block * GRAPH_PROGRAMS // layer.kv_heads)
    return max(rows, shares) + rows * _GRAPH_OTHERS[queries - 1]


def _slice_rows(cols: int) -> int:
    return max(1, _SLICE_BYTES // (2 * cols) // _SLICE_ROWS) * _SLICE_ROWS


def _widest(config: ModelConfig, layer: LayerConfig, queries: int) -> int:
    """Elements alive per row: residual, normed input, projections, attention output; or the MLP's."""
    d, f = config.d_model, _dense_width(config)
    each = _projections(config, layer)
    over_rows = max(2 * d + (queries + 2 * bool(config.block.qk_norm)) * q + kv + out for q, kv, out in each)
    outputs = [out for _, _, out in each]
    mlp = d + max(*outputs, d) + max(d + 2 * f, 3 * f, _mixture(config))
    padded = max((x for x in (d, f, *outputs) if x % _LANES), default=0)
    return max(over_rows, mlp) + padded


def _dense_width(config: ModelConfig) -> int:
    """Of the widest feed-forward part that every token has."""
    experts = config.experts
    return config.d_ff if experts is None else max(config.d_ff if experts.has_dense else 0, experts.shared_ff)


def _mixture(config: ModelConfig) -> int:
    """Elements alive per row in a mixture of experts on a CPU: see kernels/experts.py. Products copy rows by expert."""
    if (experts := config.experts) is None:
        return 0
    d, f, shared, used = config.d_model, experts.d_ff, experts.shared_ff, experts.routing.used
    products = max(_whole(d) + 2 * f, 3 * f, f + _whole(f) + d)
    beside = 2 * d if experts.beside else 0  # what the dense part gave, and what the router reads
    return beside + d + experts.routing.experts + max(used * products, used * d + d, d + 3 * shared, 2 * d + shared)


def _mixture_on_gpu(config: ModelConfig) -> int:
    """The same on a GPU, in units of four bytes: rows of products are float32, activated ones float16; see
    kernels/gpu/experts.py, which sorts pairs."""
    if (experts := config.experts) is None:
        return 0
    d, f, used = config.d_model, experts.d_ff, experts.routing.used
    shared = max(2 * experts.shared_ff + experts.shared_ff // 2, experts.shared_ff // 2 + d)
    products = max(2 * f + f // 2 + 1, f // 2 + 1 + d) + _SORTED
    beside = 2 * d if experts.beside else 0
    return beside + d + experts.routing.experts + max(used * products, shared)


def _projections(config: ModelConfig, layer: LayerConfig, gpu: bool = False) -> list[tuple[int, int, int]]:
    """Elements of a token's queries, of its keys and values, and of the attention output; of what keeps a state
    likewise. A layer may have both."""
    found = []
    if isinstance(layer.mixer, DeltaNet):
        found.append(_of_delta(layer.mixer, gpu))
    elif isinstance(layer.mixer, Mamba):
        found.append(_of_mamba(layer.mixer, gpu))
    elif layer.kind == RECURRENT:
        found.append((config.d_model, 2 * config.d_model, config.d_model))
    if layer.kind != RECURRENT:
        found.append(_of_attention(config, layer))
    return found


def _of_attention(config: ModelConfig, layer: LayerConfig) -> tuple[int, int, int]:
    beside = layer.dim_v if layer.kind == LATENT else layer.turned  # what queries of joined records have besides
    q = config.n_heads * (layer.dim_k + beside)
    out = config.n_heads * layer.dim_v
    return q, layer.kv_heads * (layer.dim_k + layer.dim_v), out


def guess_bytes(config: ModelConfig) -> int:
    """What layers with a state computed GUESSED_ROWS rows from, which may have to be taken back: float32."""
    return 4 * GUESSED_ROWS * sum(_carried_width(config, layer) for layer in config.layers)


def _carried_width(config: ModelConfig, layer: LayerConfig) -> int:
    """Elements of a row that the state of a layer goes on from; 0 = it has none, or kv does not run it."""
    if isinstance(layer.mixer, DeltaNet):
        return _of_delta(layer.mixer, gpu=False)[0]
    if isinstance(layer.mixer, Mamba):
        return _of_mamba(layer.mixer, gpu=False)[0]
    return 0 if layer.mixer is None else 3 * config.d_model


def _of_delta(mixer: DeltaNet, gpu: bool) -> tuple[int, int, int]:
    """The same of a gated delta network: what it reads, what its kernels make of that, and what heads give. On a GPU
    each head has two rows beside those of its chunk, and its products with these: see kernels/gpu/chunks.py."""
    heads, inner = mixer.value_heads, mixer.value_heads * mixer.dim_v
    channels = 2 * mixer.key_heads * mixer.dim_k + inner
    chunks = heads * (_power(mixer.dim_k) + _power(mixer.dim_v) + _CHUNK_ROWS + 3) if gpu else 0
    return channels + inner + 2 * heads, channels + chunks, inner


def _of_mamba(mixer: Mamba, gpu: bool) -> tuple[int, int, int]:
    """The same of Mamba-2, whose heads have one such row."""
    inner = mixer.heads * mixer.dim
    chunks = mixer.heads * (_power(mixer.dim) + _CHUNK_ROWS + 3) if gpu else 0
    return inner + mixer.channels + mixer.heads, mixer.channels + chunks, inner


def _power(n: int) -> int:
    """The power of two that holds n, 16 at least."""
    return max(16, 1 << (n - 1).bit_length())


def scratch_bytes(config: ModelConfig, page_size: int, threads: int, queries: int = 1) -> int:
    """Scratch of the CPU kernels: for each thread a panel of decoded weights, or a page and its queries."""
    experts = config.experts
    widest = max(config.d_model, _dense_width(config), experts.d_ff if experts else 0)
    most = max(_PANEL * _whole(widest), 4 * _whole(experts.routing.experts if experts else 0))
    for layer in set(config.layers):
        if layer.kind != RECURRENT:
            dim_k, dim_v = _whole(layer.dim_k), _whole(layer.dim_v, 4 * _LANES)
            rows = _QUERY_BLOCK * max(1, config.n_heads // layer.kv_heads)
            page = page_size * (dim_k + dim_v + 1)
            most = max(most, page + rows * (queries * dim_k + 3 * dim_v + 6))
    return 4 * threads * most


def _whole(elements: int, step: int = _LANES) -> int:
    return -(-elements // step) * step


def logit_bytes(config: ModelConfig, sequences: int = 1, kind: str = CPU) -> int:
    """A row of logits for each sequence (its last token's only), and the sampler's copies of one; a GPU samples for all
    at once."""
    others = 1 if kind == CPU else _LOGIT_COPIES
    return 4 * config.vocab_size * (_LOGIT_COPIES + others * (sequences - 1))


def tokenizer_bytes(config: ModelConfig) -> int:
    fixed, each = _TOKENIZER_BYTES
    return fixed + each * config.vocab_size
