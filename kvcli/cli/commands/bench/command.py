"""`kv bench`: tokens a second of prompts and of generation, of one sequence or several; what the cache of keys and
values is worth, that of prompts, and guessed tokens."""

from __future__ import annotations

from functools import partial

import typer

from kvcli.cli.commands.bench import guesses, parallels, prefixes, speeds, uncached
from kvcli.cli.commands.bench.flags import BenchFlags
from kvcli.cli.commands.bench.setting import Series
from kvcli.cli.flags.attending import AttendFlags
from kvcli.cli.flags.eviction import EvictFlags
from kvcli.cli.flags.shared import DraftFlags, ModelFlags, grouped
from kvcli.cli.flags.typelists import TypeFlags
from kvcli.cli.helptext import PLANNING
from kvcli.cli.interrupt import Interrupts, last_words
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.cli.wording import length_is
from kvcli.errors import DoesNotFit
from kvcli.options import CacheOptions

EXAMPLES = """
kv bench
kv bench -m model.gguf -d 0,4k,16k -ct f16,int8,int4
kv bench -d 32k --prompt-cache deep.safetensors
kv bench --no-kv-cache -p 256 -n 64
kv bench --prefix-reuse -p 8k -ct f16,int4
kv bench --parallel 1,4,16 -d 4k
kv bench --spec suffix
kv bench --json > bench.json
"""


def register(app: typer.Typer) -> None:
    app.command("bench", rich_help_panel=PLANNING, epilog=EXAMPLES)(bench)


@grouped
def bench(
    ctx: typer.Context,
    model: ModelFlags,
    draft: DraftFlags,
    what: BenchFlags,
    types: TypeFlags,
    evict: EvictFlags,
    attend: AttendFlags,
    json: JsonFlag = False,
) -> None:
    """Measure the speed of prompts (pp) and generation (tg) by cache type and depth, as in kv run.

    Rates are medians over the repetitions, with their standard deviation. The limit is what generation would reach if
    reading weights and cache took all the time.
    """
    invocation: Invocation = ctx.obj
    with Interrupts(partial(last_words, as_json=json)) as interrupts, length_is("-d"):
        what.check(draft)
        load, pairs = draft.add_to(model.options(invocation.offline), what.spec), types.types("f16", invocation)
        evicting = evict.options(types.page_size, prompt=False)
        cache = CacheOptions(
            page_size=types.page_size,
            ubatch=what.ubatch_size,
            tail=types.kv_tail,
            sinks=types.kv_sink,
            evict=evicting,
            attend=attend.options(evicting),
        )
        series = Series(load, pairs, cache, invocation, interrupts)
        arms = {uncached: what.no_kv_cache, prefixes: what.prefix_reuse, parallels: what.parallel, guesses: what.spec}
        arm = next((arm for arm, asked in arms.items() if asked), speeds)
        failures = arm.measure(series, what, types, evicting, json)
    raise typer.Exit(DoesNotFit.exit_code if failures else 0)
