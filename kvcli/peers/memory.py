"""What other programs leave for the KV cache on each GPU, by their own arithmetic, and the command lines that go with
it. On paper: nothing of it is measured. No torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcli.errors import DoesNotFit, UsageError
from kvcli.peers import mapping
from kvcli.peers.mapping import LLAMA, SGLANG, VLLM
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.config import RECURRENT, ModelConfig
from kvcli.runtime.plan import footprint
from kvcli.runtime.plan.plan import per_rank

VLLM_SHARE = 0.92  # --gpu-memory-utilization, where nothing is said
GRAPHS = 1 << 30  # assumed: CUDA graphs, NCCL and what libraries take beside torch's memory
CONTEXT = 450 << 20  # assumed: a CUDA context
MIB = 1 << 20
HEAD = "HEAD"  # stands for the address of the first node
# Bytes of an element of the cache, with their share of the scales: blocks of 32 in llama.cpp, rows of heads in vLLM.
_BLOCKS = {"int8": 34 / 32, "int5": 22 / 32, "int4": 18 / 32}
_BITS = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "fp8_e5m2": 8, "int8": 8, "int4": 4}
SGLANG_STATES = 0.9  # --mamba-full-memory-ratio: memory of states to that of rows
# SGLang's defaults by the GiB of a GPU: tokens of a prefill step, and the largest batch of a CUDA graph, on few GPUs
# and from four on.
_SGLANG = ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (90, 8192, 256, 512), (1 << 20, 16384, 512, 512))


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines with `gpus` GPUs of `total` bytes each. A layer is on `tp` of them; `pp`: stages of layers."""

    nodes: int
    gpus: int
    tp: int
    pp: int
    total: int


@dataclass(frozen=True)
class Asked:
    """A model, in a context of `ctx` tokens, for `sequences` at a time. `weights`: bytes of all; `types`: of keys and
    values; `given`: the options, by their longest names, whose words are wanted."""

    config: ModelConfig
    weights: int
    ctx: int
    sequences: int
    types: tuple[str, str]
    ubatch: int
    given: Mapping[str, Any]


@dataclass(frozen=True)
class Left:
    """What one GPU has: rows of (name, bytes), the last of which is what is left for the cache, with `token_bytes` of a
    token and `state_bytes` of a sequence there. `most`: sequences that there are states for in memory of their own.
    `words`: of its command line, that say so."""

    rows: tuple[tuple[str, int], ...]
    token_bytes: float
    words: tuple[str, ...] = ()
    state_bytes: float = 0.0
    most: float = math.inf

    @property
    def tokens(self) -> int:
        """Of one sequence."""
        return int(max(0.0, self.rows[-1][1] - self.state_bytes) / self.token_bytes) if self.most >= 1 else 0

    def contexts(self, ctx: int) -> float:
        """Sequences of `ctx` tokens."""
        return min(self.most, self.rows[-1][1] / (self.state_bytes + self.token_bytes * ctx))


def left(program: str, asked: Asked, on: Cluster) -> Left:
    """Raises UsageError for heads that cannot be divided."""
    return {VLLM: _vllm, SGLANG: _sglang, LLAMA: _llama}[program](asked, on)


