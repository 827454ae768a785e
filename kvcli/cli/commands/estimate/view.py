"""How `kv estimate` shows its numbers: the screen (80 columns), CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvcli.api.planning import NO_LIMIT, Outcome, Query, Recommendation, Target
from kvcli.cli.render import one_line
from kvcli.cli.wrapping import fill
from kvcli.runtime.cache.layout import GroupLayout, KVLayout
from kvcli.runtime.config import LATENT, RECURRENT, ModelConfig
from kvcli.runtime.headers.plannedmodel import PlannedModel
from kvcli.runtime.host.memory import CPU
from kvcli.runtime.plan.plan import DRAFT, per_rank
from kvcli.words import counted, human_count

_IN_TABLE = ("KV pool", f"{DRAFT}KV pool")
_BYTES = {"B": 1, "MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class Report:
    """All that was found out; by context the outcomes and the best choice."""

    model: PlannedModel
    target: Target
    query: Query
    outcomes: Sequence[Sequence[Outcome]]
    best: Sequence[Recommendation | None]
    warnings: Sequence[str] = ()

    @property
    def config(self) -> ModelConfig:
        """What one device holds."""
        return per_rank(self.model.config, self.query.ranks)


def number(count: int, units: str) -> str:
    """Bytes in these units: '8,192' of MiB, '8.00' of GiB."""
    return f"{count / _BYTES[units]:,.{2 if units in ('GiB', 'GB') else 0}f}"


def size(count: int, units: str) -> str:
    """Bytes in these units, which stand behind the number: '8,192 MiB'."""
    return f"{number(count, units)} {units}"


# --- the screen: one unit for all sizes ---


def screen(report: Report, units: str) -> str:
    """The whole answer as text that fits into 80 columns unless numbers are enormous."""
    lines = [f"{name:<11}{text}".rstrip() for name, text in _model_lines(report, units)]
    lines += ["", *_device_lines(report, units)]
    for outcomes, best in zip(report.outcomes, report.best, strict=True):
        lines += ["", *_table(report, outcomes, units), "", *_advice(report, outcomes, best, units)]
    return "\n".join(lines) + "\n"


def cache_only(report: Report, units: str) -> str:
    """For a shape without weights: the cache alone, one line for each pair of types and context."""
    lines = [f"{name:<11}{text}" for name, text in _model_lines(report, units)]
    for outcomes in report.outcomes:
        times = f" × {report.query.sequences:,} sequences" if report.query.sequences > 1 else ""
        lines += ["", f"{outcomes[0].plan.tokens:,} tokens{times}"]
        for o in outcomes:
            figures = f"{_token_bytes(o)} · {size(o.plan.kv_bytes, units)}"
            lines.append(f"{o.label:<11}{figures}")
    return "\n".join([*lines, "", "weights are not counted: --params N gives their number"]) + "\n"


def _token_bytes(o: Outcome) -> str:
    """'131,072 B/token', with what it comes to where windows are full."""
    first, further = o.layout.token_bytes(), o.layout.token_bytes(o.plan.tokens)
    return f"{first:,} B/token" + (f", {further:,} once windows are full" if further < first else "")


def _model_lines(report: Report, units: str) -> Iterator[tuple[str, str]]:
    model, config, ranks = report.model, report.model.config, report.query.ranks
    parts = _named(model)
    if model.params and model.weights and model.weights.packed:
        parts.append(f"{8 * (model.weights.in_file or model.weights.packed) / model.params:.2f} bits/weight")
    yield "model", " · ".join(part for part in parts if part)
    if config.context_length:
        yield "", f"trained context {config.context_length:,}"
    if model.runs != "yes":
        yield "runs", _how_it_runs(model)
    if model.bytes_read:
        yield "", f"read {number(model.bytes_read, units)} of {size(model.file_bytes, units)}"
    if model.alternatives:
        named = [one_line(name) + (f" {size(nbytes, units)}" if nbytes else "") for name, nbytes in model.alternatives]
        more = f", and {len(named) - 3} more" if len(named) > 3 else ""
        yield "others", ", ".join(named[:3]) + more
    if draft := report.query.draft:
        yield "draft", " · ".join(filter(None, _named(draft)))
        for group in KVLayout.build(per_rank(draft.config, ranks), "f16", "f16").groups:
            yield "", formula(group)
    for option, nbytes in model.lora:
        yield "adapter", f"{one_line(os.path.basename(option.path))} · scale {option.scale:g} · {size(nbytes, units)}"
    yield "attention", _attention(config)
    name, each = "KV/token", f", on each of {ranks}" if ranks > 1 else ""
    for group in KVLayout.build(report.config, "f16", "f16").groups:
        yield name, formula(group) + each
        name = ""
    layout = KVLayout.build(report.config, "f16", "f16")
    if layout.states:
        live, kept = layout.states
        yield "state", f"{live.page_bytes:,} B per sequence in {len(live.layers)} layers (f32), whatever the context"
        yield "", f"at most {kept.limit} checkpoints of as many bytes, which later prompts go on from"


def _named(model: PlannedModel) -> list[str]:
    """What a model is; "" for what is not known."""
    arch = model.config.arch if model.config.arch != model.name else ""
    size = f"{human_count(model.params)} parameters" if model.params else ""
    return [one_line(os.path.basename(model.name) or model.name), arch, model.quantization, size]


def _how_it_runs(model: PlannedModel) -> str:
    if model.runs == "no":
        return f"no: {one_line(model.problem)}"
    return f"as {model.run_as} (from the hub)" if model.run_as else "from a GGUF file of your own or one from the hub"


def _attention(config: ModelConfig) -> str:
    groups = KVLayout.build(config, "f16", "f16").groups
    counts = [f"{len(g.layers)} {g.kind}" for g in groups]
    silent = [layer.state_bytes > 0 for layer in config.layers if layer.kind == RECURRENT]
    kinds = (sum(silent), "recurrent"), (len(silent) - sum(silent), "feed-forward")
    counts += [f"{count} {kind}" for count, kind in kinds if count]
    shared = sum(1 for layer in config.layers if layer.shares_kv_with is not None)
    if shared:
        counts.append(f"{shared} sharing")
    layers = f"{' + '.join(counts)} layers"
    if not config.n_heads:  # a shape by hand that names KV heads only
        return layers
    parts = [f"{config.attention_kind} · {layers}", f"{config.n_heads} query heads"]
    heads = {g.kv_heads for g in groups if g.kind != LATENT}
    if len(heads) == 1:
        n = heads.pop()
        parts.append(f"{counted(n, 'KV head')} ({config.n_heads // n}:1)")
    return " · ".join(parts)


def formula(group: GroupLayout) -> str:
    """'32 × 8 × (128 K + 128 V) × 2 B = 131,072 B (f16)' for one group of a cache in f16."""
    head = f"{len(group.layers)} × {group.kv_heads} × " if group.kind != LATENT else f"{len(group.layers)} × "
    widths = f"({group.dim_k} K + {group.dim_v} V)" if not group.record.joined else f"{group.record.dim_q}"
    end = f" up to {group.window:,} tokens" if group.window else ""
    note = " (latent: K and V share it)" if group.kind == LATENT else ""
    if group.joined:
        note = f" (K is V but for {group.dim_k} dims that RoPE turns)"
    return f"{head}{widths} × 2 B = {group.token_bytes:,} B{end}{note} (f16)"


def _device_lines(report: Report, units: str) -> list[str]:
    memory, target = report.target.memory, report.target
    free = f"{number(memory.free, units)} of {size(memory.total, units)} free"
    if memory.free == memory.total:
        free = size(memory.free, units)
    each = f" · each of {report.query.ranks}" if report.query.ranks > 1 else ""
    lines = [f"{'device':<11}{one_line(memory.name)} · {free} ({memory.source}){each}"]
    plan = _shown(report).plan
    rows = [("", units, "source")]
    for row in plan.rows:
        if row.name not in _IN_TABLE and (count := number(row.bytes, units)).strip("0."):  # not nothing in these units
            rows.append((row.name, count, _source(row.source, row.detail)))
    rows.append(("margin", number(target.margin, units), "left free (--margin)"))
    width = max(9, *(len(count) for _, count, _ in rows))
    return lines + [f"{name:<28}{count:>{width}}  {source}" for name, count, source in rows]


def _shown(report: Report) -> Outcome:
    """The outcome whose plan stands for what all have in common: the recommended one's."""
    best = report.best[0]
    return report.outcomes[0][0] if best is None else best.outcome


