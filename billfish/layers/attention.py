"""Attention over the paged KV cache."""

from torch import Tensor, nn

from billfish.kernels import paged_attention
from billfish.kernels.paged_attention import AttentionMetadata


class PagedAttention(nn.Module):
    """Turns queries and keys by their positions, writes the step's keys and values into their
    blocks, then attends over the block tables.

    query [T, heads, head_dim]; key, value [T, kv_heads, head_dim]; positions int64 [T];
    layer_cache [2, num_blocks, block_size, kv_heads, head_dim]; returns [T, heads, head_dim].
    cos_sin: see `billfish.layers.rotary.rotary_table`.
    """

    def __init__(self, scale: float, cos_sin: Tensor) -> None:
        super().__init__()
        self.scale = scale
        self.cos_sin = nn.Buffer(cos_sin)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        layer_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        k_cache, v_cache = layer_cache[0], layer_cache[1]
        query = paged_attention.rotate_and_write(
            query, key, value, k_cache, v_cache, metadata.slot_mapping,
            positions=positions, cos_sin=self.cos_sin,
        )  # fmt: skip
        return paged_attention.attend(query, k_cache, v_cache, metadata, scale=self.scale)
