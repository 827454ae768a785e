"""The tests of GPU kernels find launches whose programs depend on their order: see support/programs.py."""

from __future__ import annotations

import gpucases  # before anything of Triton
import programs
import pytest
import torch
import triton.language as tl
from gpucases import watched  # noqa: F401
from triton.runtime.interpreter import InterpretedFunction

pytestmark = pytest.mark.skipif(gpucases.DEVICE != "cpu", reason="of Triton's interpreter")
N = 4


def run(kernel: object, *sizes: int) -> list[torch.Tensor]:
    """Launch it for N programs over whole numbers from 1 on, `sizes` of them in each tensor."""
    given = [torch.arange(1, size + 1, dtype=torch.int32) for size in sizes]
    InterpretedFunction(kernel)[(N,)](*given)
    return given


def shifted(x):
    """Reads what another program writes."""
    i = tl.program_id(0)
    tl.store(x + i, tl.load(x + i + 1))


def all_to_one(x):
    """Writes what the others write."""
    tl.store(x, tl.program_id(0))


def behind_the_end(x, y):
    """Reads one number too many."""
    i = tl.program_id(0)
    tl.store(y + i, tl.load(x + i + 1))


def counted(x, done):
    """The last one to count reads what all wrote, which is in order."""
    i = tl.program_id(0)
    tl.store(x + i, 10 * (i + 1))
    if tl.atomic_add(done, 1, sem="acq_rel") == N:
        tl.store(x + N, tl.load(x) + tl.load(x + 1) + tl.load(x + 2) + tl.load(x + 3))


def counted_too_early(x, done):
    """As `counted`, but it counts before it writes."""
    i = tl.program_id(0)
    last = tl.atomic_add(done, 1, sem="acq_rel") == N
    tl.store(x + i, 10 * (i + 1))
    if last:
        tl.store(x + N, tl.load(x) + tl.load(x + 1) + tl.load(x + 2) + tl.load(x + 3))


def summed(x, total):
    tl.atomic_add(total, tl.load(x + tl.program_id(0)), sem="relaxed")


@pytest.mark.usefixtures("watched")
def test_what_is_in_order() -> None:
    assert run(counted, N + 1, 1)[0].tolist() == [10, 20, 30, 40, 100]
    assert run(summed, N, 1)[1].item() == 1 + 1 + 2 + 3 + 4


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize(
    ("kernel", "sizes", "fault"),
    [
        (shifted, (N + 1,), "12 bytes are read by one program and changed by another"),
        (all_to_one, (1,), "bytes are changed by several"),
        (behind_the_end, (N, N), "behind_the_end: 4 bytes are in no tensor"),
        (counted_too_early, (N + 1, 1), "bytes are read by one program and changed by another"),
    ],
)
def test_what_is_not(kernel: object, sizes: tuple[int, ...], fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        run(kernel, *sizes)


@pytest.mark.parametrize("how", programs.ORDERS)
def test_the_order(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program runs once."""
    places = []
    builder = programs.interpreter.interpreter_builder
    monkeypatch.setattr(builder, "set_grid_dim", lambda *_: None)
    monkeypatch.setattr(builder, "set_grid_idx", lambda *place: places.append(place))
    programs.reorder(how)
    builder.set_grid_dim(2, 3, 4)
    for _ in range(24):
        builder.set_grid_idx(0, 0, 0)
    expected = [(x, y, z) for x in range(2) for y in range(3) for z in range(4)]
    assert sorted(places) == expected
    assert (places == expected, places[::-1] == expected) == (how == "ordered", how == "reversed")
