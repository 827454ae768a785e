"""What reading fewer pages costs: KL divergence and perplexity of rules that choose them, and of sparse prefill.

    python benchmarks/selection.py pages TEXT_FILE [--tokens 2048] [--from 1024] [--shares 0.5,0.25,0.1] [--rules ...]
    python benchmarks/selection.py prefill TEXT_FILE [--tokens 8192] [--sparse auto,25%] [--device cuda]
    python benchmarks/selection.py heads TEXT_FILE [--tokens 512] [--shares 0.5,0.25,0.1] [--questions 6]

`pages`: every row from `--from` on reads the first page, its own, the one before and a share of all pages, chosen for
it and for each key-value head: the recent ones, the best by bounds of their keys (Quest, arXiv 2406.10774) or by means
of 16 of them, in 8 bits as `kv` has them, and the best by the true sum of weights, which no rule can beat. `prefill`
computes a text by `--prefill-sparse` from its second step on, and says which share of the pages before a step the rule
read. `heads`: rows that SnapKV keeps of a prompt, as many in each key-value head or, as Ada-KV has it (arXiv
2407.11550), as many in each layer; behind passages and behind texts whose question comes later. All compare with all
that there is. `--model` chooses the model. Each prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvcli.kernels import Stretch
from kvcli.kernels.reference.choosing import choose
from kvcli.options import AttendOptions, CacheOptions, LoadOptions
from kvcli.runtime.cache import attending
from kvcli.runtime.cache.eviction import snapkv
from kvcli.runtime.cache.sequence import Step
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.evaluate import tasks
from kvcli.runtime.host.memory import CPU
from kvcli.runtime.hub import modelfiles

PAGE, MEAN_ROWS, SLICE = 64, 16, 64
SAFE = 0.2  # of the budget that every head has in any case
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def opened(
    options: argparse.Namespace, type_: str, attend: AttendOptions = AttendOptions(), device: str = "cpu"
) -> Engine:
    path = modelfiles.find_model(options.model)
    cache = CacheOptions(options.tokens + 64, type_, type_, PAGE, force_types=True, attend=attend)
    return Engine.open(path, LoadOptions(options.model, device=device), cache)


# --- rules: queries [group, T, dim], keys [T, dim] of a head and scores [group, T, T] -> scores of pages [T, pages]


def _pages(keys: torch.Tensor, rows: int = PAGE) -> torch.Tensor:
    """[runs of rows, rows, dim]; what is behind the last row is zeros."""
    whole = -(-len(keys) // PAGE) * PAGE
    return torch.nn.functional.pad(keys, (0, 0, 0, whole - len(keys))).view(-1, rows, keys.shape[1])


def recent(q: torch.Tensor, keys: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.arange(-(-len(keys) // PAGE)).float().expand(q.shape[1], -1)


def bounds(q: torch.Tensor, keys: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    low, high = _pages(keys).amin(1), _pages(keys).amax(1)
    return (q.clamp(min=0) @ high.T + q.clamp(max=0) @ low.T).sum(0)


def means(rows: int, bits: int = 0) -> Rule:
    """By means of so many keys, as codes of so many bits with a scale for each mean; 0 = as they are."""

    def found(q: torch.Tensor, keys: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        each = _pages(keys, rows).mean(1)
        if bits:
            scale = each.abs().amax(1, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1)
            each = (each / scale).round() * scale
        return (q.sum(0) @ each.T).unflatten(1, (-1, PAGE // rows)).amax(-1)

    return found


def weights(q: torch.Tensor, keys: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    whole = -(-len(keys) // PAGE) * PAGE
    padded = torch.nn.functional.pad(scores.softmax(-1), (0, whole - len(keys)))
    return padded.unflatten(2, (-1, PAGE)).sum(3).sum(0)


def every(tokens: int) -> Rule:
    """By means, for so many tokens at a time, by the query of the first of them."""

    def found(q: torch.Tensor, keys: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        each = means(MEAN_ROWS)(q, keys, scores)
        return each[torch.arange(len(each)) // tokens * tokens]

    return found


RULES: dict[str, Rule] = {
    "the recent ones": recent, "bounds of keys": bounds, "means of 64 keys": means(64), "means of 32 keys": means(32),
    "means of 16 keys": means(MEAN_ROWS), "8 bits": means(MEAN_ROWS, 8), "4 bits": means(MEAN_ROWS, 4),
    "true weights": weights,
    **{f"for {n} tokens": every(n) for n in (2, 4, 8, 16, 64)},
}  # fmt: skip


class Dense:
    """Attention in plain torch over a whole text, in which rows from `first` on read some pages."""

    def __init__(self, first: int) -> None:
        self.first, self.rule, self.pages = first, None, 0
        self.rows: tuple[torch.Tensor, torch.Tensor]

    def store_each(self, k: torch.Tensor, v: torch.Tensor, parts: list[Stretch]) -> None:
        self.rows = k.clone(), v.clone()

    def attention_each(
        self, q: torch.Tensor, parts: Any, window: int, scale: float, softcap: float, *rest: Any
    ) -> torch.Tensor:
        (k, v), (t, heads, _) = self.rows, q.shape
        at = torch.arange(t)
        seen = at[None] <= at[:, None]
        seen = seen & (at[None] > at[:, None] - window) if window else seen
        found, group = [], heads // k.shape[1]
        for head in range(k.shape[1]):
            mine = q[:, head * group : (head + 1) * group].transpose(0, 1) * scale
            scores = mine @ k[:, head].T
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores.masked_fill(~seen, -math.inf)
            if self.rule is not None and not window:
                read = self._read(self.rule(mine, k[:, head], scores), t)
                scores = scores.masked_fill(~read.repeat_interleave(PAGE, 1)[:, :t], -math.inf)
            found.append((scores.softmax(-1) @ v[:, head]).transpose(0, 1))
        return torch.cat(found, 1).flatten(1)

    def _read(self, scores: torch.Tensor, t: int) -> torch.Tensor:
        """bool [t, pages]."""
        page, own = torch.arange(scores.shape[1])[None], torch.arange(t)[:, None] // PAGE
        among = (page >= attending.FIRST_PAGES) & (page < own - attending.RECENT_PAGES)
        best = scores.masked_fill(~among, -math.inf).topk(self.pages, -1).indices
        read = torch.zeros_like(among).scatter_(1, best, True) | ~among
        read[: self.first] = True
        return read


class Budgets(Dense):
    """Rows behind the first `prompt` see `share` of those, in each head or, where `adaptive`, of all heads of a layer
    together, and all behind them."""

    prompt, share, adaptive = 0, 1.0, False

    def attention_each(
        self, q: torch.Tensor, parts: Any, window: int, scale: float, softcap: float, *rest: Any
    ) -> torch.Tensor:
        (k, v), (t, heads, _), n = self.rows, q.shape, self.prompt
        at = torch.arange(t)
        seen = (at[None] <= at[:, None]) & ((at[None] > at[:, None] - window) if window else True)
        group = heads // k.shape[1]
        mine = q.transpose(0, 1).unflatten(0, (-1, group)) * scale  # [kv_heads, group, T, dim]
        scores = mine @ k.permute(1, 2, 0)[:, None]
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = scores.masked_fill(~seen, -math.inf)
        if self.share < 1 and not window:
            mass = scores[:, :, n - snapkv.WINDOW : n, :n].softmax(-1).sum((1, 2))
            mass = torch.nn.functional.avg_pool1d(mass[:, None], snapkv.KERNEL, 1, snapkv.KERNEL // 2)[:, 0]
            mass[:, n - snapkv.WINDOW :] = math.inf
            hidden = self._dropped(mass)
            scores[:, :, n:, :n] = scores[:, :, n:, :n].masked_fill(hidden[:, None, None], -math.inf)
        found = scores.softmax(-1) @ v.transpose(0, 1)[:, None]
        return found.flatten(0, 1).transpose(0, 1).flatten(1)

    def _dropped(self, mass: torch.Tensor) -> torch.Tensor:
        """Which rows go by their scores [kv_heads, n]: bool [kv_heads, n]."""
        heads, n = mass.shape
        budget = max(snapkv.WINDOW + 1, round(self.share * n))
        counts = [budget] * heads
        if self.adaptive:
            best = mass.flatten().topk(heads * budget).indices // n
            counts = [round((1 - SAFE) * int((best == h).sum()) + SAFE * budget) for h in range(heads)]
        dropped = torch.ones_like(mass, dtype=torch.bool)
        for head, count in enumerate(counts):
            dropped[head, mass[head].topk(min(n, count)).indices] = False
        return dropped


def told(full: torch.Tensor, found: torch.Tensor, ids: list[int]) -> dict[str, float]:
    """KL divergence and perplexity of log probabilities [n, vocab] of what follows each row, ids [n]."""
    nll = -found.gather(1, torch.tensor(ids)[:, None]).mean()
    return {"kld": float((full.exp() * (full - found)).sum(-1).mean()), "perplexity": float(nll.exp())}


@torch.inference_mode()
def pages(options: argparse.Namespace) -> list[dict[str, Any]]:
    engine, first = opened(options, "f32"), options.first
    ids = engine.tokenizer.encode(Path(options.text).read_text("utf-8"))[: options.tokens]
    dense, ops, found = Dense(first), engine.model.ops, []
    ops.store_each, ops.attention_each = dense.store_each, dense.attention_each  # type: ignore[method-assign,union-attr]

    def log_p() -> torch.Tensor:
        seq = engine.new_sequence()
        hidden = engine.model.hidden(Step((seq.reserve(ids),)))
        seq.close()
        return engine.logits(hidden[first:-1]).log_softmax(-1)

    full, following, all_pages = log_p(), ids[first + 1 :], -(-len(ids) // PAGE)
    print(f"perplexity with all {all_pages} pages: {told(full, full, following)['perplexity']:.3f}\n")
    print("| pages read | rule | KL divergence | perplexity |\n|---:|---|---:|---:|")
    for share in map(float, options.shares.split(",")):
        dense.pages = max(1, round(share * all_pages))
        for name in options.rules.split(","):
            dense.rule = RULES[name]
            row = {"share": share, "pages": dense.pages, "rule": name, **told(full, log_p(), following)}
            print(f"| {share:.0%} | {name} | {row['kld']:.4f} | {row['perplexity']:.3f} |", flush=True)
            found.append(row)
    return found


@torch.inference_mode()
def heads(options: argparse.Namespace) -> list[dict[str, Any]]:
    engine, dense, found = opened(options, "f32"), Budgets(0), []
    ops, text, tokenizer = engine.model.ops, Path(options.text).read_text("utf-8"), engine.tokenizer
    ops.store_each, ops.attention_each = dense.store_each, dense.attention_each  # type: ignore[method-assign,union-attr]
    examples = tasks.passages(tokenizer, text, options.tokens, options.passages)
    for i in range(options.questions):
        examples.append(tasks.example(tokenizer, "needles", options.tokens, i))
        examples.append(tasks.example(tokenizer, "recall", options.tokens, i, 100 * i / options.questions))

    def log_p(each: tasks.Example) -> torch.Tensor:
        dense.prompt, seq, ids = len(each.context) - each.asked, engine.new_sequence(), each.context + each.answer[:-1]
        hidden = engine.model.hidden(Step((seq.reserve(ids),)))
        seq.close()
        return engine.logits(hidden[len(each.context) - 1 :]).log_softmax(-1)

    full = [log_p(each) for each in examples]
    print("| rows kept | counts | KLD of texts | perplexity | KLD of answers | NLL |\n|---:|---|---:|---:|---:|---:|")
    for share in (1.0, *map(float, options.shares.split(","))):
        for adaptive in (False, True) if share < 1 else (False,):
            dense.share, dense.adaptive = share, adaptive
            rows = [told(p, log_p(each), each.answer) for p, each in zip(full, examples, strict=True)]
            kinds = [row for row, e in zip(rows, examples, strict=True) if not e.asked], rows[options.passages :]
            (texts, nll), (asked, of_answers) = (
                (_mean([r["kld"] for r in kind]), _mean([math.log(r["perplexity"]) for r in kind])) for kind in kinds
            )
            row = {"share": share, "adaptive": adaptive, "kld": texts, "perplexity": math.exp(nll)}
            row |= {"answers_kld": asked, "answers_nll": of_answers}
            found.append(row)
            figures = f"{texts:.4f} | {math.exp(nll):.2f} | {asked:.4f} | {of_answers:.3f}"
            print(f"| {share:.0%} | {'a layer' if adaptive else 'a head'} | {figures} |", flush=True)
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def count(engine: Engine) -> list[int]:
    """How many pages are read from now on of those that are chosen among, and how many those are."""
    ops, counts = engine.model.ops, [0, 0]
    attention = ops.attention_each  # type: ignore[union-attr]

    def counted(q: torch.Tensor, parts: list[Stretch], window: int, scale: float, *rest: Any) -> torch.Tensor:
        kv = parts[0].kv
        if kv.choice is not None and kv.entries.summaries is not None:
            among = torch.from_numpy(kv.entries.summaries.addresses != 0)
            read = choose(q, kv, parts[0].start, scale)[..., among]
            counts[0], counts[1] = counts[0] + int(read.sum()), counts[1] + read.numel()
        return attention(q, parts, window, scale, *rest)

    ops.attention_each = counted  # type: ignore[method-assign,union-attr,assignment]
    return counts


def count_masks() -> list[int]:
    """The same on a GPU, with the first page, which is always read."""
    from kvcli.kernels.gpu import past

    counts, mask = [0, 0], past.mask

    def counted(*what: Any) -> torch.Tensor:
        found: torch.Tensor = mask(*what)
        counts[0], counts[1] = counts[0] + int(found.sum()), counts[1] + found.numel()
        return found

    past.mask = counted
    return counts


@torch.inference_mode()
def prefill(options: argparse.Namespace) -> list[dict[str, Any]]:
    found, full = [], None
    print("| --prefill-sparse | pages read | KL divergence | perplexity |\n|---|---:|---:|---:|")
    for how in ("off", *options.sparse.split(",")):
        attend = AttendOptions(0, *attending.sparseness(how), sparse_from=1)
        engine = opened(options, "f16", attend, options.device)
        counts = count(engine) if engine.device.kind == CPU else count_masks()
        ids = engine.tokenizer.encode(Path(options.text).read_text("utf-8"))[: options.tokens]
        seq, rows, half = engine.new_sequence(), [], len(ids) // 2
        for start, end in engine.chunks(0, len(ids)):
            hidden = engine.forward(seq, ids[start:end])
            for at in range(max(start, half), min(end, len(ids) - 1), SLICE):
                logits = engine.logits(hidden[at - start : min(at + SLICE, end, len(ids) - 1) - start])
                rows.append(logits[(half - at) % 4 :: 4].float().cpu())  # memory
        log_p = torch.cat(rows).log_softmax(-1)
        full = log_p if full is None else full
        row = {"sparse": how, "read": counts[0] / counts[1] if counts[1] else 1.0}
        row |= told(full, log_p, ids[half + 1 :][::4])
        print(f"| {how} | {row['read']:.1%} | {row['kld']:.4f} | {row['perplexity']:.3f} |", flush=True)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pages", "prefill", "heads"))
    parser.add_argument("text")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, help="2048; 512 of `heads`")
    parser.add_argument("--from", dest="first", type=int, default=1024)
    parser.add_argument("--shares", default="0.5,0.25,0.1")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--sparse", default="auto,25%")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--passages", type=int, default=2)
    parser.add_argument("--questions", type=int, default=6)
    options = parser.parse_args()
    options.tokens = options.tokens or (512 if options.what == "heads" else 2048)
    found = {"pages": pages, "prefill": prefill, "heads": heads}[options.what](options)
    print("\n" + json.dumps({"model": options.model, "tokens": options.tokens, "rows": found}))


if __name__ == "__main__":
    main()
