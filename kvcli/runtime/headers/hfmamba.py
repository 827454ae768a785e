"""Tensors of Mamba-2 as llama.cpp's converter writes them. No torch."""

from __future__ import annotations

import numpy as np

from kvcli.runtime.headers.hfconfig import HFConfig
from kvcli.runtime.headers.presented import Presented


def as_in_files(tensor: Presented, config: HFConfig) -> Presented:
    """Decays are there as logarithms, without their sign; what is one number for each head has a row for each, and the
    norm one for each group."""
    n = tensor.shape[0]
    if tensor.name.endswith(".ssm_a"):
        return tensor.then(lambda values: -np.exp(values).reshape(n, 1), (n, 1))
    if tensor.name.endswith(".ssm_d"):
        return tensor.then(lambda values: values.reshape(n, 1), (n, 1))
    if tensor.name.endswith(".ssm_norm.weight"):
        groups = config.count("mamba_n_groups")
        shape = groups, n // groups
        return tensor.then(lambda values: values.reshape(shape), shape)
    return tensor
