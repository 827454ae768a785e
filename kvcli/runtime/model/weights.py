"""`Weights`: the named tensors of a model, packed as in the file and mapped, not read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from kvcli.blockformats import WEIGHT_FORMATS
from kvcli.errors import ModelError
from kvcli.kernels import ExpertTensor, LowRank, QuantTensor
from kvcli.kernels.reference import ggml
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.formats.adapter import EMBEDDING, Adapter, Pair
from kvcli.runtime.formats.modelfile import ModelFile

HEAD = "output.weight"


class Weights:
    """Tensors of an open model. Matrices stay packed, and mapped where the file has them so; vectors are decoded to
    float32."""

    def __init__(
        self,
        file: ModelFile,
        adapters: Sequence[Adapter] = (),
        sent: Callable[[str], torch.Tensor | None] | None = None,
    ) -> None:
        """`sent` gives the packed bytes of a matrix where they are on a device already."""
        self.file, self.adapters, self._sent = file, adapters, sent
        self.used: set[str] = set()  # names that were asked for
        self.changed: set[str] = set()  # those of matrices that came with what adapters change

    def __contains__(self, name: str) -> bool:
        return name in self.file.tensors

    def matrix(self, name: str, rows: int, cols: int, padded: bool = False) -> QuantTensor:
        """The matrix [rows, cols] of that name, the first rows of a `padded` one that has more.

        Raises ModelError if it is missing, or of another shape or type.
        """
        info = self._info(name, (rows, cols), padded)
        self.changed.add(name)
        pairs = [(each.file, each.pairs[name]) for each in self.adapters if name in each.pairs]
        changes = tuple(_low_rank(file, pair, name == EMBEDDING) for file, pair in pairs)
        return QuantTensor(info.type, self._packed(name).view(info.shape[0], -1), cols, changes).part(0, rows)

    def experts(self, name: str, experts: int, rows: int, cols: int) -> ExpertTensor:
        """The matrices [rows, cols] of that name, one of each expert. Raises ModelError likewise.

        Files of the first months of Mixtral have a tensor for each expert: blk.0.ffn_up.7.weight.
        """
        apart = [name.replace("_exps.", f".{i}.") for i in range(experts)]
        if name not in self and apart[0] in self:
            types = {self._info(each, (rows, cols)).type for each in apart}
            if len(types) > 1:
                raise ModelError(
                    f"the experts of {name} are stored as {' and '.join(sorted(types))}", "convert it again"
                )
            blocks = tuple(self._packed(each).view(rows, -1) for each in apart)
            return ExpertTensor(types.pop(), blocks, cols)
        info = self._info(name, (experts, rows, cols))
        return ExpertTensor(info.type, self._packed(name).view(experts, rows, -1), cols)

    def row(self, name: str, cols: int) -> QuantTensor:
        """The vector of that name as a matrix of one row."""
        shape = (1, cols) if name in self and len(self.file.tensors[name].shape) == 2 else (cols,)
        return QuantTensor(self._info(name, shape).type, self._bytes(name).view(1, -1), cols)

    def vector(self, name: str, *shape: int) -> torch.Tensor:
        """The vector (or the vectors) of that name as float32 [*shape]."""
        info = self._info(name, shape)
        return ggml.decode(info.type, self._bytes(name)).view(shape).clone()

    def release(self) -> None:
        """Give back the memory of what was read so far and is kept in another form."""
        for file in self.file.open_files():
            file.release()

    def mapped(self, address: int, nbytes: int) -> bool:
        """Whether that memory is a mapped file's."""
        return any(file.has(address, nbytes) for file in self.file.open_files())

    def embedding(self, config: ModelConfig) -> QuantTensor:
        """The token embedding [vocab_size, d_model], without rows that belong to no token."""
        return self.matrix("token_embd.weight", config.vocab_size, config.d_model, padded=True)

    @property
    def has_head(self) -> bool:
        """Whether the file has an output matrix; else the embedding is it."""
        return HEAD in self

    def head(self, config: ModelConfig) -> QuantTensor:
        """The output matrix [vocab_size, d_model].

        There are no logits of rows that belong to no token, so nothing can draw one and no softmax counts it.
        """
        return self.matrix(HEAD, config.vocab_size, config.d_model, padded=True)

    def _packed(self, name: str) -> torch.Tensor:
        """The packed bytes of a matrix, on a device if they are there."""
        found = self._sent(name) if self._sent else None
        return self._bytes(name) if found is None else found

    def _bytes(self, name: str) -> torch.Tensor:
        """The packed bytes of a tensor: uint8 [nbytes]."""
        return _bytes(self.file, name)

    def _info(self, name: str, shape: tuple[int, ...], padded: bool = False):
        info = self.file.tensors.get(name)
        self.used.add(name)
        if info is None:
            raise ModelError(f"the file has no tensor {name}", "it is incomplete or of another architecture")
        if info.shape != shape and not (padded and info.shape[1:] == shape[1:] and info.shape[0] > shape[0]):
            raise ModelError(f"tensor {name} has the shape {list(info.shape)}, {list(shape)} is needed")
        if info.type not in WEIGHT_FORMATS:
            raise ModelError(
                f"tensor {name} is stored as {info.type}, which kv cannot compute with",
                f"use a file quantized as one of {', '.join(WEIGHT_FORMATS)}",
            )
        return info


