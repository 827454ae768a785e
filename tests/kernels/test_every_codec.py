"""Every cache type of the registry in the CPU kernels: one that they lack fails here by its name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kernelcases import ISAS, native, one_thread, poisoned
from kernelcases import page as page_of
from sealedcases import Cache, gaussian, layout

from kvcli.codecs import CODECS, RecordLayout
from kvcli.errors import KVError
from kvcli.kernels.reference.backend import ReferenceBackend

DIMS, HEADS, ROWS = (80, 48), 2, 50


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("isa", ISAS)
def test_the_kernels_have(isa: str, name: str) -> None:
    """They store and seal what the reference does, but where a value lies between two codes, and read it right."""
    found, expected = (Cache(ops, layout((name, name), DIMS, HEADS)) for ops in (native(isa), ReferenceBackend()))
    for cache in (found, expected):
        cache.append(gaussian(ROWS, HEADS, DIMS[0]) + gaussian(DIMS[0], seed=1), gaussian(ROWS, HEADS, DIMS[1], seed=2))
    for page in range(1, 3):
        for a, b in zip(*(c.kv.rows(page_of(c.kv, page), 0, 16) for c in (found, expected)), strict=True):
            assert a.isfinite().all() and (a != b).double().mean() < 0.02
    q = gaussian(3, 4, DIMS[0], seed=3)
    assert (found.attend(q, ROWS - 3) - found.dense(q, ROWS - 3)).abs().max() < 2e-5


def test_what_the_kernels_lack_is_named() -> None:
    odd = replace(CODECS["int6"], name="int7", bits=7)
    pages = poisoned(RecordLayout.of(16, 1, 64, 64, CODECS["f16"], odd), 0, 16)
    with pytest.raises(KVError, match="lack the cache type int7"):
        native().attention(gaussian(1, 1, 64), pages, 0)
