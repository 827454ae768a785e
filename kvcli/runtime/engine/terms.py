"""`Terms`: how long a context is, what stays of a longer sequence, and the memory that takes. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvcli.errors import ContextOverflow, KVError, UsageError
from kvcli.options import CacheOptions, EvictOptions
from kvcli.runtime.cache import attending, eviction
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.host.memory import CPU
from kvcli.runtime.plan.footprint import WeightBytes
from kvcli.runtime.plan.plan import Budget, Drafting, Plan, Setting, plan_for_engine

ANSWER_ROOM = 512  # tokens of an answer of which nobody says how long it may be


def advised(prompt: int, answer: int, could_hold: Callable[[int], bool], trained: int = 0) -> int:
    """Tokens of a context for such a prompt and its answer, rounded up, or as many as it was trained for; where these
    do not fit into memory the prompt alone. 0 = nor does that. `answer`: its most tokens, -1 = nobody says."""
    wanted = prompt + (ANSWER_ROOM if answer < 0 else max(1, answer))
    step = 256 if wanted <= 4096 else 1024
    rounded = -(-wanted // step) * step
    sizes = [trained, prompt] if prompt < trained < rounded else [rounded, prompt]
    return next((size for size in sizes if could_hold(size)), 0)


@dataclass(frozen=True)
class Terms:
    """What `options` come to in `setting` with the memory of `budget`. `shortened`: why the context is less than the
    training context although no size was asked for; "" = it is not."""

    setting: Setting
    budget: Budget
    options: CacheOptions
    layout: KVLayout
    ctx_size: int
    plan: Plan
    shortened: str

    @classmethod
    def settle(
        cls,
        config: ModelConfig,
        weights: WeightBytes,
        options: CacheOptions,
        budget: Budget,
        threads: int,
        draft: Drafting | None = None,
    ) -> Terms:
        """The terms of `options` within a budget, which a `draft` model has a part of. Raises UsageError, and
        DoesNotFit."""
        if options.ctx_size < 0:
            raise UsageError(f"`ctx` must be 0 or more, not {options.ctx_size}", "0 = as trained, or what fits")
        found = plan_for_engine(config, weights, options, budget, threads, draft)
        return cls(found.setting, budget, options, found.layout, found.ctx_size, found.plan, found.notice)

    def changed(self, ctx_size: int, evict: EvictOptions) -> Terms:
        """With another context or policy. Raises UsageError, and DoesNotFit."""
        return self.under(replace(self.options, ctx_size=ctx_size, evict=evict))

    def under(self, options: CacheOptions) -> Terms:
        """The terms of other options, within the same budget. Raises UsageError, and DoesNotFit."""
        same = self.setting
        return Terms.settle(same.config, same.weights, options, self.budget, same.threads, same.draft)

    @property
    def keeps_prompt(self) -> bool:
        """Whether the whole prompt is to be kept (--keep -1) and its length is not known yet."""
        return self.setting.evict.keep == eviction.WHOLE_PROMPT

    def keeping(self, prompt_tokens: int) -> Terms:
        """With that length, where it is to be kept. Raises UsageError where it leaves no window."""
        if not self.keeps_prompt:
            return self
        settled = self.changed(self.ctx_size, replace(self.options.evict, keep=prompt_tokens))
        return replace(settled, shortened=self.shortened)

    def could_hold(self, tokens: int) -> bool:
        """Whether a context of so many tokens fits into the memory there is."""
        try:
            self.changed(tokens, self.options.evict)
        except KVError:
            return False
        return True

    def same_rows(self, theirs: Retention | None, length: int) -> int:
        """How many of the first `length` rows of a sequence of which `theirs` stays are as they would be here, bit for
        bit: those that see everything. On a GPU none, where other rows stay: its kernels are others then, and round in
        another way."""
        mine = self.layout.retention
        if mine == theirs:
            return length
        return min(length, *(r.whole for r in (mine, theirs) if r)) if self.setting.kind == CPU else 0

    def check_text(self, chars: int, most: int) -> None:
        """Raises ContextOverflow for so many characters of a prompt that they need not be tokenized to know that the
        context has no room for them. `most`: what one token may stand for, 0 = anything."""
        if most and chars > most * self.ctx_size and self.layout.retention is None:
            raise ContextOverflow(
                f"the prompt has {chars:,} characters: more tokens than the context of {self.ctx_size:,} has room for",
                "shorten it",
            )

    def check_prompt(self, ids: list[int], history: bool = False, answer: int = -1) -> None:
        """Raises UsageError for ids that are no prompt, ContextOverflow for more of them than the context has room for.
        `history`: where old rows are evicted there may be; `answer`: tokens that it may have, -1 = nobody says."""
        config, retention = self.setting.config, self.layout.retention
        if not ids:
            raise UsageError("the prompt is empty", "give at least one token of text")
        if not 0 <= min(ids) <= max(ids) < config.vocab_size:
            raise UsageError(f"the prompt has token ids outside the vocabulary of {config.vocab_size:,}")
        if len(ids) > self.ctx_size and not (history and retention):
            over, size = len(ids) - self.ctx_size, advised(len(ids), answer, self.could_hold, config.context_length)
            larger = f" or use `ctx={size}` or more (trained: {config.context_length:,})" if size else ""
            raise ContextOverflow(
                f"the prompt has {len(ids):,} tokens, {over:,} more than the context of {self.ctx_size:,}",
                f"shorten it{larger}",
            )

    @property
    def pool_bytes(self) -> int:
        """What the pool may grow to: all that the plan leaves, but for a draft model's part of that."""
        left, plan = self.budget.bytes - self.plan.needed, self.plan
        return plan.kv_bytes + left - left * plan.draft_kv_bytes // max(1, plan.kv_bytes + plan.draft_kv_bytes)

    def without_draft(self) -> Terms:
        """The same for the model alone."""
        same = self.setting
        return Terms.settle(same.config, same.weights, self.options, self.budget, same.threads) if same.draft else self

    def of_draft(self) -> Terms | None:
        """The terms of the draft model, for sequences of the same tokens; None = there is none. Raises UsageError."""
        setting = self.setting.of_draft
        if setting is None:
            return None
        layout = self.setting.draft_layout(self.layout)
        plan = replace(setting.plan(layout, self.setting.most(self.layout, self.ctx_size)), tokens=self.ctx_size)
        left = self.budget.bytes - self.plan.needed - (self.pool_bytes - self.plan.kv_bytes)
        budget = replace(self.budget, bytes=plan.needed + left, margin=0, runtime_bytes=0)
        return Terms(setting, budget, self.options, layout, self.ctx_size, plan, "")

    @property
    def doubts(self) -> list[str]:
        """Why answers may be worse than was asked for."""
        asked, trained = self.options.ctx_size, self.setting.config.context_length
        beyond = f"context {asked:,} is beyond the {trained:,} tokens the model was trained on"
        found = beyond if asked > trained else "", self.shortened, self._dense
        return [*filter(None, found)]

    @property
    def _dense(self) -> str:
        """Why no step of a prompt leaves pages out although that was asked for; "" = some may."""
        step = self.setting.step(self.layout)
        if not self.layout.attend.sparse or step >= attending.LEAST_ROWS:
            return ""
        least = f"only those of {attending.LEAST_ROWS} or more leave pages out"
        return f"`prefill_sparse` changes nothing: prompts are read in steps of {step:,} rows (`ubatch`), and {least}"

    @property
    def notices(self) -> list[str]:
        """What the user should know, doubts included."""
        forgets = (None if self.keeps_prompt else self.layout.retention), self.layout.selection
        said = [each.notice() for each in forgets if each]
        return [*self.doubts, *filter(None, (*said, attending.described(self.layout.attend)))]
