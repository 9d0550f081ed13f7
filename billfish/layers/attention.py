"""Attention over the paged KV cache."""

from torch import Tensor, nn

from billfish.kernels import paged_attention
from billfish.kernels.paged_attention import AttentionMetadata


class PagedAttention(nn.Module):
    """Turns queries and keys by their positions, writes the step's keys and values into their
    blocks, then attends over the block tables.

    query [T, heads, head_dim]; key, value [T, kv_heads, head_dim]; positions int64 [T];
    layer_cache [2, num_blocks, block_size, kv_heads, head_dim]; returns [T, heads, head_dim].
    cos_sin: see `billfish.layers.rotary.rotary_table`; None: positions are not encoded.
    qk_norm: weights [head_dim] of the norms of query and key, and their epsilon.
    """

    def __init__(
        self,
        scale: float,
        cos_sin: Tensor | None,
        *,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        qk_norm: tuple[Tensor, Tensor, float] | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.sliding_window, self.soft_cap = scale, sliding_window, soft_cap
        self.cos_sin = None if cos_sin is None else nn.Buffer(cos_sin)
        q_norm, k_norm, self.eps = qk_norm or (None, None, 0.0)
        self.q_norm = None if q_norm is None else nn.Buffer(q_norm)
        self.k_norm = None if k_norm is None else nn.Buffer(k_norm)

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
        return paged_attention.write_and_attend(
            query, key, value, k_cache, v_cache, metadata,
            positions=None if self.cos_sin is None else positions, cos_sin=self.cos_sin,
            q_norm=self.q_norm, k_norm=self.k_norm, eps=self.eps,
            scale=self.scale, sliding_window=self.sliding_window, soft_cap=self.soft_cap,
        )  # fmt: skip
