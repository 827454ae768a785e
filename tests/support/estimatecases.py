"""What tests of `kv estimate` share: a card, a small file, folders of their own; ideal cache formulas.

A test module that imports the fixtures has them: `small`, and `own_folders` for every test.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvcli.runtime.plan.plan import heads_per_rank

CARD = ("llama-3.1-8b", "-c", "65536", "--gpu", "rtx3060-12g")

# Bytes per element of the ideal formula. "-bare" types carry no scales; qN_M are llama.cpp's blocks of 32.
IDEAL_BYTES = {
    "f32": Fraction(4), "f16": Fraction(2), "bf16": Fraction(2),
    "fp8-bare": Fraction(1), "int8-bare": Fraction(1), "int4-bare": Fraction(1, 2),
    "q8_0": Fraction(34, 32), "q5_1": Fraction(24, 32), "q5_0": Fraction(22, 32), "q4_1": Fraction(20, 32),
    "q4_0": Fraction(18, 32), "iq4_nl": Fraction(18, 32),
}  # fmt: skip


@dataclass(frozen=True)
class IdealGroup:
    """`layers` alike: elements per head of K and V, tokens seen (0 = all). MLA: one head, dim_v 0."""

    layers: int
    kv_heads: int
    dim_k: int
    dim_v: int
    window: int = 0

    def token_bytes(self, type_k: str, type_v: str) -> Fraction:
        """Bytes of one token in all layers of the group."""
        return self.layers * self.kv_heads * (self.dim_k * IDEAL_BYTES[type_k] + self.dim_v * IDEAL_BYTES[type_v])

    def per_rank(self, ranks: int) -> IdealGroup:
        """The group on one of `ranks` devices: heads are divided while they last, then repeated."""
        return replace(self, kv_heads=heads_per_rank(self.kv_heads, ranks))


def ideal_token_bytes(groups: Iterable[IdealGroup], type_k: str, type_v: str | None = None) -> Fraction:
    """Σ layers x KV heads x (dim_k x bytes_k + dim_v x bytes_v): a token's cost while no window is full."""
    return sum((g.token_bytes(type_k, type_v or type_k) for g in groups), Fraction(0))


def ideal_bytes(
    groups: Iterable[IdealGroup], tokens: int, type_k: str, type_v: str | None = None, sequences: int = 1
) -> Fraction:
    """Bytes of the tokens that each layer keeps, min(tokens, window), without pages, chunks or tails."""
    total = Fraction(0)
    for g in groups:
        total += g.token_bytes(type_k, type_v or type_k) * (min(tokens, g.window) if g.window else tokens)
    return sequences * total


@pytest.fixture(autouse=True, name="own_folders")
def fixture_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing measured or downloaded on this machine may change the answers."""
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


def small_file(folder: Path) -> Path:
    """A llama file of two layers with a vocabulary of 100."""
    path = folder / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for i in range(2):
        writer.add_tensor(f"blk.{i}.attn_q.weight", np.zeros((64, 64), np.float16))
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.zeros(64, np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((100, 64), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(name="small")
def fixture_small(tmp_path: Path) -> Path:
    return small_file(tmp_path)


def ok(outcome: tuple[int, str, str]) -> str:
    code, out, err = outcome
    assert (code, err) == (0, "")
    return out
