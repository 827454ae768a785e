"""The flags that `run` and `chat` share: groups of Annotated fields, and what each group means as options.

`grouped` lets a command take whole groups as parameters; Typer sees one option for every field.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from kvcli.cacheflags import PageSize, Sinks, Tail, check_pages, one_pair
from kvcli.errors import UsageError
from kvcli.inputs import argument, read_file
from kvcli.options import UNATTENDED_TOKENS, CacheOptions, EvictOptions, LoadOptions, SampleOptions
from kvcli.runtime import sampling
from kvcli.runtime.host.memory import main_memory, parse_size
from kvcli.telling import Tell

DEFAULT_MODEL = "smollm2"
MAX_CTX = 1 << 31


def grouped(command: Callable[..., None]) -> Callable[..., None]:
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
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _parameters_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    result = []
    for each in fields(group):
        default = each.default_factory() if callable(each.default_factory) else each.default
        kind = inspect.Parameter.KEYWORD_ONLY
        result.append(inspect.Parameter(each.name, kind, default=default, annotation=hints[each.name]))
    return result


def _panel(title: str) -> Callable[..., Any]:
    return functools.partial(typer.Option, rich_help_panel=title)


_model, _cache = _panel("Model and context"), _panel("KV cache")
_prompt, _sampling = _panel("Prompt"), _panel("Generation")


@dataclass(frozen=True)
class ModelFlags:
    """Which model, and how it is loaded."""

    model: Annotated[str, _model("-m", "--model", help="A name (kv models ls) or a .gguf file.")] = DEFAULT_MODEL
    threads: Annotated[
        int,
        _model(
            "-t",
            "--threads",
            help="Maximum number of CPU threads; 0 = the physical cores. While others use the cores, fewer compute.",
        ),
    ] = 0
    backend: Annotated[
        str,
        _model(
            "--backend",
            metavar="auto|native|reference",
            help="Which kernels compute; reference = plain torch.",
        ),
    ] = "auto"
    device: Annotated[
        str,
        _model("--device", metavar="auto|cpu|cuda[:N]", help="What computes; auto = the first usable GPU."),
    ] = "auto"
    exact: Annotated[
        bool, _model("--exact", help="On a GPU: no 8-bit activations (slower); a CPU always computes in float32.")
    ] = False
    force_pretokenizer: Annotated[
        bool, _model("--force-pretokenizer", help="Go on when the file's pre-tokenizer is unknown.")
    ] = False
    vram_limit: Annotated[
        str | None,
        _model(
            "--vram-limit",
            metavar="SIZE",
            help="Most memory to use, of a GPU or on a CPU of the process: 6G, or a share such as 0.9.",
            show_default="what is free",
        ),
    ] = None

    def options(self, offline: bool = False) -> LoadOptions:
        """Raises UsageError for a value out of range."""
        from kvcli.runtime.host.device import parse_device

        if not self.model.strip():
            raise UsageError("--model is empty", "give a name from kv models ls, or a .gguf file")
        if self.backend not in ("auto", "native", "reference"):
            raise UsageError(f"--backend is '{self.backend}'", "it is one of auto, native, reference")
        if not 0 <= self.threads <= 1024:
            raise UsageError(f"--threads is {self.threads}", "it is 1 to 1,024, or 0 for the physical cores")
        if self.vram_limit is not None:
            parse_size(self.vram_limit, "--vram-limit", main_memory().total)
        parse_device(self.device)
        return LoadOptions(
            *(self.model, self.threads, self.backend, offline, self.force_pretokenizer, self.vram_limit, self.device),
            exact=self.exact,
        )


@dataclass(frozen=True)
class CacheFlags:
    """How long the context is and how it is stored."""

    ctx_size: Annotated[
        str,
        _cache(
            "-c",
            "--ctx-size",
            metavar="N",
            help="Most tokens in the context (32k works); 0 = as trained, or what fits in memory.",
        ),
    ] = "0"
    cache_type_k: Annotated[
        str | None,
        _cache(
            "-ctk",
            "--cache-type-k",
            metavar="T",
            help="Type of keys: auto, f32, f16, bf16, fp8, fp8_e5m2, int8, int6, int4.",
            show_default="auto",
        ),
    ] = None
    cache_type_v: Annotated[
        str | None,
        _cache("-ctv", "--cache-type-v", metavar="T", help="Type of values.", show_default="as the keys"),
    ] = None
    cache_type: Annotated[
        str | None,
        _cache(
            "-ct", "--cache-type", metavar="T[/T]", help="Both types, or keys/values: int8/int4.", show_default=False
        ),
    ] = None
    force_cache_type: Annotated[
        bool, _cache("--force-cache-type", "--force", help="Go on when the weights say that this type of keys fails.")
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
            help="Tokens per prefill step; 0 = automatic: 512 (256 with types below 16 bits), on a GPU up to 2,048.",
        ),
    ] = CacheOptions.ubatch

    def options(self, evict: EvictOptions) -> CacheOptions:
        """Raises UsageError for a value out of range."""
        type_k, type_v = one_pair(self.cache_type, self.cache_type_k, self.cache_type_v)
        check_pages(self.page_size, self.kv_tail, self.kv_sink, [(type_k, type_v)])
        if self.ubatch_size < 0:
            raise UsageError(f"--ubatch-size must be 0 or more, not {self.ubatch_size}")
        ctx_size = parse_tokens(self.ctx_size, "--ctx-size", "; 0 = automatic")
        pages = self.page_size, self.ubatch_size, self.kv_tail, self.kv_sink
        return CacheOptions(ctx_size, type_k, type_v, *pages, self.force_cache_type, evict)


@dataclass(frozen=True)
class SystemFlags:
    """The system message; without one the template may bring its own."""

    system: Annotated[str | None, _prompt("-sys", "--system", metavar="TEXT", help="System message.")] = None
    system_file: Annotated[
        str | None, _prompt("-sysf", "--system-file", metavar="FILE", help="System message from a file.")
    ] = None

    def text(self, tell: Tell) -> str | None:
        """Raises UsageError, InputBytesError."""
        if self.system is not None and self.system_file is not None:
            raise UsageError("the system message is given twice, as --system and as --system-file")
        if self.system_file is not None:
            return read_file(self.system_file)
        return None if self.system is None else argument(self.system, "the system message", "-sysf", tell)


@dataclass(frozen=True)
class SampleFlags:
    """How the next token is chosen, and when to stop. None = the model's own default."""

    predict: Annotated[
        str | None,
        _sampling(
            "-n",
            "--predict",
            "--n-predict",
            "--max-tokens",
            metavar="N",
            help="Most new tokens (5k works); -1 = no limit.",
            show_default=f"no limit, but {UNATTENDED_TOKENS:,} where stdout is no terminal",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        _sampling("--temp", "--temperature", metavar="F", help="0 = greedy.", show_default="the model's, else 0.8"),
    ] = None
    top_k: Annotated[
        int | None, _sampling("--top-k", metavar="N", help="0 = off.", show_default="the model's, else 40")
    ] = None
    top_p: Annotated[
        float | None,
        _sampling("--top-p", metavar="F", help="1 = off.", show_default="the model's, else 0.95"),
    ] = None
    min_p: Annotated[
        float | None,
        _sampling("--min-p", metavar="F", help="0 = off.", show_default="the model's, else 0.05"),
    ] = None
    repeat_penalty: Annotated[
        float | None,
        _sampling("--repeat-penalty", metavar="F", help="1 = off.", show_default="the model's, else 1"),
    ] = None
    repeat_last_n: Annotated[
        int | None,
        _sampling(
            "--repeat-last-n",
            metavar="N",
            help="Tokens the penalties look back on; -1 = all.",
            show_default="the model's, else 64",
        ),
    ] = None
    presence_penalty: Annotated[float, _sampling("--presence-penalty", metavar="F", help="0 = off.")] = 0.0
    frequency_penalty: Annotated[float, _sampling("--frequency-penalty", metavar="F", help="0 = off.")] = 0.0
    dry_multiplier: Annotated[
        float,
        _sampling(
            "--dry-multiplier", metavar="F", help="Penalize what continues a repetition (DRY), e.g. 0.8; 0 = off."
        ),
    ] = SampleOptions.dry_multiplier
    dry_base: Annotated[float, _sampling("--dry-base", metavar="F", help="How DRY grows with each repeated token.")] = (
        SampleOptions.dry_base
    )
    dry_allowed_length: Annotated[
        int, _sampling("--dry-allowed-length", metavar="N", help="Tokens repeated in a row before DRY begins.")
    ] = SampleOptions.dry_allowed_length
    dry_penalty_last_n: Annotated[
        int, _sampling("--dry-penalty-last-n", metavar="N", help="Tokens DRY looks back on; -1 = all.")
    ] = SampleOptions.dry_penalty_last_n
    dry_sequence_breaker: Annotated[
        list[str],
        _sampling(
            "--dry-sequence-breaker",
            metavar="TEXT",
            help="Text over which DRY sees no repetition, instead of the default ones (repeat); none = there is none.",
            show_default=r"\n : \" *",
        ),
    ] = field(default_factory=list)
    seed: Annotated[int, _sampling("-s", "--seed", metavar="N", help="-1 = random; the stats line names it.")] = -1
    stop: Annotated[
        list[str],
        _sampling("-r", "--stop", "--reverse-prompt", metavar="TEXT", help="Stop before this text (repeat)."),
    ] = field(default_factory=list)
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Go on after the end of the text.")] = False
    loop_stop: Annotated[
        bool | None,
        _sampling(
            "--loop-stop/--no-loop-stop",
            help="End an answer that says the same again and again.",
            show_default="on, off with --ignore-eos",
        ),
    ] = None
    logit_bias: Annotated[
        list[str],
        _sampling("--logit-bias", metavar="ID+B", help="Add B to a token's logit, e.g. 29-inf (repeat)."),
    ] = field(default_factory=list)

    def options(self, attended: bool) -> SampleOptions:
        """`attended`: the answer is seen as it grows. Raises UsageError for a value out of range."""
        if "" in self.stop:
            raise UsageError("--stop is empty", "give the text to stop at")
        default = -1 if attended else UNATTENDED_TOKENS
        options = SampleOptions(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            repeat_last_n=self.repeat_last_n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            dry_multiplier=self.dry_multiplier,
            dry_base=self.dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_penalty_last_n=self.dry_penalty_last_n,
            dry_sequence_breakers=_breakers(self.dry_sequence_breaker),
            seed=self.seed,
            logit_bias=parse_logit_bias(self.logit_bias),
            max_tokens=default if self.predict is None else _limit(self.predict),
            unattended=self.predict is None and not attended,
            ignore_eos=self.ignore_eos,
            loop_stop=self.loop_stop,
            stop=tuple(self.stop),
        )
        sampling.check(options)
        return options


def _limit(text: str) -> int:
    """What -n says; -1 = no limit."""
    return -1 if text.strip() == "-1" else parse_tokens(text, "--predict", "; -1 = no limit")


def _breakers(given: list[str]) -> tuple[str, ...]:
    """DRY's sequence breakers: those given, in which \\n and \\t are spelled out, else the default ones."""
    if not given:
        return SampleOptions.dry_sequence_breakers
    texts = [text.replace("\\n", "\n").replace("\\t", "\t") for text in given if text != "none"]
    if "" in texts:
        raise UsageError("--dry-sequence-breaker is empty", "give a text, or none for no sequence breaker")
    return tuple(texts)


def parse_tokens(text: str, flag: str, more: str = "") -> int:
    """'4096', '32k' (x 1024) or '1m' (x 1024 x 1024) -> tokens. Raises UsageError; `more` belongs to its hint."""
    match = re.fullmatch(r"(\d+)([kKmM]?)", text.strip(), re.ASCII)
    if match is None:
        raise UsageError(f"{flag} is '{text}', which is not a number of tokens", f"write 4096 or 32k{more}")
    tokens = int(match[1][:12]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()]
    if tokens > MAX_CTX or len(match[1]) > 12:
        raise UsageError(f"{flag} is '{text}', more than any model can address", f"the most is {MAX_CTX}")
    return tokens


def parse_logit_bias(entries: list[str]) -> dict[int, float]:
    """'15043-1.5' or '29+inf' -> {id: bias}. Raises UsageError."""
    result = {}
    for entry in entries:
        match = re.fullmatch(r"(\d{1,9})([+-](?:\d+\.?\d*|\.\d+|(?<=-)inf))", entry.strip(), re.ASCII)
        if match is None:
            raise UsageError(f"--logit-bias is '{entry}'", "write a token id and a signed bias, e.g. 15043-1 or 29-inf")
        result[int(match[1])] = float(match[2])
    return result
