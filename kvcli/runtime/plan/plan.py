"""The memory plan as numbers: what a run needs byte by byte, and the largest context that fits.

No torch. Cache bytes come from `KVLayout`, the class that the allocator itself uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcli.errors import DoesNotFit, UsageError
from kvcli.options import FORGET_NOTHING, READ_ALL, AttendOptions, CacheOptions, EvictOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.cache.layout import ADDRESS_BYTES, KVLayout
from kvcli.runtime.config import LATENT, ModelConfig
from kvcli.runtime.host.memory import CPU, Memory, process_bytes
from kvcli.runtime.plan import footprint, graphs, overheads
from kvcli.runtime.plan.footprint import ASSUMED, COMPUTED, EXACT, WeightBytes
from kvcli.runtime.plan.overheads import assumed_bytes

DEFAULT_MARGIN = 512 << 20
CPU_STEP = 512  # rows of a prefill step where none are asked for
# The same on a GPU, fastest first: the first that leaves room for the context is taken. Launching some 500 kernels
# takes as long as computing 2,048 rows of an 8B model.
GPU_STEPS = (4096, 2048, 1024, 512)
SEALED_STEP = 256  # most rows of a prefill step on a CPU where rows wait in 16 bits until their pages are full


def heads_per_rank(kv_heads: int, ranks: int) -> int:
    """KV heads on each of `ranks` devices; more devices than heads repeat heads."""
    return -(-kv_heads // ranks)


def per_rank(config: ModelConfig, ranks: int) -> ModelConfig:
    """What one of `ranks` tensor-parallel devices holds: its share of heads and MLP; a latent cache is
    repeated.

    Raises UsageError if the query heads cannot be divided evenly.
    """
    if ranks == 1:
        return config
    if ranks < 1 or config.n_heads % ranks:
        raise UsageError(f"--tp {ranks} does not divide the {config.n_heads} query heads")
    layers = tuple(
        replace(
            layer,
            kv_heads=layer.kv_heads if layer.kind == LATENT else heads_per_rank(layer.kv_heads, ranks),
            state_bytes=-(-layer.state_bytes // ranks),
        )
        for layer in config.layers
    )
    return replace(config, n_heads=config.n_heads // ranks, d_ff=-(-config.d_ff // ranks), layers=layers)


@dataclass(frozen=True)
class Row:
    """One line of a plan. `source` is one of footprint's marks."""

    name: str
    bytes: int
    source: str
    detail: str = ""


