"""What a model on a GPU will launch, as jobs that have it compiled before it serves.

Triton compiles a kernel when it is first launched. One after another that takes most of a first
start, so `compilation` has several compiled at a time. (Later starts find the machine code in
Triton's cache.)
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from billfish.kernels.marlin import gpu
from billfish.kernels.paged_attention import AttentionMetadata
from billfish.kernels.paged_attention.metadata import PADDING_SLOT
from billfish.layers.linear import Int8Linear, Linear, QuantLinear
from billfish.models.decoder import Attention, CausalLM

TYPICAL_KV_TOKENS = 2048
"""KV tokens of a sequence that steps are prepared for: attention of few and short sequences starts
while the kernel ahead of it ends."""


def products(model: CausalLM, sizes: Sequence[int], max_tokens: int) -> list[Callable[[], object]]:
    """A job for each kernel that INT4 products of the model run at these numbers of tokens, and at
    larger ones up to max_tokens; the largest first, which take longest to compile."""
    modules = list(model.modules())
    layers = {_kind_of(m): (m, False) for m in modules if isinstance(m, QuantLinear)}
    # The second product of a head in INT8 adds the first.
    layers |= {(_kind_of(m.low), True): (m.low, True) for m in modules if isinstance(m, Int8Linear)}
    rows = {*sizes, *range(256, max_tokens, 256), max_tokens}
    jobs: dict[Hashable, Callable[[], object]] = {}
    for count in sorted(rows, reverse=True):
        for layer, adds in layers.values():
            kernel = gpu.kernel_key(
                layer.weight, count, bias=layer.bias is not None, residual=adds,
                batch_invariant=layer.batch_invariant,
            )  # fmt: skip
            jobs.setdefault(kernel, partial(_product, layer, count, adds))
    return list(jobs.values())


def kinds_of_layers(model: CausalLM) -> list[int]:
    """The first layer of each kind: between them they launch every kernel that all layers do."""
    kinds: dict[Hashable, int] = {}
    for index, (layer, config) in enumerate(zip(model.layers, model.config.layers, strict=True)):
        linears = [m for m in layer.modules() if isinstance(m, Linear | QuantLinear)]
        kind = (config.sliding_window, config.rope is None, *map(_kind_of, linears))
        kinds.setdefault(kind, index)
    return list(kinds.values())


def _kind_of(layer: Linear | QuantLinear) -> Hashable:
    """Layers with this in common run the same kernels."""
    weight, bias = layer.weight, layer.bias is not None
    if isinstance(weight, Tensor):
        return (tuple(weight.shape), bias)
    return (weight.n, weight.k, weight.layout, weight.group_size, weight.silu_mul, bias)


def norms(model: CausalLM, max_tokens: int) -> list[Callable[[], object]]:
    """A job for each kind of launch of a norm and of a gated activation."""
    norm: Any = model.norm
    mlp: Any = model.layers[0].mlp
    width, inner = model.config.hidden_size, 2 * model.config.intermediate_size

    def zeros(rows: int, columns: int) -> Tensor:
        return torch.zeros(rows, columns, dtype=norm.weight.dtype, device=norm.weight.device)

    jobs: list[Callable[[], object]] = []
    for rows in (1, max_tokens):
        jobs.append(partial(norm, zeros(rows, width)))
        jobs.append(partial(norm, zeros(rows, width), zeros(rows, width)))
    if not mlp.activated:
        jobs.append(partial(mlp.activation, zeros(1, inner)))
    return jobs


def attention(
    model: CausalLM, kv_cache: Tensor, make_plans: Callable[[], list[Any]],
    steps: Sequence[tuple[int, int]],
) -> list[Callable[[], object]]:  # fmt: skip
    """A job for each kind of attention that layers have and each step, (requests, new tokens of
    each). Each plans for itself, and writes no KV."""
    all_layers: Any = model.layers
    layers = {layer.attention.attention.sliding_window: layer.attention for layer in all_layers}
    return [
        partial(_attend, layer, kv_cache, make_plans, requests, tokens)
        for layer in layers.values()
        for requests, tokens in dict.fromkeys(steps)
    ]


def _attend(
    layer: Attention, kv_cache: Tensor, make_plans: Callable[[], list[Any]], requests: int,
    tokens: int,
) -> None:  # fmt: skip
    device, total = kv_cache.device, requests * tokens
    ones = torch.ones(requests, dtype=torch.int32, device=device)
    blocks = -(-tokens // kv_cache.shape[3])
    metadata = AttentionMetadata(
        block_table=torch.zeros(requests, blocks, dtype=torch.int32, device=device),
        seq_lens=ones * tokens,
        query_start=torch.arange(requests + 1, dtype=torch.int32, device=device) * tokens,
        slot_mapping=torch.full((total,), PADDING_SLOT, device=device),
        max_query_len=tokens,
        max_seq_len=TYPICAL_KV_TOKENS,
    )
    for plan in make_plans():
        metadata = plan.update(metadata)
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    qkv = torch.zeros(total, sum(heads), layer.head_dim, dtype=kv_cache.dtype, device=device)
    query, key, value = qkv.split(heads, dim=1)
    positions = torch.zeros(total, dtype=torch.int64, device=device)
    layer.attention(query, key, value, positions, kv_cache[0], metadata)


def _product(layer: QuantLinear, rows: int, adds: bool) -> Tensor:
    weight = layer.weight

    def zeros(columns: int) -> Tensor:
        return torch.zeros(rows, columns, dtype=weight.dtype, device=weight.device)

    return layer(zeros(weight.k), zeros(weight.outputs) if adds else None)
