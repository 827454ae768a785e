"""8-bit floating point with five exponent bits: more range, one mantissa bit less than fp8.py's."""

import torch

from kvcli.kernels.reference.codecs.fp8 import Float8

CODEC = Float8(torch.float8_e5m2, 57344.0)
