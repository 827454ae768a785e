"""What `kv bench` measures: lengths, depths, repetitions, and which arms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.cli.flags.cache import check_size_of_step
from kvcli.cli.flags.checks import check_bandwidth, checked, file_name, number
from kvcli.cli.flags.promptcache import writable
from kvcli.cli.flags.shared import DraftFlags, parse_tokens
from kvcli.cli.flags.typelists import PARALLEL, counts
from kvcli.cli.helptext import MEASURE
from kvcli.errors import UsageError
from kvcli.options import CacheOptions, PromptCacheOptions
from kvcli.runtime.engine.spec import DRAFT, METHODS

if TYPE_CHECKING:
    from kvcli.runtime.evaluate.benching import Case

_NONE, _DEPTH = "; 0 = none", "; -d is not --device"  # for hints
_option = partial(typer.Option, rich_help_panel=MEASURE)
NO_CACHE, PREFIX_REUSE, PROMPT_CACHE = "--no-kv-cache", "--prefix-reuse", "--prompt-cache"
SPEC = "--spec"


def _list(*names: str, help: str, more: str, show_default: str) -> typer.models.OptionInfo:
    """An option whose value is what `_lengths` takes."""
    check = checked(partial(_lengths, flag=names[-1], more=more))
    return _option(*names, metavar="LIST", help=help, callback=check, show_default=show_default)


def _lengths(text: str, flag: str, more: str) -> list[int]:
    """'0,4k' -> tokens, each once. Raises UsageError."""
    return list(dict.fromkeys(parse_tokens(word, flag, more) for word in text.split(",")))


def _method(text: str) -> str:
    """Raises UsageError for what is no way to guess."""
    if text not in METHODS:
        raise UsageError(f"{SPEC} must be {', '.join(METHODS[:-1])} or {METHODS[-1]}, not {text!r}")
    return text


@dataclass(frozen=True)
class BenchFlags:
    """Lengths, depths and repetitions. None = not given: what is measured has a default of its own."""

    n_prompt: Annotated[
        str | None,
        _list(*("-p", "--n-prompt"), help="Prompt lengths to measure; 0 = none.", more=_NONE, show_default="512"),
    ] = None
    n_gen: Annotated[
        str | None,
        _list(*("-n", "--n-gen"), help="Numbers of tokens to generate; 0 = none.", more=_NONE, show_default="128"),
    ] = None
    n_depth: Annotated[
        str | None,
        _list(
            *("-d", "--n-depth"),
            help="Numbers of tokens that are in the cache already, e.g. 0,4k.",
            more=_DEPTH,
            show_default="0",
        ),
    ] = None
    repetitions: Annotated[
        int | None,
        number(
            *(MEASURE, "-r", "--repetitions"),
            least=1,
            help="Repetitions of each test; the median counts.",
            show_default="5",
        ),
    ] = None
    no_warmup: Annotated[bool, _option("--no-warmup", help="Skip the warm-up run of each test.")] = False
    no_kv_cache: Annotated[
        bool,
        _option(
            NO_CACHE,
            help="Generate behind prompts of -p (128) tokens with the cache, and without: every token computes all of"
            " the context again (-n 32, -r 3).",
        ),
    ] = False
    prefix_reuse: Annotated[
        bool,
        _option(
            PREFIX_REUSE,
            help="Time to the first token of prompts that begin with the same -p (2048) tokens: computed, read from"
            " disk, and still in memory.",
        ),
    ] = False
    parallel: Annotated[
        str | None,
        _option(
            PARALLEL,
            metavar="LIST",
            help="Tokens a second of so many sequences at a time, each behind -d tokens of its own, e.g. 1,2,4,8.",
            callback=checked(counts),
        ),
    ] = None
    spec: Annotated[
        str | None,
        _option(
            SPEC,
            metavar="|".join(METHODS),
            help="What guessed tokens are worth: answers that copy a text of -p (512) tokens, and such in words of"
            " their own, with guesses and without.",
            callback=checked(_method),
        ),
    ] = None
    suffix: Annotated[
        int | None,
        number(
            *(MEASURE, "--suffix"),
            least=1,
            help=f"With {PREFIX_REUSE}: tokens behind the prefix, which are new in every prompt.",
            show_default="64",
        ),
    ] = None
    prompt_cache: Annotated[
        str | None,
        file_name(
            *(MEASURE, PROMPT_CACHE), help="Read the rows of -d from this file; create or extend it where it has fewer."
        ),
    ] = None
    bandwidth: Annotated[
        float | None,
        _option(
            "--bandwidth",
            metavar="GB/s",
            help="Memory bandwidth, from which the limit is computed.",
            callback=check_bandwidth,
        ),
    ] = None
    ubatch_size: Annotated[
        int,
        _option(
            *("-ub", "--ubatch-size", "-b", "--batch-size"),
            metavar="N",
            help="Tokens per prefill step; 0 = automatic.",
            callback=check_size_of_step,
        ),
    ] = CacheOptions.ubatch

    def check(self, draft: DraftFlags) -> None:
        """Raises UsageError for options that change nothing in what is measured."""
        if (self.spec == DRAFT) != (draft.draft_model is not None):
            raise UsageError(f"{SPEC} {DRAFT} and --draft-model need each other", "the one says what the other is for")
        arms = {NO_CACHE: self.no_kv_cache, PREFIX_REUSE: self.prefix_reuse, PARALLEL: self.parallel, SPEC: self.spec}
        only, *others = [name for name, there in arms.items() if there] or [""]
        if others:
            raise UsageError(f"{only} and {others[0]} cannot be used together", "run them one after the other")
        unused: dict[str, object] = {PROMPT_CACHE: self.prompt_cache} if only else {}
        if only == PARALLEL:
            unused |= {"-p": self.n_prompt}
        elif only:
            unused |= {"-d": self.n_depth, "--bandwidth": self.bandwidth}
        unused |= {"-n": self.n_gen} if self.prefix_reuse else {"--suffix": self.suffix}
        if given := [name for name, value in unused.items() if value is not None]:
            if not only:
                raise UsageError(f"{given[0]} needs {PREFIX_REUSE}", "it is about prompts that begin alike")
            length = "-d" if only == PARALLEL else "-p"
            raise UsageError(f"{given[0]} cannot be used with {only}", f"{length} is the length of the prompts there")
        if self.prompt_cache is not None and not any(self.depths()):
            raise UsageError(f"{PROMPT_CACHE} needs -d", "it has the rows that are in the cache before a test")

    def depths(self) -> list[int]:
        """Tokens that are in the cache before a test."""
        return _lengths(self.n_depth or "0", "--n-depth", _DEPTH)

    def caches(self) -> PromptCacheOptions | None:
        """Where rows of depths are looked for and kept. Raises UsageError and OutputError for what is no file."""
        return None if self.prompt_cache is None else PromptCacheOptions(file=writable(self.prompt_cache))

    def cases(self) -> list[Case]:
        """Every test of prompts and generation. Raises UsageError where there is none."""
        from kvcli.runtime.evaluate import benching

        found = benching.cases(self.prompts("512"), self.generations("128"), self.depths())
        if not found:
            raise UsageError("there is nothing to measure: -p and -n are both 0")
        return found

    def prompts(self, default: str) -> list[int]:
        """The lengths of prompts."""
        return _lengths(self.n_prompt or default, "--n-prompt", _NONE)

    def generations(self, default: str) -> list[int]:
        """How many tokens are generated."""
        return _lengths(self.n_gen or default, "--n-gen", _NONE)

    def sequences(self) -> list[int]:
        """How many sequences are written at a time."""
        assert self.parallel is not None
        return counts(self.parallel)

    def positive(self, lengths: list[int], flag: str) -> list[int]:
        """Raises UsageError for a length of 0, where that is no test."""
        if 0 in lengths:
            raise UsageError(f"{flag} must be 1 or more here, not 0", "there is nothing to compare without tokens")
        return lengths
