"""Shapes of models, and the tensors that files of them have: what synthetic.py writes."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np

Row = tuple[str, tuple[int, ...], str]  # name, shape and type


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: a llama; with `experts` a qwen3moe, of which a token has `used`, `ffn` wide each.

    `pattern`, again and again, says what layers are: "*" attention, "D" a gated delta network of `delta` (key heads,
    value heads, size of each), "M" Mamba-2 of `mamba` (heads, their size, groups, size of the state), "C" a short
    convolution, "B" Mamba-2 beside attention, "-" a feed-forward part alone. `latent`: rank and dims that RoPE turns.
    `dense`: layers without experts, which come first, `dense_ffn` wide; `shared`: experts that every token has."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 128256
    context: int = 131072
    tied: bool = False
    experts: int = 0
    used: int = 0
    family: str = ""
    pattern: str = "*"
    delta: tuple[int, int, int] = (0, 0, 0)
    mamba: tuple[int, int, int, int] = (0, 0, 0, 0)
    latent: tuple[int, int] = (0, 0)
    dense: int = 0
    dense_ffn: int = 0
    shared: int = 0

    @property
    def arch(self) -> str:
        return self.family or ("qwen3moe" if self.experts else "llama")

    def kind(self, layer: int) -> str:
        return self.pattern[layer % len(self.pattern)]

    def each(self, kinds: str, value: int) -> list[int]:
        """The value for layers of these kinds, 0 for others."""
        return [value if self.kind(i) in kinds else 0 for i in range(self.layers)]

    @property
    def channels(self) -> int:
        """Of the convolution of Mamba-2."""
        heads, size, groups, state = self.mamba
        return heads * size + 2 * groups * state


SHAPES = {
    "1b": Shape(16, 2048, 8192, 32, 8, 64, tied=True),
    "8b": Shape(32, 4096, 14336, 32, 8, 128),
    "30b-a3b": Shape(48, 2048, 768, 32, 4, 128, vocab=151936, context=40960, experts=128, used=8),
    "9b-delta": Shape(
        32, 4096, 12288, 16, 4, 256, vocab=248320, context=262144, family="qwen35", pattern="DDD*", delta=(16, 32, 128)
    ),
    "falcon-h1-7b": Shape(
        44,
        3072,
        12288,
        12,
        2,
        128,
        vocab=130048,
        context=262144,
        family="falcon-h1",
        pattern="B",
        mamba=(24, 128, 1, 256),
    ),
    "nemotron-h-8b": Shape(
        52,
        4096,
        21504,
        32,
        8,
        128,
        vocab=131072,
        context=8192,
        family="nemotron_h",
        mamba=(128, 64, 8, 128),
        pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    ),
    "granite-h-3b": Shape(
        40,
        2048,
        8192,
        32,
        8,
        64,
        vocab=100352,
        tied=True,
        family="granitehybrid",
        pattern="MMMMM*MMMM",
        mamba=(64, 64, 1, 128),
    ),
    "lfm2-1b": Shape(
        16, 2048, 8192, 32, 8, 64, vocab=65536, context=128000, tied=True, family="lfm2", pattern="CC*CC*CC*C*C*C*C"
    ),
    "lite": Shape(
        27,
        2048,
        1408,
        16,
        1,
        192,
        vocab=102400,
        context=163840,
        experts=64,
        used=6,
        family="deepseek2",
        latent=(512, 64),
        dense=1,
        dense_ffn=10944,
        shared=2,
    ),
    "tiny-delta": Shape(
        4, 256, 512, 4, 2, 64, vocab=512, context=2048, family="qwen35", pattern="DDD*", delta=(2, 4, 64)
    ),
    "tiny-falcon": Shape(
        2, 256, 512, 4, 2, 64, vocab=512, context=2048, family="falcon-h1", pattern="B", mamba=(4, 64, 1, 32)
    ),
    "tiny-nemotron": Shape(
        3, 256, 512, 4, 2, 64, vocab=512, context=2048, family="nemotron_h", pattern="M-*", mamba=(4, 64, 2, 32)
    ),
    "tiny-granite": Shape(
        2,
        256,
        512,
        4,
        2,
        64,
        vocab=512,
        context=2048,
        tied=True,
        family="granitehybrid",
        pattern="M*",
        mamba=(4, 64, 1, 32),
    ),
    "tiny-lfm2": Shape(2, 256, 512, 4, 2, 64, vocab=512, context=2048, tied=True, family="lfm2", pattern="C*"),
    "tiny-lite": Shape(
        2,
        256,
        64,
        4,
        1,
        48,
        vocab=512,
        context=2048,
        experts=8,
        used=2,
        family="deepseek2",
        latent=(64, 16),
        dense=1,
        dense_ffn=512,
        shared=2,
    ),
    "tiny-experts": Shape(2, 256, 256, 4, 2, 64, vocab=512, context=2048, experts=8, used=2),
    "tiny": Shape(2, 256, 512, 4, 2, 64, vocab=512, context=2048),
}


@dataclass(frozen=True)
class Tensor:
    """Name, shape in rows and columns, and GGML type."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def whole(self) -> bool:
        """Whether rows are whole blocks."""
        return self.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]][0] == 0

    @property
    def nbytes(self) -> int:
        elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]]
        return int(np.prod(self.shape)) // elements * size


