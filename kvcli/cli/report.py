"""What a generation cost: the stats line for people and the result object for programs."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

from kvcli.cli.invocation import Invocation
from kvcli.cli.outcome import Outcome, Result
from kvcli.cli.overflow import Cut
from kvcli.cli.render import is_terminal
from kvcli.cli.verification import as_json
from kvcli.cli.wording import as_flags
from kvcli.cli.wrapping import columns
from kvcli.options import FORGET_NOTHING, AttendOptions, EvictOptions, SampleOptions
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.engine.events import End, Logprob, Logprobs, Usage
from kvcli.runtime.host.processmemory import peak_bytes
from kvcli.runtime.promptcache.marks import Breakpoint, MovedChunk
from kvcli.words import counted, human_bytes, human_seconds

BRIEF = 80  # columns that the line of statistics is made for where a terminal has less


def wants_stats(asked: bool | None, invocation: Invocation) -> bool:
    """Whether the stats line is printed: as asked, else on a terminal or with -v, never with -q."""
    if asked is not None:
        return asked
    return not invocation.quiet and (is_terminal(sys.stderr) or invocation.verbose > 0)


def stats_line(result: Result, loaded: bool = True, verbose: bool = False) -> str:
    """The line on stderr: short on a terminal, unless `verbose`. `loaded`: name the load time (the first answer of a
    process); `verbose`: and how much of the pages is in use."""
    if is_terminal(sys.stderr) and not verbose:
        return brief_stats(result, max(BRIEF, columns(sys.stderr)) - len("kv: "))
    return full_stats(result, loaded, verbose)


_ENDINGS = {
    "length": "cut by -n",
    "context": "context full",
    "repetition": "repeats itself",
    "interrupted": "interrupted",
}


def brief_stats(result: Result, width: int) -> str:
    """What most people want to know; what has no room in `width` columns is left out, the cache first."""
    usage, timings, cache = result.end.usage, result.end.timings, result.cache
    moved = ", moved, lossy" if any(each.copied for each in usage.chunks) else ""
    reused = f" ({usage.cache_read_tokens:,} reused{moved})" if usage.cache_read_tokens else ""
    reads = f" ({as_flags(cache.attend.named)})" if cache.attend.named else ""
    parts = [
        f"prompt {usage.prompt_tokens:,}{reused} {timings.prefill_s:.2f} s",
        f"answer {usage.completion_tokens:,}{_thought(usage)}, {timings.decode_tps:,.0f} tok/s{reads}",
        f"KV {human_bytes(cache.nbytes)} {cache.types}",
        f"{cache.evicted:,} evicted" if cache.evict != FORGET_NOTHING else f"{cache.limit - cache.tokens:,} left",
        *filter(None, [_ENDINGS.get(result.end.finish_reason, "")]),
    ]
    while len(line := " · ".join(parts)) > width and len(parts) > 2:
        del parts[2]
    return line


def _thought(usage: Usage) -> str:
    return f" ({usage.reasoning_tokens:,} thinking)" if usage.reasoning_tokens else ""


def _drafted(usage: Usage) -> str:
    """What became of guessed tokens, where there were any."""
    if not usage.drafted_tokens:
        return ""
    right = f"{usage.accepted_tokens:,} of {usage.drafted_tokens:,} drafted tokens right"
    return f" · {right}, {usage.tokens_per_step:.2f} tok a step"


def full_stats(result: Result, loaded: bool = True, verbose: bool = False) -> str:
    """Everything there is to tell."""
    usage, timings = result.end.usage, result.end.timings
    parts = [
        f"{prompt_stats(result.end)} · {timings.prefill_s:.2f} s · {timings.prompt_tps:,.0f} tok/s",
        f"gen {usage.completion_tokens:,} tok{_thought(usage)} · {timings.decode_tps:.1f} tok/s{_drafted(usage)}",
        f"TTFT {timings.ttft_s:.2f} s",
        *([f"load {timings.load_s:.2f} s"] if loaded else []),
        str(result.cache) + (f", {result.cache.use}" if verbose else ""),
        f"peak {human_bytes(peak_bytes())}",
        f"seed {result.params.seed}",
    ]
    if result.end.finish_reason != "stop":
        limit = f" (-n {result.params.max_tokens})" if result.end.finish_reason == "length" else ""
        parts.append(result.end.finish_reason + limit)
    return " | ".join(parts)


def sampling_line(params: SampleOptions) -> str:
    """How tokens are chosen and when an answer ends, as options; what is off is left out."""
    penalised = (params.repeat_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
    values = (  # with what means off
        ("--temp", params.temperature, None),
        ("--top-k", params.top_k, 0),
        ("--top-p", params.top_p, 1),
        ("--min-p", params.min_p, 0),
        ("--repeat-penalty", params.repeat_penalty, 1),
        ("--presence-penalty", params.presence_penalty, 0),
        ("--frequency-penalty", params.frequency_penalty, 0),
        ("--repeat-last-n", params.repeat_last_n if penalised else 0, 0),
        ("--dry-multiplier", params.dry_multiplier, 0),
        ("-n", params.max_tokens, None),
    )
    switches = (("--ignore-eos", params.ignore_eos), ("--loop-stop", params.loop_stop))
    shown = [f"{flag} {value}" for flag, value, off in values if value != off]
    return " ".join(["sampling:", *shown, *(flag for flag, on in switches if on)])


def prompt_stats(end: End) -> str:
    """How much of the prompt was in a cache already, and where."""
    total, reused = end.usage.prompt_tokens, end.usage.cache_read_tokens
    how = f", {end.usage.cache_how}" if end.usage.cache_how else ""
    where = "" if not reused else f" (memory{how})"
    if reused and end.usage.disk_tokens:
        where = f" (disk{_choice(end.usage)}{how})"
    return f"reused {reused:,} of {counted(total, 'prompt token')}{where}, prefilled {total - reused:,}"


def _choice(usage: Usage) -> str:
    """What the rows were predicted to take."""
    if usage.choice is None:
        return ""
    read, compute = human_seconds(usage.choice.read_s), human_seconds(usage.choice.compute_s)
    return f", predicted {read} to read, {compute} to compute"


def result_object(result: Result) -> dict[str, Any]:
    """The object that --json prints; all sizes in bytes, all times in seconds."""
    return {
        "model": result.model,
        "text": result.text,
        "reasoning": result.reasoning or None,
        "finish_reason": result.end.finish_reason,
        "stop": result.end.stop,
        "repetition": {"tokens": loop.tokens, "period_tokens": loop.period, "times": loop.times}
        if (loop := result.end.loop)
        else None,
        **end_objects(result.end),
        **cache_objects(result),
        "prompt_cut": _cut_object(result.cut) if result.cut else None,
        "memory": {
            "predicted_bytes": result.memory.predicted,
            "peak_bytes": peak_bytes(),
            "full_context_bytes": result.memory.full_context,
            **({"verification": as_json(result.verification)} if result.verification else {}),
        },
        "sampling": sampling_object(result.params),
        "warnings": result.warnings,
        **({"logprobs": result.logprobs} if result.logprobs is not None else {}),
        **({"tool_calls": result.calls.whole} if result.calls is not None else {}),
        **({"error": result.error.as_object()} if result.error else {}),
    }


def cache_objects(outcome: Outcome) -> dict[str, Any]:
    """The cache of an answer, and what was lost of it."""
    cache = outcome.cache
    return {
        "kv": {
            "type_k": cache.type_k,
            "type_v": cache.type_v,
            "page_size": cache.page_size,
            "pages": cache.pages,
            "tokens": cache.tokens,
            "ctx_size": cache.limit,
            "kv_tail": cache.tail,
            "kv_sink": cache.sinks,
            "kv_bytes": cache.nbytes,
            "page_utilization": None if cache.page_utilization is None else round(cache.page_utilization, 6),
            "contiguous_bytes": cache.contiguous_bytes,
            "evicted_tokens": cache.evicted,
            "lossless": not outcome.end.losses,
            "losses": list(outcome.end.losses),
        },
        "evict": evict_object(cache.evict, cache.retention),
        **attend_object(cache.attend),
        "prompt_evicted_tokens": outcome.end.prompt_evicted,
    }


def logprobs_object(logprobs: Logprobs) -> dict[str, Any]:
    """A token with its log probability, and the tokens that the model took for the likeliest."""
    return {**_logprob(logprobs.chosen), "top": [_logprob(each) for each in logprobs.top]}


def _logprob(one: Logprob) -> dict[str, Any]:
    """JSON has no infinity: a token that is ruled out has null."""
    value = round(one.logprob, 6) if math.isfinite(one.logprob) else None
    return {"token_id": one.id, "token": one.token, "logprob": value}


def end_objects(end: End) -> dict[str, Any]:
    """Tokens and times of an answer."""
    usage, timings = end.usage, end.timings
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cache_read_tokens": usage.cache_read_tokens,
            "cache_disk_tokens": usage.disk_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
            "cache_miss": as_flags(usage.cache_miss) or None,
            "predicted_read_s": round(usage.choice.read_s, 6) if usage.choice else None,
            "predicted_compute_s": round(usage.choice.compute_s, 6) if usage.choice else None,
            "cache_how": usage.cache_how or None,
            "breakpoints": [breakpoint_object(each) for each in usage.breakpoints],
            **({"chunks": [chunk_object(each) for each in usage.chunks]} if usage.chunks else {}),
            "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
            "drafted_tokens": usage.drafted_tokens,
            "accepted_tokens": usage.accepted_tokens,
            "tokens_per_step": round(usage.tokens_per_step, 3),
        },
        "timings": {
            "load_s": round(timings.load_s, 6),
            "prefill_s": round(timings.prefill_s, 6),
            "ttft_s": round(timings.ttft_s, 6),
            "decode_s": round(timings.decode_s, 6),
            "prompt_tps": round(timings.prompt_tps, 3),
            "decode_tps": round(timings.decode_tps, 3),
        },
    }


def breakpoint_object(point: Breakpoint) -> dict[str, Any]:
    """A place of the prompt that later ones may start from."""
    mark = point.mark
    named = {"end_token": mark.at, "kind": mark.kind, "name": mark.name}
    return {**named, "reused": point.reused, "kept": point.kept}


def chunk_object(chunk: MovedChunk) -> dict[str, Any]:
    """A document of the prompt whose rows were to be moved."""
    kld = None if chunk.kld is None else round(chunk.kld, 6)
    return {"name": chunk.name, "tokens": chunk.tokens, "moved_tokens": chunk.copied, "kld": kld}


def sampling_object(params: SampleOptions) -> dict[str, Any]:
    """The sampling options; JSON has no infinity, so an infinite bias is written as a string."""
    values = dataclasses.asdict(params)
    values["logit_bias"] = {
        str(token): bias if math.isfinite(bias) else str(bias) for token, bias in params.logit_bias.items()
    }
    values["grammar"] = params.grammar or None
    values["stops"], values["top_logprobs"] = values.pop("stop"), values.pop("logprobs")
    return values


def evict_object(asked: EvictOptions, kept: Retention | None) -> dict[str, Any]:
    """What is forgotten of a context that is full, or of a prompt that is read."""
    keep, window = (kept.keep, kept.window) if kept else (None, None)
    return {"policy": asked.policy, "keep": keep, "window": window, "budget": asked.budget or None}


def attend_object(attend: AttendOptions) -> dict[str, Any]:
    """What is read in part, as a field of an object; nothing where all is read."""
    if not attend.named:
        return {}
    share, first = attend.share or None, attend.sparse_from
    sparse = {"threshold": attend.threshold or None, "page_share": share, "first_sparse_token": first}
    some = {"attended_pages": attend.pages or None, "prefill_sparse": sparse if attend.sparse else None}
    return {"attend": some}


def _cut_object(cut: Cut) -> dict[str, Any]:
    return {
        "policy": cut.policy,
        "prompt_tokens": cut.prompt_tokens,
        "ctx_size": cut.context,
        "first_token": cut.start,
        "end_token": cut.end,
    }
