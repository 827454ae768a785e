"""The flags of `kv estimate` in groups, and what each group means. Never imports torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.api.checks import Types, block_format, check_pages, lora_option
from kvcli.cli.flags.cache import (
    PageSize,
    Sinks,
    Tail,
    check_size_of_step,
    type_pairs,
    types_checked,
)
from kvcli.cli.flags.checks import check_bandwidth, checked, in_range, number, one_of
from kvcli.cli.flags.shared import check_device, parse_tokens
from kvcli.cli.helptext import DEVICE, OUTPUT, PLAN, SHAPE
from kvcli.cli.invocation import JsonFlag
from kvcli.codecs import canonical
from kvcli.errors import UsageError
from kvcli.options import AttendOptions, CacheOptions, EvictOptions
from kvcli.peers.mapping import PROGRAMS
from kvcli.runtime.engine.spec import MTP
from kvcli.runtime.host.cores import usable_cpus
from kvcli.runtime.host.memory import parse_size

if TYPE_CHECKING:
    from kvcli.api.planning import Pair, Query
    from kvcli.runtime.headers.plannedmodel import PlannedModel
    from kvcli.runtime.headers.shapes import Given

UNITS = ("MiB", "GiB", "MB", "GB", "B")
PROGRAMS_TOO = ("kv", *PROGRAMS)


_plan, _device, _output = (functools.partial(typer.Option, rich_help_panel=title) for title in (PLAN, DEVICE, OUTPUT))
_count = functools.partial(in_range, least=1, most=1 << 20)  # of sequences or devices


def _shape(flag: str, help: str, metavar: str = "N") -> typer.models.OptionInfo:
    """An option of a size that `Given` checks."""

    def check(value: float) -> None:
        from kvcli.runtime.headers.shapes import Given

        Given(**{flag.removeprefix("--").replace("-", "_"): value})  # type: ignore[arg-type]

    return typer.Option(flag, help=help, metavar=metavar, rich_help_panel=SHAPE, callback=checked(check))


def _contexts(text: str) -> list[int]:
    """'4k,32k' -> tokens; 0 = as trained. Raises UsageError."""
    return [parse_tokens(word, "--ctx-size", "; 0 = as trained") for word in text.split(",")]


def _shared(text: str) -> int:
    return parse_tokens(text, "--shared-prefix")


def _check_card(name: str) -> None:
    from kvcli.runtime.plan.cards import find_card

    find_card(name)


def _check_part(flag: str) -> Callable[[Any], Any]:
    """Of an amount of memory that may be a fraction of one not known yet."""
    return checked(lambda text: parse_size(text, flag, 1 << 40))


def _parameters(text: str) -> int:
    """'8e9', '8b', '135m' or '8030261248' -> a number. Raises UsageError."""
    scale = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    word = text.strip().lower().replace(",", "")
    factor = scale.get(word[-1:], 1.0)
    try:
        number = float(word[:-1] if word[-1:] in scale else word) * factor
        return int(number)
    except (ValueError, OverflowError):
        raise UsageError(
            f"--params must be a number of weights, not '{text}'", "such as 8e9, 8b or 8030261248"
        ) from None


def _needs_memory(method: str) -> None:
    """Raises UsageError for a way to guess that takes no memory."""
    if method != MTP:
        hint = f"there are --spec {MTP} and --draft-model MODEL"
        raise UsageError(f"--spec {method} has no memory of its own to plan", hint)


@dataclass(frozen=True)
class PlanFlags:
    """Contexts, cache types and how the run is cut."""

    ctx_size: Annotated[
        str | None,
        _plan(
            *("-c", "--ctx-size"),
            metavar="N[,N]",
            help="Context lengths to plan for, e.g. 4k,32k.",
            show_default="as trained",
            callback=checked(_contexts),
        ),
    ] = None
    spec: Annotated[
        str | None,
        _plan(
            "--spec",
            metavar=MTP,
            help="Plan the layer of the file that predicts further tokens, too.",
            callback=checked(_needs_memory),
        ),
    ] = None
    cache_type_k: Annotated[
        str | None,
        _plan(
            *("-ctk", "--cache-type-k"),
            metavar="T[,T]",
            help="Cache types of keys to compare, in place of those of -ct.",
            callback=types_checked("--cache-type-k", type_pairs),
        ),
    ] = None
    cache_type_v: Annotated[
        str | None,
        _plan(
            "-ctv",
            "--cache-type-v",
            metavar="T[,T]",
            help="Cache types of values to compare, in place of those of -ct.",
            callback=types_checked("--cache-type-v", type_pairs),
        ),
    ] = None
    cache_type: Annotated[
        str | None,
        _plan(
            *("-ct", "--cache-type"),
            metavar="T[,T]",
            help="Cache types to compare, e.g. f16,int8/int4 (keys/values).",
            callback=types_checked("--cache-type", type_pairs),
        ),
    ] = None
    page_size: PageSize = CacheOptions.page_size
    kv_tail: Tail = CacheOptions.tail
    kv_sink: Sinks = CacheOptions.sinks
    ubatch_size: Annotated[
        int,
        _plan(
            "-ub",
            "--ubatch-size",
            "--prefill-chunk",
            metavar="N",
            help="Tokens per prefill step; 0 = automatic: 512, and on a GPU up to 2,048.",
            callback=check_size_of_step,
        ),
    ] = CacheOptions.ubatch
    batch_size: Annotated[
        int,
        _plan("--batch-size", metavar="N", help="Number of sequences at a time.", callback=_count("--batch-size")),
    ] = 1
    shared_prefix: Annotated[
        str,
        _plan(
            "--shared-prefix",
            metavar="N",
            help="Number of tokens that all sequences share.",
            callback=checked(_shared),
        ),
    ] = "0"
    tp: Annotated[
        int,
        _plan(
            "--tp",
            metavar="N",
            help="Number of tensor-parallel devices; figures are per device.",
            callback=_count("--tp"),
        ),
    ] = 1
    lora: Annotated[
        list[str],
        _plan(
            "--lora",
            metavar="FILE[:SCALE]",
            help="Count a LoRA adapter (a .gguf file), too (repeatable).",
            callback=checked(lora_option),
        ),
    ] = field(default_factory=list)
    quantize: Annotated[
        str | None,
        _plan(
            "--quantize",
            metavar="TYPE",
            help="Count the weights of a folder of safetensors as they are packed: q8_0, q6_k, q4_k, ...",
            show_default="as they are",
            callback=checked(block_format),
        ),
    ] = None

    @property
    def names_types(self) -> bool:
        return bool(self.cache_type or self.cache_type_k or self.cache_type_v)

    def query(self, model: PlannedModel, evict: EvictOptions, attend: AttendOptions) -> Query:
        """Raises UsageError for values that do not go together, or for a context that nobody names."""
        from kvcli.api.planning import Query, kept_apart

        pairs = self.pairs()
        check_pages(self.kv_tail, self.kv_sink, pairs)
        contexts, shared = self.contexts(model), _shared(self.shared_prefix)
        if shared > min(contexts):
            raise UsageError(f"--shared-prefix must be at most the context of {min(contexts):,}, not {shared:,}")
        pairs = kept_apart(model, pairs)
        threads = len(usable_cpus())  # no fewer than the engine starts
        cut = self.page_size, self.ubatch_size, self.batch_size, shared, self.tp, threads
        return Query(contexts, pairs, *cut, self.kv_tail, self.kv_sink, evict, attend)

    def contexts(self, model: PlannedModel) -> tuple[int, ...]:
        trained = model.config.context_length
        asked = [0] if self.ctx_size is None else _contexts(self.ctx_size)
        contexts = tuple(dict.fromkeys(tokens or trained for tokens in asked))
        if 0 in contexts:
            key = (
                f"{model.config.arch}.context_length is not known" if model.origin != "flags" else "no context is given"
            )
            raise UsageError(key, "-c N supplies it")
        return contexts

    def pairs(self) -> tuple[Pair, ...]:
        """The pairs of types to compare. Raises UsageError for a type that does not exist."""
        from kvcli.api.planning import USUAL_PAIRS

        return tuple(dict.fromkeys((canonical(k), canonical(v)) for k, v in self.named_pairs())) or USUAL_PAIRS

    def named_pairs(self) -> list[Types]:
        """Those of the flags, as given. Raises UsageError."""
        return type_pairs(self.cache_type, self.cache_type_k, self.cache_type_v)


@dataclass(frozen=True)
class ShapeFlags:
    """A model's sizes by hand."""

    layers: Annotated[int | None, _shape("--layers", help="Number of layers.")] = None
    heads: Annotated[int | None, _shape("--heads", help="Number of query heads.")] = None
    kv_heads: Annotated[int | None, _shape("--kv-heads", help="Number of KV heads.")] = None
    head_dim: Annotated[int | None, number(SHAPE, "--head-dim", least=1, help="Head dimension of K and V.")] = None
    dim_k: Annotated[int | None, _shape("--dim-k", help="Head dimension of K.")] = None
    dim_v: Annotated[int | None, _shape("--dim-v", help="Head dimension of V.")] = None
    kv_lora_rank: Annotated[int | None, _shape("--kv-lora-rank", help="MLA: dimension of the latent.")] = None
    rope_dim: Annotated[int | None, _shape("--rope-dim", help="MLA: dimension of the part with RoPE.")] = None
    swa_layers: Annotated[int | None, _shape("--swa-layers", help="Number of layers with a sliding window.")] = None
    swa_window: Annotated[int | None, _shape("--swa-window", help="Length of that window, in tokens.")] = None
    vocab: Annotated[int | None, _shape("--vocab", help="Vocabulary size.")] = None
    hidden: Annotated[int | None, _shape("--hidden", help="Hidden size.")] = None
    ffn: Annotated[int | None, _shape("--ffn", help="Feed-forward size.")] = None
    params: Annotated[
        str | None,
        typer.Option(
            "--params",
            help="Number of parameters, e.g. 8e9 or 8b.",
            metavar="N",
            rich_help_panel=SHAPE,
            callback=checked(_parameters),
        ),
    ] = None
    bpw: Annotated[float | None, _shape("--bpw", metavar="F", help="Bits per weight.")] = None

    def given(self) -> Given:
        from kvcli.runtime.headers.shapes import Given

        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "head_dim"}
        for dim in ("dim_k", "dim_v"):
            values[dim] = self.head_dim if values[dim] is None else values[dim]
        values["params"] = None if self.params is None else _parameters(self.params)
        return Given(**values)


