"""Documents in any order, one by one in the cache: time to the first token, and how far answers are from those of the
whole prompt.

    python benchmarks/chunks.py MODEL TEXT_FILE [--questions 30] [--from 0] [--json FILE]
    python benchmarks/chunks.py --told FILE.json... [--limit 0.2]

Each question has five passages of the text in random order, each with a sentence that names a code, and asks for one of
the codes. The full cache answers greedily; the first 16 tokens of its answer are scored with each repair, by the KL
divergence of their predictions. `none`: all rows of a document are those that it has alone; `first N`: its first N rows
are computed in place (EPIC has 16, MEPIC a block); `chosen 15 %`: those whose values in the second layer are farthest
from what the whole prompt has (CacheBlend), one by one, so their time is not told. `rule`: see kvcli; the divergences
of its gate are told behind the table, which has all prompts as if it had let them pass. Times are processor time.
`--told` puts together what several runs kept with `--json`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.cache.pagerows import copies
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine import chunks
from kvcli.runtime.engine.engine import Engine

PLACES = ("harbour", "library", "station", "garden", "tower", "market", "museum", "bakery", "theatre", "mill")
DOCUMENTS, ANSWER, CHOSEN = 5, 16, 0.15
FIRST = (0, 16, 64)
RULE = "rule"


def question(text: str, chance: random.Random, size: int) -> tuple[list[str], str]:
    """Documents, in order, and what is asked."""
    documents, places = [], chance.sample(PLACES, DOCUMENTS)
    for place in places:
        at = text.index("\n\n", chance.randrange(2000, len(text) - size - 2000))
        passage, code = text[at : at + size].strip(), "".join(chance.choices("123456789", k=5))
        cut = passage.index(" ", chance.randrange(len(passage) // 2))
        documents.append(f"{passage[:cut]} The code of the {place} is {code}: {code}.{passage[cut:]}\n\n")
    asked = chance.choice(places)
    return documents, f"What is the code of the {asked}? The code of the {asked} is"


def last_rows(engine: Engine, seq: Sequence, ids: list[int]) -> torch.Tensor:
    """Log probabilities behind the last of ids, float64 [1, vocab]."""
    for start, end in engine.chunks(seq.length, len(ids)):
        hidden = engine.forward(seq, ids[start:end])
    return engine.logits(hidden[-1:]).double().log_softmax(-1)


def answer(engine: Engine, seq: Sequence, ids: list[int], given: list[int]) -> tuple[torch.Tensor, list[int], float]:
    """Predictions of the answer's tokens, these (greedy ones unless `given`), and the seconds to the first."""
    began = time.process_time()
    rows = [last_rows(engine, seq, ids)]
    seconds, tokens = time.process_time() - began, list(given)
    if given:
        rows.append(engine.logits(engine.forward(seq, given[:-1])).double().log_softmax(-1))
    while len(tokens) < ANSWER:
        tokens.append(int(rows[-1].argmax()))
        if len(tokens) < ANSWER:
            rows.append(engine.logits(engine.forward(seq, tokens[-1:])).double().log_softmax(-1))
    return torch.cat(rows), tokens, seconds


def values(engine: Engine, seq: Sequence, layer: int, lo: int, hi: int) -> torch.Tensor:
    """Values of rows [lo, hi) of a layer: [n, kv_heads * dim]. Of a layer with a window as many as are there."""
    group, index = seq.pool.layout.slots[layer]
    found = [v.flatten(1) for _, _, v in copies(seq.views()[group][index], lo, hi)]
    return torch.cat(found)


def chosen(engine: Engine, full: Sequence, source: Sequence, place: chunks.Place) -> list[int]:
    """The rows of a chunk that CacheBlend computes again, ascending; the second layer that sees everything tells."""
    everything = [i for i, slot in enumerate(engine.layout.slots) if slot and not engine.config.layers[i].window]
    layer = everything[min(1, len(everything) - 1)]
    theirs = values(engine, full, layer, place.at + place.lo, place.at + place.hi)
    mine = values(engine, source, layer, place.lo, place.hi)
    far = (theirs - mine).square().sum(1)
    count = round(CHOSEN * (place.hi - place.lo))
    return sorted((far.topk(count).indices + place.lo).tolist())


def blend(engine: Engine, seq: Sequence, ids: list[int], places: list[chunks.Place], alone: Engine,
          sources: list[Sequence], repair: int = chunks.REPAIR, gate: int = chunks.GATE,
          limit: float = chunks.LIMIT) -> list[chunks.Moved]:  # fmt: skip
    """`chunks.put` at all of these places, compared until one of them has passed, as prompts of kv are."""
    found: list[chunks.Moved] = []
    for place in places:
        compared = 0 if any(each.passed for each in found) else gate
        found.append(chunks.put(engine, seq, ids, place, alone, sources[place.chunk], repair, compared, limit))
    return found


