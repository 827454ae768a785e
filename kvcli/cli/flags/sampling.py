"""The flags that say how the next token is chosen, and where an answer ends. Never imports torch."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, fields
from typing import Annotated

import typer

from kvcli.cli.flags.checks import checked
from kvcli.cli.flags.shared import parse_tokens
from kvcli.cli.helptext import GENERATION
from kvcli.errors import UsageError
from kvcli.options import UNATTENDED_TOKENS, SampleOptions
from kvcli.runtime.engine import samplesettings
from kvcli.runtime.engine.spec import METHODS

_option = functools.partial(typer.Option, rich_help_panel=GENERATION)


def _field(
    name: str, *flags: str, help: str, metavar: str = "F", model: str = "", default: str = ""
) -> typer.models.OptionInfo:
    """The option of a field of `SampleOptions`. `model`: what it is where the model says nothing either."""

    def check(value: float | str) -> None:
        samplesettings.check(SampleOptions(**{name: value}))  # type: ignore[arg-type]

    shown = default or (f"the model's, else {model}" if model else True)
    return _option(*flags, metavar=metavar, help=help, callback=checked(check), show_default=shown)


def _limit(text: str) -> int:
    """What -n says; -1 = no limit."""
    return -1 if text.strip() == "-1" else parse_tokens(text, "--predict", "; -1 = no limit")


def _breaker(text: str) -> str:
    """A sequence breaker of DRY, in which \\n and \\t are spelled out."""
    if not text:
        raise UsageError("--dry-sequence-breaker is empty", "give a text, or none for no sequence breaker")
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _check_stop(text: str) -> None:
    if not text:
        raise UsageError("--stop is empty", "give the text to stop at")


def parse_logit_bias(entries: list[str]) -> dict[int, float]:
    """'15043-1.5' or '29+inf' -> {id: bias}. Raises UsageError."""
    result = {}
    for entry in entries:
        match = re.fullmatch(r"(\d{1,9})([+-](?:\d+\.?\d*|\.\d+|(?<=-)inf))", entry.strip(), re.ASCII)
        if match is None:
            raise UsageError(
                f"--logit-bias must be a token id and a signed bias, not '{entry}'", "write 15043-1 or 29-inf"
            )
        result[int(match[1])] = float(match[2])
    return result


def _check_bias(entry: str) -> None:
    parse_logit_bias([entry])


@dataclass(frozen=True)
class SampleFlags:
    """How the next token is chosen, and when to stop. None = the model's own default."""

    predict: Annotated[
        str | None,
        _option(
            *("-n", "--predict", "--n-predict", "--max-tokens"),
            metavar="N",
            help="Maximum number of new tokens, e.g. 200 or 5k; -1 = no limit.",
            show_default=f"no limit, but {UNATTENDED_TOKENS:,} where stdout is no terminal",
            callback=checked(_limit),
        ),
    ] = None
    temperature: Annotated[
        float | None,
        _field(
            *("temperature", "--temp", "--temperature"),
            help="Sampling temperature; 0 = always the most likely token (greedy).",
            model="0.8",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        _field("top_k", "--top-k", metavar="N", help="Choose from the N most likely tokens; 0 = off.", model="40"),
    ] = None
    top_p: Annotated[
        float | None,
        _field(
            *("top_p", "--top-p"),
            help="Choose from the most likely tokens that together have probability F; 1 = off.",
            model="0.95",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        _field(
            *("min_p", "--min-p"),
            help="Exclude tokens less likely than F times the most likely one; 0 = off.",
            model="0.05",
        ),
    ] = None
    repeat_penalty: Annotated[
        float | None,
        _field(
            *("repeat_penalty", "--repeat-penalty"),
            help="Penalty for tokens that occurred, as a factor; 1 = off.",
            model="1",
        ),
    ] = None
    repeat_last_n: Annotated[
        int | None,
        _field(
            *("repeat_last_n", "--repeat-last-n"),
            metavar="N",
            help="Number of recent tokens that the penalties consider; -1 = all.",
            model="64",
        ),
    ] = None
    presence_penalty: Annotated[
        float,
        _field("presence_penalty", "--presence-penalty", help="Penalty for tokens that occurred at all; 0 = off."),
    ] = SampleOptions.presence_penalty
    frequency_penalty: Annotated[
        float,
        _field("frequency_penalty", "--frequency-penalty", help="Penalty for each time a token occurred; 0 = off."),
    ] = SampleOptions.frequency_penalty
    dry_multiplier: Annotated[
        float,
        _field(
            *("dry_multiplier", "--dry-multiplier"),
            help="Penalty for continuing a repetition (DRY), e.g. 0.8; 0 = off.",
        ),
    ] = SampleOptions.dry_multiplier
    dry_base: Annotated[
        float,
        _field("dry_base", "--dry-base", help="Factor by which the DRY penalty grows with each repeated token."),
    ] = SampleOptions.dry_base
    dry_allowed_length: Annotated[
        int,
        _field(
            *("dry_allowed_length", "--dry-allowed-length"),
            metavar="N",
            help="Length of repetition, in tokens, that DRY does not penalize.",
        ),
    ] = SampleOptions.dry_allowed_length
    dry_penalty_last_n: Annotated[
        int,
        _field(
            *("dry_penalty_last_n", "--dry-penalty-last-n"),
            metavar="N",
            help="Number of recent tokens that DRY considers; -1 = all.",
        ),
    ] = SampleOptions.dry_penalty_last_n
    dry_sequence_breaker: Annotated[
        list[str],
        _option(
            "--dry-sequence-breaker",
            metavar="TEXT",
            help=(
                "Text that ends a repetition for DRY, in place of the default ones (repeatable); none = no such text."
            ),
            show_default=r"\n : \" *",
            callback=checked(_breaker),
        ),
    ] = field(default_factory=list)
    seed: Annotated[
        int,
        _field(
            *("seed", "-s", "--seed"),
            metavar="N",
            help="Random seed; -1 = a new one each time, which the statistics show.",
        ),
    ] = SampleOptions.seed
    stop: Annotated[
        list[str],
        _option(
            *("-r", "--stop", "--reverse-prompt"),
            metavar="TEXT",
            help="Stop before this text (repeatable).",
            callback=checked(_check_stop),
        ),
    ] = field(default_factory=list)
    ignore_eos: Annotated[bool, _option("--ignore-eos", help="Continue past the end-of-text token.")] = False
    loop_stop: Annotated[
        bool | None,
        _option(
            "--loop-stop/--no-loop-stop",
            help="End an answer that keeps repeating itself.",
            show_default="on, but off with --ignore-eos",
        ),
    ] = None
    spec: Annotated[
        str | None,
        _field(
            *("spec", "--spec"),
            metavar="|".join(METHODS),
            help="How tokens are guessed ahead where that saves time; the answer is the same.",
            default="draft with --draft-model, else off",
        ),
    ] = SampleOptions.spec
    logit_bias: Annotated[
        list[str],
        _option(
            "--logit-bias",
            metavar="ID+B",
            help="Add B to the logit of a token id: 15043+1.5, or 29-inf to exclude it (repeatable).",
            callback=checked(_check_bias),
        ),
    ] = field(default_factory=list)

    def options(self, attended: bool) -> SampleOptions:
        """`attended`: the answer is seen as it grows."""
        default = -1 if attended else UNATTENDED_TOKENS
        return SampleOptions(
            **{name: getattr(self, name) for name in _AS_GIVEN},
            dry_sequence_breakers=_breakers(self.dry_sequence_breaker),
            logit_bias=parse_logit_bias(self.logit_bias),
            max_tokens=default if self.predict is None else _limit(self.predict),
            unattended=self.predict is None and not attended,
            stop=tuple(self.stop),
        )


# Fields that are in the options what they are in the flags.
_AS_GIVEN = {f.name for f in fields(SampleFlags)} & {f.name for f in fields(SampleOptions)} - {"logit_bias", "stop"}


def _breakers(given: list[str]) -> tuple[str, ...]:
    """DRY's sequence breakers: those given, else the default ones."""
    if not given:
        return SampleOptions.dry_sequence_breakers
    return tuple(_breaker(text) for text in given if text != "none")
