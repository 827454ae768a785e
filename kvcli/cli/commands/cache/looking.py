"""`kv cache show --mass`: what the last tokens of a stored prompt look at."""

from __future__ import annotations

from functools import partial

from kvcli.cli import engines, render
from kvcli.cli.commands.cache import modelchecks
from kvcli.cli.interrupt import Interrupts, last_words
from kvcli.cli.invocation import Invocation
from kvcli.cli.wording import as_flags
from kvcli.errors import CacheFileError
from kvcli.options import FORGET_NOTHING, LoadOptions

STRETCHES, BAR = 24, 30  # lines, and columns of the longest bar


def drawn(model: str, ids: list[int], identity: dict[str, str], invocation: Invocation) -> str:
    """A line for each stretch of the text: its tokens, its share of the attention, a bar, its first words. Raises
    CacheFileError for a model with another tokenizer."""
    from kvcli.runtime.evaluate.attentionmass import look, watching
    from kvcli.runtime.promptcache import fingerprint

    made = modelchecks.options_of(identity)
    cache = watching(made, len(ids))
    with Interrupts(partial(last_words, as_json=False)) as interrupts:
        engine = engines.open_engine(LoadOptions(model, offline=invocation.offline), cache, invocation, interrupts)
        if fingerprint.tokenizer_hash(engine.loaded.file.metadata) != identity.get("tokenizer"):
            raise CacheFileError(
                f"the tokens are not those of {model}: it has a different tokenizer", "name the cache's model"
            )
        looked = look(engine, ids)
    stretches = looked.stretches(STRETCHES, cache.page_size)
    most, width = max(share for *_, share in stretches), len(f"{len(ids) - 1:,}")
    lines = [f"what the last {looked.queries} of {len(ids):,} tokens look at, in {looked.layers} layers"]
    if made.evict != FORGET_NOTHING:
        lines[0] += f", where nothing is evicted; the file has the rows that {as_flags(made.evict.named)} left"
    for first, end, share in stretches:
        bar = "#" * round(BAR * share / most)
        words = render.one_line(engine.tokenizer.decode(ids[first : first + 12]))
        line = f"{first:>{width},} - {end - 1:>{width},}  {100 * share:5.1f} %  {bar:<{BAR}}  {words}"
        lines.append(render.fitting(line))
    return "".join(f"{line}\n" for line in lines)
