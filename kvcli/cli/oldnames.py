"""Names that JSON objects had before `kv_schema` 2, given for one more release; then this module goes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

# For each kind of object: a path with an old name, and the path of what it means. A list is passed with [].
_SECTIONS = (
    *("kv", "system", "program", "cpu", "kernels", "compiler", "packages"),
    *("memory", "disk", "stored", "models", "storage", "settings"),
)
_RUN = {
    "params": "sampling",
    "params.stop": "sampling.stops",
    "kv.limit": "kv.ctx_size",
    "kv.bytes": "kv.kv_bytes",
    "kv.keep": "evict.keep",
    "kv.window": "evict.window",
    "prompt_cut.context": "prompt_cut.ctx_size",
    "prompt_cut.start": "prompt_cut.first_token",
    "prompt_cut.end": "prompt_cut.end_token",
    "repetition.period": "repetition.period_tokens",
    "memory.verification.measured_bytes": "memory.verification.peak_bytes",
    "memory.verification.rows[].predicted": "memory.verification.rows[].predicted_bytes",
    "memory.verification.rows[].measured": "memory.verification.rows[].measured_bytes",
}
OLD_NAMES: dict[str, dict[str, str]] = {
    "run": _RUN,
    "run --jsonl": {
        **_RUN,
        "id": "token_id",
        "done": "done_tokens",
        "total": "total_tokens",
        "reused": "cache_read_tokens",
    },
    "estimate": {
        "fixed[].bytes": "fixed[].predicted_bytes",
        "types[].k": "types[].type_k",
        "types[].v": "types[].type_v",
        "types[].ctx": "types[].ctx_size",
        "types[].total_bytes": "types[].predicted_bytes",
        "types[].max_ctx": "types[].max_ctx_size",
        "types[].max_ctx_memory": "types[].memory_ctx_size",
        "types[].tps_ceiling": "types[].limit_tps",
    },
    "inspect": {
        "name": "model_title",
        "quantization[].nbytes": "quantization[].size_bytes",
        "quantization[].bits": "quantization[].bits_per_weight",
        "tensors[].nbytes": "tensors[].size_bytes",
        "tokenizer.model": "tokenizer.kind",
        "tokenizer.pre": "tokenizer.pre_tokenizer",
        "tokenizer.tokens": "tokenizer.vocab_size",
        "kv_bytes_per_token_f16": "bytes_per_token",
        "kv_bytes_per_token_f16_windows_full": "windows_full_bytes_per_token",
    },
    "bench": {
        "results[].tokens_per_s": "results[].tps",
        "results[].deviation": "results[].tps_deviation",
        "results[].samples": "results[].tps_samples",
        "results[].depth": "results[].depth_tokens",
        "results[].token_s_p50": "results[].token_p50_s",
        "results[].token_s_p95": "results[].token_p95_s",
        "results[].limit_tokens_per_s": "results[].limit_tps",
        "memory[].measured_bytes": "memory[].peak_bytes",
    },
    "perplexity": {
        "protocol.chunk": "protocol.ctx_size",
        "protocol.first_scored": "protocol.first_scored_token",
        "types[].tokens": "types[].scored_tokens",
        "types[].ppl_delta": "types[].ppl_delta_percent",
        "types[].top1": "types[].top1_percent",
        "types[].bits": "types[].bits_per_element",
        "types[].sealed_bits": "types[].sealed_bits_per_element",
        "types[].by_text[].tokens": "types[].by_text[].scored_tokens",
        "types[].by_text[].ppl_delta": "types[].by_text[].ppl_delta_percent",
        "types[].by_text[].top1": "types[].by_text[].top1_percent",
    },
    "eval": {
        "results[].ctx": "results[].ctx_size",
        "results[].depth": "results[].depth_percent",
        "results[].exact": "results[].exact_trials",
    },
    "tokenize": {"count": "tokens"},
    "doctor": {
        **{f"{section}.error": f"{section}.problem" for section in _SECTIONS},
        "system.system": "system.os",
        "memory.read_gb_s": "memory.bandwidth_gb_s",
        "gpus[].read_gb_s": "gpus[].bandwidth_gb_s",
        "models.here[].name": "models.here[].model",
        "models.here[].bytes": "models.here[].file_bytes",
        "settings.file": "settings.path",
    },
    "pull": {"bytes": "file_bytes"},
    "models ls": {
        "models[].name": "models[].model",
        "models[].title": "models[].model_title",
        "models[].bytes": "models[].file_bytes",
    },
    "cache ls": {"entries[].bytes": "entries[].size_bytes"},
    "cache show": {"bytes": "size_bytes"},
    "cache build": _RUN,
    "chat ls": {"sessions[].name": "sessions[].session", "sessions[].error": "sessions[].problem"},
    "config show": {"file": "path"},
}


def add(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the object with its old names at the end."""
    found: dict[str, Any] = copy.deepcopy(dict(value))
    for old, new in OLD_NAMES.get(kind, {}).items():
        _give(found, old.split("."), found, new.split("."))
    return found


def _give(to: Any, old: list[str], of: Any, new: list[str]) -> None:
    """Put what is at `new` in `of` to `old` in `to`; nothing where there is no such thing."""
    if not isinstance(to, dict) or not isinstance(of, dict):
        return
    (first, *old_rest), (head, *new_rest) = old, new
    if first.endswith("[]"):
        for each in to.get(first[:-2]) or []:
            _give(each, old_rest, each, new_rest)
    elif old_rest:
        _give(to.get(first), old_rest, of.get(first) if first == head else of, new_rest if first == head else new)
    elif new_rest:
        _give(to, old, of.get(head), new_rest)
    elif head in of:
        to[first] = copy.deepcopy(of[head])
