"""Whether trees of guesses would pay: how often a draft model's second choice is right where its first one is not.

    python benchmarks/trees.py MODEL.gguf DRAFT.gguf [TEXT...]

Greedy answers of the model are read by the draft model, so that each guess has the right tokens before it. From that
the tokens are computed that a step of so many rows gives: with a chain of guesses, and with a chain of one less and the
second choice beside the first of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from kvcli import environment
from kvcli.options import CacheOptions, LoadOptions, SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End

ROWS = (4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("texts", type=Path, nargs="*")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("-n", type=int, default=128, help="tokens of an answer")
    parser.add_argument("-p", type=int, default=100, help="tokens of a prompt")
    parser.add_argument("-t", type=int, default=0, help="threads")
    options = parser.parse_args()
    environment.prepare()
    texts = options.texts or sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    text = "\n".join(path.read_text() for path in texts)
    engines = [
        Engine.open(path, LoadOptions(str(path), options.t), CacheOptions(options.p + options.n + 64))
        for path in (options.model, options.draft)
    ]
    ids = engines[0].tokenizer.encode(text, add_bos=False)
    bos = [engines[0].tokenizer.bos_id] if engines[0].tokenizer.add_bos else []
    starts = range(0, len(ids) - options.p, (len(ids) - options.p) // options.prompts)[: options.prompts]
    runs = [right(*engines, [*bos, *ids[start : start + options.p]], options.n) for start in starts]
    found = torch.cat(runs)
    first, second = float((found == 0).float().mean()), float((found == 1).float().mean())
    print(f"{len(found):,} tokens: the first choice is right {100 * first:.1f} %, the second {100 * second:.1f} %")
    for rows in ROWS:
        chain, tree = (sum(given(run, rows, branches) for run in runs) / len(runs) for branches in (False, True))
        print(f"{rows} rows: {chain:.3f} tokens a step with a chain, {tree:.3f} with two first guesses")


@torch.inference_mode()
def right(model: Engine, draft: Engine, prompt: list[int], n: int) -> torch.Tensor:
    """Of each token of a greedy answer which choice of the draft model it is: 0, 1, or 2 for any other."""
    seq, how = model.new_sequence(), SampleOptions(temperature=0.0, max_tokens=n, ignore_eos=True, spec="off")
    *_, end = model.generate(seq, prompt, how)
    assert isinstance(end, End)
    seq.close()
    theirs = draft.new_sequence()
    hidden = draft.forward(theirs, [*prompt, *end.ids[:-1]])
    logits = draft.logits(hidden[len(prompt) - 1 :])
    theirs.close()
    logits[:, list(draft.tokenizer.eog_ids)] = float("-inf")
    best = logits.topk(2).indices
    matches = best == torch.tensor(end.ids)[:, None]
    return torch.where(matches.any(1), matches.int().argmax(1), 2)


def given(choices: torch.Tensor, rows: int, branches: bool) -> float:
    """Tokens a step over an answer, where each step guesses `rows` - 1 tokens."""
    at = steps = 0
    most = rows - 1 - branches
    while at < len(choices):
        taken = 0
        while taken < most and at + taken < len(choices) and choices[at + taken] == 0:
            taken += 1
        if branches and taken == 0 and choices[at] == 1:
            taken = 1
        at, steps = at + taken + 1, steps + 1
    return len(choices) / steps


if __name__ == "__main__":
    main()
