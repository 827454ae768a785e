"""What the user asked for, as frozen dataclasses. No torch, no parsing, no defaults taken from a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ChatOptions:
    """How a chat template is used, and how long a model may think."""

    template: str | None = None  # its text; None = the model's own
    variables: Mapping[str, Any] = field(default_factory=dict)  # what the template gets beside the messages
    reasoning: str = "auto"  # "on", "off"; "auto" = as the template does by itself
    budget: int = -1  # most tokens of thinking; -1 = as many as the model likes


MODELS_OWN = ChatOptions()


@dataclass(frozen=True)
class LoraOption:
    """A LoRA adapter, and how much of it: 1 = as it was trained."""

    path: str
    scale: float = 1.0


@dataclass(frozen=True)
class LoadOptions:
    """How to find and hold the weights."""

    model: str  # a recipe name, a path to a .gguf file or a folder of safetensors, or a hub repository
    threads: int = 0  # 0 = the physical cores this process may use
    backend: str = "auto"  # "auto" = the fastest one that works here; "reference" = plain torch
    offline: bool = False
    force: bool = False  # go on with an unknown pre-tokenizer
    memory_limit: str | None = None  # most memory of the process, as --vram-limit takes it; None = what is free
    device: str = "auto"  # "auto" = the first GPU that can be used, else the CPU; "cpu", "cuda", "cuda:1"
    quantize: str = ""  # what the matrices of a folder are packed as: a key of FORMATS; "" = as they are
    exact: bool = False  # activations of products: 16 bits throughout on a GPU, float32 on a CPU
    chat_anyway: bool = False  # take the architecture's chat template where the file has none
    chat: ChatOptions = MODELS_OWN
    lora: tuple[LoraOption, ...] = ()  # what is added to the weights
    strict_repeat: bool = False  # on a GPU rows of prompts have the same bits whatever is computed beside them
    draft: str = ""  # another model of the same vocabulary that guesses tokens, named like `model`; "" = none
    mtp: bool = False  # the file's own layer that predicts further tokens guesses


@dataclass(frozen=True)
class EvictOptions:
    """What is forgotten where the context is full. `policy`: a file of `runtime/eviction`."""

    policy: str = "none"
    window: int = 0  # recent tokens that stay; 0 = as many as the context holds
    keep: int | None = None  # first tokens that stay; -1 = the whole prompt, None = the policy's own
    budget: str = ""  # rows that stay where they are selected by score: "1024", or "25%" of the tokens

    @property
    def named(self) -> str:
        """The fields that say so, as errors name them."""
        window = [f"`window={self.window}`"] if self.window else []
        keep = [] if self.keep is None else [f"`keep={self.keep}`"]
        budget = [f"`budget={self.budget}`"] if self.budget else []
        return " ".join([f"`evict={self.policy}`", *window, *keep, *budget])


FORGET_NOTHING = EvictOptions()


@dataclass(frozen=True)
class AttendOptions:
    """What of the cache is read, none of which is forgotten. With the defaults it is all that there is."""

    pages: int = 0  # each token of an answer reads so many pages beside the first and the recent ones; 0 = all
    threshold: float = 0.0  # prefill reads pages whose weight is at least so much of the largest one; 0 = all
    share: float = 0.0  # in place of it: the share of pages that prefill reads, the best ones
    sparse_from: int = 32768  # rows of prompts from that position on are computed so

    @property
    def sparse(self) -> bool:
        """Whether prefill reads less than all."""
        return self.threshold > 0 or self.share > 0

    @property
    def named(self) -> str:
        """The fields that say so, as errors name them."""
        of_answer = [f"`attend=pages:{self.pages}`"] if self.pages else []
        how = f"{self.threshold:g}" if self.threshold else f"{100 * self.share:g}%"
        moved = [f"`prefill_sparse_from={self.sparse_from}`"] if self.sparse_from != AttendOptions.sparse_from else []
        return " ".join([*of_answer, *([f"`prefill_sparse={how}`", *moved] if self.sparse else [])])


READ_ALL = AttendOptions()
UNATTENDED_TOKENS = 4096  # most of an answer that no terminal shows, where no number is asked for


@dataclass(frozen=True)
class CacheOptions:
    """The KV cache: how long, which types, how cut into pages."""

    ctx_size: int = 0  # most tokens in a sequence; 0 = the training context or what fits
    type_k: str = "auto"
    type_v: str = "auto"
    page_size: int = 64  # tokens per page
    ubatch: int = 0  # tokens per prefill step; 0 = as fast as memory allows
    tail: int = 1  # of 16-bit pages at the end of a sealed cache: 1, or 0 = rows are sealed one by one
    sinks: int = 1  # 16-bit pages at its start
    force_types: bool = False  # go on with cache types that the model's weights speak against
    evict: EvictOptions = FORGET_NOTHING
    attend: AttendOptions = READ_ALL
    sequences: int = 1  # at a time; `ctx_size` is of each, and they share the memory that is there


@dataclass(frozen=True)
class PromptCacheOptions:
    """Where rows of prompts are kept beyond the process: a file that the user names, and the store."""

    file: Path | None = None
    save_answer: bool = False  # the file gets the generated rows too
    read_only: bool = False  # the file is never written
    strict: bool = False  # a file that cannot be used is an error
    replace: bool = False  # a prompt cache that is there is not read, and is replaced whatever it has
    store: Path | None = None  # the store's folder; None = no store
    scope: str = ""  # of the store: prompts of another scope are not found, nor told of
    min_tokens: int = 1024  # shorter prompts are not worth a file of the store
    max_bytes: int = 4 << 30  # of the store
    ttl_s: float = 7 * 86400.0  # after its last use a file of the store is removed
    converts: bool = True  # rows that were stored with a larger cache type are of use, too; a saved chat has its own
    memory: bool = False  # pages stay in the pool for the next prompt of this process
    source: str = ""  # where the text of prompts is from, for people: names of files
    lead: int = 0  # first tokens of a prompt that are not the user's: template, system message
    awaited: bool = False  # an answer ends when all is written: what is told of it is what came of it
    selected: bool = False  # the file gets the rows that were selected of a prompt, not all of them
    chat: str | None = None  # the saved chat whose turns the prompts are, "" = a chat that is not saved; None = no chat

    @property
    def stored_from(self) -> int:
        """Tokens of the shortest prompt that gets into the store: every turn of a saved chat does."""
        return 1 if self.chat else self.min_tokens


@dataclass(frozen=True)
class SampleOptions:
    """How the next token is chosen and when to stop. None = the model's own default, else the built-in one."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None  # tokens the three penalties look back on; 0 = off, -1 = the whole context
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0  # 0 = DRY is off
    dry_base: float = 1.75
    dry_allowed_length: int = 2  # tokens that may be repeated for nothing
    dry_penalty_last_n: int = -1  # tokens in which repetitions are looked for; 0 = off, -1 = the whole context
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")  # texts over which no repetition reaches
    seed: int = -1  # -1 = a random one, reported in the stats
    sequence: int = 0  # which of the answers that are drawn from one prompt with one seed
    logit_bias: dict[int, float] = field(default_factory=dict)
    max_tokens: int = -1  # -1 = to the end of the text or of the context
    unattended: bool = False  # nobody asked for max_tokens: it is UNATTENDED_TOKENS, as nobody sees the answer grow
    ignore_eos: bool = False
    loop_stop: bool | None = None  # end an answer that repeats itself; None = unless ignore_eos
    stop: tuple[str, ...] = ()
    grammar: str = ""  # what the answer follows, made by runtime/text/grammar.py; "" = it is free
    spec: str | None = (
        None  # how tokens are guessed ahead, which changes speed alone: "suffix", "ngram", "draft", "mtp" or "off"
    )
    logprobs: int | None = None  # of how many tokens log probabilities are told, beside the chosen one; None = of none
