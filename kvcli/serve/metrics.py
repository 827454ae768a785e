"""Counts of what a server did, as Prometheus reads them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvcli.runtime.engine.events import End

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Counts:
    """Since the start. Only the worker's thread changes them, one number at a time."""

    requests: int = 0
    refused: int = 0  # because too many waited
    failed: int = 0
    prompt_tokens: int = 0
    cache_read_tokens: int = 0  # of the prompts' tokens
    completion_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    ttft_seconds: float = 0.0

    def add(self, end: End) -> None:
        """An answer that has ended."""
        self.prompt_tokens += end.usage.prompt_tokens
        self.cache_read_tokens += end.usage.cache_read_tokens
        self.completion_tokens += end.usage.completion_tokens
        self.prefill_seconds += end.timings.prefill_s
        self.decode_seconds += end.timings.decode_s
        self.ttft_seconds += end.timings.ttft_s


HELP = {
    "requests": "prompts that were begun",
    "refused": "prompts that were refused because too many waited",
    "failed": "answers that ended with an error",
    "prompt_tokens": "tokens of prompts",
    "cache_read_tokens": "tokens of prompts whose rows were in a cache",
    "completion_tokens": "tokens that were generated",
    "prefill_seconds": "time of prompts",
    "decode_seconds": "time from first tokens to last ones",
    "ttft_seconds": "time to first tokens",
    "requests_running": "answers that are being written",
    "requests_waiting": "prompts that wait",
    "preemptions_total": "answers that gave up their pages and went on later",
    "cache_pages_used": "pages of the KV cache that hold rows",
    "cache_used_bytes": "bytes of these pages",
    "cache_budget_bytes": "most bytes of pages; 0 = no limit but memory",
}


def text(by_model: Mapping[str, tuple[Counts, Mapping[str, float]]]) -> str:
    """The page of /metrics: `by_model` has counts, and facts of this moment."""
    lines = []
    names = [(field.name, f"{field.name}_total", "counter") for field in fields(Counts)]
    facts = dict.fromkeys(name for _, found in by_model.values() for name in found)
    names += [(name, name, "counter" if name.endswith("_total") else "gauge") for name in facts]
    for key, name, kind in names:
        lines += [f"# HELP kv_{name} {HELP[key]}", f"# TYPE kv_{name} {kind}"]
        for model, (counts, now) in by_model.items():
            value = now[key] if key in facts else getattr(counts, key)
            label = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            lines.append(f'kv_{name}{{model="{label}"}} {value:.10g}')
    return "\n".join(lines) + "\n"
