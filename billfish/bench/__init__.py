"""Measurements, each a module with a `main` that `billfish bench NAME` runs; results are records.

gemm, attention, general   kernels beside their peers on a GPU, with each technique and without; and
                           tune, step and tutorial, which are their parts
engine, throughput         whole models, on a GPU and on a CPU
serve, server              a running server under load, and what the HTTP server itself costs
quantize                   what INT4 costs in perplexity
turns, record, processes   for all of them: timing in turns, what a record says of its origin,
                           and compilation in processes of their own
"""
