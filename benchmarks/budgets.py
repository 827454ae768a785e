"""What rows that are selected by score cost: every policy at several budgets, beside `random` and sinks with a window.

    python benchmarks/budgets.py TEXT_FILE... [--model smollm2] [--tokens 1024] [--passages 2] [--png FILE]

Each passage of a text is a prompt, and its end an answer that is scored token by token, as it would be chosen: the
prompt is read whole, rows are selected, and again while the answer grows. The table has the mean divergence of the
predictions from those over the full cache, and the perplexity of the answers. `--answer` limits them, `--cache-type`,
`--device` and `--budgets` choose what is measured; --png needs matplotlib, which nothing else does. Prints the tables,
and one JSON line last. With SmolLM2, 1,024 tokens and four passages it takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

from kvcli.options import CacheOptions, EvictOptions, LoadOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.evaluate import answers, tasks
from kvcli.runtime.hub import modelfiles

PAGE = 64
Figures = dict[str, dict[int, tuple[float, float]]]  # by policy and budget in per cent: KLD, perplexity
POLICIES = (*eviction.scoring(), "sink")


def setting(policy: str, budget: int, context: int) -> EvictOptions:
    """What keeps about that share of a prompt of `context` tokens."""
    if policy != "sink":
        return EvictOptions(policy, budget=f"{budget}%")
    return EvictOptions("sink", max(PAGE, context * budget // 100 - PAGE), 4)  # up to a page more is seen


def measure(options: argparse.Namespace) -> Figures:
    """Every policy over the same passages."""
    base = CacheOptions(
        options.tokens + PAGE, options.cache_type, options.cache_type, PAGE, force_types=True
    )  # with room for a page that is being filled
    load = LoadOptions(options.model, device=options.device)
    full = Engine.open(modelfiles.find_model(options.model), load, base)
    passages = [
        replace(each, answer=each.answer[: options.answer])
        for path in options.texts
        for each in tasks.passages(full.tokenizer, Path(path).read_text("utf-8"), options.tokens, options.passages)
    ]
    expected = [answers.predictions(full, each) for each in passages]
    scores = [answers.score(p, p, each.answer) for p, each in zip(expected, passages, strict=True)]
    found: Figures = {"everything": {100: _mean(scores)}}
    for policy in options.policies.split(","):
        for budget in map(int, options.budgets.split(",")):
            engine = full.beside(replace(base, evict=setting(policy, budget, len(passages[0].context))))
            scores = [
                answers.score(answers.predictions(engine, each), p, each.answer)
                for p, each in zip(expected, passages, strict=True)
            ]
            found.setdefault(policy, {})[budget] = _mean(scores)
            kld, ppl = found[policy][budget]
            print(f"{policy} {budget} %: KLD {kld:.4f}, perplexity {ppl:.2f}", file=sys.stderr, flush=True)
    return found


def _mean(scores: list[answers.Answer]) -> tuple[float, float]:
    n = len(scores)
    return sum(each.kld for each in scores) / n, math.exp(sum(each.nll for each in scores) / n)


def table(found: Figures) -> str:
    """Policies by budgets: divergence, and the perplexity behind it."""
    budgets = sorted({b for name, row in found.items() if name != "everything" for b in row}, reverse=True)
    full = found["everything"][100][1]
    lines = [
        f"| `--evict` (perplexity with everything {full:.2f}) | " + " | ".join(f"{b} %" for b in budgets) + " |",
        "|---|" + "---:|" * len(budgets),
    ]
    for name, row in found.items():
        if name != "everything":
            lines.append(f"| {name} | " + " | ".join(f"{row[b][0]:.3f}, {row[b][1]:.1f}" for b in budgets) + " |")
    return "\n".join(lines)


def draw(path: str, found: Figures, title: str) -> None:
    """Divergence over the budget, a line for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 4))
    for name, row in found.items():
        if name != "everything":
            budgets = sorted(row)
            dashed = "--" if name in ("random", "sink") else "-"
            axes.plot([*budgets, 100], [*(row[b][0] for b in budgets), 0], dashed, marker="o", ms=3, label=name)
    axes.set_yscale("symlog", linthresh=1e-2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows that stay, % of the tokens")
    axes.set_ylabel("KLD from the full cache, nats a token")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", metavar="TEXT_FILE")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache-type", default="f16")
    parser.add_argument("--tokens", type=int, default=1024, help="of a passage")
    parser.add_argument("--answer", type=int, default=256, help="tokens that are scored, at most")
    parser.add_argument("--passages", type=int, default=2, help="of each text")
    parser.add_argument("--budgets", default="75,50,25,10", help="in per cent")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--png")
    options = parser.parse_args()
    found = measure(options)
    print(table(found))
    if options.png:
        draw(options.png, found, f"{options.model}, passages of {options.tokens:,} tokens, {options.cache_type}")
    print(json.dumps({"model": options.model, "tokens": options.tokens, "found": found}))


if __name__ == "__main__":
    main()
