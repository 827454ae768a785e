"""What rows that are selected by score cost: every policy at several budgets, beside `random` and sinks with a window.

    python benchmarks/budgets.py TEXT_FILE... [--model smollm2] [--tokens 1024] [--passages 2] [--png FILE]
    python benchmarks/budgets.py TEXT_FILE... --questions 4 --results FILE.json [--policies snapkv,kvzip]

Each passage of a text is a prompt, and its end an answer that is scored token by token, as it would be chosen: the
prompt is read whole, rows are selected, and again while the answer grows. The table has the mean divergence of the
predictions from those over the full cache, and the perplexity of the answers. With `--questions` there are so many of
the tasks `recall` (at each of five depths) and `needles` (five times as many) of `kv eval`, with the question in the
prompt, and once more as a second turn, when rows are gone already; the tables say how many are answered exactly, and
the negative log likelihood of an answer's token. `--results` keeps all figures in a file, so that several runs may
measure some policies each; without texts, tables and pictures are made of what is there. `--answer` limits
continuations, `--cache-type`, `--device` and `--budgets` choose what is measured; --png needs matplotlib, which nothing
else does. Prints the tables, and one JSON line last. With SmolLM2, 1,024 tokens and four passages it takes about ten
minutes on two cores, with questions ten times as long.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

from kvcli.options import CacheOptions, EvictOptions, LoadOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.replaying import PIECE
from kvcli.runtime.evaluate import givenanswers, tasks
from kvcli.runtime.hub import modelfiles

PAGE = 64
DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)
Figures = dict[str, dict[str, dict[str, float]]]  # by policy, and budget in per cent
POLICIES = (*eviction.scoring(), "sink")
FULL, EVERYTHING = "everything", "100"
TABLES = {  # what is told of each, and how
    "continuations: KLD, perplexity": ("kld", "perplexity", "{:.3f}, {:.1f}"),
    "questions in the prompt: exact, NLL": ("now", "now_nll", "{:.0f}, {:.2f}"),
    "questions in a second turn: exact, NLL": ("later", "later_nll", "{:.0f}, {:.2f}"),
}


def setting(policy: str, budget: int, context: int) -> EvictOptions:
    """What keeps about that share of a prompt of `context` tokens."""
    if policy != "sink":
        return EvictOptions(policy, budget=f"{budget}%")
    return EvictOptions("sink", max(PAGE, context * budget // 100 - PAGE), 4)  # up to a page more is seen


def measure(options: argparse.Namespace) -> Figures:
    """Every policy over the same passages and questions."""
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
    asked = [("recall", depth) for depth in DEPTHS] + [("needles", None)] * len(DEPTHS)
    questions = [
        tasks.example(full.tokenizer, task, options.tokens, seed * len(asked) + i, depth)
        for i, (task, depth) in enumerate(asked)
        for seed in range(options.questions)
    ]
    expected = [givenanswers.predictions(full, each) for each in (*passages, *questions)]

    def scored(engine: Engine) -> dict[str, float]:
        of_texts, of_questions = expected[: len(passages)], expected[len(passages) :]
        found = _scores(engine, passages, of_texts, False)
        row = {"kld": _mean([s.kld for s in found]), "perplexity": math.exp(_mean([s.nll for s in found]))}
        for name, later in (("now", False), ("later", True)) if questions else ():
            found = _scores(engine, questions, of_questions, later)
            row |= {name: sum(s.exact for s in found), f"{name}_nll": _mean([s.nll for s in found])}
            row[f"{name}_kld"] = _mean([s.kld for s in found])
        return row

    found: Figures = {FULL: {EVERYTHING: scored(full)}}
    for policy in options.policies.split(","):
        context = replace(base, ctx_size=base.ctx_size + PIECE) if policy == "kvzip" else base  # that is repeated
        for budget in map(int, options.budgets.split(",")):
            engine = full.beside(replace(context, evict=setting(policy, budget, len(passages[0].context))))
            row = found.setdefault(policy, {})[str(budget)] = scored(engine)
            del engine
            print(f"{policy} {budget} %: {row}", file=sys.stderr, flush=True)
            together(options.results, found)
    return found


def _scores(
    engine: Engine, examples: list[tasks.Example], full: list[givenanswers.torch.Tensor], later: bool
) -> list[givenanswers.Answer]:
    found = (givenanswers.predictions(engine, each, later=later) for each in examples)
    return [givenanswers.score(log_p, p, each.answer) for log_p, p, each in zip(found, full, examples, strict=True)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def together(path: str | None, found: Figures) -> Figures:
    """These and those that are in the file, which gets them all."""
    if path is None:
        return found
    with open(path, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        kept = json.loads(file.read() or "{}")
        for policy, row in found.items():
            kept.setdefault(policy, {}).update(row)
        file.truncate(0)
        json.dump(kept, file)
    return {name: kept[name] for name in sorted(kept, key=lambda name: (name == "sink", name))}


def table(found: Figures, first: str, second: str, form: str) -> str:
    """Policies by budgets."""
    full = found[FULL][EVERYTHING]
    budgets = sorted({int(b) for name, row in found.items() if name != FULL for b in row}, reverse=True)
    lines = [
        f"| `--evict` (everything: {form.format(full[first], full[second])}) | "
        + " | ".join(f"{b} %" for b in budgets)
        + " |",
        "|---|" + "---:|" * len(budgets),
    ]
    for name, row in found.items():
        if name != FULL:
            cells = (form.format(row[str(b)][first], row[str(b)][second]) if str(b) in row else "" for b in budgets)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(path: str, found: Figures, title: str) -> None:
    """Divergence over the budget, and how many questions are answered, a line for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    full = found[FULL][EVERYTHING]
    wanted = [("kld", "KLD from the full cache, nats a token")]
    wanted += [("now_nll", "question in the prompt: NLL"), ("later_nll", "question in a second turn: NLL")]
    wanted = [(name, told) for name, told in wanted if name in full]
    figure, panels = pyplot.subplots(1, len(wanted), figsize=(6.5 if len(wanted) == 1 else 13, 4), squeeze=False)
    for axes, (measured, told) in zip(panels[0], wanted, strict=True):
        for name, row in found.items():
            if name != FULL:
                budgets = sorted(map(int, row))
                dashed, all_of_it = "--" if name in ("random", "sink") else "-", full.get(measured, 0.0)
                values = [*(row[str(b)][measured] for b in budgets), all_of_it]
                axes.plot([*budgets, 100], values, dashed, marker="o", ms=3, label=name)
        if measured == "kld":
            axes.set_yscale("symlog", linthresh=1e-2)
            axes.set_ylim(bottom=0)
        axes.set_xlabel("rows that stay, % of the tokens")
        axes.set_ylabel(told)
        axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", metavar="TEXT_FILE")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache-type", default="f16")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--passages", type=int, default=2, help="of each text")
    parser.add_argument("--answer", type=int, default=256, help="tokens of it, at most")
    parser.add_argument("--questions", type=int, default=0)
    parser.add_argument("--budgets", default="75,50,25,10")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--results")
    parser.add_argument("--png")
    options = parser.parse_args()
    found = together(options.results, measure(options) if options.texts else {})
    for told, (first, second, form) in TABLES.items():
        if first in found[FULL][EVERYTHING]:
            print(f"{told}\n\n{table(found, first, second, form)}\n")
    if options.png:
        draw(options.png, found, f"{options.model}, {options.tokens:,} tokens, {options.cache_type} cache")
    print(json.dumps({"model": options.model, "tokens": options.tokens, "results": found}))


if __name__ == "__main__":
    main()
