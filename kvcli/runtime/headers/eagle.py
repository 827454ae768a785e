"""`EagleHead`: a folder with a head of EAGLE-3 (arXiv 2503.01840) for another model, as its authors publish them.

`config.json` names the class in `architectures` (LlamaForCausalLMEagle3 and the like). The layer is called `midlayer`
or `layers.0`. `d2t` says how far from its own number each of the head's tokens stands in the model's vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.errors import ModelError
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.formats import safetensors
from kvcli.runtime.headers.safetensorsmodel import SafetensorsModel, read_object
from kvcli.runtime.model.archs import from_gguf
from kvcli.runtime.text.foldernames import CONFIG

if TYPE_CHECKING:
    import numpy as np

    from kvcli.runtime.headers.presented import Presented

OFFSETS = "d2t"
_LAYER = re.compile(r"(?:model\.)?(?:midlayer|layers\.0)\.(.+)\.(weight|bias)")
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_BESIDE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "fc": "fc"}
_OWN_KEYS = (
    "draft_vocab_size",
    "eagle_config",
    "architectures",
    "target_hidden_size",
    "norm_before_residual",
    "auto_map",
)


def is_head(path: Path) -> bool:
    """Whether a folder has such a head. Raises ModelError for a damaged config.json."""
    folder = path if path.is_dir() else path.parent
    if path.suffix == ".gguf" or not (folder / CONFIG).is_file():
        return False
    names = read_object(folder / CONFIG).get("architectures")
    return isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)


class EagleHead(SafetensorsModel):
    """The tensors of a head by names like those of a GGUF file. `config`: of its layer; `normed`: see `Eagle`."""

    config: ModelConfig

    def __init__(self, path: Path) -> None:
        """Raises ModelError for a folder that is no such head, or damaged."""
        super().__init__(path if path.is_dir() else path.parent)
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        config = from_gguf(self.metadata, shapes)
        if config.n_layers != 1 or "fc.weight" not in shapes:
            what = f"{config.n_layers} layers" if config.n_layers != 1 else "no matrix fc.weight"
            raise ModelError(f"the head has {what}; kv runs those of EAGLE-3 with one layer")
        self.config = replace(config, block=replace(config.block, rope_pairs=False))

    def _described(self, folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        of_head, more = self._own(config)
        self.normed = bool(config.get("norm_before_residual") or more.get("norm_before_residual"))
        named = more.get("eagle_aux_hidden_state_layer_ids")
        self._named = tuple(named) if isinstance(named, list) and all(isinstance(x, int) for x in named) else ()
        return super()._described(folder, of_head)

    def _text(self, folder: Path) -> dict[str, Any]:
        return {}  # it has the vocabulary of the model

    def _present(
        self, merged: Mapping[str, safetensors.TensorInfo], config: Mapping[str, Any], quantize: str
    ) -> dict[str, Presented]:
        from kvcli.runtime.formats.packedweights import sources_of
        from kvcli.runtime.headers.presented import Presented

        weights = {name: tensor for name, tensor in merged.items() if name not in (OFFSETS, "t2d")}
        found = {}
        for original, source in sources_of(weights, self._raw, config).items():
            name = _name(original)
            found[name] = Presented.of(name, source)
        return found

    @property
    def offsets(self) -> np.ndarray | None:
        """What to add to a number of one of the head's tokens for that of the model, int64; None = nothing."""
        import numpy as np

        if (tensor := self.stored().get(OFFSETS)) is None:
            return None
        if tensor.type != "I64" or len(tensor.shape) != 1:
            raise ModelError(f"the head's {OFFSETS} is no list of whole numbers", "the file is damaged")
        return np.frombuffer(self.stored_bytes(OFFSETS).tobytes(), np.int64)

    @staticmethod
    def _own(config: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """The config of a model of one layer, and what else is said of the head."""
        more = config.get("eagle_config")
        plain = {key: value for key, value in config.items() if key not in _OWN_KEYS}
        return plain, more if isinstance(more, Mapping) else {}

    def reads(self, n_layers: int) -> tuple[int, ...]:
        """Layers of a model of so many before which its residual stream is read."""
        found = self._named or (2, n_layers // 2, n_layers - 3)
        if not all(0 <= layer < n_layers for layer in found) or list(found) != sorted(set(found)):
            raise ModelError(
                f"the head reads layers {list(found)} of a model that has {n_layers}", "it is of another model"
            )
        return found


def _name(original: str) -> str:
    if layer := _LAYER.fullmatch(original):
        if layer[1] == "hidden_norm":
            return f"hidden_norm.{layer[2]}"
        if layer[1] in _NAMES:
            return f"blk.0.{_NAMES[layer[1]]}.{layer[2]}"
    base, _, end = original.removeprefix("model.").rpartition(".")
    if base in _BESIDE and end in ("weight", "bias"):
        return f"{_BESIDE[base]}.{end}"
    raise ModelError(f"the head has the tensor {original}, which kv does not know of EAGLE-3")
