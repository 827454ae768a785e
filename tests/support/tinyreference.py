"""Tiny random models of transformers."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from tinyshapes import CONTEXT, Variant
from tinyvariants import family_of


class Headed(torch.nn.Module):
    """A text model that transformers has no head for, with one."""

    def __init__(self, config: Any) -> None:
        from transformers import AutoModel

        super().__init__()
        self.config = config
        self.model = AutoModel.from_config(config, attn_implementation="eager", dtype=torch.float32)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.model(ids).last_hidden_state))


def reference_of(variant: Variant, vocab_size: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    family = family_of(variant)
    settings: dict[str, Any] = {"num_hidden_layers": 3, "max_position_embeddings": CONTEXT, "hidden_size": 48}
    settings |= {"intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "vocab_size": vocab_size}
    settings |= copy.deepcopy(family.settings | variant.settings)  # transformers adds to what it is given
    config = AutoConfig.for_model(variant.kind or family.kind or variant.arch, **settings)
    if type(config) in AutoModelForCausalLM._model_mapping:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    else:
        model = Headed(config)
    model.eval()
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():  # larger than transformers' own, or layers would do next to nothing
        scale = 0.2 if weight.dim() == 1 else 1.5 * weight.shape[-1] ** -0.5
        mean = 1.0 if weight.dim() == 1 and name.endswith("weight") and not family.one_more else 0.0
        weight.data = mean + scale * torch.randn(weight.shape, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.5 + float(torch.rand(1, generator=generator)))
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.data = 0.3 * torch.randn(buffer.shape, generator=generator)
    if variant.padding:
        model.get_output_embeddings().weight.data[-variant.padding :] *= 50  # they would win every draw
    return model
