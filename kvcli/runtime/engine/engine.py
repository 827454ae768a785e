"""`Engine`: opens a model, keeps its pool, and generates. The only file that knows all the others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Some
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvcli import kernels
from kvcli.codecs import canonical
from kvcli.errors import ModelError, UsageError
from kvcli.notices import Tell
from kvcli.options import CacheOptions, EvictOptions, LoadOptions, PromptCacheOptions, SampleOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence, Step, chunk_end
from kvcli.runtime.engine import guard, sampling
from kvcli.runtime.engine.decoding import graph_tokens
from kvcli.runtime.engine.events import Event
from kvcli.runtime.engine.request import Request
from kvcli.runtime.engine.sampler import Sampler
from kvcli.runtime.engine.terms import Terms
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.headers.titles import title_of
from kvcli.runtime.host.cores import physical_cores, too_many
from kvcli.runtime.host.device import AUTO, Device, choose
from kvcli.runtime.host.memory import CPU, CUDA, Memory, gpus, process_bytes
from kvcli.runtime.model.archs import from_gguf
from kvcli.runtime.model.loading import load as load_model
from kvcli.runtime.model.weights import Weights
from kvcli.runtime.plan import repacked
from kvcli.runtime.plan.footprint import weights_of_tensors
from kvcli.runtime.plan.plan import Plan, engine_budget
from kvcli.runtime.promptcache import fingerprint
from kvcli.runtime.promptcache.caches import Caches, LiveRows, keep_rows
from kvcli.runtime.promptcache.lookup import PromptCaches
from kvcli.runtime.text.template import ChatTemplate, template_note
from kvcli.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvcli.runtime.engine.graph.tokengraph import TokenGraph


class Engine:
    """One model, one pool of pages, any number of sequences. Not for use from several threads at once.

    `plan` is the memory of a run over the whole context (`ctx_size`); `shortened` says why that is less than
    the training context although no size was asked for ("" = it is not).
    """

    def __init__(self, file: GGUFFile, load: LoadOptions, cache: CacheOptions) -> None:
        self.notices: list[str] = []
        self.doubts: list[str] = []  # those that say that answers may be worse than was asked for
        self.tell: Callable[[str], None] = lambda text: None  # of what is noticed after the model is open
        self.config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
        self.device = self._choose(load, file)
        if self.device.notice:
            self.notices.append(self.device.notice)
        self.cache_types = canonical(cache.type_k), canonical(cache.type_v)
        if cache.ubatch < 0:
            raise UsageError(f"`ubatch` must be 1 or more, not {cache.ubatch}", "0 = automatic")
        eviction.check(cache.evict, cache.page_size)
        self.threads = threads = load.threads or physical_cores()
        if self.device.kind == CPU and (notice := too_many(threads)):
            self.notices.append(notice)
        weight_bytes = weights_of_tensors(file.tensors, self.config, self.device.kind)
        budget = engine_budget(load.memory_limit, self.device.kind, self.device.index)
        self._take(Terms.settle(self.config, weight_bytes, cache, budget, threads))
        self.tokenizer = Tokenizer.from_gguf(file.metadata, force=load.force)
        if self.tokenizer.vocab_size > self.config.vocab_size:
            raise ModelError(
                f"the vocabulary has {self.tokenizer.vocab_size} tokens, the embedding {self.config.vocab_size} rows"
            )
        bos, eos = (
            "" if i is None else self.tokenizer.piece(i) for i in (self.tokenizer.bos_id, self.tokenizer.eos_id)
        )
        self.template = ChatTemplate.from_gguf(file.metadata, bos, eos, file.path.name)
        self.spare_template = ChatTemplate.built_in(file.metadata, bos, eos)
        self.template_note = template_note(file.metadata, file.path.name)
        for template in (self.template, self.spare_template):
            if template:
                template.watch(self.tokenizer.controls, self._tell_lost_control)
        self.sampling_defaults = sampling.model_defaults(file.metadata)
        if asked := sampling.not_obeyed(self.sampling_defaults):
            self.notices.append(asked)
        torch.set_num_threads(1)  # what is left to torch is too little to share: a token's sampling takes longer by two
        ops, notice = kernels.backend(load.backend, threads, str(self.device))
        self.backend = ops.name
        if notice:
            self.notices.append(notice)
        self.model_weights = weights = Weights(file)
        doubt = guard.check(weights, self.config, self.layout, self.cache_types, cache.force_types)
        if doubt:
            self._doubt(doubt)
        self.model = load_model(self.config, weights, ops)
        self.pool = PagePool(self.layout, self.terms.pool_bytes, ops.device)
        self.caches: Caches = LiveRows()
        self.exact = load.exact
        self.graph = None if self.keeps_prompt else self._token_graph()
        file.check()
        self.path, self.load_s, self.bytes_before_open = file.path, 0.0, 0
        self.title = title_of(file.path, file.size, file.metadata)
        self.cards_before_open: list[Memory] = []

    def chat_anyway(self) -> None:
        """Take the architecture's chat template where the file has none. Raises ModelError where there is none."""
        self.template = self.template or self.spare_template
        if self.template is None:
            raise ModelError(
                f"the file has no chat template, and kv has none for {self.config.arch}",
                "text can be continued without a template (`raw`)",
            )

    def _doubt(self, text: str) -> None:
        self.doubts.append(text)
        self.notices.append(text)

    def notice(self, text: str) -> None:
        """Note what the user should know, once, and tell it."""
        if text not in self.notices:
            self.notices.append(text)
            self.tell(text)

    def _tell_lost_control(self, token: str) -> None:
        self.notice(
            f"the chat template writes {token} in a way that kv cannot follow: the model reads it as plain text"
        )

    def _choose(self, load: LoadOptions, file: GGUFFile) -> Device:
        """The device to compute on. Raises UsageError or DeviceError, ModelError for a GPU that cannot compute it."""
        device = choose(load.device if load.backend == AUTO else CPU)
        if device.kind == CPU:
            return device
        reason = repacked.unfit(self.config, {n: t.type for n, t in file.tensors.items() if len(t.shape) > 1})
        if reason and load.device != AUTO:
            raise ModelError(f"this model cannot be computed on a GPU: {reason}", "use `device=cpu`")
        return Device(CPU, notice=f"runs on the CPU; a GPU cannot compute this model: {reason}") if reason else device

    @classmethod
    def open(
        cls,
        path: Path,
        load: LoadOptions,
        cache: CacheOptions,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Engine:
        """Check everything that can be refused, then map the weights.

        `progress(stage, done, total)` is called with the stage "load". Raises ModelError, UsageError, and
        DoesNotFit before any weight is read.
        """
        began, before, cards = time.perf_counter(), process_bytes(), gpus()
        file = GGUFFile.open(path)
        if progress:
            progress("load", 0, file.size)
        with torch.inference_mode():
            engine = cls(file, load, cache)
        if progress:
            progress("load", file.size, file.size)
        if engine.device.kind == CUDA:
            torch.cuda.empty_cache()  # what repacking needed for a while
        engine.load_s, engine.bytes_before_open = time.perf_counter() - began, before
        engine.cards_before_open = cards
        return engine

    def _take(self, terms: Terms) -> None:
        """Have these terms, and note what the user should know of them."""
        self.terms, self.layout, self.ctx_size, self.plan = terms, terms.layout, terms.ctx_size, terms.plan
        self.ubatch, self.shortened = terms.setting.step(terms.layout), terms.shortened
        for doubt in terms.doubts:
            if doubt not in self.doubts:
                self._doubt(doubt)
        if self.retention and not self.keeps_prompt:
            self.notices.append(self.retention.notice())

    @property
    def retention(self) -> Retention | None:
        """What stays of a sequence longer than the context; None = there is none."""
        return self.layout.retention

    @property
    def keeps_prompt(self) -> bool:
        """Whether `keep_prompt` must be told how long the prompt is (--keep -1)."""
        return self.terms.setting.evict.keep == eviction.WHOLE_PROMPT

    def keep_prompt(self, n_tokens: int) -> None:
        """Settle --keep -1, before there is a sequence: the first `n_tokens` stay. UsageError if no window is left."""
        self.change(self.ctx_size, replace(self.terms.options.evict, keep=n_tokens))

    @torch.inference_mode()
    def change(self, ctx_size: int, evict: EvictOptions, seq: Sequence | None = None) -> None:
        """Another context, or another policy, with the same weights. `seq`, the only sequence there is, keeps the rows
        that are the same under both. Raises UsageError and DoesNotFit, with nothing changed. Caches are to be opened
        again."""
        before = self.terms
        self._take(self.terms.changed(ctx_size, evict))
        self.pool.change(self.layout, self.terms.pool_bytes)
        if seq is not None:
            keep_rows(seq, before.same_rows(self.terms, seq.length))
        self.caches, self.graph = LiveRows(), None
        self.graph = None if self.keeps_prompt else self._token_graph()

    def _token_graph(self) -> TokenGraph | None:
        """The fast way of single tokens on a GPU; None on a CPU, with --exact and for models that it cannot compute."""
        if self.device.kind != CUDA or self.exact:
            return None
        from kvcli.runtime.engine.graph import tokengraph

        reason = tokengraph.unsupported(self.model)
        if reason:
            self.notices.append(f"slow path (each token as a prompt of one): {reason}")
            return None
        graph = tokengraph.TokenGraph(self.model, self.layout, self.ctx_size)
        graph.compile(self._dry_run)
        return graph

    def _dry_run(self) -> None:
        """Prompts that need every kernel that prompts need: long ones, and short ones, whose keys have no mean yet."""
        from kvcli.kernels.gpu.sample import DeviceSampler

        device, room = self.pool.device, max(1, self.ctx_size - 1)
        for steps in ((2 * self.layout.page_size + 1, 1), (2, 1)):
            seq = self.new_sequence()
            for rows in steps:
                logits = self.logits(self.forward(seq, [0] * min(rows, room - seq.length or 1))[-1:])[0]
            seq.close()
        for temperature, penalty in itertools.product((None, 0.0), (1.0, 1.1)):
            options = SampleOptions(temperature=temperature, repeat_penalty=penalty)
            effective = Sampler(options, self.sampling_defaults, self.config.vocab_size).effective
            if not DeviceSampler.supports(effective):
                chooser = DeviceSampler(effective, self.config.vocab_size, device)
                chooser.launch(logits, torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int64, device=device))

    def synchronize(self) -> None:
        """Wait for what was asked of a GPU."""
        if self.device.kind == CUDA:
            torch.cuda.synchronize(self.pool.device)

    def predict(self, tokens: int, sequences: int = 1, shared: int = 0) -> Plan:
        """What the process needs for so many sequences of `tokens`, of which they have the first `shared` in common, by
        the same plan as the whole context."""
        return replace(self.terms.setting, sequences=sequences, shared=shared).plan(self.layout, tokens)

    def bytes_per_token(self, length: int) -> int:
        """Bytes that one token reads behind `length` rows: weights, rows of the cache, recurrent state."""
        return self.terms.setting.weights.read + self.layout.read_bytes(length) + self.layout.state_bytes

    def new_sequence(self) -> Sequence:
        """An empty context."""
        return Sequence(self.pool)

    def use_caches(self, options: PromptCacheOptions, tell: Tell) -> PromptCaches:
        """From now on look for the rows of prompts in these caches too, and keep them there. The caller closes them."""
        from kvcli.runtime.promptcache import enginecaches

        self.caches = caches = PromptCaches(enginecaches.setting(self), options, tell)
        return caches

    def tokenizer_hashes(self) -> dict[str, str]:
        """What token ids of a chat depend on: the tokenizer and the template, by content."""
        return fingerprint.text_hashes(self.model_weights.file)

    @torch.inference_mode()
    def forward(self, seq: Sequence, ids: list[int]) -> torch.Tensor:
        """Run `ids` as the next rows of `seq` in one step -> hidden states float32 [T, d_model].

        Raises ModelError where the model's file was truncated meanwhile; then `seq` is as it was. DoesNotFit.
        """
        return self.forward_all([(seq, ids)])

    def forward_all(self, rows: list[tuple[Sequence, list[int]]]) -> torch.Tensor:
        """Like `forward`, for rows of several sequences in one step; hidden states one after the other."""
        hidden = self.model.hidden(Step(tuple(seq.reserve(ids) for seq, ids in rows)))
        self._check_weights()
        for seq, ids in rows:
            seq.commit(ids)
        return hidden

    @torch.inference_mode()
    def step(self, requests: list[Request], budget: int = 0) -> list[list[Event]]:
        """Compute rows that the requests want, at most `budget` (0 = a prefill step) of all of them together -> the
        events of each. Newest tokens come first, then prompts, in the order of `requests`.

        On a CPU the rows go through the model together, and none depends on its neighbours. A GPU computes one request
        after the other. Raises DoesNotFit where the pool has no room for these rows, with no request changed for the
        worse, and ModelError like `forward`. A failure of a request alone is its `error`.
        """
        left, work = budget or self.ubatch, list[tuple[Request, list[int]]]()
        for request in sorted(requests, key=lambda r: not r.answering):
            if ids := request.wants(left):
                work.append((request, ids))
                left -= len(ids)
        if self.device.kind == CPU:
            self._compute(work)
        else:
            for request, ids in work:
                if not request.pull():
                    self._compute([(request, ids)])
        return [request.take_events() for request in requests]

    def _compute(self, work: list[tuple[Request, list[int]]]) -> None:
        """Run these rows of the requests in one pass, and let each go on."""
        if not work:
            return
        hidden = self.forward_all([(request.seq, ids) for request, ids in work])
        ends = itertools.accumulate(len(ids) for _, ids in work)
        newest = [end - 1 for (request, _), end in zip(work, ends, strict=True) if request.newest]
        logits = iter(self.logits(hidden[newest])) if newest else iter(())
        for request, _ in work:
            request.feed(next(logits) if request.newest else None)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, d_model] -> logits float32 [n, vocab_size]. Raises ModelError like `forward`."""
        logits = self.model.logits(hidden)
        self._check_weights()
        return logits

    def _check_weights(self) -> None:
        if self.device.kind == CPU:  # a GPU has its own copy
            self.model_weights.file.check()

    def device_tokens(
        self, seq: Sequence, history: list[int], sampler: Sampler, logits: torch.Tensor
    ) -> Generator[int, None, None] | None:
        """Where single tokens have a fast way: `graph_tokens`; None where they are computed like prompts."""
        graph = self.graph
        return None if graph is None else graph_tokens(graph, self.config.vocab_size, seq, history, sampler, logits)

    def sampled_on_host(self, settled: SampleOptions) -> str:
        """Why the host chooses every token with these options although the device computes it; "" = it does not."""
        if self.graph is None:
            return ""
        from kvcli.kernels.gpu.sample import DeviceSampler

        return DeviceSampler.supports(vars(settled))

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
    ) -> Iterator[Event]:
        """Continue `prompt_ids`, the whole context: what `seq` already holds of it is reused, the rest prefilled.

        The last prompt token is always run again. Raises UsageError or ContextOverflow before `seq` is touched.
        `cancelled` and `history`: see `request`.
        """
        return self._events(self.request(seq, prompt_ids, options, cancelled, history))

    def _events(self, request: Request) -> Iterator[Event]:
        try:
            while not request.finished:
                yield from self.step([request])[0]
            if request.error is not None:
                raise request.error
        finally:
            request.close()

    def request(
        self,
        seq: Sequence,
        prompt_ids: list[int],
        options: SampleOptions,
        cancelled: Callable[[], bool] = lambda: False,
        history: bool = False,
        twins: Some[Request] = (),
    ) -> Request:
        """A request for `step`: continue `prompt_ids`, the whole context, in `seq`. Raises UsageError or
        ContextOverflow.

        `cancelled` is asked between chunks and tokens. `history`: the prompt may be longer than the context where old
        rows are evicted; it is one that went through the cache before, so nothing is lost that was not told. `twins`:
        requests for the same prompt that go on from copies of this one's rows.
        """
        self.terms.check_prompt(prompt_ids, history)
        if options.ignore_eos:
            banned = dict.fromkeys(self.tokenizer.eog_ids, float("-inf"))
            options = replace(options, logit_bias={**options.logit_bias, **banned})
        sampler = Sampler(options, self.sampling_defaults, self.config.vocab_size, self.tokenizer.token_bytes)
        return Request(self, seq, prompt_ids, options, sampler, cancelled, twins)
