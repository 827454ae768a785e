"""The flags that `run` and `chat` share: groups of Annotated fields, and what each group means as options.

`grouped` lets a command take whole groups as parameters; Typer sees one option for every field.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, get_type_hints

import typer

from kvcli.api.checks import BACKENDS, MAX_THREADS, check_pages, lora_option, parse_tokens
from kvcli.cli.flags.cache import PageSize, Sinks, Tail, check_size_of_step, one_pair, types_checked
from kvcli.cli.flags.checks import checked, not_empty, number, one_of
from kvcli.cli.helptext import KV_CACHE, MODEL, PROMPT
from kvcli.cli.inputs import argument, read_file
from kvcli.codecs import CODECS
from kvcli.errors import UsageError
from kvcli.notices import Tell
from kvcli.options import READ_ALL, AttendOptions, CacheOptions, EvictOptions, LoadOptions
from kvcli.runtime.engine.spec import DRAFT, MTP
from kvcli.runtime.formats.packing import named
from kvcli.runtime.host.memory import main_memory, parse_size

DEFAULT_MODEL = "smollm2"


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace every parameter whose type is a dataclass by that dataclass's fields.

    The returned function is called with the fields by keyword and passes the built groups on to `command`.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _parameters_of(hints[name])
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(command)
    def call(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        return command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _ctx_size(text: str) -> int:
    return parse_tokens(text, "--ctx-size", "; 0 = automatic")


check_model = not_empty("--model", "give a name from kv models ls, or a .gguf file")


def check_device(name: str) -> None:
    from kvcli.runtime.host.device import parse_device

    parse_device(name)


def _check_limit(text: str) -> None:
    parse_size(text, "--vram-limit", main_memory().total)


def _parameters_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    result = []
    for each in fields(group):
        default = each.default_factory() if callable(each.default_factory) else each.default
        kind = inspect.Parameter.KEYWORD_ONLY
        result.append(inspect.Parameter(each.name, kind, default=default, annotation=hints[each.name]))
    return result


def _section(title: str) -> Callable[..., Any]:
    return functools.partial(typer.Option, rich_help_panel=title)


_model, _cache, _prompt = map(_section, (MODEL, KV_CACHE, PROMPT))


ModelName = Annotated[
    str,
    _model(
        "-m",
        "--model",
        metavar="MODEL",
        help="A name (kv models ls), a .gguf file, a folder of safetensors or org/repo[:quant] of the hub.",
        callback=check_model,
    ),
]


Lora = Annotated[
    list[str],
    _model(
        "--lora",
        metavar="FILE[:SCALE]",
        help="Add a LoRA adapter (a .gguf file) to the weights, or SCALE times it (repeatable).",
        callback=checked(lora_option),
    ),
]


@dataclass(frozen=True)
class ModelFlags:
    """Which model, and how it is loaded."""

    model: ModelName = DEFAULT_MODEL
    threads: Annotated[
        int,
        number(
            *(MODEL, "-t", "--threads"),
            least=0,
            most=MAX_THREADS,
            hint="0 = the physical cores",
            help="Maximum number of CPU threads; 0 = one per physical core. Fewer are used while other programs need"
            " the cores.",
        ),
    ] = 0
    backend: Annotated[
        str,
        _model(
            "--backend",
            metavar="auto|native|reference",
            help="CPU kernels: native = compiled, reference = plain torch.",
            callback=one_of("--backend", BACKENDS),
        ),
    ] = "auto"
    device: Annotated[
        str,
        _model(
            "--device",
            metavar="auto|cpu|cuda[:N]",
            help="Device to run on; auto = the first usable GPU, else the CPU.",
            callback=checked(check_device),
        ),
    ] = "auto"
    exact: Annotated[
        bool,
        _model("--exact", help="Do not round activations to 8 bits (GPU) or 15 bits (CPU) in products; slower."),
    ] = False
    strict_repeat: Annotated[
        bool,
        _model(
            "--strict-repeat",
            help="On a GPU compute prompts in fixed blocks, so that answers from cached rows are those without; slower."
            " (On a CPU they always are.)",
        ),
    ] = False
    quantize: Annotated[
        str | None,
        _model(
            "--quantize",
            metavar="TYPE",
            help="Pack the weights of a folder of safetensors while they are read: q8_0, q6_k, q4_k, ...",
            show_default="as they are",
            callback=checked(named),
        ),
    ] = None
    lora: Lora = field(default_factory=list)
    force_pretokenizer: Annotated[
        bool, _model("--force-pretokenizer", help="Go on if the model's pre-tokenizer is unknown; tokens may be wrong.")
    ] = False
    vram_limit: Annotated[
        str | None,
        _model(
            "--vram-limit",
            metavar="SIZE",
            help=(
                "Maximum memory to use, of a GPU or, on a CPU, by the process: a size such as 6G or a"
                " fraction such as 0.9."
            ),
            show_default="all that is free",
            callback=checked(_check_limit),
        ),
    ] = None

    def options(self, offline: bool = False) -> LoadOptions:
        return LoadOptions(
            *(self.model, self.threads, self.backend, offline, self.force_pretokenizer, self.vram_limit, self.device),
            exact=self.exact,
            strict_repeat=self.strict_repeat,
            quantize=named(self.quantize) if self.quantize else "",
            lora=tuple(map(lora_option, self.lora)),
        )


@dataclass(frozen=True)
class DraftFlags:
    """A model that guesses tokens for the other one."""

    draft_model: Annotated[
        str | None,
        _model(
            "--draft-model",
            metavar="MODEL",
            help="A smaller model of the same vocabulary, or a head of EAGLE-3, that guesses tokens; the answer is the"
            " same.",
            callback=not_empty("--draft-model", "give a name from kv models ls, a .gguf file or a folder"),
        ),
    ] = None

    def add_to(self, load: LoadOptions, spec: str | None = None) -> LoadOptions:
        """The options with the draft model, or with what `spec` needs, the way in which tokens are guessed. Raises
        UsageError where that is not by the draft model."""
        if self.draft_model and spec not in (None, DRAFT):
            raise UsageError(
                f"--draft-model and --spec {spec} cannot be used together", "--spec draft is what the model is for"
            )
        return replace(load, draft=self.draft_model or "", mtp=spec == MTP)


@dataclass(frozen=True)
class CacheFlags:
    """How long the context is and how it is stored."""

    ctx_size: Annotated[
        str,
        _model(
            "-c",
            "--ctx-size",
            metavar="N",
            help=(
                "Maximum number of tokens in the context, e.g. 4096 or 32k; 0 = as trained, or as "
                "many as fit in memory."
            ),
            callback=checked(_ctx_size),
        ),
    ] = "0"
    cache_type_k: Annotated[
        str | None,
        _cache(
            "-ctk",
            "--cache-type-k",
            metavar="T",
            help=f"Cache type of keys: auto, {', '.join(CODECS)}.",
            show_default="auto",
            callback=types_checked("--cache-type-k", one_pair),
        ),
    ] = None
    cache_type_v: Annotated[
        str | None,
        _cache(
            "-ctv",
            "--cache-type-v",
            metavar="T",
            help="Cache type of values.",
            show_default="same as the keys",
            callback=types_checked("--cache-type-v", one_pair),
        ),
    ] = None
    cache_type: Annotated[
        str | None,
        _cache(
            "-ct",
            "--cache-type",
            metavar="T[/T]",
            help="Cache type of keys and values, or of each: int8/int4.",
            show_default=False,
            callback=types_checked("--cache-type", one_pair),
        ),
    ] = None
    force_cache_type: Annotated[
        bool,
        _cache(
            "--force-cache-type",
            "--force",
            help="Use the cache type even if the model's weights indicate that it fails.",
        ),
    ] = False
    page_size: PageSize = CacheOptions.page_size
    kv_tail: Tail = CacheOptions.tail
    kv_sink: Sinks = CacheOptions.sinks
    ubatch_size: Annotated[
        int,
        _cache(
            "-ub",
            "--ubatch-size",
            "--prefill-chunk",
            metavar="N",
            help="Tokens per prefill step; 0 = automatic: 512 (256 with types below 16 bits), on a GPU up to 4,096.",
            callback=check_size_of_step,
        ),
    ] = CacheOptions.ubatch

    def options(self, evict: EvictOptions, attend: AttendOptions = READ_ALL) -> CacheOptions:
        """Raises UsageError for values that do not go together."""
        type_k, type_v = one_pair(self.cache_type, self.cache_type_k, self.cache_type_v)
        check_pages(self.kv_tail, self.kv_sink, [(type_k, type_v)])
        pages = self.page_size, self.ubatch_size, self.kv_tail, self.kv_sink
        return CacheOptions(_ctx_size(self.ctx_size), type_k, type_v, *pages, self.force_cache_type, evict, attend)


@dataclass(frozen=True)
class SystemFlags:
    """The system message; without one the template may bring its own."""

    system: Annotated[str | None, _prompt("-sys", "--system", metavar="TEXT", help="System message.")] = None
    system_file: Annotated[
        str | None, _prompt("-sysf", "--system-file", metavar="FILE", help="File with the system message.")
    ] = None

    def text(self, tell: Tell) -> str | None:
        """Raises UsageError, InputBytesError."""
        if self.system is not None and self.system_file is not None:
            raise UsageError("the system message is given twice, as --system and as --system-file")
        if self.system_file is not None:
            return read_file(self.system_file)
        return None if self.system is None else argument(self.system, "the system message", "-sysf", tell)
