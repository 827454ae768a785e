"""Kernels for a CUDA GPU, in Triton; nothing outside this package imports Triton when it is imported itself."""
