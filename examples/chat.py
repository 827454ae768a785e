"""A conversation in a terminal: python examples/chat.py [MODEL]

Each turn sends all messages again; the model prefills only those that are new.
"""

import sys

import kvcli

with kvcli.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2", ctx=4096) as model:
    messages = []
    for line in iter(lambda: input("> "), ""):
        messages.append({"role": "user", "content": line})
        answer = model.chat(messages, max_tokens=200)
        for piece in answer:
            print(piece, end="", flush=True)
        print(f"\n[{answer.usage.cache_read_tokens} of {answer.prompt_tokens} prompt tokens were there]")
        messages.append({"role": "assistant", "content": answer.text})