def _source(source: str, detail: str) -> str:
    if source == "assumed" and not detail:
        detail = "kv doctor measures it"
    return f"{source}: {detail}" if detail else source


def _table(report: Report, outcomes: Sequence[Outcome], units: str) -> list[str]:
    query, context = report.query, outcomes[0].plan.tokens
    times = f" × {query.sequences:,} sequences" if query.sequences > 1 else ""
    common = f", {query.shared:,} of them shared" if query.shared and query.sequences > 1 else ""
    small, unit = ("B", 1) if units == "B" else ("KiB", 1024) if "i" in units else ("kB", 1000)
    drafts = ["draft KV"] if query.draft else []
    rows = [["cache", f"{small}/token", "KV", *drafts, "total", "left", "fits", "max ctx", "≤ tok/s"]]
    for o in outcomes:
        star = "*" if o.memory_context > o.max_context else ""
        rate = "-" if o.tokens_per_s is None else f"{o.tokens_per_s:.1f}"
        pools = [o.plan.kv_bytes, *([o.plan.draft_kv_bytes] if drafts else [])]
        sizes = [number(count, units) for count in (*pools, o.plan.total, o.left)]
        token = f"{o.layout.token_bytes(context) / unit:,.{0 if unit == 1 else 1}f}"
        rows.append([o.label, token, *sizes, "yes" if o.fits else "no", f"{o.max_context:,}" + star, rate])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [f"At a context of {context:,} tokens{times}{common}, in {units}:"]
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells))
    if outcomes[0].layout.token_bytes(context) < outcomes[0].layout.token_bytes():
        lines.append(f"{small}/token  of a further token, now that windows are full")
    if 0 < (trained := report.model.config.context_length) < context:
        lines.append(f"fits  into memory; {context:,} tokens are more than the {trained:,} of training")
    if any(o.memory_context > o.max_context for o in outcomes):
        lines.append("* as trained; memory alone would allow " + _beyond(outcomes))
    lines.append("≤ tok/s  " + _what_limits_speed(report))
    if likely := [f"{o.label} {o.predicted_tps:,.0f}" for o in outcomes if o.fits and o.predicted_tps]:
        told = f"≈ tok/s  {', '.join(likely)}: predicted for a full context"
        lines += fill(told, 80, "  ").splitlines()
    shown = _shown(report)
    if report.target.memory.kind != CPU and (others := [o for o in outcomes if o.step != shown.step]):
        told = f"prefill steps of {shown.step:,} tokens as far as memory goes: {_steps(others)}"
        lines += fill(told, 80, "  ").splitlines()
    return lines


