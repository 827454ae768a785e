"""Tokens a second that GPUs would generate: the constants of kvcli/runtime/plan/speed.py, and the tables that follow.

    python benchmarks/predicted.py           # writes the tables of docs/benchmarks.md between their markers
    python benchmarks/predicted.py --check   # changes nothing; exits with 1 if they are not what is predicted now
    python benchmarks/predicted.py --fit     # the constants that fit MEASURED best, beside those in use

The fit is by least squares of relative distances. Models are those of models/ without a file, quantized to so many bits
a weight.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.headers.plannedmodel import PlannedModel, planned_model
from kvcli.runtime.headers.shapes import Given
from kvcli.runtime.host.memory import CUDA
from kvcli.runtime.plan import speed
from kvcli.runtime.plan.cards import CARDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BITS = {"Q4_K_M": 4.9, "Q8_0": 8.5}
BEHIND = 64  # tokens generated before the middle one of a test


class Measured(NamedTuple):
    """`kv bench -p 0 -n 128 -d DEPTH`."""

    model: str
    quant: str
    types: str
    depth: int
    tps: float


MODELS = {"8B": "llama-3.1-8b", "1B": "llama-3.2-1b", "30B-A3B": "qwen3-30b-a3b", "SmolLM2": "smollm2"}
H200 = [  # kv of 2026-11-29
    *(Measured("8B", "Q4_K_M", "f16", *x) for x in ((0, 561), (8192, 472), (32768, 342), (120_000, 178))),
    *(Measured("8B", "Q4_K_M", "int8", *x) for x in ((8192, 486), (32768, 397), (120_000, 249))),
    *(Measured("8B", "Q4_K_M", "int4", *x) for x in ((8192, 500), (32768, 423), (120_000, 282))),
    Measured("8B", "Q8_0", "f16", 0, 392), Measured("1B", "Q4_K_M", "f16", 0, 1631),
    Measured("SmolLM2", "Q8_0", "f16", 0, 2246),
]  # fmt: skip
H100 = [  # kv of 2026-11-28, which was slower; nothing is fitted to it
    *(Measured("8B", "Q4_K_M", "f16", *x) for x in ((0, 480), (8192, 402), (32768, 283), (120_000, 138))),
    *(Measured("8B", "Q4_K_M", "int8", *x) for x in ((0, 474), (8192, 422), (32768, 338), (120_000, 205))),
    *(Measured("8B", "Q4_K_M", "int4", *x) for x in ((0, 465), (8192, 431), (32768, 371), (120_000, 261))),
    Measured("8B", "Q8_0", "f16", 0, 320), Measured("1B", "Q4_K_M", "f16", 0, 1566),
    Measured("SmolLM2", "Q8_0", "f16", 0, 2196),
]  # fmt: skip
ASKED = (
    "rtx3060-12g", "rtx3090-24g", "rtx4060ti-16g", "rtx4070-12g", "rtx4090-24g", "rtx5060ti-16g", "rtx5070-12g",
    "rtx5080-16g", "rtx5090-32g", "a4000-16g", "l4-24g", "a100-80g", "h100-80g",
)  # fmt: skip
DEPTHS = (0, 8192, 32768)
RESERVE_BYTES = 2 << 30  # of a card: its context, workspace and a margin


@cache
def planned(model: str, quant: str) -> PlannedModel:
    return planned_model(MODELS[model], Given(bpw=BITS[quant]), CUDA, offline=True)


def seconds(case: Measured, card: str) -> float:
    """What is predicted of a token of that test."""
    model, layout = planned(case.model, case.quant), layout_of(case)
    assert model.weights is not None
    found = speed.token_seconds(model.config, model.weights.read, layout, case.depth + BEHIND, CARDS[card])
    assert found is not None
    return found


def layout_of(case: Measured) -> KVLayout:
    return KVLayout.build(planned(case.model, case.quant).config, case.types, case.types)


def fit() -> dict[str, float]:
    """The constants, by name."""
    names = ("LAUNCH_NARROW", "LAUNCH", "WEIGHTS", "ROWS", "UNPACK_8", "UNPACK")
    rows, card = [], CARDS["h200-141g"]
    for case in H200:
        model, layout, n = planned(case.model, case.quant), layout_of(case), case.depth + BEHIND
        assert model.weights is not None
        narrow, count = model.config.d_model < speed.NARROW, speed.launches(model.config)
        elements = sum(g.rows_seen(n) * len(g.layers) * g.kv_heads * (g.dim_k + g.dim_v) for g in layout.groups)
        share = elements / card.multiprocessors
        rows.append([
            count * narrow, count * (not narrow), model.weights.read / (card.bandwidth * 1e9),
            layout.read_bytes(n) / (card.bandwidth * 1e9), share * (case.types == "int8"),
            share * (case.types == "int4"),
        ])  # fmt: skip
    times = np.array([1 / case.tps for case in H200])
    found, *_ = np.linalg.lstsq(np.array(rows) / times[:, None], np.ones(len(times)), rcond=None)
    found[2:4] = 1 / found[2:4]
    return dict(zip(names, found.tolist(), strict=True))


def predictions() -> str:
    """The table of cards."""
    columns = [*(("8B", types) for types in ("f16", "int8", "int4")), ("1B", "f16")]
    columns += [("30B-A3B", "f16"), ("30B-A3B", "int4")]
    lines = [
        "| card | " + " | ".join(f"{model} {types}" for model, types in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for name in ASKED:
        cells = []
        for model, types in columns:
            cases = [Measured(model, "Q4_K_M", types, depth, 0) for depth in DEPTHS]
            cells.append(" / ".join(f"{1 / seconds(case, name):,.0f}" if fits(case, name) else "–" for case in cases))
        lines.append(f"| {CARDS[name].title.removeprefix('NVIDIA ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fits(case: Measured, name: str) -> bool:
    """Whether weights and cache leave the card what else it needs."""
    model = planned(case.model, case.quant)
    assert model.weights is not None
    taken = model.weights.packed + layout_of(case).read_bytes(case.depth + BEHIND) + RESERVE_BYTES
    return taken <= CARDS[name].usable_mib << 20


def comparison() -> str:
    """The table of what was measured beside what is predicted."""
    lines = ["| | measured | predicted | H100: measured | predicted |", "|---|---:|---:|---:|---:|"]
    before = {case[:4]: case.tps for case in H100}
    for case in [*H200, *(x for x in H100 if x[:4] not in {y[:4] for y in H200})]:
        there = next((x.tps for x in H200 if x[:4] == case[:4]), None)
        cells = [*_pair(there, case, "h200-141g"), *_pair(before.get(case[:4]), case, "h100-80g")]
        depth = f"{case.depth:,} tokens" if case.depth else "no context"
        lines.append(f"| {case.model} {case.quant}, {case.types}, {depth} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _pair(measured: float | None, case: Measured, card: str) -> tuple[str, str]:
    if measured is None:
        return "", ""
    predicted = 1 / seconds(case, card)
    return f"{measured:,.0f}", f"{predicted:,.0f} ({100 * (predicted / measured - 1):+.0f} %)"


def main() -> None:
    if "--fit" in sys.argv:
        for name, value in fit().items():
            print(f"{name:14} fits best at {value:.4g}, in use is {getattr(speed, name):.4g}")
        return
    old = new = PAGE.read_text("utf-8")
    for name, text in (("predicted", predictions()), ("compared", comparison())):
        block = f"<!-- {name} -->\n{text}\n<!-- end -->"
        new, count = re.subn(rf"<!-- {name} -->.*?<!-- end -->", lambda _, text=block: text, new, flags=re.S)
        assert count == 1, name
    if "--check" in sys.argv:
        sys.exit(old != new)
    PAGE.write_text(new, "utf-8")


if __name__ == "__main__":
    main()
