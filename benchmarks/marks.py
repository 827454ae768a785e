"""One system message, other documents: whether answers from cached rows are those without, how much is reused, and the
time to the first token.

    python benchmarks/marks.py MODEL... [--documents 20] [--others 10] [--tokens 16] [--device cpu] [--rows disk]

The prompts of a model, through its chat template: `documents` that stand behind one system message; documents that
were asked about before, `cut` at any place; such with one word in the middle `edited`. Each is asked in a context of
its own, with the rows that prompts before it left on disk (or in memory), and once more without any. "Least": in the
worst case, by how many tokens what is reused exceeds what it has to be: up to the longest kept mark that the prompt
shares with one before it, and where no layer has a window all tokens in common; below 0 something was missed. Prints a
table, and one JSON line last; the exit code is 1 where a text differs or something was missed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvcli.notices import Tell
from kvcli.options import CacheOptions, LoadOptions, PromptCacheOptions, SampleOptions
from kvcli.runtime.config import WINDOWED
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End
from kvcli.runtime.engine.prompt import Prompt
from kvcli.runtime.hub import modelfiles
from kvcli.runtime.promptcache.caches import LIVE_ROWS, Caches
from kvcli.runtime.promptcache.prefixpages import common_length

DOCS = Path(__file__).resolve().parent.parent / "docs"
DOCUMENTS, CUT, EDITED = "documents", "cut", "edited"
QUESTION = "What is this document about?"
QUIET = Tell(*(lambda _: None for _ in range(3)))


@dataclass
class Kind:
    """Prompts of one kind. `least`: see above. The share that is reused is of each prompt."""

    kind: str
    prompts: int = 0
    same_text: int = 0
    least: int = 1 << 30
    shares: list[float] = field(default_factory=list)
    cached_s: list[float] = field(default_factory=list)
    fresh_s: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        cached, fresh = (statistics.median(times) for times in (self.cached_s, self.fresh_s))
        share = f"{100 * statistics.median(self.shares):.0f} %"
        figures = f"{share} | {self.least:+,} | {cached:.3f} | {fresh:.3f} | {fresh / cached:.1f}"
        return f"| {name} | {self.kind} | {self.same_text} of {self.prompts} | {figures} |"


def texts(options: argparse.Namespace) -> tuple[str, list[str]]:
    """The system message, and the documents."""
    everything = "\n\n".join(path.read_text("utf-8") for path in sorted(DOCS.glob("*.md")))
    size, step = options.size, len(everything) // (options.documents + 1)
    return everything[: options.system], [everything[n * step :][:size] for n in range(1, options.documents + 1)]


def asked(documents: list[str], others: int, chance: random.Random) -> Iterator[tuple[str, str]]:
    """The kind of each prompt, and its document; others come between new documents, about those before."""
    for number, document in enumerate(documents):
        yield DOCUMENTS, document
        if (number + 1) * others // len(documents) > number * others // len(documents):
            known = chance.choice(documents[: number + 1])
            yield CUT, known[: chance.randrange(len(known) // 8, len(known))]
            known = chance.choice(documents[: number + 1])
            at = known.index(" ", chance.randrange(len(known) // 3, len(known) // 2))
            yield EDITED, f"{known[:at]} (sic){known[at:]}"


def answer(engine: Engine, prompt: Prompt, options: SampleOptions, caches: Caches = LIVE_ROWS) -> End:
    """In a context of its own."""
    with closing(engine.new_sequence()) as seq:
        *_, end = engine.generate(seq, prompt.ids, options, caches=caches, marks=prompt.marks)
    assert isinstance(end, End)
    return end


def measure(path: Path, options: argparse.Namespace) -> list[Kind]:
    """Every kind of prompt, with one model."""
    load = LoadOptions(str(path), device=options.device, strict_repeat=options.strict_repeat, chat_anyway=True)
    engine = Engine.open(path, load, CacheOptions(8192, options.cache_type, options.cache_type))
    text, windows = engine.loaded.text, any(group.kind in WINDOWED for group in engine.layout.groups)
    assert text.template is not None
    system, documents = texts(options)
    sampling = SampleOptions(temperature=0.0, max_tokens=options.tokens)
    found = {kind: Kind(kind) for kind in (DOCUMENTS, CUT, EDITED)}
    began = time.monotonic()
    before: list[tuple[list[int], list[int]]] = []  # prompts, and where later ones can start from them
    with tempfile.TemporaryDirectory() as folder:
        in_memory = options.rows == "memory"
        kept = PromptCacheOptions(memory=True) if in_memory else PromptCacheOptions(store=Path(folder), min_tokens=1)
        caches = engine.prompt_caches(kept, QUIET)
        for kind, document in asked(documents, options.others, random.Random(options.seed)):
            if time.monotonic() - began > options.seconds:
                break
            turn = {"role": "user", "content": f"{document}\n\n{QUESTION}"}
            messages = [{"role": "system", "content": system}, turn]
            prompt = Prompt.of_chat(text.tokenizer, text.template, messages)
            if not before:
                answer(engine, prompt, sampling)  # warms up
            if not in_memory:  # as a process of its own
                caches.close()
                caches = engine.prompt_caches(kept, QUIET)
            cached, fresh = answer(engine, prompt, sampling, caches), answer(engine, prompt, sampling)
            in_common = [(common_length(prompt.ids[:-1], ids), marks) for ids, marks in before]
            reachable = [at for common, marks in in_common for at in (marks if windows else [common]) if at <= common]
            reused = cached.usage.cache_read_tokens
            if before:  # nothing is there of the first one
                found[kind].least = min(found[kind].least, reused - max(reachable, default=0))
                found[kind].shares.append(reused / len(prompt.ids))
                found[kind].cached_s.append(cached.timings.ttft_s)
                found[kind].fresh_s.append(fresh.timings.ttft_s)
                found[kind].same_text += cached.ids == fresh.ids
                found[kind].prompts += 1
            before.append((prompt.ids, [each.mark.at for each in cached.usage.breakpoints if each.kept]))
        caches.close()
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--others", type=int, default=10, help="cut ones, and edited ones")
    parser.add_argument("--system", type=int, default=2600, help="letters of the system message")
    parser.add_argument("--size", type=int, default=2600, help="letters of a document")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--cache-type", default="f16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--strict-repeat", action="store_true")
    parser.add_argument("--rows", choices=("disk", "memory"), default="disk")
    parser.add_argument("--seconds", type=float, default=3600.0, help="most for each model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    head = "| model | prompts | text as without | reused | least | TTFT s | without | times |"
    print(f"{head}\n|---|---|---:|---:|---:|---:|---:|---:|", flush=True)
    results, failed = [], False
    for name in options.models:
        path = modelfiles.find_model(name)
        for kind in measure(path, options):
            if not kind.prompts:
                continue
            print(kind.row(path.stem), flush=True)
            results.append({"model": path.stem, **asdict(kind)})
            failed |= kind.same_text < kind.prompts or kind.least < 0
    print(json.dumps({"device": options.device, "cache_type": options.cache_type, "results": results}))
    sys.exit(failed)


if __name__ == "__main__":
    main()
