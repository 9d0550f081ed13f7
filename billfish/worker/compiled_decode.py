"""Decoding steps of few requests as one compiled function, where numba and the model allow it."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from billfish.kernels import cpu_native
from billfish.kernels.cpu_native.threads import shared
from billfish.kernels.paged_attention import AttentionMetadata
from billfish.layers.linear import Linear, QuantLinear
from billfish.models.decoder import CausalLM

logger = logging.getLogger(__name__)

SECONDS_IN_SILENCE = 3.0  # reading what was compiled before takes less
COMPILING = "compiling decoding steps for this machine: once, for up to a minute"


def why_not(model: CausalLM, kv_cache: Tensor) -> str | None:
    """What keeps a model from being compiled, in words; None where nothing does."""
    config = model.config
    options = {
        "an activation other than SiLU": config.activation != "silu",
        "norms of query and key": config.qk_norm,
        "norms behind sub-layers": config.post_norms,
        "soft caps": config.attention_soft_cap or config.logit_soft_cap,
        "sliding windows": any(layer.sliding_window for layer in config.layers),
        "layers that differ in rotation": len({layer.rope for layer in config.layers}) > 1,
        "no rotation": config.layers[0].rope is None,
        "heads of odd sizes": config.head_dim % 32 or config.hidden_size % 32,
        "an MLP of an odd size": config.intermediate_size % 32,
        "a cache in another dtype": kv_cache.dtype != torch.bfloat16 or kv_cache.stride(-1) != 1,
    }
    for name, there in options.items():
        if there:
            return name
    for layer in _layers(model):
        attention, mlp = layer.attention, layer.mlp
        for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            if not isinstance(linear, QuantLinear) or linear.weight.layout != "int4pack":
                return "layers that are not INT4 with bfloat16 activations"
            if linear.weight.perm is not None or linear.weight.silu_mul:
                return "columns in another order"
            if linear.batch_invariant:
                return "batch_invariant"
    head = model.lm_head
    if (
        not isinstance(head, Linear)
        or head.bias is not None
        or head.batch_invariant
        or not head.weight.is_contiguous()
    ):
        return "a head that is not dense, without a bias"
    return None


class CompiledDecode:
    """The layers and the head of a model, for steps in which each request has one new token.

    Reads the model's weights and cache where they lie: neither may be replaced. See `of`.
    """

    def __init__(self, model: CausalLM, kv_cache: Tensor, max_model_len: int, step: Any) -> None:
        self.model, self.kv_cache, self._step = model, kv_cache, step
        layers, head = _layers(model), model.lm_head
        assert isinstance(head, Linear)
        self._q8_0 = head.q8_0 is not None
        self._head = head.weight if head.q8_0 is None else head.q8_0
        self._threads = shared(torch.get_num_threads())
        self._table = np.array(
            [_addresses(each, cache) for each, cache in zip(layers, kv_cache, strict=True)],
            dtype=np.int64,
        )
        config, threads, rows = model.config, self._threads.count, step.MAX_ROWS
        strides = [2 * stride for stride in kv_cache.stride()[1:5]]
        self._cos_sin: Tensor = layers[0].attention.attention.cos_sin
        self._scale = np.float32(layers[0].attention.attention.scale)
        self._sizes = np.array(
            [
                config.hidden_size, config.intermediate_size, config.num_heads,
                config.num_kv_heads, config.head_dim, config.rotary_dim, *strides,
                kv_cache.shape[3],
            ],
            dtype=np.int64,
        )  # fmt: skip
        queries = config.num_heads * config.head_dim
        merged = queries + 2 * config.num_kv_heads * config.head_dim
        widest = max(config.hidden_size, config.intermediate_size, queries)
        heads = -(-config.num_heads // config.num_kv_heads // 4) * 4  # taken four at a time

        def floats(*sizes: int) -> np.ndarray:
            *outer, last = sizes
            return np.zeros((*outer, -(-last // 64) * 64 + 16), dtype=np.float32)

        self._shared = (
            floats(rows, merged), floats(rows, queries), floats(rows, 2 * config.intermediate_size),
            floats(rows, config.hidden_size),
        )  # fmt: skip
        self._own = (
            floats(threads, rows, config.hidden_size), floats(threads, rows, widest),
            np.zeros((threads, rows, widest), dtype=np.int16),
            floats(threads, rows, widest // 16), floats(threads, heads, config.head_dim),
            floats(threads, heads, max_model_len), floats(threads, heads, config.head_dim),
        )  # fmt: skip
        self._logits = floats(threads, rows, step.HEAD_ROWS)
        self._sync = np.zeros(16 + step.PHASES * len(self._table), dtype=np.int64)

    @staticmethod
    def of(model: CausalLM, kv_cache: Tensor, max_model_len: int) -> "CompiledDecode | None":
        """None where this machine or this model is of another kind.

        The first one on a machine is compiled, which takes some ten seconds; later ones are read
        from numba's cache.
        """
        reason = cpu_native.why_not() or why_not(model, kv_cache)
        if reason is None:
            begin = time.perf_counter()
            patience = threading.Timer(SECONDS_IN_SILENCE, logger.warning, [COMPILING])
            patience.daemon = True
            patience.start()
            try:
                compiled = CompiledDecode(model, kv_cache, max_model_len, cpu_native.load())
                compiled.warm_up()
            except (ImportError, RuntimeError) as error:  # of numba: no place for its cache
                reason = str(error)
            finally:
                patience.cancel()
            if reason is None:
                logger.info("decoding steps compiled in %.1f s", time.perf_counter() - begin)
                return compiled
        logger.debug("decoding steps are not compiled: %s", reason)
        return None

    def warm_up(self) -> None:
        """Compile, or read what was compiled, on a model without layers: on a machine that has
        other work, threads that wait for each other a hundred times would make the start longer.
        """
        nothing, table = torch.zeros(1, dtype=torch.int64), self._table
        metadata = AttentionMetadata.build([[0]], [1], [1], self.kv_cache.shape[3])
        self._table = table[:0]
        self.logits(self.forward(nothing, nothing, metadata))
        self._table = table

    def takes(self, positions: Tensor, metadata: AttentionMetadata) -> bool:
        """Whether a step is one for `forward`; the model says what is wrong with others."""
        count = len(positions)
        size, block_size = self.kv_cache.shape[2:4]
        if metadata.max_query_len != 1 or not 0 < count <= self._step.MAX_ROWS:
            return False
        longest = self._own[5].shape[2] - 16
        if len(metadata.seq_lens) != count or metadata.max_seq_len > longest:
            return False
        table, lengths = metadata.block_table.numpy(), metadata.seq_lens.numpy()
        if lengths.max() > table.shape[1] * block_size:
            return False
        first_tokens = block_size * np.arange(table.shape[1])
        blocks = table[first_tokens < lengths[:, None]]
        bounds = (
            (lengths, 1, lengths.max() + 1),
            (blocks, 0, size),
            (metadata.slot_mapping.numpy(), 0, size * block_size),
            (positions.numpy(), 0, len(self._cos_sin)),
        )
        return all(low <= values.min() and values.max() < high for values, low, high in bounds)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """As a call of the model, for a step that `takes` approves of and the cache it was made
        for."""
        return self.forward(token_ids, positions, metadata)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Torch uses one thread meanwhile: another of its own would, between its operations, take
        the processor from ours by waiting for work."""
        count = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(count)

    def forward(self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        x = self._rows(self.model.embed(token_ids))
        out = torch.empty((len(token_ids), x.shape[1]), dtype=torch.bfloat16)
        self._sync[:] = 0
        layout = np.ascontiguousarray
        arguments = (
            self._threads.count, self._sync, self._table, self._sizes, self.model.norm.eps,
            self._scale, len(token_ids), len(x),
            x.numpy(), layout(positions.numpy()), self._cos_sin.data_ptr(),
            layout(metadata.slot_mapping.numpy()), layout(metadata.block_table.numpy()),
            layout(metadata.seq_lens.numpy()), *self._shared, *self._own,
            self.model.norm.weight.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        self._threads.run(lambda thread: self._step.layers(thread, *arguments))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """As `CausalLM.logits`."""
        count = len(hidden)
        if count > self._step.MAX_ROWS:  # forks sample a row several times
            return self.model.logits(hidden)
        x = self._rows(hidden)
        if not self._q8_0:
            x = x.view(len(x), -1, 16, 2).transpose(2, 3).reshape(len(x), -1).contiguous()
        size = self.model.config.vocab_size
        out = torch.empty((count, size), dtype=torch.bfloat16)
        self._sync[:] = 0
        arguments = (
            self._sync, self._head.data_ptr(), self._q8_0, size, x.shape[1], count, len(x),
            x.numpy(), self._logits, out.data_ptr(),
        )  # fmt: skip
        self._threads.run(lambda thread: self._step.head(thread, *arguments))
        return out

    def _rows(self, x: Tensor) -> Tensor:
        """In float32, with rows of zeros up to a number that the loops are written for."""
        rows = x.new_zeros((1 << (len(x) - 1).bit_length(), x.shape[1]), dtype=torch.float32)
        rows[: len(x)] = x
        return rows


def _layers(model: CausalLM) -> list[Any]:
    return list(model.layers)


def _addresses(layer: Any, cache: Tensor) -> list[int]:
    """See `billfish.kernels.cpu_native.step`."""
    attention, mlp = layer.attention, layer.mlp
    row = [
        layer.input_layernorm.weight.data_ptr(),
        layer.post_attention_layernorm.weight.data_ptr(),
        cache.data_ptr(),
    ]
    for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
        codes, pairs = linear.weight.tensors
        bias = 0 if linear.bias is None else linear.bias.data_ptr()
        row += [codes.data_ptr(), pairs.data_ptr(), bias, linear.weight.k // len(pairs)]
    return row
