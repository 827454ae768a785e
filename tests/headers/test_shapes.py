"""Shapes for planning: GGUF keys of any architecture, config.json, recipes, flags."""

from __future__ import annotations

import pytest
from shapecases import gguf, hf, token_bytes, windows

from kvcli.errors import ModelError
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.headers.anygguf import config_from_gguf_any
from kvcli.runtime.headers.shapes import Given

# --- GGUF ---


def test_a_plain_architecture() -> None:
    config = gguf("qwen2")
    assert (config.n_layers, config.n_heads, config.vocab_size, config.context_length) == (4, 8, 1000, 4096)
    assert token_bytes(config) == 4 * 2 * (32 + 32) * 2
    assert config.attention_kind == "GQA"


def test_head_dims_of_their_own() -> None:
    """The width divided by the heads is not the head dim of these models."""
    config = gguf("qwen3", attention__key_length=128, attention__value_length=96)
    assert token_bytes(config) == 4 * 2 * (128 + 96) * 2


def test_heads_per_layer() -> None:
    config = gguf("deci", attention__head_count_kv=[2, 0, 8, 1])
    assert [layer.kv_heads for layer in config.layers] == [2, 0, 8, 1]
    assert token_bytes(config) == (2 + 8 + 1) * 64 * 2
    assert KVLayout.build(config, "f16", "f16").state_bytes == 0


@pytest.mark.parametrize(
    ("arch", "every"), [("gemma2", 2), ("gpt-oss", 2), ("cohere2", 4), ("gemma3n", 5), ("exaone4", 4)]
)
def test_families_without_a_pattern(arch: str, every: int) -> None:
    config = gguf(arch, block_count=20, attention__sliding_window=128)
    assert windows(config) == [0 if (i + 1) % every == 0 else 128 for i in range(20)]


def test_patterns_in_the_file() -> None:
    assert windows(gguf("new", attention__sliding_window=64, attention__sliding_window_pattern=2)) == [
        64,
        0,
        64,
        0,
    ]
    pattern = [True, False, False, True]
    assert windows(gguf("new", attention__sliding_window=64, attention__sliding_window_pattern=pattern)) == [
        64,
        0,
        0,
        64,
    ]
    assert windows(gguf("phi3", attention__sliding_window=2047)) == [2047] * 4
    assert windows(gguf("gemma2")) == [4096, 0, 4096, 0]  # old files lack the window, too


def test_sliding_layers_with_dims_of_their_own() -> None:
    config = gguf(
        "gemma4",
        attention__sliding_window=512,
        attention__sliding_window_pattern=[1, 1, 1, 0],
        attention__key_length=512,
        attention__value_length=512,
        attention__key_length_swa=256,
        attention__value_length_swa=256,
        attention__head_count_kv=[8, 8, 8, 2],
    )
    assert [(x.kv_heads, x.dim_k, x.window) for x in config.layers] == [(8, 256, 512)] * 3 + [(2, 512, 0)]


@pytest.mark.parametrize("modern", [True, False])
def test_latent_attention(modern: bool) -> None:
    """Files of before and after the compressed cache: the latent is the same."""
    keys = {
        "attention__kv_lora_rank": 512,
        "rope__dimension_count": 64,
        "block_count": 61,
        "attention__head_count": 128,
    }
    own = {
        "attention__head_count_kv": 1,
        "attention__key_length": 576,
        "attention__value_length": 512,
        "attention__key_length_mla": 192,
        "attention__value_length_mla": 128,
    }
    old = {"attention__head_count_kv": 128, "attention__key_length": 192, "attention__value_length": 128}
    config = gguf("deepseek2", **keys, **(own if modern else old))
    assert token_bytes(config) == 70272
    assert config.attention_kind == "MLA"


def test_layers_that_share_keys_and_values() -> None:
    config = gguf("gemma3n", block_count=10, attention__sliding_window=512, attention__shared_kv_layers=4)
    assert [layer.shares_kv_with for layer in config.layers] == [None] * 6 + [5, 5, 5, 4]
    groups = KVLayout.build(config, "f16", "f16").groups
    assert sum(len(g.layers) for g in groups) == 6