def tensors(shape: Shape, quant: str) -> list[Tensor]:
    """The tensors of the model. `quant`: Q8_0, or Q4_K_M with the better types where that mix has them."""
    base, better = ("Q4_K", "Q6_K") if quant == "Q4_K_M" else (quant, quant)
    d = shape.hidden
    found = [Tensor("token_embd.weight", (shape.vocab, d), better if shape.tied else base)]
    for i in range(shape.layers):
        eighth = shape.layers // 8
        more = i < eighth or i >= 7 * shape.layers // 8 or (i - eighth) % 3 == 2
        found += _layer(f"blk.{i}.", shape, i, base, better if more else base)
    found.append(Tensor("token_embd_norm.weight" if shape.arch == "lfm2" else "output_norm.weight", (d,), "F32"))
    return found if shape.tied else [*found, Tensor("output.weight", (shape.vocab, d), better)]


def _layer(p: str, shape: Shape, i: int, base: str, sensitive: str) -> list[Tensor]:
    kind, inner = shape.kind(i), list[tuple[str, tuple[int, ...], str]]()
    if kind == "D":
        inner += _delta(shape, base)
    if kind == "C":
        inner += [
            ("shortconv.in_proj.weight", (3 * shape.hidden, shape.hidden), base),
            ("shortconv.conv.weight", (shape.hidden, 3), "F32"),
            ("shortconv.out_proj.weight", (shape.hidden, shape.hidden), base),
        ]
    if kind in "MB":
        inner += _mamba(shape, base)
    if kind in "*B":
        inner += _latents(shape, base) if shape.latent[0] else _attention(shape, base, sensitive)
    second = {"qwen35": "post_attention_norm.weight", "falcon-h1": "ffn_norm"}.get(shape.arch, "ffn_norm.weight")
    alone = shape.arch == "nemotron_h"
    norms = [(x, (shape.hidden,), "F32") for x in ("attn_norm.weight", *(() if alone else (second,)))]
    found = [Tensor(p + name, sizes, kind) for name, sizes, kind in (*inner, *norms)]
    if alone and kind != "-":
        return found
    if shape.experts and i >= shape.dense:
        return [*found, *_experts(p, shape, base, sensitive)]
    return [*found, *_dense(p, shape, base, sensitive)]


