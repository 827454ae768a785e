"""config.json of every family that transformers knows: the shape is that of the class of its config."""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

import hfdefaults
import pytest

from kvcli.errors import ModelError
from kvcli.runtime.config import CHUNKED, FULL, LATENT, RECURRENT, SLIDING, ModelConfig
from kvcli.runtime.headers.anygguf import config_from_hf
from kvcli.runtime.headers.hflayers import SAYING

# From the table, for transformers takes seconds to import.
TYPES = [name for name, row in json.loads(hfdefaults.PATH.read_text(encoding="utf-8"))["types"].items() if row]


_KINDS = {"sliding_attention": SLIDING, "chunked_attention": CHUNKED}


@functools.cache
def classes() -> dict[str, Any]:
    try:
        return {cls.model_type: cls for cls in hfdefaults.classes()}
    finally:
        logging.disable(logging.NOTSET)  # which it leaves disabled, for what is tested behind it as well


NOT_FROM_FEW = ("nemotron_h", "bailing_hybrid")  # their layers, or the state of these, must be said


def shape_of(config: ModelConfig) -> list[tuple[Any, ...]]:
    return [
        (x.kind, x.window, x.kv_heads, x.dim_k, x.dim_v) if x.kind != RECURRENT else (RECURRENT,) for x in config.layers
    ]


def truth_of(config: Any) -> list[tuple[Any, ...]]:
    """What the class says each layer keeps."""
    n = config.num_hidden_layers
    named = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    layers = []
    for i in range(n):
        each = config.per_layer_config[i] if config.per_layer_config else config
        window = getattr(each, "sliding_window", None) or 0
        kind = named[i] if named else ("sliding_attention" if window else "full_attention")
        if kind in ("linear_attention", "conv", "mlp", "moe", "mamba"):
            layers.append((RECURRENT,))
        elif getattr(each, "kv_lora_rank", None):
            index = getattr(each, "index_head_dim", None) or 0
            layers.append((LATENT, 0, 1, each.qk_rope_head_dim + index, each.kv_lora_rank))
        else:
            heads = each.num_attention_heads
            dim = getattr(each, "head_dim", None) or each.hidden_size // heads
            kv_heads = getattr(each, "num_key_value_heads", None) or heads
            if config.model_type == "falcon":  # the attention of its smaller models has one
                kv_heads = each.num_kv_heads if each.new_decoder_architecture or not each.multi_query else 1
            if kind == "chunked_attention":
                window = each.attention_chunk_size
            elif kind != "sliding_attention":
                window = 0
            layers.append(
                (
                    _KINDS.get(kind, FULL) if window else FULL,
                    window,
                    kv_heads,
                    dim,
                    getattr(each, "v_head_dim", None) or dim,
                )
            )
    return layers


@pytest.mark.parametrize("model_type", TYPES)
def test_the_shape_is_that_of_the_class(model_type: str):
    if (cls := classes().get(model_type)) is None:
        pytest.skip("another version of transformers, which lacks it")
    for changed in ({}, {"num_hidden_layers": 13}):
        config, few = cls(**changed), {"model_type": model_type, **changed}
        expected = truth_of(config)
        assert shape_of(config_from_hf(json.loads(json.dumps(config.to_dict(), default=str)))) == expected
        if model_type in NOT_FROM_FEW:
            with pytest.raises(ModelError):
                config_from_hf(few)
        else:
            assert shape_of(config_from_hf(few)) == expected


def test_the_table_is_up_to_date():
    from transformers import __version__

    written = json.loads(hfdefaults.PATH.read_text(encoding="utf-8"))
    if written["transformers"] != __version__:
        pytest.skip("the table is that of another version of transformers")
    assert written == json.loads(hfdefaults.text()), "run python tests/support/hfdefaults.py"


