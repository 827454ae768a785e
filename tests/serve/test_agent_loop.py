"""The loop of an agent through the official client: from the second turn on nearly all is read from the cache."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from chattemplates import TEMPLATES
from serving import open_engine, running

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


def test_ten_turns_read_their_prompts_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import agent

    monkeypatch.setattr(agent, "SYSTEM", "\n".join(agent.SYSTEM.splitlines()[:16]))
    with running(open_engine(template=TEMPLATES["qwen3"], ctx_size=16384)) as server:
        turns = agent.loop(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0), 10)
    assert len(turns) == 10 and turns[0].cached_tokens == 0
    assert [turn.prompt_tokens for turn in turns] == sorted({turn.prompt_tokens for turn in turns})
    assert min(turn.share for turn in turns[1:]) >= 0.95, [round(turn.share, 3) for turn in turns]
