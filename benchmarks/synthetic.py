"""GGUF files with the shapes of real models and random weights, to try large plans without large downloads.

    python benchmarks/synthetic.py 1b OUT.gguf                  # Llama-3.2-1B: tied embeddings, about 0.8 GB
    python benchmarks/synthetic.py 8b OUT.gguf --quant Q8_0     # Llama-3.1-8B: 8.5 GB, 4.9 GB as Q4_K_M
    python benchmarks/synthetic.py 8b OUT.gguf --vocab 4096     # small embeddings: quicker to write
    python benchmarks/synthetic.py 30b-a3b OUT.gguf             # Qwen3-30B-A3B: 128 experts, 8 a token, 18.6 GB
    python benchmarks/synthetic.py 30b-a3b OUT.gguf --layers 3  # fewer of its 48 layers
    python benchmarks/synthetic.py 9b-delta OUT.gguf            # Qwen3.5-9B: gated delta networks, 5.6 GB

Every block is a valid one with finite scales, so `kv run` computes with real cost and says nonsense. `--vocab` is the
number of tokens; the tokenizer is a byte-level one of exactly that size. Blocks are written in pieces: memory stays
below 200 MiB whatever the model's size. Nothing is written unless the disk has 1 GiB more than the file needs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np

PIECE_BYTES = 16 << 20  # random bytes made at a time
KEEP_FREE_BYTES = 1 << 30
SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: a llama; with `experts` a qwen3moe, of which a token has `used`, `ffn` wide each; with `delta`
    (key heads, value heads, size of each) a qwen35, which has attention in every fourth layer."""

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
    delta: tuple[int, int, int] | None = None

    @property
    def arch(self) -> str:
        if self.delta:
            return "qwen35"
        return "qwen3moe" if self.experts else "llama"


SHAPES = {
    "1b": Shape(16, 2048, 8192, 32, 8, 64, tied=True),
    "8b": Shape(32, 4096, 14336, 32, 8, 128),
    "30b-a3b": Shape(48, 2048, 768, 32, 4, 128, vocab=151936, context=40960, experts=128, used=8),
    "9b-delta": Shape(32, 4096, 12288, 16, 4, 256, vocab=248320, context=262144, delta=(16, 32, 128)),
    "tiny-delta": Shape(4, 256, 512, 4, 2, 64, vocab=512, context=2048, delta=(2, 4, 64)),
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
    def nbytes(self) -> int:
        elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]]
        return int(np.prod(self.shape)) // elements * size


def tensors(shape: Shape, quant: str) -> list[Tensor]:
    """The tensors of the model. `quant`: Q8_0, or Q4_K_M with the better types where that mix has them."""
    base, better = ("Q4_K", "Q6_K") if quant == "Q4_K_M" else (quant, quant)
    d, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found = [Tensor("token_embd.weight", (shape.vocab, d), better if shape.tied else base)]
    for i in range(shape.layers):
        eighth = shape.layers // 8
        more = i < eighth or i >= 7 * shape.layers // 8 or (i - eighth) % 3 == 2
        sensitive, p = better if more else base, f"blk.{i}."
        if shape.delta:
            found += _hybrid(p, shape, i, base, sensitive)
            continue
        found += [
            Tensor(p + "attn_norm.weight", (d,), "F32"),
            Tensor(p + "attn_q.weight", (q, d), base),
            Tensor(p + "attn_k.weight", (kv, d), base),
            Tensor(p + "attn_v.weight", (kv, d), sensitive),
            Tensor(p + "attn_output.weight", (d, q), base),
            Tensor(p + "ffn_norm.weight", (d,), "F32"),
            *(_experts(p, shape, base, sensitive) if shape.experts else _dense(p, shape, base, sensitive)),
        ]
    found.append(Tensor("output_norm.weight", (d,), "F32"))
    return found if shape.tied else [*found, Tensor("output.weight", (shape.vocab, d), better)]


def _dense(prefix: str, shape: Shape, base: str, sensitive: str) -> list[Tensor]:
    f, d = shape.ffn, shape.hidden
    return [
        Tensor(prefix + "ffn_gate.weight", (f, d), base),
        Tensor(prefix + "ffn_up.weight", (f, d), base),
        Tensor(prefix + "ffn_down.weight", (d, f), sensitive),
    ]


def _hybrid(prefix: str, shape: Shape, layer: int, base: str, sensitive: str) -> list[Tensor]:
    """A layer of a qwen35."""
    assert shape.delta is not None
    d, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    keys, values, size = shape.delta
    channels = (2 * keys + values) * size
    if (layer + 1) % 4:
        inner = [
            ("attn_qkv.weight", (channels, d), base), ("attn_gate.weight", (values * size, d), base),
            *((f"ssm_{x}.weight", (values, d), base) for x in ("beta", "alpha")),
            ("ssm_conv1d.weight", (channels, 4), "F32"), ("ssm_a", (values,), "F32"), ("ssm_dt.bias", (values,), "F32"),
            ("ssm_norm.weight", (size,), "F32"), ("ssm_out.weight", (d, values * size), base),
        ]  # fmt: skip
    else:
        inner = [
            ("attn_q.weight", (2 * q, d), base), ("attn_k.weight", (kv, d), base),
            ("attn_v.weight", (kv, d), sensitive), ("attn_output.weight", (d, q), base),
            *((f"attn_{x}_norm.weight", (shape.head_dim,), "F32") for x in "qk"),
        ]  # fmt: skip
    norms = [(f"{x}_norm.weight", (d,), "F32") for x in ("attn", "post_attention")]
    return [*(Tensor(prefix + name, sizes, kind) for name, sizes, kind in inner + norms),
            *_dense(prefix, shape, base, sensitive)]  # fmt: skip


