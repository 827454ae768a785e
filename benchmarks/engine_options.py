"""Write the tables of docs/engines.md: what options of kv are in other programs.

python benchmarks/engine_options.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from cache_types import written

from kvcli.peers.mapping import LLAMA, SGLANG, TABLE, VLLM, table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "engines.md"


def page(text: str) -> str:
    """The page with current tables."""
    planned = tuple(flag for flag, row in TABLE.items() if row[1] is not None)
    text = written(
        text, "vllm", table({VLLM: "vLLM"}, tuple(flag for flag, row in TABLE.items() if row[0] is not None))
    )
    return written(text, "planned", table({SGLANG: "SGLang", LLAMA: "llama-server"}, planned))


def main() -> None:
    before = PAGE.read_text("utf-8")
    after = page(before)
    if "--check" in sys.argv:
        sys.exit(int(before != after))
    PAGE.write_text(after, "utf-8")


if __name__ == "__main__":
    main()