def test_recurrent_layers_by_interval() -> None:
    """48 of 64 layers: 598.5 MiB for four sequences, and 16,384 MiB of rows at 262,144 tokens."""
    config = gguf(
        "qwen35",
        block_count=64,
        full_attention_interval=4,
        attention__head_count_kv=4,
        attention__key_length=256,
        attention__value_length=256,
        ssm__conv_kernel=4,
        ssm__inner_size=6144,
        ssm__state_size=128,
        ssm__group_count=16,
    )
    layout = KVLayout.build(config, "f16", "f16")
    assert 4 * layout.state_bytes == 598.5 * (1 << 20)
    assert layout.read_bytes(262144) == 16384 << 20


def test_recurrent_layers_by_heads() -> None:
    config = gguf("lfm2", attention__head_count_kv=[0, 0, 2, 0], shortconv__l_cache=3)
    assert [layer.kind for layer in config.layers] == ["recurrent", "recurrent", "full", "recurrent"]
    assert KVLayout.build(config, "f16", "f16").state_bytes == 3 * 2 * 256 * 4


def test_models_without_any_attention() -> None:
    mamba = gguf("mamba", drop="attention.head_count", ssm__conv_kernel=4, ssm__inner_size=512, ssm__state_size=16)
    assert KVLayout.build(mamba, "f16", "f16").state_bytes == 4 * (3 * 512 + 16 * 512) * 4
    assert token_bytes(mamba) == 0 and mamba.attention_kind == "none"
    rwkv = gguf("rwkv6", drop="attention.head_count", wkv__head_size=64)
    assert KVLayout.build(rwkv, "f16", "f16").state_bytes == 4 * (2 * 256 + 256 * 64) * 4


def test_attention_and_state_in_every_layer() -> None:
    config = gguf("falcon-h1", ssm__conv_kernel=4, ssm__inner_size=512, ssm__state_size=16, ssm__group_count=1)
    layout = KVLayout.build(config, "f16", "f16")
    assert layout.token_bytes() == 4 * 2 * 64 * 2
    assert layout.state_bytes == 4 * (3 * 544 + 16 * 512) * 4


def test_states_of_models_by_their_config() -> None:
    """Bytes of a sequence: of Qwen3.5 27B, and of Falcon-H1 and Nemotron H in shapes of theirs."""
    delta = {"linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128}
    delta |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
    qwen = hf(model_type="qwen3_5_text", num_hidden_layers=64, **delta)
    assert KVLayout.build(qwen, "f16", "f16").state_bytes == 48 * 4 * (3 * 10240 + 48 * 128 * 128) == 156_893_184
    mamba = {"mamba_d_state": 128, "mamba_n_groups": 8, "mamba_d_conv": 4}
    falcon = hf(model_type="falcon_h1", **mamba, mamba_d_ssm=1024, mamba_n_heads=16)
    assert KVLayout.build(falcon, "f16", "f16").state_bytes == 4 * 4 * (3 * 3072 + 1024 * 128)
    assert token_bytes(falcon) == 4 * 2 * 2 * 32 * 2
    heads = {"mamba_num_heads": 16, "mamba_head_dim": 64, "head_dim": 32}
    nemotron = hf(model_type="nemotron_h", drop="num_hidden_layers", hybrid_override_pattern="M-M*ME", **mamba, **heads)
    assert nemotron.arch == "nemotron_h_moe" and [nemotron.has_experts(i) for i in range(6)] == [0, 1, 0, 0, 0, 1]
    assert KVLayout.build(nemotron, "f16", "f16").state_bytes == 3 * 4 * (3 * 3072 + 1024 * 128)
    assert token_bytes(nemotron) == 2 * 2 * 32 * 2


def test_experts_widen_the_workspace() -> None:
    config = gguf("qwen3moe", expert_count=128, expert_used_count=8, expert_feed_forward_length=768)
    assert config.experts and (config.experts.routing.used, config.experts.d_ff, config.d_ff) == (8, 768, 512)
    novel = gguf("novel", expert_count=8, expert_used_count=2)  # kv does not run it, but plans for it
    assert novel.experts and novel.experts.routing.experts == 8


def test_layers_that_only_predict_are_left_out() -> None:
    assert gguf("glm4moe", block_count=5, nextn_predict_layers=1).n_layers == 4


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ("block_count", "--layers"),
        ("attention.head_count", "--heads"),
        ("embedding_length", "--hidden"),
        ("feed_forward_length", "--ffn"),
        ("vocab_size", "--vocab"),
    ],
)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_missing_key_is_named_with_its_flag(arch: str, key: str, flag: str) -> None:
    with pytest.raises(ModelError) as error:
        gguf(arch, drop=key)
    assert f"{arch}.{key}" in error.value.message
    assert error.value.hint == f"{flag} supplies it"
    values = {"--layers": 4, "--heads": 8, "--hidden": 256, "--ffn": 512, "--vocab": 1000}
    supplied = gguf(arch, Given(**{flag[2:]: values[flag]}), drop=key)
    assert token_bytes(supplied) == token_bytes(gguf(arch))


