"""`kv estimate` of every kind of attention, of files, folders and shapes by hand."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
from conftest import KvHere
from estimatecases import fixture_own_folders, fixture_small, ok  # noqa: F401

MIB = 1 << 20


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "gemma-3-12b", "falcon-7b", "mistral-7b-v0.1", "gpt-oss-120b", "llama-3.1-405b"]
)
@pytest.mark.parametrize("card", ["rtx3060-12g", "h200-141g"])
def test_every_kind_of_model_fits_the_terminal(name: str, card: str, kv_here: KvHere) -> None:
    code, out, _ = kv_here("estimate", name, "--gpu", card)
    assert code in (0, 4)
    assert max(map(len, out.splitlines())) <= 80, out


def test_attention_kinds(kv_here: KvHere) -> None:
    assert "61 × 576 × 2 B = 70,272 B (latent" in ok(kv_here("estimate", "deepseek-v3", "--vram", "800G"))
    assert "MQA · 32 full layers · 71 query heads · 1 KV head (71:1)" in ok(
        kv_here("estimate", "falcon-7b", "--vram", "80G")
    )
    gemma = ok(kv_here("estimate", "gemma-3-12b", "--vram", "80G"))
    assert "8 full + 40 sliding layers" in gemma
    assert "40 × 8 × (256 K + 256 V) × 2 B = 327,680 B up to 1,024 tokens" in gemma


def test_a_latent_model_has_no_values_of_their_own(kv_here: KvHere) -> None:
    out = ok(kv_here("estimate", "deepseek-v3", "--vram", "800G", "--csv"))
    assert all(row["type_k"] == row["type_v"] for row in csv.DictReader(io.StringIO(out)))


def test_a_file(small: Path, kv_here: KvHere) -> None:
    out = ok(kv_here("estimate", str(small), "--json", "--device", "cpu"))
    answer = json.loads(out)
    weights = 2 * (64 * 64 * 2 + 64 * 4) + 100 * 64 * 2
    fixed = {row["name"]: row for row in answer["fixed"]}
    assert fixed["weights"]["predicted_bytes"] == weights and fixed["weights"]["source"] == "exact"
    assert fixed["weight copies"]["predicted_bytes"] == 2 * (64 * 64 * 2 + 64 * 4)  # q is reordered, norms are decoded
    assert fixed["margin"]["predicted_bytes"] == 512 * MIB
    assert answer["attention"] == {
        "kind": "gqa", "state_bytes": 0,
        "groups": [{"kind": "full", "layers": 2, "kv_heads": 2, "dim_k": 16, "dim_v": 16, "window": None}],
    }  # fmt: skip
    f16 = next(row for row in answer["types"] if row["type_k"] == "f16")
    assert f16["bytes_per_token"] == 2 * 2 * 32 * 2
    assert (f16["ctx_size"], f16["pages"], f16["max_ctx_size"]) == (512, 8, 512)
    assert answer["recommend"]["args"] == ["--cache-type-k", "f16", "--cache-type-v", "f16", "-c", "512"]
    assert answer["device"] == "cpu" and answer["device_info"]["source"] in ("MemAvailable", "cgroup")
    assert (answer["page_size"], answer["kv_schema"]) == (64, 2)


def test_a_further_token_where_windows_are_full(kv_here: KvHere) -> None:
    """In KiB at f16: 8 full layers of 8 heads with 256 + 256 elements; the 40 sliding ones hold 1,024 tokens."""
    for context, cost in (("1000", "384.0"), ("32k", "64.0")):
        out = ok(kv_here("estimate", "gemma-3-12b", "--vram", "80G", "-c", context))
        row = next(line.split() for line in out.splitlines() if line.startswith("f16 "))
        assert row[1] == cost
        assert ("KiB/token  of a further token, now that windows are full" in out) is (cost == "64.0")
    rows = json.loads(ok(kv_here("estimate", "gemma-3-12b", "--vram", "80G", "--json")))["types"]
    f16 = next(row for row in rows if row["type_k"] == "f16")
    assert (f16["bytes_per_token"], f16["windows_full_bytes_per_token"]) == (384 << 10, 64 << 10)
    small = "--layers 2 --kv-heads 1 --heads 1 --head-dim 64 --hidden 64 --swa-layers 1 --swa-window 128 -c 1024"
    assert "512 B/token, 256 once windows are full" in ok(kv_here("estimate", *small.split()))


def test_a_shape_by_hand(kv_here: KvHere) -> None:
    shape = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "-c", "8192", "--batch-size", "64")
    out = ok(kv_here("estimate", *shape, "--cache-type", "bf16"))
    assert "131,072 B/token · 65,536 MiB" in out
    exact = ok(kv_here("estimate", *shape, "--cache-type", "bf16", "--units", "B"))
    assert "131,072 B/token · 68,719,476,736 B" in exact
    assert "weights are not counted" in out
    counted = ok(kv_here("estimate", *shape[:-2], "--params", "8b", "--bpw", "16", "--vram", "80G", "--json"))
    weights = json.loads(counted)["fixed"][0]
    assert [weights[key] for key in ("name", "predicted_bytes", "source")] == ["weights", 16_000_000_000, "computed"]


def test_a_missing_context_length_is_asked_for(tmp_path: Path, kv_here: KvHere) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for add in (writer.add_block_count, writer.add_head_count):
        add(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_tensor("token_embd.weight", np.zeros((10, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    code, _, err = kv_here("estimate", str(path))
    assert code == 2 and "llama.context_length" in err and "-c N supplies it" in err
    assert kv_here("estimate", str(path), "-c", "100")[0] == 0


def test_a_safetensors_folder(tmp_path: Path, kv_here: KvHere) -> None:
    from safetensors.numpy import save_file

    matrix, vector = np.zeros((100, 64), np.float16), np.zeros(64, np.float16)
    tensors = {"model.embed_tokens.weight": matrix, "lm_head.weight": matrix, "model.norm.weight": vector}
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, str(folder / "model.safetensors"))
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    others = {"vocab_size": 100, "intermediate_size": 128, "max_position_embeddings": 512}
    config = {"model_type": "mistral", "sliding_window": 256} | sizes | others
    (folder / "config.json").write_text(json.dumps(config))
    answer = json.loads(
        ok(kv_here("estimate", str(folder), "--json", "--bandwidth", "1", "--device", "cpu", "-ct", "f16"))
    )
    assert answer["attention"]["groups"] == [
        {"kind": "sliding", "layers": 2, "kv_heads": 2, "dim_k": 16, "dim_v": 16, "window": 256}
    ]
    assert answer["fixed"][0]["predicted_bytes"] == 2 * 12800 + 128
    read = 12800 + 128 + 256 * 2 * 2 * 32 * 2  # not the input embedding; one window of the cache
    assert answer["types"][0]["limit_tps"] == pytest.approx(1e9 / read, rel=1e-4)
    (folder / "config.json").unlink()
    code, _, err = kv_here("estimate", str(folder))
    assert code == 3 and "config.json" in err


def test_a_folder_is_planned_as_it_runs(kv_here: KvHere) -> None:
    """The same as the file that it would become."""
    words = ("--json", "--bandwidth", "1", "--device", "cpu", "-ct", "f16")
    folder, file = (
        json.loads(ok(kv_here("estimate", str(each), *words)))
        for each in (tiny.folder("llama-untied"), tiny.make("llama-untied").path)
    )
    assert folder["model_info"]["runs"] is file["model_info"]["runs"] is True
    assert [folder[key] for key in ("attention", "fixed")] == [file[key] for key in ("attention", "fixed")]
    same = ("bytes_per_token", "kv_bytes", "predicted_bytes", "limit_tps")  # what is free changes meanwhile
    assert [folder["types"][0][key] for key in same] == [file["types"][0][key] for key in same]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "layers"),
    [
        ("llama4", "3 chunked + 1 full layers"),
        ("gemma3n", "2 sliding + 1 full + 3 sharing layers"),
        ("gemma4-experts", "1 sliding + 2 full layers"),
    ],
)
def test_families_with_layers_of_several_kinds(kv_here: KvHere, variant: str, layers: str) -> None:
    path = str(tiny.make(variant).path)
    code, out, err = kv_here("estimate", path, "-c", "256", "--device", "cpu")
    assert (code, err) == (0, "") and layers in out
    assert kv_here("estimate", "--explain", path, "-c", "256", "--device", "cpu")[0] == 0
