"""`kv run`: one prompt in, generated text out, exit."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.cli import batch, engines, keeping, render, report, samples, verification
from kvcli.cli.answer import Job, answer, settle
from kvcli.cli.batch import PARALLEL, Batch
from kvcli.cli.batchlines import Form
from kvcli.cli.flags.attending import AttendFlags
from kvcli.cli.flags.checks import file_name, number
from kvcli.cli.flags.engine import EngineFlags
from kvcli.cli.flags.eviction import EvictFlags, OverflowFlags
from kvcli.cli.flags.grammar import GrammarFlags
from kvcli.cli.flags.keeping import KeepFlags
from kvcli.cli.flags.prompt import PromptFlags, Question
from kvcli.cli.flags.promptcache import CACHE_MARK, CacheMarks, Chunks, FileFlags, StoreFlags
from kvcli.cli.flags.sampling import SampleFlags
from kvcli.cli.flags.shared import CacheFlags, DraftFlags, ModelFlags, SystemFlags, grouped
from kvcli.cli.flags.template import TemplateFlags, ThinkingFlags
from kvcli.cli.flags.tools import ToolFlags
from kvcli.cli.helptext import GENERATE, GENERATION, OUTPUT, PROMPT
from kvcli.cli.interrupt import UNWIND, Interrupts, last_words
from kvcli.cli.invocation import Invocation, JsonFlag, json_option
from kvcli.cli.overflow import ERROR, Cut, answer_leaves, cut_text
from kvcli.cli.sinks import CopySink, JsonlSink, JsonSink, SamplesSink, Sink, TextSink
from kvcli.cli.streams import OutputFile, TextOut, say
from kvcli.errors import EXIT_CONTEXT_FULL, CheckFailed, ContextOverflow, UsageError
from kvcli.peers.mapping import VLLM
from kvcli.runtime.engine.spec import MTP

if TYPE_CHECKING:
    from kvcli.cli.outcome import Result
    from kvcli.options import PromptCacheOptions
    from kvcli.runtime.engine.chunkcaches import ChunkCaches
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.engine.loaded import LoadedModel
    from kvcli.runtime.promptcache.lookup import PromptCaches


_option, _generation, _output = (partial(typer.Option, rich_help_panel=each) for each in (PROMPT, GENERATION, OUTPUT))


@dataclass(frozen=True)
class OutputFlags:
    """Where the answer goes, and what is told about it."""

    json: JsonFlag = False
    jsonl: Annotated[bool, json_option("--jsonl", "--stream-json", help="Print one JSON event per line on stdout.")] = (
        False
    )
    output: Annotated[
        str | None,
        _output("-o", "--output", metavar="FILE", help="Also write the text to this file."),
    ] = None
    stats: Annotated[
        bool | None,
        _output(
            "--stats/--no-stats",
            help="Show tokens, speed and memory on stderr; -v shows more (TTFT: time to the first token).",
            show_default="on a terminal",
        ),
    ] = None
    no_newline: Annotated[bool, _output("--no-newline", help="Do not add a newline at the end.")] = False
    n_samples: Annotated[
        int,
        number(
            *(GENERATION, "--n-samples"),
            least=1,
            help="Number of answers to the prompt, which is read once; they are decoded together.",
        ),
    ] = 1
    verify_estimate: Annotated[
        bool,
        _output(
            "--verify-estimate",
            help=(
                "Compare predicted and measured memory; exit with code 8 if they differ by more than 3 % and 100 MiB."
            ),
        ),
    ] = False
    logprobs: Annotated[
        int | None,
        number(
            *(OUTPUT, "--logprobs"),
            least=0,
            most=100,
            help="With --json or --jsonl: the log probability of each token, and of the N likeliest ones.",
        ),
    ] = None
    raw_output: Annotated[bool, _output("--raw-output", help="Do not escape control characters on a terminal.")] = False

    def copy(self, reads: Sequence[str]) -> OutputFile | None:
        """The file of -o, which is none that is read. Raises UsageError, OutputError."""
        out = self.output
        if out == "-":
            if self.json or self.jsonl:
                raise UsageError("-o - and JSON are both for stdout", "the text is in the JSON, too")
            return None
        if self.output == "":
            raise UsageError("--output is empty", "give the name of a file")
        if out and any(os.path.isfile(name) and os.path.realpath(name) == os.path.realpath(out) for name in reads):
            raise UsageError(f"{out} would be read and replaced", "name another file with -o")
        return None if out is None else OutputFile(out)

    def asked_logprobs(self) -> int | None:
        """Raises UsageError where nobody would see them."""
        if self.logprobs is not None and not (self.json or self.jsonl):
            raise UsageError("--logprobs needs --json or --jsonl", "they are in no text")
        return self.logprobs

    def sink(self, invocation: Invocation, copy: OutputFile | None) -> Sink:
        """Raises UsageError, OutputError."""
        if self.json and self.jsonl:
            raise UsageError("--json and --jsonl cannot be used together")
        if self.n_samples > 1 and self.verify_estimate:
            raise UsageError("--verify-estimate measures the memory of one answer", "leave --n-samples out")
        out, newline = TextOut.stdout(self.raw_output), not self.no_newline
        sink: Sink = TextSink(out, invocation, newline)
        if self.json:
            several = self.n_samples > 1
            sink = SamplesSink(out, invocation, self.n_samples) if several else JsonSink(out, invocation)
        elif self.jsonl:
            sink = JsonlSink(out, invocation)
        return sink if copy is None else CopySink(sink, copy, newline, self.n_samples)

    def leave(self, code: int, invocation: Invocation, copy: OutputFile | None = None) -> None:
        """Before an exit at once: nothing is lost that was generated."""
        last_words(code, self.json or self.jsonl, copy.keep() if copy else "", "".join(invocation.answer))


@dataclass(frozen=True)
class BatchFlags:
    """Many prompts from a file."""

    batch: Annotated[
        str | None,
        file_name(
            *(PROMPT, "--batch"),
            help=(
                'Answer each line of this file, {"prompt": TEXT} or {"messages": [...]}, perhaps with id, max_tokens,'
                " temperature and so on; - = stdin. One JSON object a line comes out, in the same order; -o FILE keeps"
                " them, and an existing FILE is continued."
            ),
        ),
    ] = None
    parallel: Annotated[
        int | None,
        number(
            *(GENERATION, "--parallel"),
            least=1,
            most=256,
            help="Number of lines of --batch that are answered at a time. They share the memory; -c is of each.",
            show_default=str(PARALLEL),
        ),
    ] = None

    def refuse(
        self, prompt: PromptFlags, instruction: str | None, output: OutputFlags, named: FileFlags, policy: str,
        tools: bool,
    ) -> None:  # fmt: skip
        """Raises UsageError for what makes no sense with or without a batch."""
        if self.batch is None:
            if self.parallel is not None:
                raise UsageError("--parallel needs --batch FILE", "--n-samples decodes several answers to one prompt")
            return
        together = {
            "a prompt": instruction is not None or prompt.prompt is not None,
            "--file": bool(prompt.file),
            "--on-overflow": policy != ERROR,
            "--json": output.json,
            "--jsonl": output.jsonl,
            "--n-samples": output.n_samples > 1,
            "--verify-estimate": output.verify_estimate,
            "--assistant": prompt.assistant is not None,
            "--tools": tools,
            "--logprobs": output.logprobs is not None,
            "--prompt-cache-all": named.prompt_cache_all,
        }
        if given := [name for name, there in together.items() if there]:
            raise UsageError(f"--batch and {given[0]} cannot be used together", "each line has a prompt and an answer")


def _check_chunks(chunks: bool, prompt: PromptFlags, named: FileFlags, many: BatchFlags) -> None:
    """Raises UsageError for what --chunks cannot be used with."""
    if not chunks:
        return
    if many.batch is not None or named.prompt_cache is not None:
        other = "--batch" if many.batch is not None else "--prompt-cache"
        raise UsageError(f"--chunks and {other} cannot be used together", "each file of -f is stored by itself")
    if not prompt.file:
        raise UsageError("--chunks needs documents", "give them as files, e.g. -f a.txt -f b.txt")


def _caches(
    engine: Engine, question: Question, kept: PromptCacheOptions, chunks: bool, invocation: Invocation
) -> PromptCaches | ChunkCaches:
    """Where rows of the prompt are looked for; `chunks`: of its files one by one."""
    tell = render.telling(invocation)
    if not chunks:
        return engine.prompt_caches(kept, tell)
    from kvcli.runtime.engine.chunkcaches import ChunkCaches, Document

    documents = [Document(*each) for each in question.documents(engine.loaded.text)]
    return ChunkCaches(engine, documents, kept, tell)


def _answers(engine: Engine, ids: list[int], job: Job, count: int) -> list[Result]:
    """So many answers to one prompt."""
    return [answer(engine, engine.new_sequence(), ids, job)] if count == 1 else samples.answers(engine, ids, job, count)


def _tell(results: list[Result], output: OutputFlags, invocation: Invocation) -> None:
    """What people want to know of the answers."""
    for loss in dict.fromkeys(loss for result in results for loss in result.losses):
        render.warn(loss, invocation)
    if report.wants_stats(output.stats, invocation):
        several, verbose = len(results) > 1, invocation.verbose > 0
        line = samples.summary(results) if several else report.stats_line(results[0], verbose=verbose)
        render.aside(line, invocation)
        if verbose:
            say(report.sampling_line(results[0].params))


def _fitting(loaded: LoadedModel, question: Question, policy: str, max_tokens: int) -> tuple[list[int], Cut | None]:
    """The prompt's ids, cut to the context where `policy` wants that. Raises ContextOverflow where it does not."""
    terms, text = loaded.terms, loaded.text
    try:
        if policy == ERROR:
            terms.check_text(len(question.prompt), text.tokenizer.longest)
        terms.check_prompt(ids := question.ids(text), answer=max_tokens)
        return ids, None
    except ContextOverflow as error:
        if policy == ERROR:
            error.hint += "; --on-overflow cuts it"
            raise
    room = answer_leaves(terms.ctx_size, max_tokens, None if terms.keeps_prompt else terms.layout.retention)
    return cut_text(ids, question.text(text, ids), policy, terms.ctx_size, room, terms.could_hold, max_tokens)