def blend_chosen(engine: Engine, seq: Sequence, ids: list[int], full: Sequence, places: list[chunks.Place],
                 sources: list[Sequence]) -> None:  # fmt: skip
    """As `blend` with rows that are chosen one by one."""
    for place in places:
        again = set(chosen(engine, full, sources[place.chunk], place))
        chunks.compute(engine, seq, ids[seq.length : place.at + place.lo])
        row = place.lo
        while row < place.hi:
            end = row
            while end < place.hi and (end in again) == (row in again):
                end += 1
            if row in again:
                chunks.compute(engine, seq, ids[place.at + row : place.at + end])
            else:
                chunks.graft(engine, seq, sources[place.chunk], row, end)
            row = end


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("text", nargs="?")
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--from", type=int, default=0, dest="start")
    parser.add_argument("--size", type=int, default=800, help="characters of a passage")
    parser.add_argument("--cache-type", default="f16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json")
    parser.add_argument("--told", nargs="+", metavar="FILE.json")
    parser.add_argument("--limit", type=float, default=chunks.LIMIT, help="of the gate, for what is told")
    options = parser.parse_args()
    if options.told:
        told = [row for file in options.told for row in json.loads(Path(file).read_text())]
        summary(sorted(told, key=lambda row: row["question"]), options.limit)
        return
    engine = Engine.open(Path(options.model), LoadOptions(options.model, options.threads, device="cpu"),
                         CacheOptions(4096, options.cache_type, options.cache_type))  # fmt: skip
    alone = engine if options.cache_type == "f16" else engine.beside(CacheOptions(4096, "f16", "f16"))
    text, tokenizer, rows = Path(options.text).read_text("utf-8"), engine.tokenizer, []
    for number in range(options.start, options.questions):
        documents, asked = question(text, random.Random(f"question {number}"), options.size)
        ids = tokenizer.encode("".join(documents) + asked)
        sources, alone_ids = [], [tokenizer.encode(document) for document in documents]
        for each in alone_ids:
            sources.append(alone.new_sequence())
            chunks.compute(alone, sources[-1], each)
        places = chunks.find(ids, alone_ids, 64)
        assert len(places) == DOCUMENTS
        full = engine.new_sequence()
        base, tokens, seconds = answer(engine, full, ids, [])
        found: dict[str, dict[str, float]] = {"full": {"ttft_s": seconds, "kld": 0.0, "computed": len(ids)}}
        for n in (*FIRST, -1, None):
            seq, began = engine.new_sequence(), time.process_time()
            if n is None:
                moved = blend(engine, seq, ids, places, alone, sources, limit=math.inf)
                copied = sum(each.copied for each in moved)
            elif n < 0:
                blend_chosen(engine, seq, ids, full, places, sources)
                copied = sum(round((1 - CHOSEN) * (p.hi - p.lo)) for p in places)
            else:
                moved = blend(engine, seq, ids, places, alone, sources, n, 0)
                copied = sum(each.copied for each in moved)
            blended = time.process_time() - began
            mine, _, seconds = answer(engine, seq, ids, tokens)
            kld = float((base.exp() * (base - mine)).sum(-1).mean())
            same = float((base.argmax(-1) == mine.argmax(-1)).double().mean())
            name = RULE if n is None else "chosen" if n < 0 else f"first {n}" if n else "none"
            found[name] = {"ttft_s": blended + seconds, "kld": kld, "same": same, "computed": len(ids) - copied}
            if n is None:
                found[name]["gate"] = [each.divergence for each in moved if each.divergence is not None]
            seq.close()
        for seq in (full, *sources):
            seq.close()
        rows.append({"question": number, "tokens": len(ids), **found})
        print(
            number, len(ids), " ".join(f"{k} {v['ttft_s']:.2f}s {v['kld']:.4f}" for k, v in found.items()), flush=True
        )
        if options.json:
            Path(options.json).write_text(json.dumps(rows))
    summary(rows, options.limit)


def summary(rows: list[dict[str, Any]], limit: float) -> None:
    print("| repair | rows computed | time to first token | KLD mean | median | largest | same token |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in ("full", *(f"first {n}" if n else "none" for n in FIRST), "chosen", RULE):
        klds = [row[name]["kld"] for row in rows]
        ttft = "" if name == "chosen" else f"{statistics.median(row[name]['ttft_s'] for row in rows):.2f} s"
        share = 100 * statistics.mean(row[name]["computed"] / row["tokens"] for row in rows)
        same = 100 * statistics.mean(row[name].get("same", 1.0) for row in rows)
        figures = f"{statistics.mean(klds):.4f} | {statistics.median(klds):.4f} | {max(klds):.4f}"
        print(f"| {name} | {share:.0f} % | {ttft} | {figures} | {same:.0f} % |")
    gates = [max(row[RULE]["gate"]) for row in rows if row[RULE]["gate"]]
    above = [row[RULE]["kld"] for row in rows if row[RULE]["gate"] and max(row[RULE]["gate"]) > limit]
    passed = [row[RULE]["kld"] for row in rows if row[RULE]["gate"] and max(row[RULE]["gate"]) <= limit]
    print(f"\ngate of {len(gates)} prompts: median {statistics.median(gates):.3f}, largest {max(gates):.3f}")
    for what, klds in ((f"above {limit:g}", above), ("passed", passed)):
        mean = f", whose answers are off by {statistics.mean(klds):.3f} on average" if klds else ""
        print(f"{what}: {len(klds)}{mean}")
    if len(gates) > 2:
        answers = [row[RULE]["kld"] for row in rows if row[RULE]["gate"]]
        print(f"correlation with the answer's divergence: {statistics.correlation(gates, answers):.2f}")


if __name__ == "__main__":
    main()
