"""Kernels that stand alone: `marlin` (W4A16 matmul), `paged_attention`, `general`.

They import torch and triton only, so they are useful in anybody's model:

    from billfish.kernels import general, marlin, paged_attention
"""