class UnreadWeights(Weights):
    """Weights of which no byte is read, to check a model by: matrices have no memory, vectors are of ones."""

    def _bytes(self, name: str) -> torch.Tensor:
        return torch.empty(self.file.tensors[name].nbytes, dtype=torch.uint8, device="meta")

    def vector(self, name: str, *shape: int) -> torch.Tensor:
        """Ones [*shape] for the vector of that name. Raises ModelError like that of weights that are read."""
        self._info(name, shape)
        return torch.ones(shape)


def _bytes(file: ModelFile, name: str) -> torch.Tensor:
    with warnings.catch_warnings():  # the map is read-only and torch has no read-only tensors; nothing writes
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(file.data(name))


def _low_rank(file: ModelFile, pair: Pair, embedding: bool) -> LowRank:
    """What an adapter adds to a matrix. For the embedding the adapter has both parts turned."""
    a, b = (QuantTensor(x.type, _bytes(file, x.name).view(x.shape[0], -1), x.shape[1]) for x in (pair.a, pair.b))
    largest = [float(x.decode().abs().max()) for x in (a, b)]  # NaN where an element is
    limit = torch.finfo(torch.float16).max
    if not abs(pair.scale) * pair.rank * largest[0] * largest[1] <= limit:
        raise ModelError(
            f"the LoRA adapter {file.path} has elements in {pair.a.name} and its pair that are no numbers, or may add"
            f" more than {limit:,.0f} to an element of the matrix when they are multiplied by {pair.scale:g}",
            "the adapter is damaged, or its scale is too large (`lora`)",
        )
    if embedding:
        return LowRank(LowRank(b, a, 1.0).a_turned, a, pair.scale)
    return LowRank(a, b, pair.scale)


def half_split_rows(w: QuantTensor, heads: int, rope_dim: int) -> QuantTensor:
    """Reorder the rows of a query or key matrix from interleaved RoPE pairs (as llama files keep them) to halves.

    Row 2i + j of a head becomes row j * rope_dim / 2 + i; rows from `rope_dim` on stay. Copies the packed rows.
    """
    return w.with_rows(lambda rows: half_split(rows, heads, rope_dim))


def half_split(rows: torch.Tensor, heads: int, rope_dim: int) -> torch.Tensor:
    """Reorder rows [heads * dim, ...] likewise: those of a matrix, or the elements of a bias. Copies them."""
    by_head = rows.unflatten(0, (heads, -1))
    pairs = by_head[:, :rope_dim].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, by_head[:, rope_dim:]], 1).flatten(0, 1)
