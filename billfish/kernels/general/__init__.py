"""The general kernels, each with its reference: what layers of a model need besides products and
attention, in inference and in training, parallel data processing, scientific computing, images and
signals.

y, residual = general.rms_norm(x, weight, 1e-5, residual)
running = general.scan(x, dim=-1, exclusive=False)
warm = general.heat_equation(x, 0.1, steps=100)
"""

from billfish.kernels.general.adamw import AdamW, adamw_reference, adamw_step
from billfish.kernels.general.bilateral import bilateral, bilateral_reference
from billfish.kernels.general.compact import compact, compact_reference
from billfish.kernels.general.convolve2d import (
    convolve2d,
    convolve2d_reference,
    gaussian,
    separable_convolve2d,
)
from billfish.kernels.general.cross_entropy import (
    cross_entropy,
    cross_entropy_reference,
    linear_cross_entropy,
)
from billfish.kernels.general.elementwise import elementwise, elementwise_reference
from billfish.kernels.general.fft import fft, fft_reference, ifft, irfft, rfft
from billfish.kernels.general.fir import fir, fir_reference
from billfish.kernels.general.gelu_mul import (
    gelu_tanh_mul,
    gelu_tanh_mul_backward_reference,
    gelu_tanh_mul_reference,
)
from billfish.kernels.general.histogram import histogram, histogram_reference
from billfish.kernels.general.layer_norm import (
    layer_norm,
    layer_norm_reference,
    norm_backward_reference,
)
from billfish.kernels.general.matmul import matmul, matmul_reference
from billfish.kernels.general.monte_carlo import (
    black_scholes,
    market_paths,
    option_price,
    option_price_reference,
)
from billfish.kernels.general.nbody import (
    leapfrog_step,
    nbody_acceleration,
    nbody_acceleration_reference,
)
from billfish.kernels.general.reduce import reduce, reduce_reference
from billfish.kernels.general.rms_norm import rms_norm, rms_norm_reference
from billfish.kernels.general.rotary import rotary_embedding, rotary_embedding_reference
from billfish.kernels.general.sample import sample, sample_reference
from billfish.kernels.general.scan import scan, scan_reference
from billfish.kernels.general.segment_reduce import segment_reduce, segment_reduce_reference
from billfish.kernels.general.silu_mul import (
    silu_mul,
    silu_mul_backward_reference,
    silu_mul_reference,
)
from billfish.kernels.general.sobel import sobel, sobel_reference
from billfish.kernels.general.softmax import softmax, softmax_backward_reference, softmax_reference
from billfish.kernels.general.sort import sort, sort_reference
from billfish.kernels.general.spmv import spmv, spmv_reference
from billfish.kernels.general.stencil import heat_equation, heat_equation_reference
from billfish.kernels.general.transpose import transpose, transpose_reference

__all__ = [
    "AdamW",
    "adamw_reference",
    "adamw_step",
    "bilateral",
    "bilateral_reference",
    "black_scholes",
    "compact",
    "compact_reference",
    "convolve2d",
    "convolve2d_reference",
    "cross_entropy",
    "cross_entropy_reference",
    "elementwise",
    "elementwise_reference",
    "fft",
    "fft_reference",
    "fir",
    "fir_reference",
    "gaussian",
    "gelu_tanh_mul",
    "gelu_tanh_mul_backward_reference",
    "gelu_tanh_mul_reference",
    "heat_equation",
    "heat_equation_reference",
    "histogram",
    "histogram_reference",
    "ifft",
    "irfft",
    "layer_norm",
    "layer_norm_reference",
    "leapfrog_step",
    "linear_cross_entropy",
    "market_paths",
    "matmul",
    "matmul_reference",
    "nbody_acceleration",
    "nbody_acceleration_reference",
    "norm_backward_reference",
    "option_price",
    "option_price_reference",
    "reduce",
    "reduce_reference",
    "rfft",
    "rms_norm",
    "rms_norm_reference",
    "rotary_embedding",
    "rotary_embedding_reference",
    "sample",
    "sample_reference",
    "scan",
    "scan_reference",
    "segment_reduce",
    "segment_reduce_reference",
    "separable_convolve2d",
    "silu_mul",
    "silu_mul_backward_reference",
    "silu_mul_reference",
    "sobel",
    "sobel_reference",
    "softmax",
    "softmax_backward_reference",
    "softmax_reference",
    "sort",
    "sort_reference",
    "spmv",
    "spmv_reference",
    "transpose",
    "transpose_reference",
]
