"""`kv run --verify-estimate`: what the plan said against what the process took, row by row where that can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcli.runtime.host.memory import CUDA, peak_on_card
from kvcli.runtime.host.processmemory import mapped_bytes, peak_bytes

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine

MOST_SHARE, MOST_BYTES = 0.03, 100 << 20  # off by more than both: the check fails
_RUNTIME = "runtime and libraries"
_STATES = "states", "checkpoints"  # rows of a plan, in the order of the arenas


@dataclass(frozen=True)
class Row:
    """Bytes of one part. `measured` is None where the system does not tell it; `source`: of the prediction."""

    name: str
    predicted: int
    measured: int | None
    source: str = ""


@dataclass(frozen=True)
class Verification:
    """The plan for `tokens` rows of cache, part by part, and the peak of the whole process."""

    tokens: int
    rows: tuple[Row, ...]
    predicted: int
    measured: int

    @property
    def off(self) -> int:
        """Bytes that were needed beyond the prediction; negative = fewer."""
        return self.measured - self.predicted

    @property
    def passed(self) -> bool:
        return abs(self.off) <= max(MOST_BYTES, MOST_SHARE * self.measured)


def verify(engine: Engine, tokens: int) -> Verification:
    """Compare the plan for a sequence of `tokens`, the longest that this process ran, with its peak until now.

    On a GPU other programs count, too. On a CPU weights are kept when they are used again: those that
    were not need not have been in memory, and the plan is taken with as much of them as comes nearest.
    """
    plan, pending = engine.predict(tokens), engine.loaded.pending_bytes
    pool, layout = engine.pool, engine.layout
    known: dict[str, int | None] = {"KV pool": pool.committed(range(len(layout.row_arenas)))}
    if layout.state_arenas:
        known |= {name: pool.committed([i]) for name, i in zip(_STATES, layout.state_arenas, strict=True)}
    if engine.device.kind == CUDA:
        index = engine.device.index
        peak = max(1, peak_on_card(index, engine.loaded.cards_before[index].free))
    else:
        peak = peak_bytes()
        mapped = mapped_bytes(engine.loaded.path)
        weights = None if mapped is None else mapped + engine.loaded.interleaved_bytes
        known |= {"weights": weights, _RUNTIME: engine.loaded.bytes_before}
    left_out = min(pending, max(0, plan.total - peak))
    planned = {r.name: r.bytes - left_out * (r.name == "weights") for r in plan.rows}
    rows = [Row(r.name, planned[r.name], known[r.name], r.source) for r in plan.rows if known.get(r.name)]
    rest, total = peak - sum(row.measured or 0 for row in rows), plan.total - left_out
    rows.append(Row("everything else", total - sum(row.predicted for row in rows), rest))
    return Verification(tokens, tuple(rows), total, peak)


def block(found: Verification) -> str:
    """The lines that people read."""
    lines = [f"memory of {found.tokens:,} tokens (MiB)   predicted    measured"]
    lines += [_line(row.name, row.predicted, row.measured, row.source) for row in found.rows]
    share = found.off / found.measured
    lines.append(_line("total (peak)", found.predicted, found.measured, f"off by {share:+.1%}"))
    return "\n".join(lines)


def _line(name: str, predicted: int, measured: int | None, remark: str) -> str:
    value = "-" if measured is None else f"{measured / (1 << 20):,.1f}"
    return f"{name:<32}{predicted / (1 << 20):>12,.1f}{value:>12}  {remark}".rstrip()


def failure(found: Verification) -> str:
    """Why the check failed, and what may help."""
    share = abs(found.off) / found.measured
    text = f"the estimate is off by {found.off / (1 << 20):+,.0f} MiB ({share:.1%})"
    assumed = any(row.name == _RUNTIME and row.source == "assumed" for row in found.rows)
    return text + ("; the size of the libraries was assumed: kv doctor measures it" if assumed else "")


def as_json(found: Verification) -> dict[str, Any]:
    """Sizes in bytes."""
    return {
        "passed": found.passed,
        "tokens": found.tokens,
        "predicted_bytes": found.predicted,
        "peak_bytes": found.measured,
        "rows": [
            {
                "name": row.name,
                "predicted_bytes": row.predicted,
                "measured_bytes": row.measured,
                "source": row.source or None,
            }
            for row in found.rows
        ],
    }