@pytest.mark.parametrize("model_type", hfdefaults.NOT_PLANNED)
def test_a_family_whose_shape_is_not_known_is_refused(model_type: str):
    with pytest.raises(ModelError, match=f"of the type {model_type} from its config.json"):
        config_from_hf({"model_type": model_type, "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 1})


# --- what makers write ---


def hf(family: str = "x", **keys: Any) -> ModelConfig:
    base = {"num_hidden_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    base |= {"vocab_size": 1000, "intermediate_size": 512, "max_position_embeddings": 4096}
    return config_from_hf({"model_type": family, **base, **keys})


def windows(config: ModelConfig) -> list[int]:
    return [layer.window for layer in config.layers]


def rows(config: ModelConfig) -> list[int]:
    """KV heads of each layer, 0 where it keeps no rows."""
    return [layer.kv_heads for layer in config.layers]


@pytest.mark.parametrize("family", ("qwen2", "qwen3", "qwen2_moe"))
def test_qwen_slides_only_where_it_is_told_to(family: str):
    assert windows(hf(family, sliding_window=64)) == [0] * 8
    assert windows(hf(family, sliding_window=64, use_sliding_window=False)) == [0] * 8
    assert windows(hf(family, sliding_window=64, use_sliding_window=True)) == [0] * 8  # from layer 28 on
    assert windows(hf(family, sliding_window=64, use_sliding_window=True, max_window_layers=6)) == [0] * 6 + [64] * 2
    assert windows(hf(family, sliding_window=None, use_sliding_window=True, max_window_layers=6)) == [0] * 8


def test_null_is_not_the_default_of_the_class():
    assert windows(hf("mistral")) == [4096] * 8 and windows(hf("mistral", sliding_window=None)) == [0] * 8


def test_llama4_has_chunks_but_in_every_fourth_layer():
    assert windows(hf("llama4_text", attention_chunk_size=128)) == [128, 128, 128, 0] * 2
    assert windows(hf("llama4_text", no_rope_layers=[1, 0] * 4, attention_chunk_size=128)) == [128, 0] * 4


def test_attention_layers_under_all_their_keys():
    some = [0, 0, 0, 2, 0, 0, 0, 2]
    mamba = {"mamba_d_state": 16, "mamba_d_conv": 4}
    assert rows(hf("nemotron_h", hybrid_override_pattern="M-M*M-M*")) == some
    assert rows(hf("bamba", attn_layer_indices=[3, 7])) == some
    assert rows(hf("lfm2", full_attn_idxs=[3, 7], conv_L_cache=3)) == some
    assert rows(hf("minimax", attn_type_list=[0, 0, 0, 1] * 2)) == some
    assert rows(hf("jamba", attn_layer_period=4, attn_layer_offset=3, **mamba)) == some
    kimi = {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "num_heads": 8, "head_dim": 32}
    config = hf("kimi_linear", linear_attn_config={**kimi, "short_conv_kernel_size": 4})
    assert [layer.kind for layer in config.layers] == ([RECURRENT] * 3 + [LATENT]) * 2
    assert {layer.state_bytes for layer in config.layers if layer.kind == RECURRENT} == {4 * (9 * 256 + 8 * 32 * 32)}


def test_layers_of_nemotron_that_only_feed_forward_keep_no_state():
    config = hf("nemotron_h", hybrid_override_pattern="M-M*M-M*", ssm_state_size=16, n_groups=1, conv_kernel=4)
    assert [bool(layer.state_bytes) for layer in config.layers] == [True, False, True, False, True, False, True, False]


def test_sizes_of_full_layers():
    types = (["sliding_attention"] * 3 + ["full_attention"]) * 2
    keys = {"layer_types": types, "sliding_window": 64, "head_dim": 32, "global_head_dim": 64, "attention_k_eq_v": True}
    config = hf("gemma4_text", **keys, num_global_key_value_heads=1)
    assert [(x.kv_heads, x.dim_k, x.window) for x in config.layers] == ([(2, 32, 64)] * 3 + [(1, 64, 0)]) * 2
    own = {str(i): {"head_dim": 64} for i in (3, 7)}
    del keys["global_head_dim"]
    assert hf("gemma4_text", **keys, per_layer_config=own, num_global_key_value_heads=1).layers == config.layers


def test_kv_heads_under_other_names():
    glm = {
        "num_layers": 3,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "multi_query_attention": True,
        "kv_channels": 16,
    }
    glm |= {"multi_query_group_num": 2, "padded_vocab_size": 99, "ffn_hidden_size": 64, "seq_length": 512}
    config = config_from_hf({"model_type": "chatglm", **glm})
    assert (rows(config), config.layers[0].dim_k, config.d_ff, config.vocab_size) == ([2] * 3, 16, 64, 99)
    assert rows(config_from_hf({"model_type": "chatglm", **glm, "multi_query_attention": False})) == [8] * 3
    table = {"kv_n_heads": 4}
    dbrx = {"model_type": "dbrx", "n_layers": 2, "d_model": 256, "n_heads": 8, "attn_config": table}
    assert rows(config_from_hf(dbrx)) == [4, 4]
    blocks = [{"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.5}}] * 7
    blocks.append({"attention": {"no_op": True}, "ffn": {"ffn_mult": 6.0}})
    searched = hf("nemotron-nas", block_configs=blocks)
    assert (rows(searched), searched.d_ff) == ([2] * 7 + [0], 1024)


@pytest.mark.parametrize("nest", ("text_config", "llm_config", "language_config", "the_language_part"))
def test_the_language_model_is_found(nest: str):
    vision = {"num_hidden_layers": 99, "hidden_size": 8, "num_attention_heads": 1, "model_type": "siglip_vision_model"}
    inner = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
    config = config_from_hf({"model_type": "y", "vision_config": vision, nest: inner})
    assert shape_of(config) == [(FULL, 0, 4, 16, 16)] * 3
    thinker = {"thinker_config": {"vision_config": vision, "text_config": inner}, "talker_config": inner}
    assert shape_of(config_from_hf(thinker)) == [(FULL, 0, 4, 16, 16)] * 3


def test_few_keys_are_filled_as_the_class_does():
    config = config_from_hf({"model_type": "gemma3", "text_config": {"num_hidden_layers": 34, "hidden_size": 2560}})
    assert (config.n_heads, config.vocab_size, config.layers[0].kv_heads, config.layers[0].dim_k) == (8, 262208, 4, 256)
    assert windows(config)[:7] == [4096] * 5 + [0, 4096]
    llava = config_from_hf({"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}})
    assert (llava.n_layers, llava.d_model, llava.vocab_size) == (32, 4096, 32064)


def test_a_list_of_widths_is_one_for_each_layer():
    assert hf(intermediate_size=[512] * 7 + [2048]).d_ff == 2048
    with pytest.raises(ModelError, match=r"intermediate_size in config\.json must name 8 layers, not 2"):
        hf(intermediate_size=[512, 2048])


def test_a_key_that_may_change_the_shape_is_refused_by_its_name():
    for key, value in {"kv_cache_layers": 4, "compressed_head_ratio": 2, "attention_window_list": [1]}.items():
        with pytest.raises(ModelError, match=f"does not know what {key} = "):
            hf(**{key: value})
        hf(**{key: None})
    hf(attention_dropout=0.1, layer_norm_eps=1e-5, some_new_training_key=3)


def test_a_number_in_quotes_is_told_from_one_out_of_range():
    with pytest.raises(ModelError, match=r"num_attention_heads in config\.json has the value '4', not a whole number"):
        hf(num_attention_heads="4")
    with pytest.raises(ModelError, match=r"num_attention_heads in config\.json has the value -4, out of range"):
        hf(num_attention_heads=-4)


FUZZED = ("x", "llama", "gemma4_text", "kimi_linear", "nemotron_h", "qwen3_next", "llama4_text", "deepseek_v3")


@pytest.mark.slow
def test_what_is_no_number_and_no_table_is_refused():
    """Whatever stands at a key: a config, or one error of ours. A family's own keys have every value there, and others
    some of them, which are others in each family."""
    values: list[Any] = [None, True, 0, -1, 2, 1 << 40, 1.5, "x", [], [1], [[1]], {}, {"a": 1}, ["full_attention"] * 8]
    keys = {key for cls in classes().values() for key in hfdefaults.defaults_of(cls)} | set(SAYING)
    always = {"rope_scaling", "rope_parameters", "partial_rotary_factor", "attn_config", "linear_attn_config"}
    always |= {"block_configs", "per_layer_config", "text_config", "model_type", "global_head_dim", "swa_head_dim"}
    always |= set(SAYING)
    for number, family in enumerate(FUZZED):
        own = always | set(hfdefaults.defaults_of(classes()[family])) if family in classes() else always
        for key in keys | always:
            for value in values if key in own else values[number % 4 :: 4]:
                try:
                    hf(family, **{key: value})
                except ModelError:
                    continue
    wide = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}}
    for value in values:
        try:
            hf("gemma4_text", rope_parameters=wide, per_layer_config={"3": value})
        except ModelError:
            continue
    scaling = ("factor", "rope_theta", "original_max_position_embeddings", "attention_factor", "mrope_section")
    for kind in ("linear", "yarn", "longrope", "llama3", "dynamic", "su", 3, None, []):
        for value in values:
            for key in scaling:
                try:
                    hf(rope_scaling={"rope_type": kind, "factor": 2.0, key: value})
                except ModelError:
                    continue
