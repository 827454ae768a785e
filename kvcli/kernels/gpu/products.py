"""Launching matrix-vector products: buffers, and which tile sizes a matrix of given sizes takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.chip import Chip
from kvcli.kernels.gpu.formats import GROUP, PLAIN, DeviceMatrix, constants
from kvcli.kernels.gpu.language import ACTS, AFTER, LEADING, SERIAL, store_activations, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.matvec import GATED, RESIDUAL, STORE, inverse_rms, load_squares, matvec_packed, matvec_plain

TWO_PLANES_BYTES = 4 << 20
EARLY = 0.95  # of the multiprocessors that a RESIDUAL product fills if it calls the next kernel early; on an H100: 126
MAX_GROUPS = 1024  # a program holds the whole vector in registers


@dataclass(frozen=True)
class Activations:
    """A vector [n] as products read it.

    Element i is scales[i / 32] * (254 * codes[0, i] + codes[1, i]): 16 bits in two planes of int8, of which the first
    alone is 8 bits. `sums` float32 [2, n / 16]: of every 16 elements, of the first plane alone and of both. `values`
    float32 [n] where `keep` (for matrices of floats).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor
    values: torch.Tensor
    keep: bool

    @classmethod
    def empty(cls, n: int, keep: bool, device: torch.device) -> Activations:
        def floats(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.float32, device=device)

        codes = torch.zeros(2, n, dtype=torch.int8, device=device)
        return cls(codes, floats(n // 32), floats(n // 8), floats(n if keep else 1), keep)

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        return self.codes, self.scales, self.sums, self.values


@dataclass(frozen=True)
class Norm:
    """Sums of squares of the pieces of a vector, float32 [parts]; consumers divide by its root mean square."""

    squares: torch.Tensor
    eps: float

    @property
    def parts(self) -> int:
        return self.squares.numel()


@dataclass(frozen=True)
class Tiles:
    """Rows a program, groups (or elements) of the vector in registers, rows a step, warps."""

    bn: int
    bg: int
    rc: int
    warps: int


def tiles(matrix: DeviceMatrix, role: int) -> Tiles:
    """Tile sizes as measured on an H100, but on an H200 those of logits by 6-bit codes and of long rows of 4-bit ones:
    about 16 to 32 words of weights a thread in flight."""
    if matrix.format.kind == PLAIN:
        bk = triton.next_power_of_2(matrix.cols)
        rc = max(1, min(8, 8192 // bk))
        bn = {STORE: max(rc, 8), RESIDUAL: 32, GATED: 64}[role]
        return Tiles(bn, bk, rc, 4 if bk <= 4096 else 8)
    bg = max(16, triton.next_power_of_2(matrix.groups))
    if role == STORE:
        bn, rc, warps = (8, 4, 4) if matrix.rows > 32768 else (8, 4, 2)
        if matrix.rows > 32768 and matrix.format.coding == 6:
            rc, warps = max(1, 128 // bg), 1
        if matrix.rows <= 1024:
            bn, rc = 4, 2
        warps = max(1, min(16, warps * bg // 128))
    elif role == GATED:
        bn, rc, warps = (64, 4, min(16, bg // 32)) if bg > 64 else (64, 16, 8)
    else:
        bn, rc, warps = (32, 16, max(1, bg // 16)) if bg <= 128 else (32, 4, min(16, bg // 64))
        if bg >= 512 and matrix.format.coding == 4:
            warps = 16
    if matrix.format.words == 8 and role != RESIDUAL:
        rc //= 2
    return Tiles(bn, bg, rc, warps)


def matvec(
    matrix: DeviceMatrix,
    x: Activations,
    role: int,
    *,
    norm: Norm | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    next_norm: torch.Tensor | None = None,
    into: Activations | None = None,
    squares: torch.Tensor | None = None,
    act: str = "silu",
    pdl: int = SERIAL,
    chosen: Tiles | None = None,
    planes: int = 0,
) -> None:
    """One product; see matvec.finish for what becomes of it.

    STORE writes float32 `out` [rows] (and `squares`). RESIDUAL adds to `residual`, and `into` becomes residual *
    next_norm. GATED makes `into` the activated gates times what they gate; the matrix is paired. `planes` of the vector
    to multiply with; 0 = as the size of the matrix allows. `pdl`: see language.SERIAL and what follows it; AFTER
    becomes LEADING but for a RESIDUAL that fills the card (EARLY): elsewhere programs of the next kernel that stand
    ready cost more than they gain, as measured.
    """
    t = chosen or tiles(matrix, role)
    if squares is not None and squares.numel() != triton.cdiv(matrix.rows, t.bn):
        raise ValueError(f"{squares.numel()} sums of squares for programs of {t.bn} of {matrix.rows} rows")
    grid = (triton.cdiv(matrix.rows, t.bn),)
    early = role == RESIDUAL and grid[0] >= EARLY * Chip.of(matrix.codes.device).multiprocessors
    if pdl == AFTER and not early:
        pdl = LEADING
    spare, change = x.scales, matrix.change
    if change:  # of a vector that is not normed yet: what is normed is the sum
        matvec(change.a, x, STORE, out=change.inner, pdl=LEADING if pdl else SERIAL)
    tensors = (
        out if out is not None else spare, residual if residual is not None else spare,
        next_norm if next_norm is not None else spare, *(into or x).arrays,
        norm.squares if norm else spare, squares if squares is not None else spare,
        *((change.inner, change.b) if change else (spare, spare)), matrix.rows,
        norm.eps if norm else 0.0,
    )  # fmt: skip
    common = {
        "ROLE": role, "PARTS": norm.parts if norm else 0, "SUMSQ": squares is not None, "ACT": ACTS[act],
        "KEEP": into is not None and into.keep, "BN": t.bn, "RC": t.rc, "PDL": pdl, "num_warps": t.warps,
        "launch_pdl": pdl != SERIAL, "RANK": change.b.shape[1] if change else 0,
    }  # fmt: skip
    f = matrix.format
    if f.kind == PLAIN:
        launch(matvec_plain, grid)(matrix.codes, x.values, *tensors, K=matrix.cols, BK=t.bg, **common)
    else:
        launch(matvec_packed, grid)(
            *matrix.arrays, matrix.table, x.codes.view(torch.int32), x.scales, x.sums, *tensors,
            G=matrix.groups, **constants(f), PLANES=planes or planes_of(matrix), BG=t.bg, DEALT=matrix.dealt,
            **common,
        )  # fmt: skip


def planes_of(matrix: DeviceMatrix) -> int:
    """Planes of the vector that the matrix is multiplied with: two where reading it is not what takes the time."""
    return 2 if matrix.nbytes <= TWO_PLANES_BYTES else 1


def parts_of(matrix: DeviceMatrix, role: int) -> int:
    """How many sums of squares a product of that role leaves."""
    return triton.cdiv(matrix.rows, tiles(matrix, role).bn)


@triton.jit
def advance_kernel(Y, H, POST, NEXT, CODES, SCALES, SUMS, VALUES, Y_SQUARES, SQUARES, K, eps, PARTS: tl.constexpr,
                   KEEP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """32 elements of the residual: H = Y, or with PARTS > 0 H += Y / rms(Y) * POST; then the next product's vector."""
    pid = tl.program_id(0)
    wait_for_previous(PDL)
    n = pid * 32 + tl.arange(0, 32)
    h = tl.load(Y + n)
    if PARTS > 0:
        h = tl.load(H + n) + h * inverse_rms(load_squares(Y_SQUARES, PARTS), K, eps) * tl.load(POST + n)
    tl.store(H + n, h)
    tl.store(SQUARES + pid, tl.sum(h * h, 0))
    store_activations(h * tl.load(NEXT + n), pid * 32, K, 1, CODES, SCALES, SUMS, VALUES, 1, KEEP)


def advance(
    y: torch.Tensor,
    residual: torch.Tensor,
    next_norm: torch.Tensor,
    into: Activations,
    squares: torch.Tensor,
    post: tuple[torch.Tensor, Norm] | None = None,
    pdl: int = SERIAL,
) -> None:
    """residual = y, or with `post` (weights, norm of y) residual += normed y; `into` becomes residual * next_norm."""
    k = y.shape[-1]
    weights, norm = post if post else (next_norm, None)
    launch(advance_kernel, (k // GROUP,))(
        y, residual, weights, next_norm, *into.arrays, norm.squares if norm else squares, squares, k,
        norm.eps if norm else 0.0, PARTS=norm.parts if norm else 0, KEEP=into.keep, PDL=pdl, num_warps=1,
        launch_pdl=pdl != SERIAL,
    )  # fmt: skip
