"""`PlannedModel`: what a plan needs to know of a model, from a header, a recipe or flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from kvcli.errors import ModelError, UsageError
from kvcli.options import LoraOption
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.formats import adapter
from kvcli.runtime.headers.anygguf import config_from_gguf_any, config_from_hf, config_problem
from kvcli.runtime.headers.facts import weight_type
from kvcli.runtime.headers.modelheaders import HeaderTensor, ModelHeader
from kvcli.runtime.headers.shapes import Given, config_by_hand, config_from_recipe, override, recipe_params_read
from kvcli.runtime.host.memory import CPU
from kvcli.runtime.hub import hubcache, store
from kvcli.runtime.hub.hubnames import SAFETENSORS
from kvcli.runtime.hub.modelref import ModelRef
from kvcli.runtime.hub.recipes import Recipe
from kvcli.runtime.hub.runnable import judge
from kvcli.runtime.plan import footprint, repacked
from kvcli.runtime.plan.footprint import ASSUMED, WeightBytes

ASSUMED_BITS = 4.9  # per weight, of a Q4_K_M file of several billion weights


@dataclass(frozen=True)
class PlannedModel:
    """`weights` is None where only the cache is asked for; `bytes_read` came over the network.

    `runs`: see Recipe; if not by its name `problem` is why, and `remedy` what to do about it. `run_as`: what `-m` of
    `kv run` is to be, "" = nothing that kv knows. `metadata`: the keys of its GGUF file, where they are known. `ahead`:
    weights of the layer that predicts further tokens. `alone`: it is a model, with a tokenizer, and no part of one.
    """

    name: str
    config: ModelConfig
    weights: WeightBytes | None
    params: int | None
    quantization: str
    origin: str  # "header", "recipe" or "flags"
    file_bytes: int = 0
    bytes_read: int = 0
    notices: Sequence[str] = ()
    alternatives: Sequence[tuple[str, int | None]] = ()  # name and bytes of the repository's other models
    runs: str = "yes"
    problem: str = ""
    remedy: str = ""
    run_as: str = ""
    lora: Sequence[tuple[LoraOption, int]] = ()  # the adapters, with the bytes of each file
    metadata: Mapping[str, Any] = field(default_factory=dict)
    ahead: WeightBytes | None = None
    alone: bool = True


def planned_model(
    name: str | None, given: Given, kind: str, offline: bool, lora: Sequence[LoraOption] = (), quantize: str = ""
) -> PlannedModel:
    """The model of that name, with adapters, for a plan on a device of `kind`; without a name the shape that the flags
    give. `quantize`: what the matrices of a folder are to be packed as, a key of FORMATS; "" = as they are.

    Raises UsageError, ModelError, DownloadError.
    """
    if lora and (name is None or given.params is not None or given.bpw is not None):
        raise UsageError("`lora` is counted by the header of a model", "name a model, and leave its size to the header")
    if quantize and name is None:
        raise UsageError("`quantize` packs the weights of a folder", "name one, or give --bpw")
    if name is None:
        return _by_hand(given)
    ref = ModelRef.parse(name, planning=True)
    recipe = ref.recipe
    if recipe is None:
        return _from_header(name, ref, given, kind, offline, lora, quantize)
    if quantize:
        raise UsageError(f"`quantize` packs the weights of a folder, and {recipe.name} has a file", "leave it out")
    path = store.stored_path(recipe)
    if path is not None and store.stored_variant(recipe):
        return _from_header(recipe.name, ModelRef(str(path)), given, kind, offline, lora)
    if lora:
        raise UsageError(f"`lora` is counted by the header of {recipe.name}, which is not here", "kv pull gets it")
    return _from_recipe(recipe, given, kind)


def _by_hand(given: Given) -> PlannedModel:
    config = config_by_hand(given)
    weights = None if given.params is None else _weights_of_number(given.params, given.params, given, ASSUMED_BITS)
    return PlannedModel("by hand", config, weights, given.params, "", "flags")


def _from_recipe(recipe: Recipe, given: Given, kind: str) -> PlannedModel:
    shape = recipe.shape
    if not shape:
        raise ModelError(f"the sizes of {recipe.name} are not known", "download it with kv pull and try again")
    config = override(config_from_recipe(recipe.name, shape), given)
    params = given.params or shape["params"]
    if given.bpw is None and given.params is None and recipe.file is not None:
        size = recipe.file.size
        source = footprint.EXACT if kind == CPU else footprint.COMPUTED  # a GPU may keep a little more
        weights = WeightBytes(size, 0, size, source, "size of the file")
    else:
        read = recipe_params_read(shape) if given.params is None else params
        weights = _weights_of_number(params, read, given, ASSUMED_BITS)
    notice = f"planned from the published sizes of {recipe.title}: no file of it is here"
    return PlannedModel(
        recipe.name, config, weights, params, "", "recipe", notices=(notice,),
        runs=recipe.runs, problem=recipe.problem, remedy=recipe.remedy if recipe.problem else "",
        run_as={"yes": recipe.name, "hub": recipe.hf}.get(recipe.runs, ""),
    )  # fmt: skip


def _weights_of_number(params: int, read: int, given: Given, assumed: float) -> WeightBytes:
    if given.bpw is not None:
        return footprint.weights_of_params(params, read, given.bpw, f"{given.bpw:g} bits per weight (--bpw)")
    weights = footprint.weights_of_params(params, read, assumed, f"{assumed:g} bits per weight (--bpw)")
    return WeightBytes(weights.packed, weights.copies, weights.read, ASSUMED, weights.detail)


def _from_header(
    label: str, ref: ModelRef, given: Given, kind: str, offline: bool, lora: Sequence[LoraOption], quantize: str = ""
) -> PlannedModel:
    from kvcli.runtime.headers.readheader import read_header

    header = read_header(ref, offline=offline)
    problem, remedy = "", "kv models ls lists the models that run"
    folder = _folder_here(ref) if header.container == SAFETENSORS else None
    if quantize and folder is None:
        raise UsageError("`quantize` is counted for folders of safetensors that are here", "leave it out, or pull it")
    if folder is not None:
        header, problem = _as_it_runs(header, folder, quantize)
    elif header.container == SAFETENSORS and header.config:
        problem = config_problem(header.config)
    if lora and not header.metadata:
        raise UsageError("`lora` is counted for models that are here, or in GGUF files", "download the model first")
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    if header.metadata:
        problem = judge(header.metadata, header.tensors)[1]
        config = config_from_gguf_any(header.metadata, shapes, given)
    elif header.config or given.shapes:
        config = config_from_hf(header.config, given)
    else:
        what = "has no config.json beside its weights, or an empty one"
        raise ModelError(f"{header.source} {what}", "the shape can be given by flags: --layers and so on")
    params = sum(prod(shape) for shape in shapes.values())
    adapters: Sequence[adapter.Adapter] = ()
    ahead = None
    if given.params is not None or given.bpw is not None:
        weights = _weights_of_number(given.params or params, given.params or params, given, ASSUMED_BITS)
    else:
        adapters = adapter.open_all(lora, header)
        weights = footprint.weights_of_tensors(header.tensors, config, kind, adapters)
        ahead = footprint.next_weights(header.tensors, config, kind) if config.ahead else None
    notices = tuple(header.notices)
    if kind != CPU and header.metadata:
        reason = repacked.unfit(config, repacked.matrix_types(header.tensors))
        notices += (f"this model cannot be computed on a GPU: {reason}",) if reason else ()
    return PlannedModel(
        label if label != ref.name else header.source,
        config,
        weights,
        given.params or params,
        weight_type(header.source, header.metadata, header.tensors),
        "header",
        header.file_bytes,
        header.bytes_read,
        notices,
        header.alternatives,
        "no" if problem else "yes",
        problem,
        remedy if problem else "",
        "" if problem else label,
        [(option, opened.file.size) for option, opened in zip(lora, adapters, strict=True)],
        header.metadata,
        ahead,
    )


def _folder_here(ref: ModelRef) -> Path | None:
    """The folder, or a file in it, that a name means: a path, or what is here of a repository."""
    if ref.is_path:
        return Path(ref.name).expanduser()
    cached = ref.reference and hubcache.find(ref.reference, loose=True)
    return cached.path if cached and cached.label == SAFETENSORS else None


def _as_it_runs(header: ModelHeader, path: Path, quantize: str) -> tuple[ModelHeader, str]:
    """A folder with the keys and tensors of the GGUF file that it runs as, and ""; else as it is, and why."""
    from kvcli.runtime.headers.safetensorsmodel import SafetensorsModel

    try:
        with SafetensorsModel(path if path.is_dir() else path.parent, quantize) as model:
            tensors = {name: HeaderTensor(t.shape, t.type, t.nbytes) for name, t in model.tensors.items()}
            notices = (*header.notices, *model.notices)
            return replace(header, metadata=model.metadata, tensors=tensors, notices=notices), ""
    except ModelError as error:
        return header, error.message
