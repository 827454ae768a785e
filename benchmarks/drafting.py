"""Answers with a draft model and without: whether their tokens are equal, how many guesses are right, and the speeds.

    python benchmarks/drafting.py MODEL.gguf DRAFT.gguf [TEXT...]

Prompts are excerpts of the texts (by default of the documentation), answers are greedy. Each is written without guesses
and with them in turn, so that both see the machine in the same state. --always: all guesses that there is room for are
made, whether they save time or not; that shows what the draft model is worth, and not the speed.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from kvcli import environment
from kvcli.options import CacheOptions, LoadOptions, SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End
from kvcli.runtime.engine.spec.pace import Drafted

PLAIN, DRAFTED = "off", "draft"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("texts", type=Path, nargs="*")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("-n", type=int, default=256, help="tokens of an answer")
    parser.add_argument("-p", type=int, default=100, help="tokens of a prompt")
    parser.add_argument("-ct", default="f16,int8,int4", help="cache types")
    parser.add_argument("-t", type=int, default=0, help="threads")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--always", action="store_true")
    options = parser.parse_args()
    environment.prepare()
    if options.always:
        Drafted.worth = lambda self, most: max(0, min(most, 7))  # type: ignore[method-assign]
    texts = options.texts or sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    text = "\n".join(path.read_text() for path in texts)
    print(f"{'cache':6} {'equal':>7} {'drafted':>8} {'right':>6} {'tok/step':>8} {'plain':>7} {'with':>8} tok/s")
    for cache_type in options.ct.split(","):
        load = LoadOptions(str(options.model), options.t, device=options.device)
        cache = CacheOptions(options.p + options.n + 64, cache_type, cache_type)
        engine = Engine.open(options.model, load, cache, options.draft)
        print(f"{cache_type:6} {measured(engine, text, options)}", flush=True)
        del engine


def measured(engine: Engine, text: str, options: argparse.Namespace) -> str:
    """A row of the table."""
    ids = engine.tokenizer.encode(text, add_bos=False)
    starts = range(0, len(ids) - options.p, (len(ids) - options.p) // options.prompts)
    bos = [engine.tokenizer.bos_id] if engine.tokenizer.add_bos and engine.tokenizer.bos_id is not None else []
    ends: dict[str, list[End]] = {PLAIN: [], DRAFTED: []}
    for start in starts[: options.prompts]:
        for method in ends:
            ends[method].append(answer(engine, [*bos, *ids[start : start + options.p]], method, options))
    pairs = list(zip(ends[PLAIN], ends[DRAFTED], strict=True))
    equal = sum(a.ids == b.ids for a, b in pairs)
    usages = [end.usage for end in ends[DRAFTED]]
    drafted, right, steps = (
        sum(getattr(u, name) for u in usages) for name in ("drafted_tokens", "accepted_tokens", "decode_steps")
    )
    speeds = [statistics.median(end.timings.decode_tps for end in ends[method]) for method in ends]
    share = f"{100 * right / drafted:.1f} %" if drafted else "-"
    each = (right + steps) / steps
    return f"{equal:>3}/{len(pairs):<3} {drafted:>8,} {share:>6} {each:>8.2f} {speeds[0]:>7.1f} {speeds[1]:>8.1f}"


def answer(engine: Engine, prompt: list[int], method: str, options: argparse.Namespace) -> End:
    """One answer, and what it took."""
    seq = engine.new_sequence()
    how = SampleOptions(temperature=options.temp, seed=1, max_tokens=options.n, ignore_eos=True, spec=method)
    *_, end = engine.generate(seq, prompt, how)
    seq.close()
    assert isinstance(end, End)
    return end


if __name__ == "__main__":
    main()