@dataclass(frozen=True)
class DeviceFlags:
    """The device planned for."""

    gpu: Annotated[
        str | None,
        _device(
            "--gpu",
            metavar="NAME",
            help="Plan for this GPU (--list-gpus), which need not be in this machine.",
            callback=checked(_check_card),
        ),
    ] = None
    vram: Annotated[
        str | None,
        _device(
            "--vram",
            metavar="SIZE",
            help="Assume this much free memory: 11G (GiB), 11GB (10^9 bytes), or a fraction such as 0.9.",
            callback=_check_part("--vram"),
        ),
    ] = None
    device: Annotated[
        str | None,
        _device(
            "--device",
            metavar="auto|cpu|cuda[:N]",
            help="Plan for this device of this machine.",
            show_default="the first GPU, else the CPU",
            callback=checked(check_device),
        ),
    ] = None
    margin: Annotated[
        str | None,
        _device(
            "--margin",
            metavar="SIZE",
            help="Memory to leave unused.",
            show_default="512MiB",
            callback=_check_part("--margin"),
        ),
    ] = None
    bandwidth: Annotated[
        float | None,
        _device(
            "--bandwidth",
            metavar="GB/s",
            help="Memory bandwidth, from which the limit of tokens/s is computed.",
            callback=check_bandwidth,
        ),
    ] = None