def test_other_missing_keys() -> None:
    with pytest.raises(ModelError, match=r"gpt-oss\.attention\.sliding_window"):
        gguf("gpt-oss")
    with pytest.raises(ModelError, match=r"rope\.dimension_count"):
        gguf("deepseek2", attention__kv_lora_rank=512)
    with pytest.raises(ModelError, match=r"ssm\.state_size"):
        gguf("qwen3next")
    with pytest.raises(ModelError, match=r"general\.architecture"):
        config_from_gguf_any({}, {})
    assert gguf("qwen2", drop="context_length").context_length == 0


@pytest.mark.parametrize("value", [-1, 1 << 40, "many", 1.5, True, [2, 2]])
def test_odd_values_are_refused(value: object) -> None:
    with pytest.raises(ModelError, match="head_count_kv"):
        gguf("qwen2", attention__head_count_kv=value)
    if not isinstance(value, list):
        with pytest.raises(ModelError, match="block_count"):
            gguf("qwen2", block_count=value)


# --- config.json ---


def test_hf_plain_and_explicit_dims() -> None:
    assert token_bytes(hf()) == 4 * 2 * 64 * 2
    assert token_bytes(hf(head_dim=128)) == 4 * 2 * 256 * 2
    assert (
        token_bytes(
            hf(
                text_config={
                    "model_type": "y",
                    "num_hidden_layers": 1,
                    "hidden_size": 64,
                    "num_attention_heads": 1,
                    "vocab_size": 10,
                }
            )
        )
        == 64 * 2 * 2
    )


def test_hf_windows() -> None:
    assert windows(hf(sliding_window=4096)) == [4096] * 4
    assert windows(hf(sliding_window=4096, use_sliding_window=False)) == [0] * 4
    assert windows(hf(sliding_window=64, use_sliding_window=True, max_window_layers=2)) == [0, 0, 64, 64]
    assert windows(hf(model_type="gemma2", sliding_window=64)) == [64, 0, 64, 0]
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(hf(layer_types=kinds, sliding_window=64)) == [64, 0, 0, 64]
    with pytest.raises(ModelError, match="sliding_window"):
        hf(layer_types=kinds)


def test_hf_latent_and_recurrent() -> None:
    assert token_bytes(hf(num_hidden_layers=61, kv_lora_rank=512, qk_rope_head_dim=64)) == 70272
    config = hf(
        num_hidden_layers=64,
        num_key_value_heads=4,
        head_dim=256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_num_value_heads=48,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )
    assert 4 * KVLayout.build(config, "f16", "f16").state_bytes == 598.5 * (1 << 20)


def test_hf_falcon() -> None:
    keys = {"model_type": "falcon", "num_attention_heads": 71, "hidden_size": 4544, "num_hidden_layers": 32}
    assert token_bytes(hf(drop="num_key_value_heads", **keys)) == 8192
    forty = {"model_type": "falcon", "num_attention_heads": 128, "hidden_size": 8192, "num_hidden_layers": 60}
    assert token_bytes(hf(drop="num_key_value_heads", new_decoder_architecture=True, num_kv_heads=8, **forty)) == 122880


def test_hf_missing_and_odd() -> None:
    with pytest.raises(ModelError) as error:
        hf(drop="num_attention_heads")
    assert "num_attention_heads" in error.value.message and error.value.hint == "--heads supplies it"
    assert hf(Given(heads=8), drop="num_attention_heads").n_heads == 8
    for value in (-1, "8", 1 << 40, True, 1.5):
        with pytest.raises(ModelError):
            hf(num_hidden_layers=value)
    with pytest.raises(ModelError, match="layer_types"):
        hf(layer_types=["full_attention"])
    with pytest.raises(ModelError, match="cannot plan"):
        hf(layer_types=["hyena"] * 4)
