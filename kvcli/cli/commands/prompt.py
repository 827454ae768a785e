"""`kv prompt`: what a model reads for a prompt, with its chat template around it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcli.cli import render
from kvcli.cli.commands.tokenize import tokens_object
from kvcli.cli.flags.prompt import PromptFlags
from kvcli.cli.flags.shared import DEFAULT_MODEL, ModelName, SystemFlags, grouped
from kvcli.cli.flags.template import TemplateFlags
from kvcli.cli.helptext import PROMPT, STORES
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.cli.locate import locate_model
from kvcli.cli.streams import TextOut

EXAMPLES = """
kv prompt "Why is the sky blue?"
kv prompt -sys "Be brief." -f report.txt "Summarize this." --json | jq .tokens
"""


def register(app: typer.Typer) -> None:
    app.command("prompt", rich_help_panel=STORES, epilog=EXAMPLES)(prompt)


@grouped
def prompt(
    ctx: typer.Context,
    flags: PromptFlags,
    system: SystemFlags,
    template: TemplateFlags,
    model: ModelName = DEFAULT_MODEL,
    json: JsonFlag = False,
    instruction: Annotated[
        str | None, typer.Argument(metavar="PROMPT", rich_help_panel=PROMPT, help="The prompt, as for kv run.")
    ] = None,
) -> None:
    """Show what a model reads for a prompt: the text with its chat template around it. Nothing is generated.

    Only the text goes to stdout. --json has its tokens, too.
    """
    from kvcli.runtime.headers.openmodel import open_model
    from kvcli.runtime.text.modeltext import ModelText

    invocation: Invocation = ctx.obj
    asked, chat = flags.question(instruction, system, invocation), template.options(flags.raw)
    path = locate_model(model, invocation)
    with open_model(path) as file:
        warn = render.telling(invocation).warn
        text = ModelText.of(file.metadata, path.name, chat_anyway=flags.raw is False, chat=chat, tell=warn)
    question = asked.of(text, invocation)
    whole = "".join(part for part, _ in question.segments(text, question.prompt))
    if json:
        origin = None if question.raw or text.template is None else text.template.origin
        tokens = tokens_object(text.tokenizer, model, question.ids(text))
        render.print_json("prompt", {"text": whole, "source": origin, **tokens})
    else:
        out = TextOut.stdout()
        out.write(whole)
        if out.tty:
            out.end_line()
        out.flush()
