"""The general kernels: normalization, rotary embedding, gated activation, each with its reference.

y, residual = general.rms_norm(x, weight, 1e-5, residual)
"""

from billfish.kernels.general.gelu_mul import gelu_tanh_mul, gelu_tanh_mul_reference
from billfish.kernels.general.rms_norm import rms_norm, rms_norm_reference
from billfish.kernels.general.rotary import rotary_embedding, rotary_embedding_reference
from billfish.kernels.general.silu_mul import silu_mul, silu_mul_reference

__all__ = [
    "gelu_tanh_mul",
    "gelu_tanh_mul_reference",
    "rms_norm",
    "rms_norm_reference",
    "rotary_embedding",
    "rotary_embedding_reference",
    "silu_mul",
    "silu_mul_reference",
]
