"""Thin modules over the kernels: each holds its weights and calls one public op."""
