"""`Engine`: runs a loaded model in one context. The only file that knows all the others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Some
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvcli.errors import UsageError
from kvcli.kernels.cpu.backend import NativeBackend
from kvcli.notices import Tell
from kvcli.options import CacheOptions, EvictOptions, LoadOptions, PromptCacheOptions, SampleOptions
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence, Step, chunk_end
from kvcli.runtime.engine.events import Event
from kvcli.runtime.engine.loaded import LoadedModel
from kvcli.runtime.engine.nextrows import Turns, answers, dealt, notes
from kvcli.runtime.engine.opened import Opened
from kvcli.runtime.engine.replaying import most_rows
from kvcli.runtime.engine.request import Request
from kvcli.runtime.engine.sampler import Sampler
from kvcli.runtime.engine.spec import OFF
from kvcli.runtime.engine.spec.drafting import check_options, unguessed
from kvcli.runtime.engine.spec.draftmodel import DraftModel
from kvcli.runtime.engine.spec.guesses import Drafts, Session
from kvcli.runtime.engine.spec.pace import CPU_COSTS, GPU_COSTS
from kvcli.runtime.engine.spec.predicting import hand_over, predictions
from kvcli.runtime.engine.steplist import StepList
from kvcli.runtime.engine.terms import Terms
from kvcli.runtime.engine.tokenstream import graph_tokens
from kvcli.runtime.host.memory import CPU, CUDA
from kvcli.runtime.model.summarizing import summarize
from kvcli.runtime.plan.plan import Plan
from kvcli.runtime.promptcache import enginecaches
from kvcli.runtime.promptcache.caches import LIVE_ROWS, Caches, carry
from kvcli.runtime.promptcache.lookup import PromptCaches
from kvcli.runtime.promptcache.marks import Mark
from kvcli.runtime.text.reasoning import Thinking
from kvcli.runtime.text.tools.use import ToolUse

if TYPE_CHECKING:
    from kvcli.runtime.engine.graph.batching import Batches
    from kvcli.runtime.engine.graph.compiling import Kernels
    from kvcli.runtime.engine.graph.nexttoken import NextToken
    from kvcli.runtime.engine.graph.stepgraph import StepGraph

SHORT_ROWS = 16  # of a prompt whose kernels are compiled first; see graph/stepgraph.py


class Engine:
    """A loaded model, one pool of pages, any number of sequences. Not for use from several threads at once.

    No part of it is replaced while it is open: another context or policy is another engine, which `reopened` makes.
    `plan` is the memory of a run over the whole context (`ctx_size`).
    """

    @torch.inference_mode()
    def __init__(self, loaded: LoadedModel, terms: Terms | None = None, before: Engine | None = None) -> None:
        """`terms`: by default those that the model was loaded for; `before`: an engine whose memory of pages goes over
        to this one."""
        began = time.perf_counter()
        self.loaded = loaded
        self.config, self.device, self.tokenizer, self.model = (
            loaded.config, loaded.device, loaded.tokenizer, loaded.decoder
        )  # fmt: skip
        self.terms = terms = terms or loaded.terms
        self.layout, self.ctx_size, self.plan = replace(terms.layout, grain=loaded.grain), terms.ctx_size, terms.plan
        self.ubatch = terms.setting.step(terms.layout) // loaded.grain * loaded.grain
        if before is None:
            self.pool = PagePool(self.layout, terms.pool_bytes, self.model.ops.device)
        else:
            self.pool = before.pool.under(self.layout, terms.pool_bytes)
        self.draft = self._draft(before)  # that of a model that guesses, where there is one
        drafts: Drafts | None = DraftModel(self.draft, self.config.vocab_size) if self.draft else None
        drafts = drafts or predictions(loaded, terms, before.session.drafts if before else None)
        self.session: Session = Session(GPU_COSTS if self.device.kind == CUDA else CPU_COSTS, drafts)
        self.steps: StepGraph | StepList | None = None
        if isinstance(self.model.ops, NativeBackend):
            self.steps = StepList(self.model, self.model.ops)
        self.turns = Turns()
        self.batches: Batches | None = None
        self.kernels: Kernels | None = None
        self.slow_path, self.graph = self._token_graph()
        self.load_s = loaded.load_s + time.perf_counter() - began

    @classmethod
    def open(cls, path: Path, load: LoadOptions, cache: CacheOptions, draft: Path | None = None) -> Engine:
        """Load a model, and a `draft` model beside it, and run it with these options. Raises as `LoadedModel` does."""
        return cls(LoadedModel(Opened(path, load), load, cache, draft=Opened.draft(draft, load) if draft else None))

    def reopened(self, ctx_size: int, evict: EvictOptions) -> Engine:
        """An engine with another context, or another policy, over the same weights and the same memory of pages. This
        one is closed, and its sequences are of use for `carried` only. Raises UsageError and DoesNotFit, with nothing
        changed."""
        terms = self._alike(self.terms.changed(ctx_size, evict))
        del self.graph, self.steps, self.batches, self.kernels  # their memory is free for the other one's
        return Engine(self.loaded, terms, self)

    def beside(self, options: CacheOptions) -> Engine:
        """An engine with other options of the cache over the same weights, with pages of its own: both stay open, and
        share what memory there is. Raises UsageError and DoesNotFit."""
        return Engine(self.loaded, self._alike(self.terms.without_draft().under(options)))

    def _draft(self, before: Engine | None) -> Engine | None:
        """The engine of the draft model, in the memory of the one before."""
        if before and before.session.drafts:
            before.session.drafts.close()
        terms = self.terms.of_draft()
        if terms is None or self.loaded.draft is None:
            return None
        return Engine(self.loaded.draft, terms, before.draft if before else None)

    def _alike(self, terms: Terms) -> Terms:
        """Terms under which the model is the same. Raises UsageError."""
        if terms.of_draft() is not None:
            check_options(terms.options, self.loaded.grain > 1)
        if self.config.at(terms.ctx_size) != self.config:
            raise UsageError(
                f"the RoPE of this model is another one in a context of {terms.ctx_size:,} tokens",
                "open the model anew with that `ctx`",
            )
        if terms.layout.joined != self.layout.joined:
            what = "values that are keys, too, are stored once, and apart where rows are selected by score"
            raise UsageError(f"this model's {what}", "open the model anew with that `evict`")
        return terms

    def carried(self, seq: Sequence) -> Sequence:
        """The rows of a sequence of the engine before this one that are the same here, as a sequence of this one. That
        one is closed."""
        same = self.terms.same_rows(seq.pool.layout.retention, seq.length) if seq.shares else 0
        return carry(seq, self.pool, same)

    @property
    def notices(self) -> list[str]:
        """What the user should know."""
        together = self.terms.options.sequences > 1 and self.one_by_one
        slow = f"slower path (answers one after the other): {together}" if together else ""
        return [*self.loaded.notices, *self.terms.notices, *filter(None, [self.slow_path, slow])]

    @property
    def doubts(self) -> list[str]:
        """Those notices that say that answers may be worse than was asked for, or come much later."""
        return [*self.loaded.doubts, *self.terms.doubts]

    @property
    def one_by_one(self) -> str:
        """Why a GPU computes answers that run together one after the other; "" = it does not."""
        if self.device.kind == CPU:
            return ""
        if self.batches is None:
            return "tokens are computed like prompts"
        return self.batches.reason

    @property
    def retention(self) -> Retention | None:
        """What stays of a sequence longer than the context; None = there is none."""
        return self.layout.retention

    def _token_graph(self) -> tuple[str, NextToken | None]:
        """The fast way of single tokens on a GPU; None on a CPU and with --exact. In front, why it is not the fastest
        one, if it is not."""
        if self.device.kind != CUDA or self.loaded.exact:
            return "", None
        from kvcli.runtime.engine.graph import opening

        facts = self.config, self.terms.options, self.ctx_size, self.ubatch, self.loaded.facts
        found = opening.open_graphs(self, self.loaded, self.layout, self.ctx_size, facts)
        self.kernels, self.steps, self.batches = found.kernels, found.steps, found.batches
        return found.slow_path, found.tokens

    def synchronize(self) -> None:
        """Wait for what was asked of a GPU."""
        if self.device.kind == CUDA:
            torch.cuda.synchronize(self.pool.device)

    def predict(self, tokens: int, sequences: int = 1, shared: int = 0) -> Plan:
        """What the process needs for so many sequences of `tokens`, of which they have the first `shared` in common, by
        the same plan as the whole context. Where prompts are repeated, that takes rows, too."""
        if self.layout.selection and self.layout.selection.scorer.repeats:
            tokens = most_rows(self, tokens, self.layout.page_size)
        return replace(self.terms.setting, sequences=sequences, shared=shared).plan(self.layout, tokens)

    def bytes_per_token(self, length: int) -> int:
        """Bytes that one token reads behind `length` rows: weights, rows of the cache, recurrent state."""
        return self.terms.setting.weights.read + self.layout.read_bytes(length) + self.layout.state_bytes

    def new_sequence(self, retention: Retention | None = None) -> Sequence:
        """An empty context. `retention`: what stays of it, where that is not what stays of all others, for which memory
        is planned."""
        return Sequence(self.pool, retention)

    @torch.inference_mode()
    def select(self, seq: Sequence) -> None:
        """Let go of rows that score lowest, where that is due: see `Selector.expect`. Raises DoesNotFit."""
        if seq.selector is not None and seq.length >= seq.selector.due:
            seq.select(self.model.layer_facts.__getitem__)

    def prompt_caches(
        self, options: PromptCacheOptions, tell: Tell, elsewhere: Callable[[], Iterable[list[int]]] = tuple
    ) -> PromptCaches:
        """Caches to give to `generate` and `request`: the rows of prompts are looked for and kept there. The caller
        closes them. `elsewhere` gives the tokens of a chat's other branches."""
        return PromptCaches(enginecaches.view(self), options, tell, elsewhere)

    @torch.inference_mode()
    def forward(self, seq: Sequence, ids: list[int], answering: bool = False) -> torch.Tensor:
        """Run `ids` as the next rows of `seq` in one step -> hidden states float32 [T, d_model]. `answering`: see
        `Sequence.reserve`.

        Raises ModelError where the model's file was truncated meanwhile; then `seq` is as it was. DoesNotFit.
        """
        return self.forward_all([(seq, ids, answering)])

    def forward_all(self, rows: list[tuple[Sequence, list[int], bool]]) -> torch.Tensor:
        """Like `forward`, for rows of several sequences in one step; hidden states one after the other."""
        if self.kernels is not None and sum(len(ids) for _, ids, _ in rows) > SHORT_ROWS:
            self.kernels.need_all()
        parts = tuple(seq.reserve(ids, answering) for seq, ids, answering in rows)
        for part in parts:
            summarize(self.model, self.layout, part)
        hidden = self.steps.run(parts[0]) if self.steps and len(parts) == 1 else None
        if len(parts) > 1 and self.steps and not isinstance(self.steps, StepList):
            hidden = self.steps.together(parts)
        if hidden is None:
            hidden = self.model.hidden(Step(parts))
        self.loaded.check_weights()
        for seq, ids, _ in rows:
            seq.commit(ids)
        return hidden

    @torch.inference_mode()
    def step(self, requests: list[Request], budget: int = 0) -> list[list[Event]]:
        """Compute rows that the requests want, at most `budget` (0 = a prefill step) of all of them together -> the
        events of each.

        On a CPU newest tokens come first, then prompts, in the order of `requests`; the rows go through the model
        together, and none depends on its neighbours. A GPU computes the newest rows of answers together (`Batches`),
        and prompts of which there are graphs; prompts come first there, for a while (`Turns`). Raises DoesNotFit where
        the pool has no room for these rows, with no request changed for the worse, and ModelError like `forward`. A
        failure of a request alone is its `error`.
        """
        gpu = self.device.kind == CUDA
        steps = None if isinstance(self.steps, StepList) else self.steps
        work = self.turns.of(requests, budget or self.ubatch, gpu, steps)
        if not gpu:
            self._compute(work)
        else:
            for some in dealt(self.batches.step(work) if self.batches else work, steps):
                request, ids = some[0]
                if len(some) == 1 and request.pull():
                    continue
                blocks = not answers(request) and (self.loaded.grain > 1 or self.layout.attend.pages > 0)
                single = self.graph if len(some) == len(ids) == 1 else None
                if single and not (blocks or request.guesses.reads or notes(request.seq)):
                    request.feed(self._one_row(single, request.seq, ids[0])[None])
                else:
                    self._compute(some)
        return [request.take_events() for request in requests]

    def _compute(self, work: list[tuple[Request, list[int]]]) -> None:
        """Run these rows of the requests in one pass, and let each go on."""
        if not work:
            return
        hidden = self.forward_all([(request.seq, ids, answers(request)) for request, ids in work])
        hand_over(self.model, [(request, len(ids)) for request, ids in work], hidden)
        ends = itertools.accumulate(len(ids) for _, ids in work)
        scored = [range(end - request.scored, end) for (request, _), end in zip(work, ends, strict=True)]
        rows = list(itertools.chain(*scored))
        wanted = hidden[rows] if len(work) > 1 else hidden[len(hidden) - len(rows) :]
        logits = self.logits(wanted) if rows else wanted
        for (request, _), own in zip(work, logits.split([len(each) for each in scored]), strict=True):
            request.feed(own if len(own) else None)

    def _one_row(self, graph: NextToken, seq: Sequence, token: int) -> torch.Tensor:
        """Run one token as the next row, as those of an answer are -> its logits [vocab]."""
        graph.unbind()
        logits = graph.run(seq, token)
        self.loaded.check_weights()
        return logits.clone()

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, d_model] -> logits float32 [n, vocab_size]. Raises ModelError like `forward`."""
        logits = self.model.logits(hidden)
        self.loaded.check_weights()
        return logits

    def device_tokens(
        self, seq: Sequence, history: list[int], sampler: Sampler, logits: torch.Tensor
    ) -> Generator[int, None, None] | None:
        """Where single tokens have a fast way: `graph_tokens`; None where they are computed like prompts."""
        graph = None if notes(seq) else self.graph
        return None if graph is None else graph_tokens(graph, self.config.vocab_size, seq, history, sampler, logits)

    def sampled_on_host(self, settled: SampleOptions) -> str:
        """Why the host chooses every token with these options although the device computes it; "" = it does not."""
        if self.graph is None:
            return ""
        if self.layout.states and settled.spec not in (None, OFF):
            return f"`spec={settled.spec}` guesses, and a row too many could not be taken back from the model's states"
        from kvcli.kernels.gpu.sample import DeviceSampler

        return DeviceSampler.supports(vars(settled))

    def unguessed(self, asked: SampleOptions) -> str:
        """The option with which nothing is guessed, where these options ask for guesses; "" = there is none."""
        return unguessed(self.terms.options, self.loaded.grain > 1) if asked.spec not in (None, OFF) else ""

    def chunks(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Cut rows [start, end) into prefill steps."""
        while start < end:
            yield start, (stop := self.chunk_end(start, end))
            start = stop

    def chunk_end(self, start: int, end: int) -> int:
        """Where the prefill step ends that begins with row `start` of rows up to `end`."""
        return chunk_end(start, end, self.ubatch, self.layout.page_size)

    def generate(
        self,
        seq: Sequence,
        prompt_ids: list[int],
        options: SampleOptions,
        cancelled: Callable[[], bool] = lambda: False,
        history: bool = False,
        caches: Caches = LIVE_ROWS,
        thinking: Thinking | None = None,
        marks: Some[Mark] = (),
        tools: ToolUse | None = None,
    ) -> Iterator[Event]:
        """Continue `prompt_ids`, the whole context: what `seq` already holds of it is reused, the rest prefilled.

        The last prompt token is always run again. Raises UsageError or ContextOverflow before `seq` is touched.
        `cancelled`, `history`, `caches`, `thinking`, `marks` and `tools`: see `request`.
        """
        request = self.request(seq, prompt_ids, options, cancelled, history, (), caches, thinking, marks, tools)
        return self._events(request)

    def _events(self, request: Request) -> Iterator[Event]:
        try:
            while not request.finished:
                yield from self.step([request])[0]
        except BaseException:
            request.abandon()
            raise
        finally:
            request.close()
        if request.error is not None:
            raise request.error

    def request(
        self,
        seq: Sequence,
        prompt_ids: list[int],
        options: SampleOptions,
        cancelled: Callable[[], bool] = lambda: False,
        history: bool = False,
        twins: Some[Request] = (),
        caches: Caches = LIVE_ROWS,
        thinking: Thinking | None = None,
        marks: Some[Mark] = (),
        tools: ToolUse | None = None,
    ) -> Request:
        """A request for `step`: continue `prompt_ids`, the whole context, in `seq`. Raises UsageError or
        ContextOverflow.

        `cancelled` is asked between chunks and tokens. `history`: the prompt may be longer than the context where old
        rows are evicted; it is one that went through the cache before, so nothing is lost that was not told. `twins`:
        requests for the same prompt that go on from copies of this one's rows. `caches`: where rows are looked for and
        kept besides `seq`; see `prompt_caches`. `thinking`: how the answer to a chat is told apart from what the model
        thinks. `marks`: places of the prompt that later ones may start from. `tools`: which the answer may call.
        """
        self.terms.check_prompt(prompt_ids, history, options.max_tokens)
        if options.ignore_eos:
            banned = dict.fromkeys(self.tokenizer.eog_ids, float("-inf"))
            options = replace(options, logit_bias={**options.logit_bias, **banned})
        loaded, vocabulary, constraint = self.loaded, self.config.vocab_size, None
        source, waits = tools.followed(options.grammar) if tools else (options.grammar, False)
        if source:
            from kvcli.runtime.text.grammar import Constraint

            if options.grammar and thinking is not None and any(style.channels for style in thinking.styles):
                raise UsageError("a grammar cannot be used with this model, whose answers are in channels")
            constraint = Constraint(source, self.tokenizer, vocabulary, waits)
        how = self.tokenizer.token_bytes, loaded.remedy, constraint
        sampler = Sampler(options, loaded.sampling_defaults, vocabulary, *how)
        return Request(self, seq, prompt_ids, options, sampler, cancelled, twins, caches, thinking, marks, tools)