def _steps(outcomes: Sequence[Outcome]) -> str:
    """'512 with f32 and f16, 256 with int8', the longest first."""
    by_step: dict[int, list[str]] = {}
    for o in sorted(outcomes, key=lambda o: -o.step):
        by_step.setdefault(o.step, []).append(o.label)
    return ", ".join(f"{step:,} with {' and '.join(labels)}" for step, labels in by_step.items())


def _what_limits_speed(report: Report) -> str:
    if report.target.bandwidth is None:
        return "not known: --bandwidth GB/s gives it"
    each = "for each sequence, " if report.query.sequences > 1 else ""
    rate = f"{report.target.bandwidth:,.0f} GB/s ({report.target.bandwidth_source})"
    return f"{each}an upper bound from reading memory at {rate}"


def _beyond(outcomes: Sequence[Outcome]) -> str:
    most = max(o.memory_context for o in outcomes)
    return "any length" if most >= NO_LIMIT else f"{most:,} at most (needs RoPE scaling)"


def _advice(
    report: Report,
    outcomes: Sequence[Outcome],
    best: Recommendation | None,
    units: str,
) -> list[str]:
    if best is None:
        return ["recommend  a smaller model: not even one page of cache fits"]
    lines = [f"{'recommend':<11}{' '.join(best.args)}", f"{'':<11}{best.reason}"]
    if report.model.runs == "no":
        lines.append(f"{'':<11}a plan only: kv does not run this model")
    sixteen = next((o for o in outcomes if o.pair == ("f16", "f16")), None)
    if sixteen and not sixteen.fits and sixteen.max_context and best.outcome is not sixteen:
        lines.append(f"{'or':<11}-c {sixteen.max_context} to stay at f16")
    held = best.outcome
    if report.query.sequences == 1 and best.context == held.plan.tokens:
        each = size(held.file_bytes, units)
        lines.append(f"{'on disk':<11}a full prompt cache of {held.plan.tokens:,} tokens takes {each} at {held.label}")
    return lines


# --- for programs ---


