"""Every cache type of the registry in the GPU kernels: one that they lack fails here by its name."""

from __future__ import annotations

import pytest
from gpucases import DEVICE, GpuCache, error, watched  # noqa: F401
from kernelcases import one_thread
from sealedcases import gaussian

from kvcli.codecs import CODECS
from kvcli.kernels.gpu.attention import attend
from kvcli.kernels.gpu.combine import combine
from kvcli.kernels.gpu.seal import seal
from kvcli.kernels.reference.rotation import rotate_

DIMS, HEADS, ROWS = (80, 48), 2, 50


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.mark.usefixtures("watched")
@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_the_kernels_have(name: str) -> None:
    """They seal into the bytes of the reference; on a GPU, where sums are made in another order, nearly. They read what
    it wrote."""
    cache = GpuCache((name, name), DIMS, HEADS)
    cache.append(gaussian(ROWS, HEADS, DIMS[0]) + gaussian(DIMS[0], seed=1), gaussian(ROWS, HEADS, DIMS[1], seed=2))
    group, sealed = cache.layout.groups[0], [page for page in cache.kv.into.memory if page is not None]
    if group.sealed:
        expected = [page.clone() for page in sealed]
        for page in sealed:
            page.fill_(0xFF)
        seal(cache.on_device(0, ROWS), *group.newly_sealed(0, ROWS))
        cache.back()
        for a, b in zip(sealed, expected, strict=True):
            assert (a != b).float().mean() <= (0 if DEVICE == "cpu" else 0.01)
    pages = cache.on_device(ROWS - 2, 2, 4)
    q, queries = cache.queries(gaussian(2, 4, DIMS[0], seed=3), pages)
    exact = cache.dense(q, ROWS - 2).float()
    if pages.rotated[1]:
        rotate_(exact.view(2, 4, -1))
    found = combine(attend(queries, pages), pages)
    assert found is not None and error(found, exact) < 2e-3
