"""What an estimate compares: cache types at each context on one device, and which to take. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from kvcli.codecs import CODECS, codec
from kvcli.errors import UsageError, of_draft_model
from kvcli.options import FORGET_NOTHING, READ_ALL, AttendOptions, CacheOptions, EvictOptions
from kvcli.runtime.cache.layout import LEAST_LATENT_BITS, KVLayout
from kvcli.runtime.config import FULL, LATENT, WINDOWED, ModelConfig
from kvcli.runtime.engine.spec import drafting
from kvcli.runtime.headers.plannedmodel import PlannedModel, planned_model
from kvcli.runtime.headers.shapes import Given
from kvcli.runtime.host.device import AUTO, check_there, parse_device
from kvcli.runtime.host.memory import CPU, CUDA, Memory, gpus, main_memory, parse_size
from kvcli.runtime.plan import overheads
from kvcli.runtime.plan.cards import Card, card_of, find_card
from kvcli.runtime.plan.footprint import WeightBytes, weights_of_tensors
from kvcli.runtime.plan.plan import DEFAULT_MARGIN, Drafting, Plan, Setting, per_rank
from kvcli.runtime.plan.speed import token_seconds
from kvcli.runtime.promptcache.prefixpages import REWIND_ROWS
from kvcli.runtime.text.tokenizer import Tokenizer

Pair = tuple[str, str]  # cache types of keys and values
MIXED: tuple[Pair, ...] = (("int8", "int4"),)
NO_LIMIT = 1 << 31  # tokens: where the training context is not known
_FILE_HEADER = 4096  # of a prompt-cache file; behind it the pages, and 4 bytes for each token id
_VOCABULARY = "tokenizer.ggml.tokens"
_NO_WEIGHTS = WeightBytes(0, 0, 0, "assumed", "not counted")


def precision(pair: Pair) -> tuple[float, ...]:
    """Sorts the most precise pairs to the front: by bits, then by those of the keys, which matter more, and their
    error."""
    k, v = (codec(name) for name in pair)
    return -k.bits - v.bits, -k.bits, k.error, list(CODECS).index(k.name)


def _usual_pairs() -> tuple[Pair, ...]:
    """Each cache type that takes other bytes than those before it in the registry, and some for keys and values."""
    by_size = {(each.bits, each.scale): each.name for each in reversed(CODECS.values())}
    return tuple(sorted([*((name, name) for name in by_size.values()), *MIXED], key=precision))


def _ladder() -> tuple[Pair, ...]:
    """The most precise of the usual pairs for each number of bits up to 16 an element: f32 is for checking."""
    best = {codec(k).bits + codec(v).bits: (k, v) for k, v in reversed(USUAL_PAIRS)}
    return tuple(pair for bits, pair in sorted(best.items(), reverse=True) if bits <= 2 * 16)


USUAL_PAIRS = _usual_pairs()
LADDER = _ladder()  # what is recommended where no types are named, the most precise first


@dataclass(frozen=True)
class Target:
    """The device planned for: `memory.free` bytes of it, read at `bandwidth` GB/s (None = not known). `card`: where it
    is a GPU of the table, as it is there, but for a bandwidth that was given."""

    memory: Memory
    margin: int = DEFAULT_MARGIN
    bandwidth: float | None = None
    bandwidth_source: str = ""
    runtime_bytes: int | None = None
    card: Card | None = None


@dataclass(frozen=True)
class Query:
    """What is asked about: contexts, pairs of cache types, and how the run would be cut."""

    contexts: tuple[int, ...]
    pairs: tuple[Pair, ...]
    page_size: int = CacheOptions.page_size
    ubatch: int = CacheOptions.ubatch
    sequences: int = 1
    shared: int = 0
    ranks: int = 1
    threads: int = 1
    tail: int = CacheOptions.tail
    sinks: int = CacheOptions.sinks
    evict: EvictOptions = FORGET_NOTHING
    attend: AttendOptions = READ_ALL
    draft: PlannedModel | None = None  # a model that guesses beside the other one


@dataclass(frozen=True)
class Outcome:
    """One pair of cache types at one context."""

    pair: Pair
    layout: KVLayout
    plan: Plan
    pages: int  # in all arenas
    fits: bool
    left: int  # bytes free after the total; the margin is to be taken from them
    max_context: int  # at most the training context
    memory_context: int  # what memory alone would allow
    tokens_per_s: float | None  # upper bound: every byte of weights and cache is read once a token
    predicted_tps: float | None  # of one sequence on a card of the table; see runtime/plan/speed.py
    file_bytes: int  # of a prompt-cache file that holds the whole context
    step: int  # rows of a prefill step
    tokens: int  # after which pages are no longer added: the context, and with eviction a step more

    @property
    def label(self) -> str:
        return label(self.pair)


@dataclass(frozen=True)
class Recommendation:
    """The flags to use, what they lead to, and why. `fits`: no less than asked for, as far as the model is trained."""

    outcome: Outcome
    context: int
    reason: str
    fits: bool

    @property
    def args(self) -> list[str]:
        k, v = self.outcome.pair
        return ["--cache-type-k", k, "--cache-type-v", v, "-c", str(self.context)]


def label(pair: Pair) -> str:
    """'int8', or 'int8/int4' where keys and values differ."""
    return pair[0] if pair[0] == pair[1] else "/".join(pair)


def find_target(
    card: str | None, vram: str | None, device: str | None, margin: str | None, bandwidth: float | None
) -> tuple[Target, list[str]]:
    """The device meant by these, or the one that is here; and warnings. `card`: a GPU by name; `vram`: free memory.
    Raises UsageError and DeviceError."""
    memory, known, source = _memory(card, vram, device)
    rate = known.bandwidth if known else None
    measured, warning = overheads.load("cpu" if memory.kind == CPU else memory.name)
    if measured.bandwidth is not None and card is None:
        rate, source = measured.bandwidth, "measured"
    if bandwidth is not None:
        rate, source = bandwidth, "--bandwidth"
        known = replace(known, bandwidth=bandwidth) if known else None
    left = DEFAULT_MARGIN if margin is None else parse_size(margin, "`margin`", memory.total)
    if margin is not None and left >= memory.total:
        raise UsageError(f"`margin={margin}` leaves nothing of {memory.total >> 20:,} MiB", "give a smaller one")
    return Target(memory, left, rate, source, measured.runtime_bytes, known), [warning] if warning else []


def _memory(card: str | None, vram: str | None, device: str | None) -> tuple[Memory, Card | None, str]:
    """The memory, and the card that it belongs to, with the source of its bandwidth."""
    if card is not None:
        if device is not None:
            raise UsageError("only one of `gpu` and `device` can be given", "`gpu` is for a card that need not be here")
        known = find_card(card)
        memory = known.memory()
        free = memory.free if vram is None else parse_size(vram, "`memory`", memory.total)
        return (
            Memory(CUDA, memory.name, memory.total, free, "table" if vram is None else "--vram"),
            known,
            "table",
        )
    if device is None and vram is not None:
        size = parse_size(vram, "`memory`", max((g.total for g in gpus()), default=None))
        return Memory(CUDA, "a GPU", size, size, "--vram"), None, ""
    memory = _device(device or AUTO)
    there = card_of(memory.name, memory.total) if memory.kind == CUDA else None
    if vram is not None:
        free = parse_size(vram, "`memory`", memory.total)
        memory = Memory(memory.kind, memory.name, memory.total, free, "--vram")
    return memory, there, "table" if there else ""


def _device(name: str) -> Memory:
    """The memory of what `device` names. UsageError, DeviceError."""
    kind, number = parse_device(name)
    if kind == CPU:
        return main_memory()
    found = gpus()
    if kind == AUTO:
        return found[0] if found else main_memory()
    check_there(name, number, len(found))
    return found[number]


def kept_apart(model: PlannedModel, pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """The pairs that differ in this model: latents have one type, that of keys. Of the usual ones those that have to be
    forced are left out."""
    if any(layer.kind != LATENT for layer in model.config.layers):
        return pairs
    least = LEAST_LATENT_BITS if pairs == USUAL_PAIRS else 0
    return tuple(dict.fromkeys((k, k) for k, _ in pairs if codec(k).bits >= least))


def setting(model: PlannedModel, target: Target, query: Query) -> Setting:
    """The parts of the plan that do not depend on types and context. Raises UsageError for an odd number of ranks."""
    weights = (model.weights or _NO_WEIGHTS).part(query.ranks)
    return Setting(
        per_rank(model.config, query.ranks),
        weights,
        target.memory.kind,
        threads=query.threads,
        sequences=query.sequences,
        shared=query.shared,
        runtime_bytes=target.runtime_bytes,
        margin=target.margin,
        evict=query.evict,
        attend=query.attend,
    )


def planned_draft(model: PlannedModel, name: str, kind: str, offline: bool, cache: CacheOptions) -> PlannedModel:
    """The model, or the head, of that name as one that guesses for `model` under these options, on a device of `kind`.
    Raises DownloadError, ModelError where that cannot be, and UsageError where nothing can be guessed. Vocabularies are
    compared where both are known."""
    drafting.check_options(cache, False)
    if (head := _head(name, kind)) is not None:
        drafting.check_head(model.config, head.config)
        drafting.check_device(head.config, {}, kind)
        return head
    with of_draft_model():
        found = planned_model(name, Given(), kind, offline)
    drafting.check_layers(found.config, kind)
    drafting.check_device(found.config, {}, kind)
    check_vocabularies(model, found)
    return found


def check_vocabularies(model: PlannedModel, draft: PlannedModel) -> None:
    """Raises ModelError where one cannot guess for the other, by their tokens where both are known, else by how many
    they are."""
    if _VOCABULARY in model.metadata and _VOCABULARY in draft.metadata:
        drafting.check_vocabulary(*(Tokenizer.from_gguf(each.metadata, True) for each in (model, draft)))
    else:
        drafting.check_sizes(model.config.vocab_size, draft.config.vocab_size)


def _head(name: str, kind: str) -> PlannedModel | None:
    """The head of EAGLE-3 in a folder; None = it has none."""
    path = Path(name).expanduser()
    if not path.exists():
        return None
    from kvcli.runtime.headers.eagle import EagleHead, is_head

    with of_draft_model():
        if not is_head(path):
            return None
        with EagleHead(path) as file:
            weights = weights_of_tensors(file.tensors, file.config, kind)
            params = sum(prod(x.shape) for x in file.tensors.values())
            return PlannedModel(name, file.config, weights, params, "", "header", file.size, run_as=name, alone=False)


def planned_next(model: PlannedModel, kind: str, cache: CacheOptions) -> PlannedModel:
    """The layer of `model` that predicts further tokens, as what guesses for it under these options, on a device of
    `kind`. Raises ModelError and UsageError where that cannot be."""
    drafting.check_options(cache, False, "mtp")
    drafting.check_next(model.config, {}, kind)
    if model.ahead is None:
        raise UsageError("the weights of the layer that predicts further tokens are not known", "leave --bpw out")
    named = f"layer {model.config.n_layers} of the file"
    return PlannedModel(named, model.config.predictor, model.ahead, None, "", model.origin, alone=False)


def compare(model: PlannedModel, target: Target, query: Query) -> list[list[Outcome]]:
    """For each context, every pair. Raises UsageError, also for a context that is too short for what is to be kept."""
    if model.runs == "no":
        target = replace(target, card=None)  # speeds are those of kv
    alone, trained = setting(model, target, query), model.config.context_length or NO_LIMIT
    plans = []
    for pair in query.pairs:
        base, layout = _with_draft(alone, query, pair), _layout(alone.config, query, pair)
        plans.append((pair, base, layout, _largest(base, layout, target, query, trained)))
    return [
        [
            _outcome(
                base.stepping(layout, context, target.memory.free, query.ubatch), pair, layout, target, context, most
            )
            for pair, base, layout, most in plans
        ]
        for context in query.contexts
    ]


def _layout(config: ModelConfig, query: Query, pair: Pair) -> KVLayout:
    return KVLayout.build(config, *pair, query.page_size, sinks=query.sinks, tail=query.tail)


def _with_draft(base: Setting, query: Query, pair: Pair) -> Setting:
    """The setting with the draft model, whose cache has the same types. Raises UsageError."""
    draft = query.draft
    if draft is None:
        return base
    config = per_rank(draft.config, query.ranks)
    weights = (draft.weights or _NO_WEIGHTS).part(query.ranks)
    return replace(base, draft=Drafting(config, weights, _layout(config, query, pair), draft.alone))


def _largest(base: Setting, layout: KVLayout, target: Target, query: Query, trained: int) -> tuple[int, int]:
    """The largest context that fits, within training and by memory alone: with the shortest steps, if need be."""
    base = base.stepping(layout, NO_LIMIT, target.memory.free, query.ubatch)
    by_memory = base.largest_context(layout, target.memory.free, NO_LIMIT)
    return min(by_memory, trained), by_memory


def _outcome(
    base: Setting, pair: Pair, layout: KVLayout, target: Target, context: int, longest: tuple[int, int]
) -> Outcome:
    layout, step, plan = base.settled(layout, context), base.step(layout), base.whole(layout, context)
    tokens = base.most(layout, context)
    read = base.weights.read + base.sequences * (layout.read_bytes(tokens) + layout.state_bytes)
    rate = None
    if target.bandwidth is not None and base.weights.read:
        rate = target.bandwidth * 1e9 / read
    return Outcome(
        pair,
        layout,
        plan,
        sum(layout.arena_pages(tokens, step, base.sequences, min(base.shared, context))),
        plan.needed <= target.memory.free,
        target.memory.free - plan.total,
        *longest,
        rate,
        _predicted(base, layout, target, tokens),
        _file_bytes(layout, context),
        step,
        tokens,
    )


def _predicted(base: Setting, layout: KVLayout, target: Target, tokens: int) -> float | None:
    """Tokens a second at the end of the context, where the formula speaks of such a model and card."""
    plain = all(layer.kind in (FULL, *WINDOWED) for layer in base.config.layers)
    if target.card is None or not plain or base.sequences > 1 or not base.weights.read:
        return None
    seconds = token_seconds(base.config, base.weights.read, layout, tokens, target.card)
    return None if seconds is None else 1 / seconds


def _file_bytes(layout: KVLayout, tokens: int) -> int:
    """Of a prompt-cache file of so many tokens: of windows also what stood just before them, nothing of a step."""
    size = _FILE_HEADER + 4 * tokens + layout.constant_bytes
    for group in layout.groups:
        size += group.pages(tokens, REWIND_ROWS + 1) * group.page_bytes
        if opened := group.open_class:
            size += group.open_pages_kept(tokens) * opened.page_bytes
    if layout.states:
        kept = layout.states[1]
        size += kept.left_by(tokens) * kept.page_bytes
    return size


def recommend(outcomes: Sequence[Outcome], named: bool, trained: int) -> Recommendation | None:
    """The most precise types that hold the context, or as much of it as the model is `trained` on (0 = not known); else
    those with the longest one, which is shorter. Of all where the user `named` them, else of LADDER. None where nothing
    fits at all.
    """
    ladder = sorted((o for o in outcomes if named or o.pair in LADDER), key=lambda o: precision(o.pair))
    for outcome in ladder:
        wanted = min(outcome.plan.tokens, trained or NO_LIMIT)
        if outcome.fits or outcome.max_context >= wanted:
            why = f"highest precision {'' if named else 'up to 16 bits '}that fits" if len(ladder) > 1 else "it fits"
            if wanted < outcome.plan.tokens:
                why += f" the {trained:,} tokens that the model is trained on"
            return Recommendation(outcome, wanted, why, True)
    best = max(ladder, key=lambda o: o.max_context, default=None)
    if best is None or best.max_context == 0:
        return None
    types = "any type" if not named else best.label if len(ladder) == 1 else "any of these types"
    return Recommendation(best, best.max_context, f"a context of {best.plan.tokens:,} does not fit with {types}", False)
