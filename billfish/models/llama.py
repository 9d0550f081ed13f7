"""The Llama family: pre-norm decoder, grouped-query attention, rotary positions, SiLU-gated MLP.

Also what SmolLM2 is. Source: Touvron et al., "LLaMA" (arXiv:2302.13971) and "Llama 2"
(arXiv:2307.09288).
"""

from typing import Protocol

from torch import Tensor, nn

from billfish.config import ModelConfig
from billfish.kernels import general
from billfish.kernels.paged_attention import AttentionMetadata
from billfish.layers.attention import PagedAttention
from billfish.layers.linear import Linear
from billfish.layers.norm import RMSNorm
from billfish.layers.rotary import rotary_table


class Weights(Protocol):
    """Where a model gets its weights from; the names are those of Hugging Face checkpoints."""

    def linear(self, *names: str) -> nn.Module:
        """The linear layers called names, merged into one along the output rows."""

    def tensor(self, name: str) -> Tensor:
        """A dense tensor in the activation dtype."""

    def rope_factors(self) -> Tensor | None:
        """What divides the rotary frequencies one by one, float32 [rotary_dim / 2], if anything."""


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of the architecture and its shape, rows first."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (config.vocab_size, hidden),
        "model.norm": (hidden,),
        "rope_freqs": (config.rotary_dim // 2,),
    }
    if not config.tie_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for index in range(config.num_layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, cos_sin: Tensor) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.qkv_proj = weights.linear(*(f"{prefix}.{name}_proj" for name in "qkv"))
        self.o_proj = weights.linear(f"{prefix}.o_proj")
        self.attention = PagedAttention(config.head_dim**-0.5, cos_sin)

    def forward(
        self, x: Tensor, positions: Tensor, layer_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        qkv = self.qkv_proj(x).view(len(x), sum(heads), self.head_dim)
        query, key, value = qkv.split(heads, dim=1)
        out = self.attention(query, key, value, positions, layer_cache, metadata)
        return self.o_proj(out.reshape(len(x), -1))


class LlamaMLP(nn.Module):
    def __init__(self, weights: Weights, prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = weights.linear(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self.down_proj = weights.linear(f"{prefix}.down_proj")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(general.silu_mul(self.gate_up_proj(x)))


class LlamaLayer(nn.Module):
    def __init__(self, config: ModelConfig, weights: Weights, index: int, cos_sin: Tensor) -> None:
        super().__init__()
        prefix = f"model.layers.{index}"
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(weights.tensor(f"{prefix}.input_layernorm"), eps)
        self.attention = LlamaAttention(config, weights, f"{prefix}.self_attn", cos_sin)
        self.post_attention_layernorm = RMSNorm(
            weights.tensor(f"{prefix}.post_attention_layernorm"), eps
        )
        self.mlp = LlamaMLP(weights, f"{prefix}.mlp")

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        layer_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Takes and returns the last sub-layer's output and the residual stream, not yet added."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.attention(x, positions, layer_cache, metadata)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class LlamaForCausalLM(nn.Module):
    """Token ids to logits, over a paged KV cache.

    kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim].
    """

    def __init__(self, config: ModelConfig, weights: Weights, max_len: int) -> None:
        super().__init__()
        self.config = config
        cos_sin = rotary_table(config, max_len, weights.rope_factors())
        self.embed_tokens = nn.Buffer(weights.tensor("model.embed_tokens"))
        self.layers = nn.ModuleList(
            LlamaLayer(config, weights, index, cos_sin) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(weights.tensor("model.norm"), config.rms_norm_eps)
        self.lm_head: nn.Module = (
            Linear(self.embed_tokens) if config.tie_embeddings else weights.linear("lm_head")
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Hidden states [T, hidden_size] of T tokens; token_ids, positions: int64 [T]."""
        x, residual = self.embed_tokens[token_ids], None
        for layer, layer_cache in zip(self.layers, kv_cache, strict=True):
            x, residual = layer(x, residual, positions, layer_cache, metadata)
        x, _ = self.norm(x, residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [S, vocab_size] of the hidden states [S, hidden_size] that are sampled."""
        return self.lm_head(hidden).float()
