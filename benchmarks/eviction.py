"""What eviction keeps and what it forgets: perplexity along a long text, pass keys by depth, and a long generation.

    python benchmarks/eviction.py curves TEXT_FILE [--tokens 16384] [--png FILE]
    python benchmarks/eviction.py recall
    python benchmarks/eviction.py soak [--tokens 10000]

`curves` reads a text in one go through a cache that evicts, with each cache type, --keep 4 and --keep 0, and scores
every token. Its measure is strided recomputation: windows of as many tokens, each from an empty cache, the second half
of each scored, on the same positions. `recall` hides a pass key at several depths of a context twice as long as the
window. `soak` generates text in a context of 2,048 tokens and looks at memory and speed. `--model`, `--device` and
`--cache-type` choose what is measured; --png needs matplotlib, which nothing else does. Each prints a table, and one
JSON line last. On 2 slow cores and with SmolLM2 the three take about 6, 4 and 8 minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvcli.options import CacheOptions, EvictOptions, LoadOptions, SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import Token
from kvcli.runtime.evaluate import givenanswers, tasks
from kvcli.runtime.host.memory import process_bytes
from kvcli.runtime.hub import modelfiles

PAGE, KEEP, SLICE = 64, 4, 64  # SLICE: rows of logits at a time


def opened(options: argparse.Namespace, type_: str, ctx: int, evict: EvictOptions) -> Engine:
    """The model with a cache of that type."""
    path = modelfiles.find_model(options.model)
    cache = CacheOptions(ctx, type_, type_, PAGE, evict=evict, force_types=True)
    return Engine.open(path, LoadOptions(options.model, device=options.device), cache)


# --- perplexity along a text


@torch.inference_mode()
def losses(engine: Engine, ids: list[int], first: int = 0) -> Iterator[torch.Tensor]:
    """Negative log likelihoods of ids[first + 1:], each after all that the cache holds: float32, in pieces."""
    seq = engine.new_sequence()
    targets = torch.tensor(ids[1:] + ids[:1])
    for start, end in engine.chunks(0, len(ids)):
        hidden = engine.forward(seq, ids[start:end])
        for at in range(max(start, first), min(end, len(ids) - 1), SLICE):
            stop = min(at + SLICE, end, len(ids) - 1)
            log_p = engine.logits(hidden[at - start : stop - start]).log_softmax(-1)
            wanted = targets[at:stop, None].to(log_p.device)
            yield -log_p.gather(1, wanted)[:, 0].cpu()
    seq.close()


def strided(options: argparse.Namespace, ids: list[int]) -> list[float]:
    """Losses of ids[window / 2 + 1:] by recomputation."""
    engine, half = opened(options, "f16", options.window, EvictOptions()), options.window // 2
    head = ids[:1] if engine.tokenizer.add_bos else []  # a window begins as the text does
    found: list[float] = []
    for start in range(0, len(ids) - half - 1, half):
        part = head + ids[start + len(head) : start + options.window + 1]
        found += torch.cat(list(losses(engine, part, half))).tolist()
    return found


def by_block(values: list[float], first: int, block: int) -> list[float]:
    """Perplexity of each block of positions. values[0] is the loss of the token at position `first`."""
    ends = range(block, first + len(values) + 1, block)
    return [
        math.exp(sum(part) / len(part)) for end in ends if (part := values[max(0, end - block - first) : end - first])
    ]


def curves(options: argparse.Namespace) -> dict[str, Any]:
    """Perplexity by block: strided, and of every cache type with the first tokens kept and not."""
    text = Path(options.text).read_text("utf-8")
    tokenizer = opened(options, "f16", PAGE, EvictOptions()).tokenizer
    ids = tokenizer.encode(text)[: options.tokens + 1]
    if len(ids) <= options.tokens:
        raise SystemExit(f"the text has {len(ids)} tokens, --tokens {options.tokens} needs one more")
    first, found, began = options.window // 2 + 1, {}, time.perf_counter()
    lines = [("strided", "f16", -1)] + [(f"keep {k}", t, k) for t in options.cache_type.split(",") for k in (KEEP, 0)]
    for name, type_, keep in lines:
        if keep < 0:
            values = strided(options, ids)
        else:
            ctx = -(-keep // PAGE) * PAGE + options.window + PAGE
            engine = opened(options, type_, ctx, EvictOptions("sink", options.window, keep))
            values = torch.cat(list(losses(engine, ids))).tolist()[first - 1 :]
            del engine
        gc.collect()
        assert len(values) == len(ids) - first and all(math.isfinite(x) for x in values)
        found[f"{name} {type_}"] = by_block(values, first, options.block)
        print(f"# {name} {type_}: {time.perf_counter() - began:.0f} s so far", flush=True)
    base = found["strided f16"]
    print("| block ends at | " + " | ".join(found) + " |\n|---:" + "|---:" * len(found) + "|")
    for i in range(len(base)):
        print(f"| {(i + 1) * options.block:,} | " + " | ".join(f"{each[i]:.2f}" for each in found.values()) + " |")
    worst = {
        n: max(x / y - 1 for x, y in zip(v, base, strict=True))
        for n, v in found.items()
        if n.startswith(f"keep {KEEP}")
    }
    for name, share in worst.items():
        print(f"{name}: at most {share:+.2%} of strided recomputation")
    if options.png:
        draw(options, found)
    return {"window": options.window, "block": options.block, "ppl": found, "worst": worst}


def draw(options: argparse.Namespace, found: dict[str, list[float]]) -> None:
    """The curves as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), dpi=110)
    for name, values in found.items():
        style = "k-" if name.startswith("strided") else "--" if name.startswith("keep 0") else "-"
        axes.plot([(i + 1) * options.block for i in range(len(values))], values, style, marker="o", ms=3, label=name)
    axes.set(xlabel="tokens read", ylabel="perplexity of the block")
    axes.set_title(f"{options.title or options.model}: a window of {options.window:,} tokens")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center")
    figure.tight_layout()
    figure.savefig(options.png)


