"""Weights count as they are kept, and what steps need beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from plancases import CONFIGS

from kvcli.runtime.host.memory import CPU
from kvcli.runtime.plan import footprint

# --- weights ---


def test_workspace_grows_with_rows() -> None:
    model = CONFIGS["llama"]
    floats, fixed = 4 * (512 + 576 + 3 * 1536), 80 * 1536 // 32  # of a row; of the longest one in fixed point
    assert footprint.activation_bytes(model, 1) == floats + (1 + 8) * fixed
    assert footprint.activation_bytes(model, 512) == 512 * floats + (256 + 8) * fixed  # so many at a time
    one, two, three = (footprint.gpu_workspace_bytes(model, rows) for rows in (1024, 1536, 2048))
    assert 0 < two - one == three - two and one > footprint.activation_bytes(model, 1024)
    more = footprint.gpu_workspace_bytes(model, 1024, 2) - one  # second queries, and three more parts
    assert more >= 3 * 1024 * 4 * model.n_heads * (model.layers[0].dim_v + 2)
    assert footprint.logit_bytes(model) >= 4 * model.vocab_size


@pytest.mark.models
@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_interleaved_weights_are_counted_as_the_engine_keeps_them(fixture: str, request: pytest.FixtureRequest) -> None:
    """Matrices of the loaded model and the file's vectors add up to `packed`, decoded vectors to `copies`."""
    import torch

    from kvcli import kernels
    from kvcli.kernels.cpu.interleaved import Interleaved
    from kvcli.runtime.formats.gguf import GGUFFile
    from kvcli.runtime.model.archs import from_gguf
    from kvcli.runtime.model.loading import load
    from kvcli.runtime.model.weights import Weights

    file = GGUFFile.open(request.getfixturevalue(fixture))
    model_config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
    ops = kernels.backend("auto", 1)[0]
    if getattr(ops, "exact", True):
        pytest.skip("nothing is interleaved on this processor")
    counted = footprint.weights_of_tensors(file.tensors, model_config, CPU)
    values = list(_reachable(load(model_config, Weights(file), ops)))
    matrices = {x.blocks.data_ptr(): x.nbytes for x in values if isinstance(x, Interleaved)}
    vectors = {x.data_ptr(): 4 * x.numel() for x in values if isinstance(x, torch.Tensor)}
    in_file = sum(t.nbytes for t in file.tensors.values() if len(t.shape) == 1)
    assert counted.packed == sum(matrices.values()) + in_file
    assert counted.copies == sum(vectors.values())


@pytest.mark.models
@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_weights_are_counted_as_the_engine_keeps_them(fixture: str, request: pytest.FixtureRequest) -> None:
    """Every tensor of the loaded model: mapped ones add up to `packed`, all others to `copies`."""
    import torch

    from kvcli import kernels
    from kvcli.kernels import QuantTensor
    from kvcli.runtime.formats.gguf import GGUFFile
    from kvcli.runtime.model.archs import from_gguf
    from kvcli.runtime.model.loading import load
    from kvcli.runtime.model.weights import Weights

    path: Path = request.getfixturevalue(fixture)
    file = GGUFFile.open(path)
    model_config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
    counted = footprint.weights_of_tensors(file.tensors, model_config, CPU, interleaved=False)
    mapped = {file.data(name).ctypes.data: t.nbytes for name, t in file.tensors.items()}
    model = load(model_config, Weights(file), kernels.backend("reference", 1)[0])
    kept: dict[int, int] = {}
    for value in _reachable(model):
        tensor = value.blocks if isinstance(value, QuantTensor) else value
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    assert len(kept) == len(file.tensors)
    copies = sum(size for address, size in kept.items() if address not in mapped)
    assert counted.packed == sum(mapped.values())
    assert counted.copies == copies
    assert all(mapped[address] == size for address, size in kept.items() if address in mapped)


def _reachable(value: object, depth: int = 6) -> Iterator[object]:
    """The object and what its attributes and lists hold, without operations and configs."""
    yield value
    if depth == 0 or not type(value).__module__.startswith(
        ("kvcli.runtime.model.decoder", "kvcli.kernels.attend", "builtins")
    ):
        return
    inner = value if isinstance(value, (list, tuple)) else list(getattr(value, "__dict__", {}).values())
    for each in inner:
        yield from _reachable(each, depth - 1)
