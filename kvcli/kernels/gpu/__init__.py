"""Kernels for NVIDIA GPUs, in Triton. Imported only where a GPU is used: Triton need not be there otherwise."""
