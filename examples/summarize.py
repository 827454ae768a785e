"""One line about each file: python examples/summarize.py MODEL FILE..."""

import sys
from pathlib import Path

import kvcli

name, *files = sys.argv[1:]
with kvcli.load(name, cache_type="int8") as model:
    for file in files:
        text = Path(file).read_text()
        try:
            answer = model.chat(f"Summarize this in one sentence:\n\n{text}", temperature=0, max_tokens=60)
            print(f"{file}: {answer.text.strip()}")
        except kvcli.ContextOverflow as error:
            print(f"{file}: {error.message}", file=sys.stderr)