@dataclass(frozen=True)
class OutputFlags:
    """The form of the answer."""

    json: JsonFlag = False
    csv: Annotated[bool, _output("--csv", help="Print the table as CSV, with sizes in bytes.")] = False
    explain: Annotated[bool, _output("--explain", help="Show every multiplication.")] = False
    print_args: Annotated[
        str | None,
        _output(
            "--print-args",
            metavar=f"[{'|'.join(PROGRAMS_TOO)}]",
            help="Print only the options for kv run; or the command line of another program, with what it leaves for"
            " the cache.",
            callback=one_of("--print-args", PROGRAMS_TOO),
        ),
    ] = None
    check: Annotated[
        bool, _output("--check", help="Print nothing; exit with 0 if the named cache types (or f16) fit, else with 4.")
    ] = False
    units: Annotated[
        str,
        _output(
            "--units",
            metavar="|".join(UNITS),
            help="Unit of all sizes on the screen; GB = 10^9 bytes.",
            callback=one_of("--units", UNITS),
        ),
    ] = UNITS[0]
    list_presets: Annotated[bool, _output("--list-presets", help="List the models known by name.")] = False
    list_gpus: Annotated[bool, _output("--list-gpus", help="List the GPUs that --gpu knows.")] = False

    def __post_init__(self) -> None:
        forms = [f.name for f in fields(self) if f.name != "units" and getattr(self, f.name)]
        if len(forms) > 1:
            flags = " and ".join("--" + name.replace("_", "-") for name in forms)
            raise UsageError(f"only one of {flags} can be given")
