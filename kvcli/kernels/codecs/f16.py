"""IEEE half rows, 16 bits an element."""

import torch

from kvcli.kernels.codecs.plain import PlainCodec

CODEC = PlainCodec(torch.float16)
