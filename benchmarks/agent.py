"""What the loop of an agent reads from the cache: each turn the model calls a tool, and gets its result.

    python benchmarks/agent.py [--url http://127.0.0.1:8080/v1] [--turns 20]

Against a server that runs, with a model whose chat template takes tools. Each call is forced, so that any model plays.
Prints, for every turn, the tokens of the prompt and the share of them whose rows were in the cache.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

SYSTEM = "\n".join(
    f"{number}. Work in small steps. Read a file before it is changed, and say in rule {number} what was seen in it."
    for number in range(1, 41)
)
_PATH = {"path": {"enum": ["README.md", "src/main.py", "tests/test_main.py"]}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.replace('_', ' ').capitalize()} of the project.",
            "parameters": {
                "type": "object",
                "properties": {**_PATH, "line": {"type": "integer", "minimum": 1, "maximum": 99}},
                "required": ["path", "line"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("read_file", "list_folder", "run_tests")
]


@dataclass(frozen=True)
class Turn:
    prompt_tokens: int
    cached_tokens: int
    seconds: float

    @property
    def share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def loop(client: Any, turns: int, model: str = "") -> list[Turn]:
    """So many turns with one call each; `client`: of the openai package."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Fix the failing test."}]
    found = []
    for turn in range(turns):
        since = time.perf_counter()
        asked = {"temperature": 0.7, "seed": turn, "parallel_tool_calls": False, "max_tokens": 200}
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice="required", **asked
        )
        usage, choice = answer.usage, answer.choices[0]
        assert choice.finish_reason == "tool_calls", choice.finish_reason
        cached = usage.prompt_tokens_details.cached_tokens
        found.append(Turn(usage.prompt_tokens, cached, time.perf_counter() - since))
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"turn {turn}: 3 lines, no error"})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--turns", type=int, default=20)
    given = parser.parse_args()
    import openai

    print("| turn | prompt tokens | from the cache | seconds |\n|---:|---:|---:|---:|")
    for number, turn in enumerate(loop(openai.OpenAI(base_url=given.url, api_key="none"), given.turns), 1):
        print(f"| {number} | {turn.prompt_tokens:,} | {turn.share:.1%} | {turn.seconds:.2f} |")


if __name__ == "__main__":
    main()
