"""float32 rows: the exact cache."""

import torch

from kvcli.kernels.reference.codecs.plain import PlainCodec

CODEC = PlainCodec(torch.float32)
