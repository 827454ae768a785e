"""`kv estimate`: what a model needs before it is loaded, and what fits. Never imports torch."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.cli import render
from kvcli.cli.commands.estimate.flags import DeviceFlags, OutputFlags, PlanFlags, ShapeFlags
from kvcli.cli.commands.estimate.others import ClusterFlags, print_command
from kvcli.cli.engines import tell_aliases
from kvcli.cli.flags.attending import AttendFlags
from kvcli.cli.flags.eviction import EvictFlags
from kvcli.cli.flags.shared import DEFAULT_MODEL, DraftFlags, grouped
from kvcli.cli.helptext import PLANNING
from kvcli.cli.invocation import Invocation
from kvcli.cli.wording import as_flags
from kvcli.errors import DoesNotFit, ModelError, UsageError
from kvcli.options import AttendOptions, CacheOptions, EvictOptions, LoadOptions
from kvcli.peers.mapping import PROGRAMS

if TYPE_CHECKING:
    from kvcli.api.planning import Recommendation
    from kvcli.cli.commands.estimate.view import Report


EXAMPLES = """
kv estimate llama-3.1-8b --gpu rtx3060-12g -c 64k
kv estimate org/repo:Q4_K_M -ct f16,int8
kv estimate --layers 32 --kv-heads 8 --head-dim 128 -c 8k
kv run $(kv estimate -m model.gguf --print-args) "Hello"
kv estimate llama-3.1-8b --gpu h100-80g -c 32k --print-args vllm --nodes 2 --gpus 8
"""


def register(app: typer.Typer) -> None:
    app.command("estimate", rich_help_panel=PLANNING, epilog=EXAMPLES)(estimate)


@grouped
def estimate(
    ctx: typer.Context,
    plan: PlanFlags,
    draft: DraftFlags,
    evict: EvictFlags,
    attend: AttendFlags,
    shape: ShapeFlags,
    device: DeviceFlags,
    cluster: ClusterFlags,
    output: OutputFlags,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A name, a .gguf file, a safetensors folder or org/repo[:quant].", show_default=DEFAULT_MODEL
        ),
    ] = None,
    model_option: Annotated[
        str | None,
        typer.Option("-m", "--model", "--preset", metavar="MODEL", help="Same as MODEL.", show_default=False),
    ] = None,
) -> None:
    """Plan memory before loading: what fits, with which cache type, and up to which context."""
    invocation: Invocation = ctx.obj
    if output.list_presets or output.list_gpus:
        _list(output, invocation)
        return
    if model is not None and model_option is not None:
        raise UsageError("the model is given twice, as an argument and as --model")
    cluster.check(output.print_args)
    if output.print_args in PROGRAMS:
        plan = replace(plan, tp=1)  # what of a card is left there is reckoned by the program's own rules
    asked = evict.options(plan.page_size, prompt=False)
    load = draft.add_to(LoadOptions(""), plan.spec)
    name = model or model_option or (None if shape.given().shapes else DEFAULT_MODEL)
    report = _report(name, plan, load, asked, attend.options(asked), shape, device, invocation)
    for text in report.model.notices:
        render.notice(text, invocation)
    for text in report.query.draft.notices if report.query.draft else ():
        render.notice(f"draft: {text}", invocation)
    for text in report.warnings:
        render.warn(text, invocation)
    if output.check:
        _check(report, plan)
    elif output.print_args in PROGRAMS:
        print_command(ctx, report, name, str(output.print_args), cluster)
    elif output.print_args:
        _print_args(report, name, plan, invocation)
    else:
        _show(report, output)
        if report.model.weights is None:  # the cache alone was asked for, of no device
            return
        if plan.ctx_size is not None and not all(any(o.fits for o in each) for each in report.outcomes):
            raise typer.Exit(DoesNotFit.exit_code)
        if report.best[0] is None:
            raise typer.Exit(DoesNotFit.exit_code)


def _report(
    name: str | None,
    plan: PlanFlags,
    load: LoadOptions,
    evict: EvictOptions,
    attend: AttendOptions,
    shape: ShapeFlags,
    device: DeviceFlags,
    invocation: Invocation,
) -> Report:
    from kvcli.api.checks import block_format, lora_option
    from kvcli.api.planning import compare, find_target, planned_draft, planned_next, recommend
    from kvcli.cli.commands.estimate.view import Report
    from kvcli.runtime.headers.plannedmodel import planned_model

    given = shape.given()
    tell_aliases(plan.named_pairs(), invocation)  # a wrong type is told before anything is read
    target, warnings = find_target(device.gpu, device.vram, device.device, device.margin, device.bandwidth)
    adapters, form = tuple(map(lora_option, plan.lora)), block_format(plan.quantize)
    model = planned_model(name, given, target.memory.kind, invocation.offline, adapters, form)
    query = plan.query(model, evict, attend)
    cache = CacheOptions(evict=evict, attend=attend)
    if load.draft:
        beside = planned_draft(model, load.draft, target.memory.kind, invocation.offline, cache)
        query = replace(query, draft=beside)
    elif load.mtp:
        query = replace(query, draft=planned_next(model, target.memory.kind, cache))
    outcomes = compare(model, target, query)
    trained = model.config.context_length
    if trained and max(query.contexts) > trained:
        warnings.append(f"a context of {max(query.contexts):,} needs RoPE scaling: the model is trained on {trained:,}")
    return Report(
        model, target, query, outcomes, [recommend(each, plan.names_types, trained) for each in outcomes], warnings
    )


def _show(report: Report, output: OutputFlags) -> None:
    from kvcli.cli.commands.estimate import view

    if output.json:
        render.print_json("estimate", view.as_json(report))
    elif output.csv:
        render.write_out(view.as_csv(report))
    elif output.explain:
        from kvcli.cli.commands.estimate.explanation import explain

        render.write_out(explain(report))
    elif report.model.weights is None:
        render.write_out(view.cache_only(report, output.units))
    else:
        render.write_out(view.screen(report, output.units))


def _check(report: Report, plan: PlanFlags) -> None:
    """DoesNotFit unless every pair asked for (by default f16, as kv run takes) fits at every context."""
    wanted = report.query.pairs if plan.names_types else (("f16", "f16"),)
    for outcomes in report.outcomes:
        for o in outcomes:
            if o.pair in wanted and not o.fits:
                needed, margin, free = (x >> 20 for x in (o.plan.needed, o.plan.margin, report.target.memory.free))
                raise DoesNotFit(
                    f"a context of {o.plan.tokens:,} tokens does not fit with {o.label}: {needed:,} MiB are needed"
                    f" (with a margin of {margin:,}), {free:,} are free",
                    f"the largest context that fits is {o.max_context:,}" if o.max_context else "use a smaller model",
                )


def _print_args(report: Report, name: str | None, plan: PlanFlags, invocation: Invocation) -> None:
    model, query = report.model, report.query
    if len(query.contexts) > 1:
        raise UsageError("--print-args is about one context", "give -c one number")
    if query.ranks > 1 or query.sequences > 1:
        raise UsageError("kv run has one device and one sequence", "leave --tp and --batch-size out with --print-args")
    if name is not None and not model.run_as:
        raise ModelError(f"there are no flags for kv run with {model.name}: {model.problem}", model.remedy)
    choice = _choice(report, plan)
    if choice is None or (plan.ctx_size is not None and not choice.fits):
        least = "nothing fits" if choice is None else f"{choice.reason}, one of {choice.context:,} does"
        raise DoesNotFit(least, "kv estimate without --print-args shows the table")
    if name is None:
        render.announce("a shape by hand names no model: kv run needs -m MODEL beside these options", invocation)
    elif model.problem:
        render.announce(f"{name} has no file of its own: {model.run_as} is taken from the hub", invocation)
    args = [] if name is None else ["-m", name if not model.problem else model.run_as]
    args += [word for each in plan.lora for word in ("--lora", each)]
    args += ["--quantize", plan.quantize] if plan.quantize else []
    if query.draft and plan.spec:
        args += ["--spec", plan.spec]
    elif query.draft:
        args += ["--draft-model", query.draft.run_as or query.draft.name]
    args += choice.args
    args += [] if query.page_size == CacheOptions.page_size else ["--page-size", str(query.page_size)]
    args += [] if query.ubatch == CacheOptions.ubatch else ["-ub", str(query.ubatch)]
    args += [] if query.tail == CacheOptions.tail else ["--kv-tail", str(query.tail)]
    args += as_flags(query.evict.named).split() if query.evict.policy != "none" else []
    args += as_flags(query.attend.named).split()
    args += [] if query.sinks == CacheOptions.sinks else ["--kv-sink", str(query.sinks)]
    render.write_out(shlex.join(args) + "\n")


def _choice(report: Report, plan: PlanFlags) -> Recommendation | None:
    """What is recommended; a context that was asked for stays as it is, also beyond the trained one."""
    from kvcli.api.planning import recommend

    return report.best[0] if plan.ctx_size is None else recommend(report.outcomes[0], plan.names_types, trained=0)


def _list(output: OutputFlags, invocation: Invocation) -> None:
    if output.list_gpus:
        from kvcli.runtime.plan.cards import CARDS

        cards = [
            [c.name, c.title, f"{c.total_mib:,}", f"{c.usable_mib:,}", f"{c.bandwidth:,.0f}"] for c in CARDS.values()
        ]
        render.print_table(["name", "card", "MiB", "usable MiB", "GB/s"], cards, invocation, right={2, 3, 4})
        return
    from kvcli.runtime.cache.layout import KVLayout
    from kvcli.runtime.headers.shapes import config_from_recipe
    from kvcli.runtime.hub.recipes import load_recipes

    rows = []
    for recipe in load_recipes().values():
        if recipe.shape:
            config = config_from_recipe(recipe.name, recipe.shape)
            cost = KVLayout.build(config, "f16", "f16").token_bytes()
            rows.append([recipe.name, config.attention_kind, f"{cost:,}", f"{config.context_length:,}", recipe.runs])
    render.print_table(["name", "attention", "B/token at f16", "context", "runs"], rows, invocation, right={2, 3})
