"""IEEE half rows, 16 bits an element."""

import torch

from kvcli.kernels.reference.codecs.plain import PlainCodec

CODEC = PlainCodec(torch.float16)
