"""The environment that torch, OpenMP and Triton read when they are imported or first used.

Only what is not set is set. `kv` does so before anything else, `kvcli.load` before it imports torch; where a program
has imported torch earlier, OpenMP has read its part already.
"""

from __future__ import annotations

import os
import sys


def prepare() -> None:
    """Set what the engine was measured with, for this process and those that it starts."""
    # Spinning OpenMP threads cost ten times the work itself as soon as another process wants a core.
    if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="1000")
    # Memory of a GPU is mapped piece by piece: else pages that are cut from what a step used leave rests of no use.
    if sys.platform == "linux" and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as measured; Triton 3.9 warns where it is not set
    if "TRITON_CACHE_DIR" not in os.environ:
        from kvcli import paths

        folder = paths.cache_dir() / "triton"
        if paths.can_be_made(folder):
            os.environ["TRITON_CACHE_DIR"] = str(folder)