@dataclass(frozen=True)
class Plan:
    """All memory of one run. `kv_bytes` is the pool alone, committed in full; `draft_kv_bytes`: a draft model's."""

    rows: tuple[Row, ...]
    tokens: int
    kv_bytes: int
    margin: int
    draft_kv_bytes: int = 0

    @property
    def total(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def needed(self) -> int:
        """What must be free: the total and the margin."""
        return self.total + self.margin

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


DRAFT = "draft: "  # before the names of rows that a draft model takes


@dataclass(frozen=True)
class Drafting:
    """A model that guesses beside another one, under the same options: its weights, and its cache of the same length.
    `layout`: see `KVLayout.of_options`; `tokenizer`: it has one of its own."""

    config: ModelConfig
    weights: WeightBytes
    layout: KVLayout
    tokenizer: bool = True

    def under(self, cache: CacheOptions) -> Drafting:
        """With other options of the cache. Raises UsageError."""
        return replace(self, layout=KVLayout.of_options(self.config, cache))


@dataclass(frozen=True)
class Setting:
    """Everything that a plan depends on but cache types and context."""

    config: ModelConfig  # of one rank
    weights: WeightBytes  # of one rank
    kind: str = CPU
    chunk: int = CPU_STEP
    threads: int = 1
    sequences: int = 1  # of the whole context each, but for the first `shared` tokens
    shared: int = 0
    together: int = 1  # sequences at a time in the pages that are planned for `sequences`
    runtime_bytes: int | None = None  # None = not measured: the default of the device's kind
    margin: int = DEFAULT_MARGIN
    runtime_source: str = footprint.MEASURED
    evict: EvictOptions = FORGET_NOTHING
    attend: AttendOptions = READ_ALL
    draft: Drafting | None = None  # whose memory is planned, too
    tokenizer: bool = True  # the process has one for this model

    def stepping(self, layout: KVLayout, ctx_size: int, budget: float, asked: int) -> Setting:
        """This setting with the rows of a prefill step that were `asked` for; 0 = the most useful ones that leave
        room in `budget` bytes for a context of that size."""
        steps = (asked,) if asked else (CPU_STEP,) if self.kind == CPU else GPU_STEPS
        settings = [replace(self, chunk=rows) for rows in steps]
        return next((s for s in settings[:-1] if s.whole(layout, ctx_size).needed <= budget), settings[-1])

    def settled(self, layout: KVLayout, ctx_size: int) -> KVLayout:
        """The layout as it is on this kind of device, with what `evict` keeps in a context of that size
        and the summaries that `attend` wants. Raises
        UsageError where that cannot be."""
        there = layout.by_layer(self.kind != CPU).attending(self.attend)
        there = there.evicting(eviction.retention(self.evict, ctx_size, layout.page_size))
        return there.selecting(eviction.selection(self.evict, ctx_size, layout.page_size))

    def whole(self, layout: KVLayout, ctx_size: int) -> Plan:
        """What a run needs that fills its context, and where rows are evicted goes on for as long as it likes (token
        ids aside). Raises UsageError as `settled` does."""
        settled = self.settled(layout, ctx_size)
        return replace(self.plan(settled, self.most(settled, ctx_size)), tokens=ctx_size)

    def most(self, settled: KVLayout, ctx_size: int) -> int:
        """Tokens after which a run needs no more pages: those of the context; where rows are evicted also a step that
        comes on top of what is kept."""
        return ctx_size + self.step(settled) if settled.retention else ctx_size

    def plan(self, layout: KVLayout, tokens: int) -> Plan:
        """What `sequences` of `tokens` need under `layout`."""
        kv = layout.pool_bytes(tokens, self.step(layout), self.sequences, min(self.shared, tokens))
        rows = [*self._fixed(layout, tokens), *self._pool(layout, tokens, kv), *self._per_sequence(layout, tokens)]
        draft = self.draft_plan(layout, tokens)
        more = [replace(row, name=DRAFT + row.name) for row in draft.rows if row.bytes] if draft else []
        return Plan((*rows, *more), tokens, kv, self.margin, draft.kv_bytes if draft else 0)

    @property
    def of_draft(self) -> Setting | None:
        """The setting of the draft model, beside this one: without what the process has once."""
        if self.draft is None:
            return None
        d = self.draft
        own = replace(self, config=d.config, weights=d.weights, tokenizer=d.tokenizer)
        return replace(own, runtime_bytes=0, margin=0, draft=None)

    def draft_layout(self, layout: KVLayout) -> KVLayout:
        """The layout of the draft model's cache beside `layout`, which is settled. It reads all that is there. Raises
        UsageError where nothing of it can be evicted."""
        assert self.draft is not None
        return self.draft.layout.by_layer(self.kind != CPU).evicting(layout.retention)

    def draft_plan(self, layout: KVLayout, tokens: int) -> Plan | None:
        """What the draft model needs then; None = there is none."""
        own = self.of_draft
        return None if own is None else own.plan(self.draft_layout(layout), tokens)

    def _pool(self, layout: KVLayout, tokens: int, kv: int) -> list[Row]:
        """What a pool of `kv` bytes has."""
        counts = layout.arena_pages(tokens, self.step(layout), self.sequences)[len(layout.row_arenas) :]
        if not layout.states:
            return [Row("KV pool", kv, EXACT)]
        live, kept = (n * states.page_bytes for n, states in zip(counts, layout.states, strict=True))
        return [
            Row("KV pool", kv - live - kept, EXACT, "rows"),
            Row("states", live, EXACT, f"{layout.state_bytes:,} B per sequence"),
            Row("checkpoints", kept, COMPUTED, f"at most {counts[1]:,} states that prompts go on from"),
        ]

    def step(self, layout: KVLayout) -> int:
        """Rows of a prefill step: `chunk`, but on a CPU no more 16-bit pages at once than sealing them saves."""
        sealed = self.kind == CPU and any(g.sealed for g in layout.groups)
        return min(self.chunk, SEALED_STEP) if sealed else self.chunk

    @property
    def _at_once(self) -> int:
        return max(self.sequences, self.together)

    def _fixed(self, layout: KVLayout, tokens: int) -> list[Row]:
        config, weights = self.config, self.weights
        rows_at_once = min(self.chunk, tokens)  # of all cache types: this part is shown once
        queries = 2 if layout.retention and layout.retention.keep else 1
        work = footprint.logit_bytes(config, self._at_once, self.kind)
        if self.kind == CPU:
            work += footprint.activation_bytes(config, rows_at_once, queries)
            work += footprint.scratch_bytes(config, layout.page_size, self.threads, queries)
        else:
            captured = min(self.chunk, tokens * self._at_once, graphs.most_rows(layout, self._at_once))
            work += footprint.gpu_workspace_bytes(config, rows_at_once, queries, captured)
        rows = [Row("weights", weights.packed, weights.source, weights.detail)]
        if weights.copies:
            rows.append(Row("weight copies", weights.copies, weights.source, "reordered rows, norms in float32"))
        rows.append(Row("workspace", work, COMPUTED, f"chunk {rows_at_once:,}"))
        if self.kind != CPU:
            kept = graphs.graph_bytes(config, layout, tokens, self._at_once)
            rows.append(Row("CUDA graphs", kept, COMPUTED, "lists and results of all"))
        if self.kind == CPU and self.tokenizer:
            rows.append(Row("tokenizer", footprint.tokenizer_bytes(config), COMPUTED))
        measured = self.runtime_bytes is not None
        runtime = assumed_bytes(self.kind) if self.runtime_bytes is None else self.runtime_bytes
        name = "runtime and libraries" if self.kind == CPU else "CUDA context + libraries"
        rows.append(Row(name, runtime, self.runtime_source if measured else ASSUMED))
        return rows

    def _per_sequence(self, layout: KVLayout, tokens: int) -> list[Row]:
        rows = []
        constant = layout.constant_bytes * self._at_once
        if constant:
            rows.append(Row("per-sequence state", constant, EXACT))
        step = self.step(layout)
        pages = sum(layout.arena_pages(tokens, step, self.sequences, self.shared))
        if self.kind == CPU:
            tables = layout.table_bytes(tokens, step, self._at_once)
            tables += pages * footprint.PAGE_BYTES + self._at_once * tokens * footprint.TOKEN_BYTES
        else:
            tables = pages * ADDRESS_BYTES
        rows.append(Row("tables and token ids", tables, COMPUTED))
        if guessed := footprint.guess_bytes(self.config):
            at_once = self._at_once if self.kind == CPU else 1  # a GPU computes guesses of one answer at a time
            rows.append(Row("rows of guesses", guessed * at_once, COMPUTED, "what states go on from once more"))
        if layout.selection:
            noted = layout.selection_bytes(tokens, self.config.n_heads)
            rows.append(Row("selection of rows", noted, COMPUTED, layout.selection.policy))
        return rows

    def largest_context(self, layout: KVLayout, budget: int, limit: int) -> int:
        """The most tokens up to `limit` that need no more than `budget` bytes: whole pages, or `limit`; 0 =
        none. Contexts that are too short for `evict` do not count.

        Every row grows with the context, so a search over pages finds the end of the line whatever its
        slope.
        """
        if self.whole(layout, limit).needed <= budget:
            return limit
        size, least = layout.page_size, eviction.least_context(self.evict, layout.page_size)
        low, high = max(0, -(-least // size) - 1), -(-limit // size)  # in pages: `low` fits or is none, `high` does not
        none = low
        while high - low > 1:
            middle = (low + high) // 2
            if self.whole(layout, middle * size).needed <= budget:
                low = middle
            else:
                high = middle
        return 0 if low == none else low * size


@dataclass(frozen=True)
class Budget:
    """Bytes of a device that a process may use in all, in words what they are, and what to leave of them.

    `runtime_bytes`: what is measured of the interpreter and its libraries, or of a CUDA context; None = not measured.
    `grows`: it would be more if other programs freed memory of that device.
    """

    bytes: int
    label: str
    margin: int = DEFAULT_MARGIN
    runtime_bytes: int | None = None
    kind: str = CPU
    grows: bool = False

    def missing(self, needed: int) -> int:
        """Of so many bytes, those that other programs would have to free; 0 = that would be of no use."""
        return max(0, needed - self.bytes) if self.grows else 0


@dataclass(frozen=True)
class EnginePlan:
    """How an engine runs: what its plan depends on, its context and the layout of its cache, the memory of a run that
    fills it, and a notice ("" = nothing to say)."""

    setting: Setting
    layout: KVLayout
    ctx_size: int
    plan: Plan
    notice: str = ""


def plan_for_engine(
    config: ModelConfig,
    weights: WeightBytes,
    cache: CacheOptions,
    budget: Budget | None,
    threads: int = 1,
    draft: Drafting | None = None,
) -> EnginePlan:
    """The plan of an engine on the budget's device (None = no limit). `weights`: as that kind of device holds them;
    `draft`: what a draft model beside it has.

    `cache.ctx_size` 0 takes the smaller of the training context and what fits, and the notice tells a
    reduction; any other size is honoured. Raises DoesNotFit where nothing or not the size asked for fits,
    UsageError for types, and for a context that is too short for what is to be kept of it.
    """
    layout, trained = KVLayout.of_options(config, cache), config.context_length
    wanted = cache.ctx_size or trained
    base = Setting(config, weights, threads=threads, margin=0, evict=cache.evict, together=cache.sequences)
    base = replace(base, attend=cache.attend, draft=draft.under(cache) if draft else None)
    if budget is not None:
        base = replace(base, kind=budget.kind, runtime_bytes=budget.runtime_bytes, margin=budget.margin)
    setting = base.stepping(layout, wanted, math.inf if budget is None else budget.bytes, cache.ubatch)
    plan = setting.whole(layout, wanted)
    if budget is None or plan.needed <= budget.bytes:
        return EnginePlan(setting, setting.settled(layout, wanted), wanted, plan)
    fits = setting.largest_context(layout, budget.bytes, wanted)
    if fits == 0:
        least = setting.plan(layout.by_layer(setting.kind != CPU), layout.page_size).needed
        models = "the model and its draft model need" if draft else "the model needs"
        raise DoesNotFit(
            f"{models} {_mib(least)} without any context, {_mib(budget.bytes)} are {budget.label}",
            "use a smaller model or free memory; kv estimate shows what takes how much",
            budget.missing(least),
        )
    if cache.ctx_size:
        raise DoesNotFit(
            f"a context of {wanted:,} needs {_mib(plan.needed)}, {_mib(budget.bytes)} are {budget.label}",
            f"the largest that fits is `ctx={fits}`; kv estimate compares cache types",
            budget.missing(plan.needed),
        )
    notice = f"context {fits:,} of {trained:,} trained: that is what fits in {_mib(budget.bytes)} {budget.label}"
    return EnginePlan(setting, setting.settled(layout, fits), fits, setting.whole(layout, fits), notice)


def engine_budget(limit: str | None, kind: str = CPU, index: int = 0, cards: Sequence[Memory] | None = None) -> Budget:
    """What an engine may use of the CPU's memory, or of GPU `index`: `limit` (--vram-limit) as it is, else what is
    free and, on a CPU, ours already. `cards`: the GPUs as they were before a CUDA context was made, which the plan
    counts; None = as they are. Raises UsageError."""
    from kvcli.runtime.host import memory as memories

    if kind == CPU:
        memory, ours = memories.main_memory(), process_bytes()
    else:
        memory, ours = (memories.gpus() if cards is None else cards)[index], 0
    measured = overheads.load(CPU if kind == CPU else memory.name)[0].runtime_bytes
    if limit is not None:
        size = memories.parse_size(limit, "`memory_limit`", memory.total)
        return Budget(size, "allowed by `memory_limit`", 0, measured, kind)
    label = "available" if kind == CPU else f"free on {memory.name}"
    return Budget(memory.free + ours, f"{label} ({memory.source})", runtime_bytes=measured, kind=kind, grows=True)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
