"""The decoder-only transformer: what all architectures here are, and where their options act.

Pre-norm decoder, grouped-query attention, rotary positions, gated MLP: Touvron et al., "LLaMA"
(arXiv:2302.13971) and "Llama 2" (arXiv:2307.09288). The other architectures differ from Llama in
what `ModelConfig` says; their files say which differences each has, and where those are from.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from billfish.config import LayerConfig, ModelConfig
from billfish.kernels import general
from billfish.kernels.paged_attention import AttentionMetadata
from billfish.layers.attention import PagedAttention
from billfish.layers.linear import Linear, QuantLinear
from billfish.layers.norm import RMSNorm
from billfish.layers.rotary import rotary_table


class Weights(Protocol):
    """Where a model gets its weights from; the names are those of Hugging Face checkpoints."""

    def linear(self, *names: str, gated: bool = False) -> nn.Module:
        """The linear layers called names, merged into one along the output rows.

        gated: they are a gate and an up projection, whose results will be silu(gate) * up. Where
        that comes cheaper at once, the layer is a QuantLinear whose weight says `silu_mul`.
        """

    def tensor(self, name: str) -> Tensor:
        """A dense tensor in the activation dtype."""

    def norm(self, name: str) -> Tensor:
        """What a normalized vector is multiplied with, in the activation dtype."""


_QKV = ("q_proj", "k_proj", "v_proj")
_QK_NORMS = ("q_norm", "k_norm")
_GATE_UP = ("gate_proj", "up_proj")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of the architecture and its shape, rows first."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    layer = layer_shapes(config)
    for index in range(config.num_layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The weights of one layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    linears: dict[str, tuple[int, int, bool]] = {}
    if config.fused:
        linears["self_attn.qkv_proj"] = (q_rows + 2 * kv_rows, hidden, config.qkv_bias)
        linears["mlp.gate_up_proj"] = (2 * inner, hidden, config.mlp_bias)
    else:
        for name, rows in zip(_QKV, (q_rows, kv_rows, kv_rows), strict=True):
            linears[f"self_attn.{name}"] = (rows, hidden, config.qkv_bias)
        for name in _GATE_UP:
            linears[f"mlp.{name}"] = (inner, hidden, config.mlp_bias)
    linears["self_attn.o_proj"] = (hidden, q_rows, config.o_bias)
    linears["mlp.down_proj"] = (hidden, inner, config.mlp_bias)

    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.post_norms:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (n,) for name, n in norms.items()}
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


class Attention(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        weights: Weights,
        prefix: str,
        cos_sin: Tensor | None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        names = ("qkv_proj",) if config.fused else _QKV
        self.qkv_proj = weights.linear(*(f"{prefix}.{name}" for name in names))
        self.o_proj = weights.linear(f"{prefix}.o_proj")
        qk_norm = None
        if config.qk_norm:
            q_norm, k_norm = (weights.norm(f"{prefix}.{name}.weight") for name in _QK_NORMS)
            qk_norm = (q_norm, k_norm, config.rms_norm_eps)
        self.attention = PagedAttention(
            config.attention_scale or config.head_dim**-0.5,
            cos_sin,
            sliding_window=layer.sliding_window,
            soft_cap=config.attention_soft_cap,
            qk_norm=qk_norm,
        )

    def forward(
        self, x: Tensor, positions: Tensor, layer_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        qkv = self.qkv_proj(x).view(len(x), sum(heads), self.head_dim)
        query, key, value = qkv.split(heads, dim=1)
        out = self.attention(query, key, value, positions, layer_cache, metadata)
        return self.o_proj(out.reshape(len(x), -1))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        super().__init__()
        names = ("gate_up_proj",) if config.fused else _GATE_UP
        silu = config.activation == "silu"
        self.gate_up_proj = weights.linear(*(f"{prefix}.{name}" for name in names), gated=silu)
        self.down_proj = weights.linear(f"{prefix}.down_proj")
        self.activation = general.silu_mul if silu else general.gelu_tanh_mul
        layer = self.gate_up_proj
        self.activated = isinstance(layer, QuantLinear) and layer.weight.silu_mul

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate_up_proj(x)
        return self.down_proj(x if self.activated else self.activation(x))


class DecoderLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, weights: Weights, index: int, cos_sin: Tensor | None
    ) -> None:
        super().__init__()
        prefix = f"model.layers.{index}"

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights.norm(f"{prefix}.{name}.weight"), config.rms_norm_eps)

        self.input_layernorm = norm("input_layernorm")
        self.attention = Attention(
            config, config.layers[index], weights, f"{prefix}.self_attn", cos_sin
        )
        # Where there are norms behind the sub-layers, the name of the one between the two moves.
        self.attention_norm = norm("post_attention_layernorm") if config.post_norms else None
        between = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        self.post_attention_layernorm = norm(between)
        self.mlp = MLP(config, weights, f"{prefix}.mlp")
        self.mlp_norm = norm("post_feedforward_layernorm") if config.post_norms else None

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
        if self.attention_norm is not None:
            x = self.attention_norm(x)
        x, residual = self.post_attention_layernorm(x, residual)
        x = self.mlp(x)
        return x if self.mlp_norm is None else self.mlp_norm(x), residual


class CausalLM(nn.Module):
    """Token ids to logits, over a paged KV cache.

    kv_cache: [num_layers, 2, 1 + num_blocks, block_size, num_kv_heads, head_dim], the null block
    first. only: the layers to build, for those who run a model in parts; None: all.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        max_len: int,
        *,
        only: Collection[int] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        self.embed_tokens = nn.Buffer(weights.tensor("model.embed_tokens.weight"))
        # On the device from the beginning: moved later, each layer would get a copy of its own.
        device = self.embed_tokens.device
        tables = {rope: rotary_table(rope, config.rotary_dim, max_len).to(device) for rope in ropes}
        self.layers = nn.ModuleList(
            DecoderLayer(config, weights, index, None if layer.rope is None else tables[layer.rope])
            for index, layer in enumerate(config.layers)
            if only is None or index in only
        )
        self.norm = RMSNorm(weights.norm("model.norm.weight"), config.rms_norm_eps)
        self.lm_head: nn.Module = (
            Linear(self.embed_tokens) if config.tie_embeddings else weights.linear("lm_head")
        )
        self.embedding_scale = None
        if config.embedding_scale is not None:  # rounded first, as in training
            scale = torch.tensor(config.embedding_scale, dtype=self.embed_tokens.dtype)
            self.embedding_scale = float(scale)

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_cache: Tensor, metadata: AttentionMetadata,
        only: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states [T, hidden_size] of T tokens; token_ids, positions: int64 [T].

        only: go through these layers alone, as one does to have their kernels launched.
        """
        x, residual = self.embed(token_ids), None
        for index, (layer, cache) in enumerate(zip(self.layers, kv_cache, strict=True)):
            if only is None or index in only:
                x, residual = layer(x, residual, positions, cache, metadata)
        x, _ = self.norm(x, residual)
        return x

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states before the first layer."""
        x = functional.embedding(token_ids, self.embed_tokens)
        return x if self.embedding_scale is None else x * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, vocab_size] of the hidden states [S, hidden_size] that are sampled.

        In the dtype of activations, or in float32 where they are capped.
        """
        logits = self.lm_head(hidden)
        cap = self.config.logit_soft_cap
        return logits if cap is None else logits.float().div_(cap).tanh_().mul_(cap)