def as_csv(report: Report) -> str:
    """One line for each context and pair; all sizes in bytes."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = ("ctx_size", "type_k", "type_v", "bytes_per_token", "kv_bytes", "predicted_bytes", "left_bytes", "fits",
             "max_ctx_size", "limit_tps", "windows_full_bytes_per_token")  # fmt: skip
    writer.writerow(names)
    for outcomes in report.outcomes:
        for o in outcomes:
            entry = _type_object(o)
            writer.writerow([json.dumps(entry[n]) if isinstance(entry[n], bool) else entry[n] for n in names])
    return out.getvalue()


def _type_object(o: Outcome) -> dict[str, Any]:
    return {
        "type_k": o.pair[0],
        "type_v": o.pair[1],
        "bytes_per_token": o.layout.token_bytes(),
        "windows_full_bytes_per_token": o.layout.token_bytes(NO_LIMIT),
        "ctx_size": o.plan.tokens,
        "pages": o.pages,
        "kv_bytes": o.plan.kv_bytes,
        "draft_kv_bytes": o.plan.draft_kv_bytes,
        "predicted_bytes": o.plan.total,
        "left_bytes": o.left,
        "fits": o.fits,
        "max_ctx_size": o.max_context,
        "memory_ctx_size": o.memory_context,
        "limit_tps": None if o.tokens_per_s is None else round(o.tokens_per_s, 2),
        "predicted_tps": None if o.predicted_tps is None else round(o.predicted_tps, 2),
        "prompt_cache_bytes": o.file_bytes,
        "ubatch_size": o.step,
    }


def as_json(report: Report) -> dict[str, Any]:
    """The object of --json; bytes are integers, `null` is what is not known."""
    model, config, memory = report.model, report.config, report.target.memory
    plan = _shown(report).plan
    of_cache = ("KV pool", "tables and token ids", "per-sequence state")
    varying = (*of_cache, *(DRAFT + name for name in of_cache))
    fixed = [
        {"name": r.name, "predicted_bytes": r.bytes, "source": r.source} for r in plan.rows if r.name not in varying
    ]
    return {
        "model": model.name if model.origin != "flags" else None,
        "draft_model": report.query.draft.name if report.query.draft else None,
        "model_info": {
            "arch": config.arch, "origin": model.origin, "parameters": model.params,
            "weight_type": model.quantization or None, "context_length": config.context_length or None,
            "runs": model.runs == "yes", "problem": model.problem or None, "run_as": model.run_as or None,
            "layers": config.n_layers, "file_bytes": model.file_bytes or None, "bytes_read": model.bytes_read,
            "alternatives": [{"model": name, "file_bytes": nbytes} for name, nbytes in model.alternatives],
            "lora": [{"path": x.path, "scale": x.scale, "file_bytes": nbytes} for x, nbytes in model.lora],
        },
        "attention": {"kind": model.config.attention_kind.lower(), "groups": _group_objects(config),
                      "state_bytes": sum(layer.state_bytes for layer in config.layers)},
        "device": memory.kind,
        "device_info": {"name": memory.name, "total_bytes": memory.total, "free_bytes": memory.free,
                        "source": memory.source, "bandwidth_gb_s": report.target.bandwidth,
                        "bandwidth_source": report.target.bandwidth_source or None},
        "page_size": report.query.page_size,
        "kv_tail": report.query.tail,
        "kv_sink": report.query.sinks,
        "ubatch_size": _shown(report).step,
        "batch_size": report.query.sequences,
        "shared_prefix": report.query.shared,
        "tp": report.query.ranks,
        "fixed": [*fixed, {"name": "margin", "predicted_bytes": report.target.margin, "source": "chosen"}],
        "types": [_type_object(o) for outcomes in report.outcomes for o in outcomes],
        "recommend": _recommend_object(report.best[0]),
        "warnings": [*model.notices, *report.warnings],
    }  # fmt: skip


def _group_objects(config: ModelConfig) -> list[dict[str, Any]]:
    return [
        {"kind": g.kind, "layers": len(g.layers), "kv_heads": g.kv_heads, "dim_k": g.dim_k, "dim_v": g.dim_v,
         "window": g.window or None}
        for g in KVLayout.build(config, "f16", "f16").groups
    ]  # fmt: skip


def _recommend_object(choice: Recommendation | None) -> dict[str, Any] | None:
    return None if choice is None else {"args": choice.args, "reason": choice.reason}
