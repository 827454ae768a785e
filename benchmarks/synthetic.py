"""GGUF files with the shapes of real models and random weights, to try large plans without large downloads.

    python benchmarks/synthetic.py 1b OUT.gguf                  # Llama-3.2-1B: tied embeddings, about 0.8 GB
    python benchmarks/synthetic.py 8b OUT.gguf --quant Q8_0     # Llama-3.1-8B: 8.5 GB, 4.9 GB as Q4_K_M
    python benchmarks/synthetic.py 8b OUT.gguf --vocab 4096     # small embeddings: quicker to write
    python benchmarks/synthetic.py 30b-a3b OUT.gguf             # Qwen3-30B-A3B: 128 experts, 8 a token, 18.6 GB
    python benchmarks/synthetic.py 9b-delta OUT.gguf            # Qwen3.5-9B: gated delta networks, 5.6 GB
    python benchmarks/synthetic.py 9b-delta OUT.gguf --layers 8 # fewer of its layers
    python benchmarks/synthetic.py lite OUT.gguf --quant Q8_0   # DeepSeek V2 Lite: latents
    python benchmarks/synthetic.py falcon-h1-7b OUT.gguf        # and other states: nemotron-h-8b, granite-h-3b, lfm2-1b

Every block is a valid one with finite scales, so `kv run` computes with real cost and says nonsense. `--vocab` is the
number of tokens; the tokenizer is a byte-level one of exactly that size. Blocks are written in pieces: memory stays
below 200 MiB whatever the model's size. Nothing is written unless the disk has 1 GiB more than the file needs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np
from synthetic_shapes import SHAPES, Shape, Tensor, tensors

PIECE_BYTES = 16 << 20  # random bytes made at a time
KEEP_FREE_BYTES = 1 << 30
SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def random_blocks(tensor: Tensor, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """The tensor's bytes, piece by piece: random codes, scales such that a weight is about 1 / sqrt(columns)."""
    if tensor.type == "F32":
        router = len(tensor.shape) > 1 and not tensor.name.endswith("norm.weight")
        values = rng.standard_normal(tensor.shape) * tensor.shape[-1] ** -0.5 if router else np.ones(tensor.shape)
        if tensor.name.endswith(("ssm_a", "ssm_dt.bias")):  # states forget a half in some ten tokens, or in thousands
            values = -(10.0 ** rng.uniform(-2, 1, tensor.shape)) if tensor.name.endswith("ssm_a") else values * -4
        if tensor.name.endswith("conv1d.bias"):
            values = np.zeros(tensor.shape)
        yield values.astype("<f4").view(np.uint8).reshape(-1)
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
    if misfits := [t.name for t in table if not t.whole]:
        sys.exit(f"{misfits[0]} has rows that are no whole blocks of {quant}: --quant Q8_0 has smaller ones")
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
    writer.add_head_count(shape.heads)
    _add_layers(writer, shape)
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


def _add_layers(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """What layers are made of."""
    alone, listed = shape.arch == "nemotron_h", shape.arch in ("nemotron_h", "granitehybrid", "lfm2")
    wide = shape.dense_ffn or shape.ffn
    writer.add_feed_forward_length(shape.each("-", wide) if alone else wide)
    writer.add_head_count_kv(shape.each("*", shape.kv_heads) if listed else shape.kv_heads)
    (rank, turned), dim = shape.latent, shape.head_dim
    writer.add_key_length(rank + turned if rank else dim)
    writer.add_value_length(rank or dim)
    writer.add_rope_dimension_count(turned or (dim // 4 if shape.arch == "qwen35" else dim))
    if rank:
        writer.add_kv_lora_rank(rank)
        writer.add_key_length_mla(dim)
        writer.add_value_length_mla(dim - turned)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.ffn)
    if shape.shared:
        writer.add_expert_shared_count(shape.shared)
        writer.add_leading_dense_block_count(shape.dense)
    if "D" in shape.pattern:
        keys, values, size = shape.delta
        _add_states(writer, size, keys, values, values * size)
    if shape.mamba[0]:
        heads, size, groups, state = shape.mamba
        _add_states(writer, state, groups, heads, heads * size)
    if "C" in shape.pattern:
        writer.add_shortconv_l_cache(3)
    if shape.arch in ("nemotron_h", "granitehybrid"):
        writer.add_rope_scaling_finetuned(False)
    if shape.arch == "granitehybrid":
        for key, value in {"embedding_scale": 12.0, "attention.scale": 1 / 64, "residual_scale": 0.22}.items():
            writer.add_float32(f"granitehybrid.{key}", value)
        writer.add_logit_scale(8.0)


def _add_states(writer: gguf.GGUFWriter, state: int, groups: int, heads: int, inner: int) -> None:
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_conv_kernel(4)


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
