"""What options of `kv` are in other programs that serve models. One table, for `kv serve --engine`, `kv run --engine`,
`kv estimate --print-args`, and the documentation. No torch.

A program has options of its own for it (`Passed`), is told with each call (`Sent`), or by a variable (`Variable`); or
kv does it in front of it (`Own`); or it cannot mean it (`Refused`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvcli.api.checks import lora_option, parse_tokens
from kvcli.codecs import canonical
from kvcli.errors import UsageError
from kvcli.options import SampleOptions

VLLM, SGLANG, LLAMA = "vllm", "sglang", "llama-server"
PROGRAMS = (VLLM, SGLANG, LLAMA)


@dataclass(frozen=True)
class Passed:
    """Options of theirs, as people read them; `words` makes them of our value, and raises UsageError for one that they
    cannot mean. `note`: what else is to be known."""

    flags: str
    words: Callable[[Any], list[str]]
    note: str = ""

    def __str__(self) -> str:
        return f"`{self.flags}`" + (f", {self.note}" if self.note else "")


@dataclass(frozen=True)
class Sent:
    """A key of each call. `field`: of `SampleOptions` that it is, "" = of none."""

    key: str
    field: str = ""

    def __str__(self) -> str:
        return f"`{self.key}` of each call"


@dataclass(frozen=True)
class Variable:
    """A variable that the program is started with."""

    name: str
    value: Callable[[Any], str]

    def __str__(self) -> str:
        return f"the variable `{self.name}`"


@dataclass(frozen=True)
class Own:
    """kv does it. `how`: in which way, where that is worth a word."""

    how: str = ""

    def __str__(self) -> str:
        return f"kv: {self.how}" if self.how else "kv"


@dataclass(frozen=True)
class Refused:
    why: str

    def __str__(self) -> str:
        return f"refused: {self.why}"


Meaning = Passed | Sent | Variable | Own | Refused
Row = tuple[Meaning | None, Meaning | None, Meaning | None]  # of PROGRAMS; None: no command asks that program for it


def _value(flag: str, made: Callable[[Any], Any] = str, note: str = "") -> Passed:
    """An option with one value."""
    return Passed(flag, lambda value: [flag, str(made(value))], note)


def _tokens(value: Any) -> int:
    return parse_tokens(str(value), "--ctx-size")


def _type(types: Mapping[str, str], program: str) -> Callable[[Any], str]:
    """Our cache type as theirs."""

    def made(value: Any) -> str:
        key, _, other = str(value).partition("/")
        if other and canonical(other) != canonical(key):
            raise UsageError(f"--cache-type {value}: {program} has one type for keys and values", "give one")
        if canonical(key) not in types:
            raise UsageError(f"--cache-type {value} is no type of {program}", f"it has {', '.join(types)}")
        return types[canonical(key)]

    return made


def _types(value: Any) -> list[str]:
    key, _, other = str(value).partition("/")
    made = _type(LLAMA_TYPES, LLAMA)
    return ["-ctk", made(key), "-ctv", made(other or key)]


def _share(value: Any) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(f"--vram-limit {value}: vLLM takes a share of the memory", "such as 0.9")
    return share


def _gib(value: Any) -> str:
    from kvcli.runtime.host.memory import parse_size

    return f"{parse_size(str(value), '--cpu-offload') / (1 << 30):g}"


def _card(value: Any) -> str:
    """What CUDA_VISIBLE_DEVICES is for --device, of which that names one; "" = as it is."""
    if not str(value).startswith("cuda"):
        raise UsageError(f"--device {value}: how vLLM was installed says what it computes on", "leave it out")
    number, there = str(value).partition(":")[2], os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not (number.isdecimal() and there):
        return number
    if int(number) >= len(cards := there.split(",")):
        raise UsageError(f"--device {value} is not among those of CUDA_VISIBLE_DEVICES={there}", "name another one")
    return cards[int(number)]


def _scaled(value: Any) -> list[str]:
    found = [lora_option(text) for text in value]
    plain = [word for each in found if each.scale == 1 for word in ("--lora", each.path)]
    return plain + [f"--lora-scaled={each.path}:{each.scale:g}" for each in found if each.scale != 1]


def _nodes(value: Any) -> list[str]:
    return ["--distributed-executor-backend", "ray"] if value > 1 else []


def _shift(value: Any) -> list[str]:
    if value != "shift":
        raise UsageError(f"--evict {value} cannot be used with {LLAMA}", "it has --evict shift")
    return ["--context-shift"]


VLLM_TYPES = {
    "f16": "float16", "bf16": "bfloat16", "fp8": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
}  # fmt: skip
SGLANG_TYPES = {"bf16": "bf16", "fp8": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
LLAMA_TYPES = {"f32": "f32", "f16": "f16", "bf16": "bf16", "int8": "q8_0", "int5": "q5_0", "int4": "q4_0"}

_KV = Own()
_ONE_TYPE = Refused("it has one type for keys and values, see `--cache-type`")
_PAGES = Refused("its cache has one type throughout")
_FORGETS = Refused("it forgets nothing: an answer ends where the context is full")
_READS = Refused("every token reads the whole cache")
_STORE = Refused("its caches are in memory, and end with it")
_PENALTY = Refused("it has no such penalty")
_ARITHMETIC = Refused("its arithmetic is its own")
_WEIGHTS = Refused("it takes weights as they are stored")
_ADAPTER = Refused("adapters of kv are GGUF files, which it does not read")
_SELDOM = Refused("it guesses a fixed number of tokens, which kv decides as it goes")
_TOLD = Refused("it does not tell what its cache holds")
_SEVERAL = Refused("one answer is asked for; `kv serve --engine vllm` writes several")
_SPLIT = Refused("it divides a model by layers, see `--pp`")


def _same(meaning: Meaning) -> Row:
    return meaning, meaning, meaning


def _vllm(meaning: Meaning) -> Row:
    return meaning, None, None


TABLE: dict[str, Row] = {
    "--model": (
        Passed("vllm serve MODEL", lambda value: ["serve", value]),
        _value("--model-path"),
        Passed("-m, -hf", lambda value: ["-m" if value.endswith(".gguf") else "-hf", value]),
    ),
    "--ctx-size": (
        Passed("--max-model-len", lambda value: ["--max-model-len", str(_tokens(value))] if _tokens(value) else []),
        _value("--context-length", _tokens),
        _value("-c", _tokens, "of all sequences together"),
    ),
    "--cache-type": (
        _value("--kv-cache-dtype", _type(VLLM_TYPES, VLLM)),
        _value("--kv-cache-dtype", _type(SGLANG_TYPES, SGLANG)),
        Passed("-ctk, -ctv", _types),
    ),
    "--cache-type-k": (_ONE_TYPE, _ONE_TYPE, _value("-ctk", _type(LLAMA_TYPES, LLAMA))),
    "--cache-type-v": (_ONE_TYPE, _ONE_TYPE, _value("-ctv", _type(LLAMA_TYPES, LLAMA))),
    "--force-cache-type": _vllm(Refused("it takes no notice of keys that are hard to store")),
    "--page-size": (_value("--block-size"), _value("--page-size"), Refused("its cache has no pages")),
    "--kv-tail": _same(_PAGES),
    "--kv-sink": _same(_PAGES),
    "--ubatch-size": (_value("--max-num-batched-tokens"), _value("--chunked-prefill-size"), _value("-ub")),
    "--parallel": _vllm(_value("--max-num-seqs")),
    "--batch-size": (_value("--max-num-seqs"), _value("--max-running-requests"), _value("-np")),
    "--tp": (_value("--tensor-parallel-size"), _value("--tp-size"), _SPLIT),
    "--pp": (
        _value("--pipeline-parallel-size"),
        _value("--pp-size"),
        Passed("-sm layer -ts", lambda value: ["-sm", "layer", "-ts", ",".join("1" for _ in range(value))]),
    ),
    "--nodes": (
        Passed("--distributed-executor-backend ray", _nodes, "over the nodes of a Ray cluster that is there"),
        Passed("--nnodes, --node-rank, --dist-init-addr", lambda value: ["--nnodes", str(value)], "a command on each"),
        Passed("--rpc", lambda value: [], "an rpc-server on each other node"),
    ),
    "--cpu-offload": (
        _value("--cpu-offload-gb", _gib), _value("--cpu-offload-gb", _gib),
        Refused("-ngl says how many layers are on the GPU"),
    ),
    "--vram-limit": _vllm(_value("--gpu-memory-utilization", _share)),
    "--cache": (
        Passed(
            "--enable-prefix-caching, --no-enable-prefix-caching",
            lambda value: ["--enable-prefix-caching" if value else "--no-enable-prefix-caching"], "in memory",
        ),
        None, None,
    ),
    "--chat-template": _vllm(_value("--chat-template")),
    "--device": _vllm(Variable("CUDA_VISIBLE_DEVICES", _card)),
    "--lora": (_ADAPTER, _ADAPTER, Passed("--lora, --lora-scaled", _scaled)),
    "--quantize": _same(_WEIGHTS),
    "--draft-model": (_SELDOM, _SELDOM, _value("-md")),
    "--evict": (_FORGETS, _FORGETS, Passed("--context-shift", _shift, "for `--evict shift`")),
    "--window": _same(_FORGETS),
    "--keep": (_FORGETS, _FORGETS, _value("--keep")),
    "--budget": _same(_FORGETS),
    **dict.fromkeys(("--attend", "--prefill-sparse", "--prefill-sparse-from"), _same(_READS)),
    "--shared-prefix": _same(Refused("it finds by itself what prompts share")),
    "--threads": _vllm(Refused("it binds its threads itself, see its VLLM_CPU_OMP_THREADS_BIND")),
    **dict.fromkeys(("--backend", "--exact", "--strict-repeat"), _vllm(_ARITHMETIC)),
    "--force-pretokenizer": _vllm(Refused("it has a tokenizer of its own")),
    "--keep-alive": _vllm(Refused("`kv serve --engine vllm` keeps it for several commands")),
    "--yield-vram": _vllm(Refused("nothing stays behind it")),
    "--models-max": _vllm(Refused("it has one model")),
    **dict.fromkeys(("--host", "--port", "--api-key", "--cors", "--alias", "--queue", "--max-body"), _vllm(_KV)),
    **dict.fromkeys((
        "--cache-dir", "--cache-min-tokens", "--cache-size", "--cache-ttl", "--cache-scope", "--prompt-cache",
        "--prompt-cache-all", "--prompt-cache-ro", "--prompt-cache-strict", "--cache-mark", "--chunks",
    ), _vllm(_STORE)),
    "--template-var": _vllm(Sent("chat_template_kwargs")),
    "--reasoning": _vllm(Sent("chat_template_kwargs")),
    "--reasoning-budget": _vllm(Refused("no interface of it sets how long every model may think")),
    "--predict": _vllm(Sent("max_tokens", "max_tokens")),
    "--temp": _vllm(Sent("temperature", "temperature")),
    "--top-k": _vllm(Sent("top_k", "top_k")),
    "--top-p": _vllm(Sent("top_p", "top_p")),
    "--min-p": _vllm(Sent("min_p", "min_p")),
    "--repeat-penalty": _vllm(Sent("repetition_penalty", "repeat_penalty")),
    "--repeat-last-n": _vllm(Refused("its penalties see the whole context")),
    "--presence-penalty": _vllm(Sent("presence_penalty", "presence_penalty")),
    "--frequency-penalty": _vllm(Sent("frequency_penalty", "frequency_penalty")),
    **dict.fromkeys((
        "--dry-multiplier", "--dry-base", "--dry-allowed-length", "--dry-penalty-last-n", "--dry-sequence-breaker",
    ), _vllm(_PENALTY)),
    "--seed": _vllm(Sent("seed", "seed")),
    "--stop": _vllm(Sent("stop", "stop")),
    "--ignore-eos": _vllm(Sent("ignore_eos", "ignore_eos")),
    "--loop-stop": _vllm(Refused("it does not look for repetitions")),
    "--spec": _vllm(_SELDOM),
    "--logit-bias": _vllm(Sent("logit_bias", "logit_bias")),
    "--json-schema": _vllm(Sent("response_format")),
    "--grammar": _vllm(Refused("grammars of vLLM are in another notation")),
    "--tools": _vllm(Sent("tools")),
    "--tool-choice": _vllm(Sent("tool_choice")),
    **dict.fromkeys(("--system", "--system-file", "--prompt", "--file", "--file-names"), _vllm(Sent("messages"))),
    "--no-stdin": _vllm(_KV),
    "--assistant": _vllm(Sent("continue_final_message")),
    "--raw": _vllm(Own("`/v1/completions` is asked")),
    "--special": _vllm(Refused("it parses special tokens of every text")),
    "--on-overflow": _vllm(Refused("it refuses what is too long")),
    "--n-samples": _vllm(_SEVERAL),
    "--batch": _vllm(_SEVERAL),
    **dict.fromkeys(("--json", "--jsonl", "--stats", "--verify-estimate", "--logprobs"), _vllm(_TOLD)),
    "--output": _vllm(Refused("its text goes to stdout")),
    **dict.fromkeys(("--no-newline", "--raw-output", "--engine"), _vllm(_KV)),
}  # fmt: skip


def refusal(flag: str, value: Any, program: str) -> str:
    """Why a program cannot mean it; "" = it can, or nothing is asked."""
    row = TABLE.get(flag)
    found = row[PROGRAMS.index(program)] if row else None
    if found is None:
        return f"{flag} is not for {program}"
    if isinstance(found, Refused) and value is not False:
        return f"{flag} cannot be used with {program}: {found.why.replace('`', '')}"
    return ""


def _meanings(given: Mapping[str, Any], program: str) -> list[tuple[Meaning | None, Any]]:
    """Raises UsageError."""
    if why := next(filter(None, (refusal(flag, value, program) for flag, value in given.items())), ""):
        raise UsageError(why, "leave it out")
    return [(TABLE[flag][PROGRAMS.index(program)], value) for flag, value in given.items()]


def words(given: Mapping[str, Any], program: str) -> list[str]:
    """The command line of a program for options of ours, by their longest names. Raises UsageError."""
    found = _meanings(given, program)
    return [word for each, value in found if isinstance(each, Passed) for word in each.words(value)]


def variables(given: Mapping[str, Any]) -> dict[str, str]:
    """What vLLM is started with in its environment. Raises UsageError."""
    found, cards = _meanings(given, VLLM), given.get("--tp", 1) * given.get("--pp", 1)
    if cards > 1 and ":" in str(given.get("--device", "")):
        raise UsageError(
            f"--device {given['--device']} is one GPU, and --tp and --pp need {cards}",
            "leave --device out; CUDA_VISIBLE_DEVICES names several",
        )
    named = [(each.name, each.value(value)) for each, value in found if isinstance(each, Variable)]
    return {name: value for name, value in named if value}


_SENT = {found.field: found.key for found, *_ in TABLE.values() if isinstance(found, Sent) and found.field}
_FREE = ("unattended", "sequence", "logprobs")  # fields that are no options, or are asked in other keys


def sent(options: SampleOptions) -> dict[str, Any]:
    """Keys of a call to vLLM for what is said of sampling. Raises UsageError for what it cannot mean."""
    said = {field.name: getattr(options, field.name) for field in fields(SampleOptions)}
    nothing = {field: getattr(SampleOptions(), field) for field in said}
    found = {field: value for field, value in said.items() if value != nothing[field] and field not in _FREE}
    if other := next((field for field in found if field not in _SENT), None):
        raise UsageError(f"`{other}` cannot be used with {VLLM}", "leave it out")
    found["max_tokens"] = None if options.max_tokens == -1 else options.max_tokens
    if options.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in options.logit_bias.items()}
    return {_SENT[field]: value for field, value in found.items() if value is not None}


def table(programs: Mapping[str, str], flags: tuple[str, ...] = tuple(TABLE)) -> str:
    """In Markdown. `programs`: by name what stands above each column; `flags`: of which options."""
    lines = [f"| {' | '.join(['kv', *programs.values()])} |", "|---" * (1 + len(programs)) + "|"]
    for flag in flags:
        cells = [str(TABLE[flag][PROGRAMS.index(program)]) for program in programs]
        lines.append(f"| {' | '.join([f'`{flag}`', *cells])} |")
    return "\n".join(lines) + "\n"
