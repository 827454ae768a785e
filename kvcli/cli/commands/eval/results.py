"""What `kv eval` found, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcli.cli import render, report
from kvcli.cli.flags.comparedsettings import Compared
from kvcli.cli.invocation import Invocation

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.evaluate.givenanswers import Answer
    from kvcli.runtime.evaluate.tasks import Example

TEXT = "text"


@dataclass(frozen=True)
class Cell:
    """The answers with one setting to the questions of one task, length and depth."""

    compared: Compared
    task: str
    tokens: int
    depth: float | None
    examples: list[Example] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def add(self, example: Example, answer: Answer) -> None:
        self.examples.append(example)
        self.answers.append(answer)

    @property
    def name(self) -> str:
        """The task, with the depth if there is one."""
        return self.examples[0].name

    @property
    def exact(self) -> int:
        return sum(answer.exact for answer in self.answers)

    @property
    def nll(self) -> float:
        return _mean(answer.nll for answer in self.answers)

    @property
    def kld(self) -> float:
        return _mean(answer.kld for answer in self.answers)

    @property
    def shown(self) -> str:
        """In a table: '3/4 0.512'; of a text the perplexity."""
        return f"{math.exp(self.nll):.3f}" if self.task == TEXT else f"{self.exact}/{len(self.answers)} {self.nll:.3f}"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def print_cells(cells: list[Cell], invocation: Invocation) -> None:
    """A row for each setting and length; a column for each task, and one each for what all questions together and the
    texts come to."""
    rows: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.compared.name, cell.tokens), []).append(cell)
    names = list(dict.fromkeys(cell.name for cell in cells))
    asked, texts = [n for n in names if n != TEXT], [n for n in names if n == TEXT]
    headers = ["setting", "tokens", *asked]
    headers += ["exact", "NLL", "KLD"] if asked else []
    headers += ["text PPL", "text KLD"] if texts else []
    table = []
    for (name, tokens), found in rows.items():
        questions = [cell for cell in found if cell.task != TEXT]
        row = [name, str(tokens), *(cell.shown for cell in questions)]
        if questions:
            trials = sum(len(cell.answers) for cell in questions)
            means = (f"{_mean(cell.nll for cell in questions):.4f}", f"{_mean(cell.kld for cell in questions):.5f}")
            row += [f"{sum(cell.exact for cell in questions)}/{trials}", *means]
        for cell in found[len(questions) :]:
            row += [cell.shown, f"{cell.kld:.5f}"]
        table.append(row)
    render.print_table(headers, table, invocation, right=range(1, len(headers)))


def print_object(
    model: str, seed: int, settings: list[tuple[Compared, Engine]], cells: list[Cell], invocation: Invocation
) -> None:
    """One JSON object."""
    head = {"model": model, "seed": seed, "compared": [setting_object(*each) for each in settings]}
    results = [_entry(cell) for cell in cells]
    render.print_json("eval", {**head, "results": results, "warnings": invocation.told})


def setting_object(compared: Compared, engine: Engine) -> dict[str, Any]:
    """A setting, as JSON has it."""
    type_k, type_v = compared.types
    evict = report.evict_object(compared.cache.evict, engine.retention)
    found = {"name": compared.name, "args": compared.args, "type_k": type_k, "type_v": type_v, "evict": evict}
    return {**found, **report.attend_object(compared.cache.attend)}


def _entry(cell: Cell) -> dict[str, Any]:
    number: Callable[[float], float | None] = lambda x: x if math.isfinite(x) else None  # noqa: E731  # JSON has no NaN
    return {
        "name": cell.compared.name,
        "task": cell.task,
        "ctx_size": cell.tokens,
        **({} if cell.depth is None else {"depth_percent": cell.depth}),
        **({"ppl": number(math.exp(cell.nll))} if cell.task == TEXT else {}),
        "trials": len(cell.answers),
        "exact_trials": cell.exact,
        "nll": number(cell.nll),
        "kld": number(cell.kld),
        "answers": [
            {"key": example.key, "exact": answer.exact, "nll": number(answer.nll), "kld": number(answer.kld)}
            for example, answer in zip(cell.examples, cell.answers, strict=True)
        ],
    }
