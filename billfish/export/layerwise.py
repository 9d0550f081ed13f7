"""A model run one layer at a time: texts go through all of it with the weights of one in memory."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from billfish.config import ModelConfig
from billfish.kernels.paged_attention import AttentionMetadata
from billfish.layers.norm import RMSNorm
from billfish.layers.rotary import rotary_table
from billfish.models.decoder import CausalLM, DecoderLayer
from billfish.models.weights import WeightSource
from billfish.quantization.calibrated import Hessian
from billfish.quantization.int4 import Int4Groups

_BLOCK_SIZE = 16
_TOKENS_AT_ONCE = 2048
_LOGITS_AT_ONCE = 128  # rows, each as wide as the vocabulary


class _Reached(Exception):
    """The layer has been run as far as it was to be."""


class CalibratedLinear(nn.Module):
    """A dense layer that can watch its inputs.

    names: of the layers merged in it. rows: how many rows each has. hessian: while it is set, a
    pass adds its inputs to it and ends here.
    """

    def __init__(
        self, names: tuple[str, ...], rows: list[int], weight: Tensor, bias: Tensor | None
    ) -> None:
        super().__init__()
        self.names, self.rows = names, rows
        self.weight, self.bias = weight, bias
        self.hessian: Hessian | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.hessian is not None:
            self.hessian.add(x)
            raise _Reached
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def parts(self, groups: Int4Groups) -> dict[str, Int4Groups]:
        """The INT4 weight of the merged layer as those of the layers it is made of."""
        pieces = zip(
            groups.codes.split(self.rows),
            groups.scales.split(self.rows),
            [None] * len(self.rows) if groups.zeros is None else groups.zeros.split(self.rows),
            strict=True,
        )
        return {
            name: Int4Groups(codes, scales, zeros, None, groups.group_size)
            for name, (codes, scales, zeros) in zip(self.names, pieces, strict=True)
        }


class DenseWeights:
    """The weights of a checkpoint, all as dense ones; see `billfish.models.decoder.Weights`.

    linears: the linear layers made so far, in the order in which a layer of the model runs them.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.linears: list[CalibratedLinear] = []

    def tensor(self, name: str) -> Tensor:
        return self._source.tensor(name)

    def norm(self, name: str) -> Tensor:
        return self._source.norm(name)

    def linear(self, *names: str, gated: bool = False) -> nn.Module:
        source = self._source
        weights, biases = [], []
        for name in names:
            groups = source.int4_groups(name)
            weights.append(
                source.tensor(f"{name}.weight")
                if groups is None
                else groups.dequantize().to(source.device, source.dtype)
            )
            if source.has_bias(name):
                biases.append(source.tensor(f"{name}.bias"))
        rows = [len(weight) for weight in weights]
        linear = CalibratedLinear(
            names, rows, torch.cat(weights), torch.cat(biases) if biases else None
        )
        self.linears.append(linear)
        return linear


@dataclass(frozen=True, slots=True)
class Written:
    """How dense tensors are written. norm_offset: what is added to norms when they are read."""

    dtype: torch.dtype
    norm_offset: float = 0.0

    def rounded(self, values: Tensor, offset: float = 0.0) -> Tensor:
        return (values - offset).to(self.dtype).to(values.dtype) + offset

    def apply(self, module: nn.Module) -> None:
        """Norms, embeddings, heads and biases become what will be read back."""
        for part in module.modules():
            if isinstance(part, CalibratedLinear) and part.bias is not None:
                part.bias = self.rounded(part.bias)
            for name, values in part.named_buffers(recurse=False):
                norm = isinstance(part, RMSNorm) or name in ("q_norm", "k_norm")
                if name != "cos_sin":  # made from the configuration
                    offset = self.norm_offset if norm else 0.0
                    part.register_buffer(name, self.rounded(values, offset))


class LayerRunner:
    """Runs texts of one length through layers that are made one by one.

    Hidden states are [S, L, hidden_size], in the dtype and on the device of the weights.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, length: int) -> None:
        self._config, self._source, self._length = config, source, length
        self._batch = max(1, _TOKENS_AT_ONCE // length)
        blocks = -(-length // _BLOCK_SIZE)
        self._cache = torch.zeros(
            2, self._batch * blocks, _BLOCK_SIZE, config.num_kv_heads, config.head_dim,
            dtype=source.dtype, device=source.device,
        )  # fmt: skip
        self._table = torch.arange(self._batch * blocks).view(self._batch, blocks)

    def embed(self, token_ids: Tensor, written: Written | None = None) -> Tensor:
        """int64 [S, L] -> the hidden states before the first layer, of the model as it will be
        written where that is given."""
        return self._ends(written).embed(token_ids.to(self._source.device))

    def make_layer(self, index: int) -> tuple[DecoderLayer, list[CalibratedLinear]]:
        """A layer of the model with its dense weights, and its linear layers in order."""
        weights = DenseWeights(self._source)
        rope = self._config.layers[index].rope
        cos_sin = None
        if rope is not None:
            table = rotary_table(rope, self._config.rotary_dim, self._length)
            cos_sin = table.to(self._source.device)
        return DecoderLayer(self._config, weights, index, cos_sin), weights.linears

    def run(self, layer: DecoderLayer, hidden: Tensor) -> None:
        """Hidden states before the layer become those after it, in place."""
        for start in range(0, len(hidden), self._batch):
            rows = hidden[start : start + self._batch]
            rows.copy_(self._pass(layer, rows).view_as(rows))

    def watch(self, layer: DecoderLayer, linear: CalibratedLinear, hidden: Tensor) -> Hessian:
        """The Hessian of the inputs that a linear layer of `layer` has."""
        hessian = linear.hessian = Hessian(linear.weight.shape[1], hidden.device)
        for start in range(0, len(hidden), self._batch):
            try:
                self._pass(layer, hidden[start : start + self._batch])
            except _Reached:
                continue
        linear.hessian = None
        return hessian

    def loss(self, hidden: Tensor, token_ids: Tensor, written: Written | None = None) -> float:
        """Mean negative log-likelihood, in nats, of each token after the first of every text."""
        ends = self._ends(written)
        total = 0.0
        for states, ids in zip(hidden, token_ids.to(hidden.device), strict=True):
            states = ends.norm(states[:-1])
            for rows, targets in zip(
                states.split(_LOGITS_AT_ONCE), ids[1:].split(_LOGITS_AT_ONCE), strict=True
            ):
                logits = ends.logits(rows).float()
                total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        return total / (token_ids.shape[0] * (token_ids.shape[1] - 1))

    def _pass(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        number, length, _ = hidden.shape
        metadata = AttentionMetadata.build(
            self._table[:number], torch.full((number,), length), torch.full((number,), length),
            _BLOCK_SIZE, hidden.device,
        )  # fmt: skip
        positions = torch.arange(length, device=hidden.device).repeat(number)
        x, residual = layer(hidden.flatten(0, 1), None, positions, self._cache, metadata)
        return x + residual

    def _ends(self, written: Written | None) -> CausalLM:
        """What is before and behind the layers; read again each time, not kept."""
        ends = CausalLM(self._config, DenseWeights(self._source), self._length, only=())
        if written is not None:
            written.apply(ends)
            for part in ends.modules():
                if isinstance(part, CalibratedLinear):
                    part.weight = written.rounded(part.weight)
        return ends
