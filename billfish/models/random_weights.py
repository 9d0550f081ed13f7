"""Models with random weights, to measure speed without a checkpoint: any shape, INT4 or dense."""

import torch
from torch import Tensor, nn

from billfish.config import LayerConfig, ModelConfig, RopeConfig
from billfish.errors import ConfigError, shown
from billfish.kernels import marlin
from billfish.layers.linear import Linear, QuantLinear
from billfish.models.decoder import CausalLM, tensor_shapes

GROUP_SIZE = 128


def _llama(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, *, head_dim: int = 128,
    vocab_size: int = 128256, tied: bool = False, theta: float = 500000.0, context: int = 131072,
) -> ModelConfig:  # fmt: skip
    return ModelConfig(
        architecture="llama", vocab_size=vocab_size, hidden_size=hidden, intermediate_size=inner,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rotary_dim=head_dim,
        context_length=context, rms_norm_eps=1e-5, tie_embeddings=tied,
        layers=(LayerConfig(rope=RopeConfig(theta=theta)),) * layers,
    )  # fmt: skip


SHAPES = {
    "tiny": _llama(2, 256, 512, 4, 2, head_dim=64, vocab_size=512, context=1024),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8, head_dim=64, tied=True),
    "llama-3-8b": _llama(32, 4096, 14336, 32, 8),
    "llama-3-70b": _llama(80, 8192, 28672, 64, 8),
}
"""Shapes by name; those of Llama 3 are in arXiv:2407.21783 and the models' own config.json."""


def shape(name: str) -> ModelConfig:
    """ConfigError for a name that is not known."""
    if name not in SHAPES:
        raise ConfigError(f"no random model {shown(name)} (known: {', '.join(SHAPES)})")
    return SHAPES[name]


class RandomWeights:
    """Weights drawn on the device; see `billfish.models.decoder.Weights`.

    int4: linear layers but for the head in INT4, symmetric, in groups of 128 columns; else dense.
    Values are scaled so that activations keep their size from layer to layer.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, *, int4: bool,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self._shapes = tensor_shapes(config)
        self._dtype, self._device, self._int4 = dtype, torch.device(device), int4
        self._rng = torch.Generator(self._device).manual_seed(seed)

    def linear(self, *names: str, gated: bool = False) -> nn.Module:
        shapes = [self._shapes[f"{name}.weight"] for name in names]
        rows, columns = sum(n for n, _ in shapes), shapes[0][1]
        biased = f"{names[0]}.bias" in self._shapes
        bias = self._normal(rows) * 0.02 if biased else None
        if not self._int4 or names[0] == "lm_head":
            return Linear(self._normal(rows, columns) * columns**-0.5, bias)
        codes = torch.randint(
            0, 16, (rows, columns), dtype=torch.uint8, device=self._device, generator=self._rng
        )
        groups = -(-columns // GROUP_SIZE)
        scales = torch.rand(rows, groups, device=self._device, generator=self._rng)
        scales = (scales + 0.5) * (columns**-0.5 / 4.6)  # codes - 8 have a deviation of 4.6
        weight = marlin.pack(
            codes, scales, group_size=GROUP_SIZE, dtype=self._dtype,
            silu_mul=gated and self._device.type == "cuda",
        )  # fmt: skip
        return QuantLinear(weight, bias)

    def tensor(self, name: str) -> Tensor:
        return self._normal(*self._shapes[name])

    def norm(self, name: str) -> Tensor:
        return self._normal(*self._shapes[name]) * 0.1 + 1.0

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, dtype=self._dtype, device=self._device, generator=self._rng)


def load_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, max_len: int,
    int4: bool, seed: int = 0,
) -> CausalLM:  # fmt: skip
    """A model of this shape, on the device."""
    model = CausalLM(config, RandomWeights(config, dtype, device, int4=int4, seed=seed), max_len)
    return model.to(device)