def _token_bytes(asked: Asked, on: Cluster, program: str) -> float:
    """Of the largest stage, on one GPU."""
    config = per_rank(asked.config, on.tp)
    layout = KVLayout.build(config, "f16", "f16")
    share = -(-len(config.layers) // on.pp) / len(config.layers)
    sizes = [_BLOCKS.get(t, 0) if program == LLAMA else 0 for t in asked.types]
    heads = sum(layer.kv_heads for layer in config.layers if layer.kind != RECURRENT)
    found = 0.0
    for size, name in zip(sizes, asked.types, strict=True):
        scales = 4 * heads if program == VLLM and name in ("int8", "int4") else 0
        found += layout.token_bytes() / 4 * (size or _BITS[name] / 8) + scales
    return found * share


def _state_bytes(asked: Asked, on: Cluster) -> float:
    """Of the states of a sequence, in 32 bits, on one GPU of the largest stage."""
    config = per_rank(asked.config, on.tp)
    return sum(layer.state_bytes for layer in config.layers) * -(-len(config.layers) // on.pp) / len(config.layers)


def _vllm(asked: Asked, on: Cluster) -> Left:
    """A share of the card, less weights and what a run of the longest step takes, which it measures when it starts.
    States are in the blocks of the cache."""
    config = per_rank(asked.config, on.tp)
    step = asked.ubatch or (8192 if on.total >= 70 << 30 else 2048)
    most = int(VLLM_SHARE * on.total)
    work = footprint.gpu_workspace_bytes(config, step) + GRAPHS
    weights = asked.weights // (on.tp * on.pp)
    rows = ((f"{VLLM_SHARE:g} of the card", most), ("weights", -weights), (f"a step of {step:,} tokens, graphs", -work))
    words = (
        "--gpu-memory-utilization",
        f"{VLLM_SHARE:g}",
        *_unless(asked, "--ubatch-size", "--max-num-batched-tokens", step),
    )
    room = ("the cache", most - weights - work)
    return Left((*rows, room), _token_bytes(asked, on, VLLM), words, _state_bytes(asked, on))


def _sglang(asked: Asked, on: Cluster) -> Left:
    """What is static is weights and cache; the rest is for activations and graphs, by a formula of its options. States
    have a fixed share of the cache."""
    _, chunk, few, many = next(row for row in _SGLANG if on.total < row[0] << 30)
    chunk, batch = asked.ubatch or chunk, few if on.tp < 4 else many
    reserved = int(512 + 1.5 * chunk + 2 * batch + 128 * on.tp * on.pp) * MIB
    share = round((on.total - reserved) / on.total, 3)
    static, weights = int(share * on.total), asked.weights // (on.tp * on.pp)
    rows, cache = ((f"{share:g} of the card", static), ("weights", -weights)), static - weights
    words = ("--mem-fraction-static", f"{share:g}", "--cuda-graph-max-bs", str(batch))
    step = _unless(asked, "--ubatch-size", "--chunked-prefill-size", chunk)
    token, state = _token_bytes(asked, on, SGLANG), _state_bytes(asked, on)
    if not state:
        return Left((*rows, ("the cache", cache)), token, (*words, *step))
    states = int(max(0, cache) * SGLANG_STATES / (1 + SGLANG_STATES))
    said = ("states", -states), ("the cache", cache - states)
    return Left((*rows, *said), token, (*words, *step), most=states // state)


def _llama(asked: Asked, on: Cluster) -> Left:
    """Layers as they fit; the cache is taken whole when it starts, nothing is kept back."""
    count, gpus = len(asked.config.layers), on.nodes * on.gpus
    step = asked.ubatch or 512
    free = on.total - CONTEXT - footprint.gpu_workspace_bytes(asked.config, step)
    everywhere = Cluster(1, 1, 1, 1, on.total)
    states = int(_state_bytes(asked, everywhere)) * asked.sequences
    cache = _token_bytes(asked, everywhere, LLAMA) * asked.ctx * asked.sequences + states
    layers = min(count, int(gpus * free / max(1.0, (asked.weights + cache) / count)))
    weights, states = (n * layers // count // gpus for n in (asked.weights, states))
    rows = (("the card", on.total), (f"context, a step of {step:,} tokens", free - on.total), ("weights", -weights))
    kept = (("states", -states),) if states else ()
    token = _token_bytes(asked, everywhere, LLAMA) * layers / count / gpus
    words = ("-ngl", str(layers if layers < count else count + 1))
    return Left((*rows, *kept, ("the cache", free - weights - states)), token or 1.0, words)


def _unless(asked: Asked, ours: str, theirs: str, value: int) -> tuple[str, ...]:
    """Their option with its default, where ours does not say it."""
    return () if ours in asked.given else (theirs, str(value))


def lines(program: str, asked: Asked, on: Cluster, card: str) -> list[str]:
    """What is left for the cache as comments of a shell, then commands. Raises UsageError, DoesNotFit."""
    words = mapping.words(asked.given, program)  # raises for types that it does not have
    found = left(program, asked, on)
    words += found.words
    name, size = found.rows[-1]
    if size <= 0 or found.tokens < asked.ctx:
        raise DoesNotFit(
            f"{program} leaves {max(0, size) >> 20:,} MiB of each GPU for the cache: {max(0, found.tokens):,} tokens,"
            f" not {asked.ctx:,}",
            "give a smaller -c, more --gpus, or another --gpu",
        )
    sums = " ".join(f"{'-' if n < 0 else '+'} {abs(n) >> 20:,} ({what})" for what, n in found.rows[:-1])
    rows = f"{found.token_bytes:,.0f} bytes a token there"
    rows += f", {found.state_bytes:,.0f} a sequence" if found.state_bytes else ""
    told = [
        f"# {program} on {card}, MiB of each GPU: {sums.removeprefix('+ ')} = {size >> 20:,} for {name}",
        f"# {rows}: {found.tokens:,} tokens, {found.contexts(asked.ctx):.1f} contexts of {asked.ctx:,}",
    ]
    if on.nodes * on.gpus > 1:
        told.append(f"# {on.nodes} x {on.gpus} GPUs, on paper: --tp {on.tp}, --pp {on.pp}; not tried by kv")
    return told + _commands(program, words, on)


def _commands(program: str, words: list[str], on: Cluster) -> list[str]:
    others = range(1, on.nodes)
    if program == VLLM:
        ray = [] if on.nodes == 1 else ["ray start --head --port 6379"]
        ray += [f"ray start --address {HEAD}:6379  # on node {number}" for number in others]
        return [*ray, shlex.join(["vllm", *words])]
    if program == SGLANG:
        command = ["python", "-m", "sglang.launch_server", *words]
        if on.nodes == 1:
            return [shlex.join(command)]
        address = ["--dist-init-addr", f"{HEAD}:5000"]
        each = ([*command, *address, "--node-rank", str(number)] for number in range(on.nodes))
        return [f"{shlex.join(line)}  # on node {number}" for number, line in enumerate(each)]
    servers = [f"rpc-server -H 0.0.0.0 -p 50052  # on node {number}" for number in others]
    reached = ["--rpc", ",".join(f"NODE{number}:50052" for number in others)] if servers else []
    return [*servers, shlex.join([LLAMA, *words, *reached])]


def cluster(nodes: int, gpus: int, tp: int | None, total: int, program: str) -> Cluster:
    """How layers are divided: each over the GPUs of a node unless `tp` says otherwise. Raises UsageError."""
    count = nodes * gpus
    if program == LLAMA:
        if tp not in (None, 1):
            raise UsageError(f"--tp cannot be used with {LLAMA}: it divides a model by layers", "leave it out")
        return Cluster(nodes, gpus, 1, count, total)
    tp = gpus if tp is None else tp
    if count % tp:
        raise UsageError(f"--tp {tp} does not divide the {count} GPUs of --nodes and --gpus", "give another number")
    return Cluster(nodes, gpus, tp, count // tp, total)
