"""The keys of a GGUF file under one architecture's prefix, read with checks; what nobody reads is not passed over.

A key that changes what is computed is obeyed by the reader of its architecture (`config.py`) or refused by name. Keys
that only describe the file (sizes that tensors have anyway, how it was trained) are harmless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcli.errors import ModelError

OTHER_MODEL = "kv would compute another model than this one"
_NEEDS_A_READER = ("rope.", "attention.")  # an unknown key of these changes the model, as far as one can tell
_HARMLESS = {
    "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",  # of use to YaRN alone
}  # fmt: skip
# Keys that no reader obeys, and the values with which they change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.kv_lora_rank": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.q_lora_rank": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.value_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "full_attention_interval": (0, 1),
    "logit_scale": (0, 1),
    "n_deepstack_layers": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (0,),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 0),
    "rope.scaling.yarn_log_multiplier": (0,),
    "swiglu_clamp_exp": (0,),
    "use_parallel_residual": (False,),
}


class Keys:
    """Typed access to GGUF metadata under one architecture's prefix; a missing or odd value names its key.

    A list of equal values, one a layer, is that value.
    """

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self.metadata, self.arch = metadata, arch
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; from now on the key counts as read."""
        self._read.add(key)
        return self.metadata.get(f"{self.arch}.{key}", default)

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        """A positive number, with `zero` also 0. Raises ModelError."""
        value, full = _common_value(self.get(key, default)), f"{self.arch}.{key}"
        if value is None:
            raise ModelError(f"the GGUF file lacks the key {full}", "the file is incomplete; convert it again")
        if _is_list(value):
            raise ModelError(f"{full} differs between the layers, which kv does not compute", OTHER_MODEL)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value > 0 or (zero and value == 0)):
            least = "0 or more" if zero else "a positive number"
            raise ModelError(f"the GGUF key {full} must be {least}, not '{str(value)[:40]}'")
        return value

    def integer(self, key: str, default: int | None = None, limit: int = 1 << 31, *, zero: bool = False) -> int:
        """A positive whole number of at most `limit`, with `zero` also 0. Raises ModelError."""
        value = self.number(key, default, zero=zero)
        if value > limit or value != int(value):
            raise ModelError(f"the GGUF key {self.arch}.{key} must be a whole number up to {limit:,}, not {value}")
        return int(value)

    def each(
        self, key: str, count: int, default: int | None = None, limit: int = 1 << 31, *, zero: bool = False
    ) -> list[int]:
        """A positive whole number, with `zero` also 0, for each of `count` layers, of which a file has one value or a
        list. ModelError."""
        value = self.get(key, default)
        if not _is_list(value):
            return [self.integer(key, default, limit, zero=zero)] * count
        if len(value) != count or not all(isinstance(x, int) and 0 <= x <= limit and (x or zero) for x in value):
            raise ModelError(f"the GGUF key {self.arch}.{key} must have {count} whole numbers up to {limit:,}")
        return list(value)

    def expect(self, key: str, *values: Any) -> None:
        """Refuse a file in which the key is there with another value than these, which change nothing."""
        value = _common_value(self.get(key))
        if value is not None and value not in values:
            raise ModelError(f"kv's {self.arch} cannot obey {self.arch}.{key} = {_shown(value)}", OTHER_MODEL)

    def expect_only_known(self) -> None:
        """Refuse a file with a key that changes what is computed and that was not read."""
        for full in self.metadata:
            arch, _, key = full.partition(".")
            if arch != self.arch or key in self._read or key in _HARMLESS:
                continue
            if key in _NEUTRAL or key.startswith(_NEEDS_A_READER):
                self.expect(key, *_NEUTRAL.get(key, ()))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _common_value(value: Any) -> Any:
    return value[0] if _is_list(value) and len(value) and all(each == value[0] for each in value) else value


def _shown(value: Any) -> str:
    return str(value if not _is_list(value) else list(value[:8]))[:60]