def _attention(shape: Shape, base: str, sensitive: str) -> list[Row]:
    d, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gates = 2 if shape.arch == "qwen35" else 1  # queries, and gates of as many elements
    normed = shape.arch in ("qwen35", "lfm2", "qwen3moe")
    return [
        ("attn_q.weight", (gates * q, d), base), ("attn_k.weight", (kv, d), base),
        ("attn_v.weight", (kv, d), sensitive), ("attn_output.weight", (d, q), base),
        *((f"attn_{x}_norm.weight", (shape.head_dim,), "F32") for x in ("qk" if normed else "")),
    ]  # fmt: skip


def _latents(shape: Shape, base: str) -> list[Row]:
    """Heads have keys of `head_dim`, of which RoPE turns some, and values as wide as the others."""
    (rank, turned), d, heads = shape.latent, shape.hidden, shape.heads
    plain = shape.head_dim - turned
    return [
        ("attn_q.weight", (heads * shape.head_dim, d), base), ("attn_kv_a_mqa.weight", (rank + turned, d), base),
        ("attn_kv_a_norm.weight", (rank,), "F32"), ("attn_k_b.weight", (heads, rank, plain), base),
        ("attn_v_b.weight", (heads, plain, rank), base), ("attn_output.weight", (d, heads * plain), base),
    ]  # fmt: skip


def _mamba(shape: Shape, base: str) -> list[Row]:
    (heads, size, groups, _), d, channels = shape.mamba, shape.hidden, shape.channels
    inner = heads * size
    norm = [] if shape.arch == "falcon-h1" else [("ssm_norm.weight", (groups, inner // groups), "F32")]
    return [
        ("ssm_in.weight", (inner + channels + heads, d), base), ("ssm_conv1d.weight", (channels, 4), "F32"),
        ("ssm_conv1d.bias", (channels,), "F32"), ("ssm_dt.bias", (heads,), "F32"), ("ssm_a", (heads, 1), "F32"),
        ("ssm_d", (heads, 1), "F32"), ("ssm_out.weight", (d, inner), base), *norm,
    ]  # fmt: skip


def _delta(shape: Shape, base: str) -> list[Row]:
    d, (keys, values, size) = shape.hidden, shape.delta
    channels = (2 * keys + values) * size
    return [
        ("attn_qkv.weight", (channels, d), base), ("attn_gate.weight", (values * size, d), base),
        *((f"ssm_{x}.weight", (values, d), base) for x in ("beta", "alpha")),
        ("ssm_conv1d.weight", (channels, 4), "F32"), ("ssm_a", (values,), "F32"), ("ssm_dt.bias", (values,), "F32"),
        ("ssm_norm.weight", (size,), "F32"), ("ssm_out.weight", (d, values * size), base),
    ]  # fmt: skip


def _dense(prefix: str, shape: Shape, base: str, sensitive: str) -> list[Tensor]:
    f, d = shape.dense_ffn or shape.ffn, shape.hidden
    gate = [] if shape.arch == "nemotron_h" else [Tensor(prefix + "ffn_gate.weight", (f, d), base)]
    up, down = Tensor(prefix + "ffn_up.weight", (f, d), base), Tensor(prefix + "ffn_down.weight", (d, f), sensitive)
    return [*gate, up, down]


def _experts(prefix: str, shape: Shape, base: str, sensitive: str) -> list[Tensor]:
    n, f, d, shared = shape.experts, shape.ffn, shape.hidden, shape.shared * shape.ffn
    return [
        Tensor(prefix + "ffn_gate_inp.weight", (n, d), "F32"),
        *(Tensor(f"{prefix}ffn_{x}_exps.weight", (n, f, d), base) for x in ("gate", "up")),
        Tensor(prefix + "ffn_down_exps.weight", (n, d, f), sensitive),
        *(Tensor(f"{prefix}ffn_{x}_shexp.weight", (shared, d), base) for x in ("gate", "up") if shared),
        *(Tensor(f"{prefix}ffn_{x}_shexp.weight", (d, shared), sensitive) for x in ("down",) if shared),
    ]
