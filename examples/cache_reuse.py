"""Several questions about one document, which is read once: python examples/cache_reuse.py MODEL FILE QUESTION...

The document's rows are kept in a file beside it, so the next run does not read it either.
"""

import sys
from pathlib import Path

import kvcli

name, document, *questions = sys.argv[1:]
saved = Path(f"{document}.kvcache")
with kvcli.load(name) as model:
    text = model.tokenize(Path(document).read_text(), bos=True)
    if not saved.exists():
        list(model.generate(text, max_tokens=0))  # no answer, only the rows
        model.save_cache(saved)
    read = model.load_cache(saved)
    for question in questions:
        with read.fork() as sequence:
            answer = model.generate(
                text + model.tokenize(f"\n\n{question}\n"), sequence=sequence, temperature=0, max_tokens=50
            )
            print(f"{question}\n{answer.text}\n[prefilled {answer.timings.prefill_tokens} of {answer.prompt_tokens}]")
