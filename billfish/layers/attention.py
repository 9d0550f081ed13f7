"""Attention over the paged KV cache."""

from torch import Tensor, nn

from billfish.kernels import paged_attention
from billfish.kernels.paged_attention import AttentionMetadata


class PagedAttention(nn.Module):
    """Writes the step's keys and values into their blocks, then attends over the block tables.

    query [T, heads, head_dim]; key, value [T, kv_heads, head_dim]; returns [T, heads, head_dim].
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_cache: Tensor,
        meta: AttentionMetadata,
    ) -> Tensor:
        k_cache, v_cache = layer_cache[0], layer_cache[1]
        paged_attention.write_kv(key, value, k_cache, v_cache, meta.slot_mapping)
        return paged_attention.attend(query, k_cache, v_cache, meta, scale=self.scale)
