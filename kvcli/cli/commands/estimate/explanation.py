"""`kv estimate --explain`: every multiplication behind one plan."""

from __future__ import annotations

from collections.abc import Iterator

from kvcli.api.planning import Outcome, Query
from kvcli.cli.commands.estimate.view import Report
from kvcli.codecs import ALIGN
from kvcli.runtime.cache.grouplayout import GroupLayout
from kvcli.runtime.config import CHUNKED, LATENT, WINDOWED

_OF_ROWS = "keys", "values", "K", "V"  # parts of a row, in words and in sums
_OF_JOINED = "rotary parts", "values that are keys", "rotary", "value"
_OF_LATENTS = "rotary parts", "latents", "rotary", "latent"


def explain(report: Report) -> str:
    """Text that derives each number of the tables, pair by pair and context by context."""
    lines: list[str] = []
    for outcomes in report.outcomes:
        for outcome in outcomes:
            lines += [*_outcome(report, outcome), ""]
    return "\n".join(lines[:-1]) + "\n"


def _outcome(report: Report, o: Outcome) -> Iterator[str]:
    query, tokens, keeps = report.query, o.tokens, o.layout.retention
    yield f"{o.label} at {o.plan.tokens:,} tokens" + (f", {query.sequences:,} sequences" if query.sequences > 1 else "")
    if keeps:
        yield f"  evicts: {keeps} stay; pages are added up to {o.plan.tokens:,} + a step of {o.step:,} = {tokens:,}"
    counts = o.layout.arena_pages(tokens, o.step, query.sequences, min(query.shared, tokens))
    sealed = (g for g in o.layout.groups if g.sealed)  # whose 16-bit classes stand behind all groups
    for i, (arena, count) in enumerate(zip(o.layout.row_arenas, counts, strict=False)):
        if i < len(o.layout.groups):
            yield from _arena(report, arena, f"{arena.kind} layers", count, _pages(query, arena, tokens, o.step))
        else:
            title = "16-bit tail and sinks" if query.tail else "16-bit sinks and rows of a step"
            yield from _arena(report, arena, title, count, _opened(query, next(sealed), tokens, o.step))
    for title, states, count in zip(
        ("states", "checkpoints"), o.layout.states, counts[len(o.layout.row_arenas) :], strict=False
    ):
        total = f"{count:,} × {states.page_bytes:,} = {states.committed_bytes(count):,} B"
        yield f"  {title}: {len(states.layers)} layers, {total}"
    yield f"  KV pool  {o.plan.row('KV pool').bytes:,} B"
    for row in o.plan.rows:
        if row.name != "KV pool":
            detail = f": {row.detail}" if row.detail else ""
            yield f"  {row.name}  {row.bytes:,} B ({row.source}{detail})"
    yield f"  total = {' + '.join(f'{row.bytes:,}' for row in o.plan.rows)}"
    yield f"        = {o.plan.total:,} B"
    free = report.target.memory.free
    verdict = "fits" if o.fits else "does not fit"
    yield f"  left = {free:,} - {o.plan.total:,} = {o.left:,} B, margin {o.plan.margin:,} B: {verdict}"
    yield f"  largest context: {o.max_context:,} (by memory alone {o.memory_context:,})"
    if o.tokens_per_s is not None and report.target.bandwidth is not None:
        weights = report.model.weights
        assert weights is not None
        read = weights.part(query.ranks).read
        cache = query.sequences * (o.layout.read_bytes(tokens) + o.layout.state_bytes)
        rate = f"{report.target.bandwidth:g}e9 / ({read:,} weights + {cache:,} cache) = {o.tokens_per_s:.1f}"
        yield f"  tokens/s ≤ {rate}"


def _arena(report: Report, g: GroupLayout, title: str, count: int, pages: str) -> Iterator[str]:
    query, size = report.query, g.page_size
    title += f", {'chunks of' if g.kind == CHUNKED else 'window'} {g.window:,}" if g.window else ""
    keys, values, k, v = _OF_LATENTS if g.kind == LATENT else _OF_JOINED if g.joined else _OF_ROWS
    types = f"{g.codec_k.name} {keys}, {g.codec_v.name} {values}"
    yield f"  {title}: {len(g.layers)} layers × {g.kv_heads} KV heads, {types}"
    record, each = g.record, g.record.token_bytes
    row = f"{k} {g.dim_k} × {g.codec_k.bits}/8 = {record.k_row_bytes} B"
    if g.dim_v:
        row += f", {v} {g.dim_v} × {g.codec_v.bits}/8 = {record.v_row_bytes} B"
    if scales := each - record.k_row_bytes - record.v_row_bytes:
        row += f", scales {scales} B"
    yield f"    a row: {row}"
    yield f"    a token: {len(g.layers)} × {g.kv_heads} × {each} = {g.token_bytes:,} B"
    yield f"    a record: {size} × {each}, to a multiple of {ALIGN} = {record.record_bytes:,} B"
    yield f"    a page: {len(g.layers)} × {g.kv_heads} × {record.record_bytes:,} = {g.page_bytes:,} B"
    if g.summarized:
        told = g.summary
        means = f"{told.kv_heads} × {told.means} means × ({told.pitch} + 4), to a multiple of 16 = {told.bytes:,} B"
        yield f"    its summary: {len(g.layers)} × {means}, {g.summary_bytes:,} B in all"
    yield f"    pages: {pages} = {count:,}"
    chunks = -(-count // g.pages_per_chunk)
    figures = f"{chunks:,} × {g.pages_per_chunk} pages × {g.held_bytes:,} = {g.committed_bytes(count):,} B"
    yield f"    committed: ceil({count:,} / {g.pages_per_chunk}) steps: {figures}"
    if query.ranks > 1:
        yield f"    (one of {query.ranks} devices)"


def _pages(query: Query, g: GroupLayout, tokens: int, step: int) -> str:
    size = g.page_size
    text = f"ceil({tokens:,} / {size})"
    if g.sealed:
        text = f"max(0, {'floor' if g.tail else 'ceil'}({tokens:,} / {size}) - {g.sinks})"
    if g.retention:
        kept, window = (
            g.retention.kept_pages - min(g.retention.kept_pages, g.sinks if g.sealed else 0),
            g.retention.window,
        )
        text = f"min({text}, {kept} kept + ceil(({window:,} - 1) / {size}) + ceil({step:,} / {size}))"
    if g.kind in WINDOWED:
        text = f"min({text}, ceil(({g.window:,} - 1) / {size}) + ceil({step:,} / {size}))"
    if query.sequences > 1:
        common, _ = g.shared_pages(min(query.shared, tokens))
        text = (
            f"{common:,} + {query.sequences:,} × ({text} - {common:,})" if common else f"{query.sequences:,} × {text}"
        )
    return text


def _opened(query: Query, g: GroupLayout, tokens: int, step: int) -> str:
    """16-bit pages of a sealed group: those of the sequence that runs, and those that the others keep meanwhile."""
    size, sinks = g.page_size, g.sinks
    if g.retention:
        sinks = min(sinks, g.retention.kept_pages + g.retention.pages_behind)
    running = f"min(ceil({tokens:,} / {size}), {sinks} + ceil({step:,} / {size}))"
    if query.sequences == 1:
        return running
    _, common = g.shared_pages(min(query.shared, tokens))
    kept = g.open_pages_kept(tokens)
    if common:
        return f"{common:,} + {query.sequences - 1:,} × ({kept:,} - {common:,}) + ({running} - {common:,})"
    return f"{query.sequences - 1:,} × {kept:,} + {running}"