EXAMPLES = """
kv run "Why is the sky blue?"
kv run -f report.txt "Summarize this."
cat notes.txt | kv run "List the action items."
kv run -m model.gguf -c 32k -ct int8 -f book.txt "Who is the narrator?"
kv run --json "Say hi." | jq -r .text
kv run --n-samples 4 "A title for a story."
kv run --batch prompts.jsonl -o answers.jsonl
"""


def register(app: typer.Typer) -> None:
    app.command("run", rich_help_panel=GENERATE, epilog=EXAMPLES)(run)


@grouped
def run(
    ctx: typer.Context,
    model: ModelFlags,
    by: EngineFlags,
    staying: KeepFlags,
    draft: DraftFlags,
    cache: CacheFlags,
    evict: EvictFlags,
    attend: AttendFlags,
    overflow: OverflowFlags,
    store: StoreFlags,
    named: FileFlags,
    prompt: PromptFlags,
    system: SystemFlags,
    template: TemplateFlags,
    thought: ThinkingFlags,
    sample: SampleFlags,
    shape: GrammarFlags,
    calls: ToolFlags,
    output: OutputFlags,
    many: BatchFlags,
    cache_mark: CacheMarks = None,
    chunks: Chunks = False,
    instruction: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", rich_help_panel=PROMPT, help="The prompt. Text from files and stdin comes before it."
        ),
    ] = None,
) -> None:
    """Answer one prompt and exit. Only the generated text goes to stdout."""
    invocation: Invocation = ctx.obj
    if by.engine == VLLM:
        from kvcli.cli import vllm

        asked_of_vllm = vllm.Asked(prompt, system, template, sample, shape, calls)
        text = TextSink(TextOut.stdout(output.raw_output), invocation, not output.no_newline)
        raise typer.Exit(vllm.run(ctx, model.model, asked_of_vllm, instruction, text))
    with Interrupts(partial(output.leave, invocation=invocation)) as interrupts:
        spec = sample.spec if many.batch is None else None  # lines may say otherwise
        load = replace(draft.add_to(model.options(invocation.offline), spec), mtp=sample.spec == MTP)
        policy = overflow.on_overflow
        keeping.find_process(load, staying.seconds, output.verify_estimate, invocation)
        chat = template.options(prompt.raw, thought.reasoning_budget)
        tools = calls.listed(prompt, render.telling(invocation))
        load = replace(load, chat=tools.told(chat) if tools else chat)
        sampling = sample.options(attended=many.batch is None and render.is_terminal(sys.stdout))
        sampling = replace(sampling, logprobs=output.asked_logprobs(), grammar=shape.source())
        evicting = evict.options(cache.page_size)
        cache_options, kept = (
            replace(cache.options(evicting, attend.options(evicting)), sequences=output.n_samples),
            replace(named.add_to(store.options(invocation)), awaited=invocation.json),
        )
        many.refuse(prompt, instruction, output, named, policy, tools is not None)
        _check_chunks(chunks, prompt, named, many)
        if many.batch is not None:
            form = Form(
                system.text(render.telling(invocation)), prompt.raw, prompt.special, sampling, tuple(cache_mark or ())
            )
            asked = replace(cache_options, sequences=many.parallel or PARALLEL)
            lines = Batch(many.batch, output.output, form, staying)
            code = batch.run(
                lines, load, asked, replace(kept, memory=True), invocation, interrupts,
                report.wants_stats(output.stats, invocation),
            )  # fmt: skip
            raise typer.Exit(code)
        copy = output.copy([*prompt.file, *filter(None, [system.system_file])])
        sink = output.sink(invocation, copy)
        interrupts.on_leave = partial(output.leave, invocation=invocation, copy=copy)
        question = prompt.question(instruction, system, invocation, chat=True)
        loaded = engines.load_model(prompt.loading(load), cache_options, invocation, interrupts)
        keeping.stay(loaded, load, staying, invocation)
        question = question.of(loaded.text, invocation)
        ids, cut = _fitting(loaded, question, policy, -1 if sampling.unattended else sampling.max_tokens)
        marks = question.marks(loaded.text, ids, cache_mark or [], CACHE_MARK)
        engine = engines.engine_of(loaded, invocation, len(ids))
        if cut is not None:
            render.warn(str(cut), invocation)
        thinking = question.thinking(loaded.text)
        use = tools.use(loaded.text, question.raw) if tools else None
        engines.tell_of_template(loaded.text.template, bool(thinking and thinking.styles), invocation)
        engines.tell_of_guesses(engine, sampling, invocation)
        sampling, told = settle(loaded, sampling), invocation.told
        if reason := engine.sampled_on_host(sampling):
            render.notice(f"each token is chosen on the CPU, which is slower: {reason}", invocation)
        kept = replace(kept, source=prompt.source, lead=question.text(loaded.text, ids)[0])
        opened = closing(_caches(engine, question, kept, chunks, invocation))
        with opened as caches, copy or nullcontext():
            how = output.verify_estimate, False, cut, thinking, marks, told, use
            job = Job(load.model, sampling, sink, interrupts, caches, *how)
            interrupts.stage = UNWIND if caches.keeps(len(ids)) else interrupts.stage
            results = _answers(engine, ids, job, output.n_samples)
        _tell(results, output, invocation)
        code = interrupts.code
    for nth, result in enumerate(results, 1):
        if result.calls and result.calls.cut:
            say(f"the call of {result.calls.cut} was cut, and is left out")
        if result.ended_early:
            say(result.ended_early if len(results) == 1 else f"sample {nth}: {result.ended_early}")
        if result.end.finish_reason == "context":
            code = code or EXIT_CONTEXT_FULL
    if result.verification is not None:
        say(verification.block(result.verification))
        if not result.verification.passed:
            say(verification.failure(result.verification))
            code = code or CheckFailed.exit_code
    raise typer.Exit(code)
