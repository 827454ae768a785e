"""What tests of `kv estimate` share: a card, a small file, folders of their own."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

CARD = ("llama-3.1-8b", "-c", "65536", "--gpu", "rtx3060-12g")


def use_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def ok(outcome: tuple[int, str, str]) -> str:
    code, out, err = outcome
    assert (code, err) == (0, "")
    return out