# --- pass keys


def ask_by_depth(options: argparse.Namespace) -> dict[str, Any]:
    """Exact answers and the key's loss by depth, for every policy."""
    found, depths = [], (0, 25, 50, 75, 100)
    print(f"| policy | stays | {' | '.join(f'{d} %' for d in depths)} |\n|---|---|" + "---:|" * len(depths))
    for policy in ("none", "window", "sink"):
        window = 0 if policy == "none" else options.window
        engine = opened(options, options.cache_type.split(",")[0], 2 * options.window, EvictOptions(policy, window))
        cells = []
        for depth in depths:
            scores = []
            for seed in range(options.trials):
                asked = tasks.example(engine.tokenizer, tasks.RECALL, 2 * options.window, seed, depth)
                predicted = givenanswers.predictions(engine, asked)
                scores.append(givenanswers.score(predicted, predicted, asked.answer))
            nll, exact = sum(a.nll for a in scores) / len(scores), sum(a.exact for a in scores)
            found.append({"policy": policy, "depth": depth, "exact": exact, "trials": len(scores), "nll": nll})
            cells.append(f"{exact}/{len(scores)} {nll:.2f}")
        stays = "everything" if engine.retention is None else str(engine.retention)
        print(f"| {policy} | {stays} | {' | '.join(cells)} |", flush=True)
    return {"ctx": 2 * options.window, "window": options.window, "recall": found}


# --- a long generation


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Memory and speed, thousand by thousand. NaN ends it: logits are looked at, or the sampler on a GPU refuses."""
    engine = opened(options, options.cache_type.split(",")[0], 2048, EvictOptions("sink"))
    original = engine.model.logits

    def checked(hidden: torch.Tensor) -> torch.Tensor:
        logits = original(hidden)
        if not logits.isfinite().all():
            raise SystemExit("logits are not finite")
        return logits

    if engine.graph is None:
        engine.model.logits = checked  # type: ignore[method-assign]
    seq, rows, n = engine.new_sequence(), [], 0
    prompt = engine.tokenizer.encode("Once upon a time")
    sampling = SampleOptions(seed=1, ignore_eos=True, max_tokens=options.tokens)
    print("| tokens | tok/s | CPU ms/tok | pool MiB | process MiB | rows kept |\n|---:|---:|---:|---:|---:|---:|")
    began, worked = time.perf_counter(), time.process_time()
    for event in engine.generate(seq, prompt, sampling):
        n += isinstance(event, Token)
        if isinstance(event, Token) and n % 1000 == 0:
            now, work = time.perf_counter(), time.process_time()
            row = {"tokens": n, "tok_s": 1000 / (now - began), "cpu_ms": work - worked}
            row |= {"pool_bytes": engine.pool.committed_bytes, "process_bytes": process_bytes(), "kept": seq.kept}
            rows.append(row)
            sizes = " | ".join(f"{row[x] / (1 << 20):,.1f}" for x in ("pool_bytes", "process_bytes"))
            print(f"| {n:,} | {row['tok_s']:.1f} | {row['cpu_ms']:.1f} | {sizes} | {seq.kept:,} |", flush=True)
            began, worked = now, work
    return {"ctx": 2048, "evicted": seq.evicted, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("curves", "recall", "soak"))
    parser.add_argument("text", nargs="?", metavar="TEXT_FILE", help="what `curves` reads")
    parser.add_argument("--model", default="smollm2", help="a name or a file")
    parser.add_argument("--title", help="the model's name in the picture")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache-type", help="of keys and values; a list for `curves`")
    parser.add_argument("--tokens", type=int, help="to read (16384) or to generate (10000)")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--block", type=int, default=2048, help="tokens of a point on a curve")
    parser.add_argument("--trials", type=int, default=2, help="pass keys at each depth")
    parser.add_argument("--png", help="where to draw the curves")
    options = parser.parse_args()
    if options.what == "curves" and not options.text:
        parser.error("curves needs a text file")
    options.cache_type = options.cache_type or ("f16,int8,int4" if options.what == "curves" else "f16")
    options.tokens = options.tokens or (16384 if options.what == "curves" else 10000)
    began = time.perf_counter()
    result = {"curves": curves, "recall": ask_by_depth, "soak": soak}[options.what](options)
    seconds = round(time.perf_counter() - began)
    head = {"benchmark": f"eviction {options.what}", "model": options.model, "device": options.device}
    print(
        json.dumps({**head, "cache_type": options.cache_type, "tokens": options.tokens, **result, "seconds": seconds})
    )


if __name__ == "__main__":
    main()
