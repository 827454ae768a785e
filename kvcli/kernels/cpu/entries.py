"""What queries see of a cache, and choose of it, as the compiled kernels read it."""

from __future__ import annotations

import numpy as np

from kvcli.kernels.paged import PagedKV


def entries(kv: PagedKV) -> np.ndarray:
    """The entries of all classes in the order of their positions (kv_entry), made once for the layers that share them:
    int64 [n, 10]."""
    made = kv.entries.made
    if "native" not in made:
        columns = [_columns(each, of) for of, each in enumerate(kv.classes)]
        rows = np.concatenate(columns)
        made["native"] = np.ascontiguousarray(rows[np.argsort(rows[:, 1], kind="stable")])
    found: np.ndarray = made["native"]  # type: ignore[assignment]
    return found


def _columns(kv: PagedKV, of: int) -> np.ndarray:
    """Those of class number `of`."""
    e, n = kv.entries, len(kv.entries)
    summaries = e.summaries.addresses if e.summaries else np.zeros(n, np.int64)
    places = np.full(n, of), np.arange(n), summaries
    return np.stack((e.addresses, e.first, e.lo, e.hi, e.since, e.until, e.turned, *places), 1)


def choice(kv: PagedKV) -> tuple[int, int, int, float]:
    """The last fields of kv_paged: pages, means, the layer's offset, threshold."""
    if kv.choice is None or kv.entries.summaries is None:
        return 0, 0, 0, 0.0
    each = kv.entries.summaries.layout
    return kv.choice.pages, each.means, kv.layer * each.bytes, kv.choice.threshold