def _experts(prefix: str, shape: Shape, base: str, sensitive: str) -> list[Tensor]:
    """The experts of a layer, and the norms of heads that a qwen3moe has."""
    n, f, d = shape.experts, shape.ffn, shape.hidden
    return [
        *(Tensor(f"{prefix}attn_{x}_norm.weight", (shape.head_dim,), "F32") for x in "qk"),
        Tensor(prefix + "ffn_gate_inp.weight", (n, d), "F32"),
        Tensor(prefix + "ffn_gate_exps.weight", (n, f, d), base),
        Tensor(prefix + "ffn_up_exps.weight", (n, f, d), base),
        Tensor(prefix + "ffn_down_exps.weight", (n, d, f), sensitive),
    ]


def random_blocks(tensor: Tensor, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """The tensor's bytes, piece by piece: random codes, scales such that a weight is about 1 / sqrt(columns)."""
    if tensor.type == "F32":
        router = len(tensor.shape) > 1
        values = rng.standard_normal(tensor.shape) * tensor.shape[-1] ** -0.5 if router else np.ones(tensor.shape)
        if tensor.name.endswith(("ssm_a", "ssm_dt.bias")):  # states forget a half in some ten tokens, or in thousands
            values = -(10.0 ** rng.uniform(-2, 1, tensor.shape)) if tensor.name.endswith("ssm_a") else values * -4
        yield values.astype("<f4").view(np.uint8)
        return
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.type]][1]
    target = tensor.shape[-1] ** -0.5
    left = tensor.nbytes // size
    while left:
        count = min(left, PIECE_BYTES // size)
        blocks = np.frombuffer(rng.bytes(count * size), dtype=np.uint8).reshape(count, size).copy()
        for offset, scale in _scales(tensor.type, target):
            blocks[:, offset : offset + 2] = np.array([scale], dtype="<f2").view(np.uint8)
        yield blocks
        left -= count


def _scales(type_: str, target: float) -> list[tuple[int, float]]:
    """(offset in a block, value) of each 16-bit scale, for weights of standard deviation `target` around zero."""
    if type_ == "Q8_0":
        return [(0, target / 74)]
    if type_ == "Q6_K":  # behind the codes and the 8-bit scales of the parts
        return [(208, target / 1370)]
    return [(0, target / 257), (2, 7.5 * target / 257)]  # Q4_K: the minimum takes the mean of the codes away


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges of a byte-level BPE of exactly `size` tokens, control tokens last."""
    if size < 256 + len(SPECIALS):
        sys.exit(f"--vocab is {size}: a byte-level tokenizer has {256 + len(SPECIALS)} tokens at least")
    letters = [_letter(byte) for byte in range(256)]
    merges = list(islice(_merges(letters), size - 256 - len(SPECIALS)))
    tokens = letters + ["".join(pair) for pair in merges] + list(SPECIALS)
    return tokens, [1] * (size - len(SPECIALS)) + [3] * len(SPECIALS), [" ".join(pair) for pair in merges]


def _letter(byte: int) -> str:
    """The character that stands for a byte in a byte-level vocabulary: itself where it can be seen."""
    if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
        return chr(byte)
    return chr(256 + sum(1 for b in range(byte) if not (33 <= b <= 126 or 161 <= b <= 172 or b >= 174)))


def _merges(letters: list[str]) -> Iterator[tuple[str, str]]:
    """Every pair of letters, then every pair with a third letter."""
    yield from ((a, b) for a in letters for b in letters)
    yield from ((a + b, c) for a in letters for b in letters for c in letters)


def write(path: Path, shape: Shape, quant: str, seed: int = 1) -> int:
    """Write the model; its size in bytes. Exits with a message where the disk is too small."""
    table = tensors(shape, quant)
    need = sum(t.nbytes for t in table)
    free = shutil.disk_usage(path.resolve().parent).free
    if free < need + KEEP_FREE_BYTES:
        sys.exit(f"{path} needs {need:,} bytes and 1 GiB to spare, {free:,} are free")
    alignment = _write_header(path, shape, quant, table)
    rng = np.random.default_rng(seed)
    with path.open("ab") as file:
        _pad(file, alignment)
        for tensor in table:
            for piece in random_blocks(tensor, rng):
                file.write(piece.data)
            _pad(file, alignment)
        return file.tell()


def _write_header(path: Path, shape: Shape, quant: str, table: list[Tensor]) -> int:
    """Metadata and the table of tensors; the alignment of the data."""
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_name(f"synthetic {shape.arch}, {shape.layers} layers of {shape.hidden}, {quant}")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.ffn)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim // 4 if shape.delta else shape.head_dim)
    if shape.delta:
        keys, values, size = shape.delta
        writer.add_ssm_state_size(size)
        writer.add_ssm_group_count(keys)
        writer.add_ssm_time_step_rank(values)
        writer.add_ssm_inner_size(values * size)
        writer.add_ssm_conv_kernel(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_vocab_size(shape.vocab)
    tokens, kinds, merges = vocabulary(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    first = shape.vocab - len(SPECIALS)
    writer.add_bos_token_id(first)
    writer.add_eos_token_id(first + SPECIALS.index("<|eot_id|>"))
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    for t in table:
        kind = gguf.GGMLQuantizationType[t.type]
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return int(writer.data_alignment)


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quant", choices=("Q4_K_M", "Q8_0"), default="Q4_K_M")
    parser.add_argument("--vocab", type=int, help="number of tokens (as in the real model)")
    parser.add_argument("--layers", type=int, help="number of layers (as in the real model)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("vocab", "layers") if getattr(options, name) is not None}
    shape = replace(SHAPES[options.shape], **given)
    size = write(options.out, shape, options.quant, options.seed)
    print(f"{options.out}: {size:,} bytes")


if __name__ == "__main__":
    main()
