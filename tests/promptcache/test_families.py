"""Every family under some cache type and policy: rows in steps, gone back to, evicted, saved to a file and restored."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
import tiny
import torch
from engines import PROMPT, open_tiny, states
from reusecases import NOWHERE, ask

from kvcli.codecs import CODECS
from kvcli.options import CacheOptions, EvictOptions, PromptCacheOptions

CTX, PAGE = 96, 16
POLICIES = (
    EvictOptions(), EvictOptions("sink", keep=4), EvictOptions("window"), EvictOptions("shift", keep=4), EvictOptions(),
)  # fmt: skip
# One of each architecture, and whatever else has a cache of its own kind.
FAMILIES = list(dict.fromkeys({v.arch: name for name, v in reversed(tiny.VARIANTS.items())}.values()))
MORE = ["gemma4-keys", "gemma4-experts", "llama4-interleaved", "gemma3n-three", "olmo2-sliding", "llama-sliding"]
SLIDING = {"phi3", "llama-sliding"}  # every layer has a window, so policies are refused: nothing is left to evict
CASES = [
    (name, codec, EvictOptions() if name in SLIDING else evict)
    for name, codec, evict in zip([*FAMILIES, *(x for x in MORE if x not in FAMILIES)], cycle(CODECS), cycle(POLICIES))
]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "codec", "evict"),
    [pytest.param(*case, marks=pytest.mark.thorough if i % 2 else ()) for i, case in enumerate(CASES)],
    ids=lambda x: getattr(x, "policy", x),
)
def test_rows_are_what_they_were(variant: str, codec: str, evict: EvictOptions, tmp_path: Path) -> None:
    """To the bit, and from a file the same tokens."""
    config = CacheOptions(ctx_size=CTX, type_k=codec, type_v=codec, page_size=PAGE, evict=evict, force_types=True)
    engine = open_tiny(variant, "native", config)
    length = 120 if evict.policy != "none" else 90
    with torch.inference_mode():
        seq, other = engine.new_sequence(), engine.new_sequence()
        whole, steps = states(engine, seq, PROMPT[:length]), states(engine, other, PROMPT[:length], 7)
        assert torch.equal(whole, steps), "steps of any size give the same rows"
        assert (seq.evicted > 0) == (evict.policy != "none")
        back = other.rewind_to(length - 9)
        assert back in (0, length - 9, (length - 9) // PAGE * PAGE)
        assert torch.equal(states(engine, other, PROMPT[back:length], 5), whole[back:])
        seq.close()
        other.close()
    document, longer = PROMPT[:60], [*PROMPT[:60], *range(3, 20)]
    options = PromptCacheOptions(file=tmp_path / "x.safetensors")
    assert ask(engine, document, options).usage.cache_write_tokens == 60
    more = ask(engine, longer, options)
    assert more.usage.disk_tokens >= 48 and more.ids == ask(engine, longer, NOWHERE).ids
