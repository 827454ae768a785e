"""Tiny random heads of EAGLE-3 for tiny models: the folder, and the head in plain torch."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file

HEADS, KV_HEADS, DIM, WIDTH, KNOWN, BASE = 4, 2, 16, 64, 120, 1e4
READS = (0, 1, 2)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-heads-")


@functools.cache
def make(variant: str, own_embedding: bool = False, normed: bool = False) -> tuple[Path, Head]:
    """A head for the model of that variant; it knows every third token and some more."""
    main = tiny.make(variant)
    head = Head(main, own_embedding, normed)
    path = Path(_folder().name) / f"{variant}-{own_embedding}-{normed}"
    path.mkdir(exist_ok=True)
    steps = head.ids - torch.arange(KNOWN)
    marks = torch.zeros(main.n_tokens, dtype=torch.bool).index_fill(0, head.ids, True)
    save_file({**head.tensors, "d2t": steps, "t2d": marks}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(head.config))
    return path, head


class Head:
    """The arithmetic of the paper, one row after the other in float32."""

    def __init__(self, main: tiny.Tiny, own_embedding: bool, normed: bool) -> None:
        self.main, self.normed = main.reference, normed
        d, generator = main.reference.config.hidden_size, torch.Generator().manual_seed(3)
        spread = torch.randperm(main.n_tokens, generator=generator)[:KNOWN]
        self.ids = spread.sort().values

        def matrix(rows: int, cols: int) -> torch.Tensor:
            return 1.5 * cols**-0.5 * torch.randn(rows, cols, generator=generator)

        shapes = {
            "self_attn.q_proj": (HEADS * DIM, 2 * d), "self_attn.k_proj": (KV_HEADS * DIM, 2 * d),
            "self_attn.v_proj": (KV_HEADS * DIM, 2 * d), "self_attn.o_proj": (d, HEADS * DIM),
            "mlp.gate_proj": (WIDTH, d), "mlp.up_proj": (WIDTH, d), "mlp.down_proj": (d, WIDTH),
        }  # fmt: skip
        self.tensors = {f"midlayer.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            self.tensors[f"midlayer.{name}.weight"] = 1 + 0.2 * torch.randn(d, generator=generator)
        self.tensors["norm.weight"] = 1 + 0.2 * torch.randn(d, generator=generator)
        self.tensors["fc.weight"] = matrix(d, 3 * d)
        self.tensors["lm_head.weight"] = matrix(KNOWN, d)
        self.embedding = main.reference.get_input_embeddings().weight.data
        if own_embedding:
            self.embedding = self.tensors["embed_tokens.weight"] = matrix(main.n_tokens, d)
        self.config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": d,
            "intermediate_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "head_dim": DIM, "num_hidden_layers": 1, "vocab_size": main.n_tokens, "draft_vocab_size": KNOWN,
            "rms_norm_eps": 1e-5, "rope_theta": BASE, "max_position_embeddings": tiny.CONTEXT, "hidden_act": "silu",
            "tie_word_embeddings": False, "norm_before_residual": normed,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(READS), "use_aux_hidden_state": True},
        }  # fmt: skip

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.tensors[f"{name}.weight"]

    @torch.inference_mode()
    def fused(self, ids: list[int]) -> torch.Tensor:
        """Features of the model's rows [n, d]."""
        layers = self.main.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.cat([layers[i][0] for i in READS], 1) @ self.tensors["fc.weight"].T

    @torch.inference_mode()
    def rows(self, ids: list[int], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Over tokens, each with the features of the row before it: logits [n, KNOWN], and features behind [n, d]."""
        of, n = lambda name: self.tensors[f"midlayer.{name}.weight"], len(ids)
        embedded = self._norm(self.embedding[torch.tensor(ids)], "midlayer.input_layernorm")
        second = self._norm(features, "midlayer.hidden_norm")
        both = torch.cat((embedded, second), 1)
        q, k, v = ((both @ of(f"self_attn.{x}_proj").T).view(n, -1, DIM).transpose(0, 1) for x in "qkv")
        angles = torch.arange(n)[:, None] * BASE ** (-torch.arange(0, DIM, 2) / DIM)
        q, k = (_turned(x, angles) for x in (q, k))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        scores = (q @ k.mT * DIM**-0.5).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
        heads = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = (second if self.normed else features) + heads @ of("self_attn.o_proj").T
        normed = self._norm(x, "midlayer.post_attention_layernorm")
        gates = torch.nn.functional.silu(normed @ of("mlp.gate_proj").T)
        x = x + (gates * (normed @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T
        return self._norm(x, "norm") @ self.tensors["lm_head.weight"].T, x

    def chain(self, known: list[int], count: int) -> list[int]:
        """So many guesses of what follows."""
        features, ids, found = self.fused(known)[:-1], known[1:], list[int]()
        while True:
            logits, behind = self.rows(ids, features)
            found.append(int(self.ids[logits[-1].argmax()]))
            if len(found) == count:
                return found
            features, ids = torch.cat((features, behind[-1:])), [*ids, found[-1]]


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
