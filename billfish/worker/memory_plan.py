"""What the memory of a GPU will hold: said before anything is loaded, measured afterwards."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, prod

import torch

from billfish.config import CacheConfig, ModelConfig, SchedulerConfig
from billfish.errors import CapacityError
from billfish.models.decoder import tensor_shapes
from billfish.worker.kv_cache import block_bytes
from billfish.worker.memory import GIB, gib
from billfish.worker.step_graphs import ladder, mixed_ladder

INT4_BYTES = 4.25 / 8
"""A weight in groups of 128 with a 16-bit scale each."""
_GRAPH_BYTES = 8 << 20
"""What the driver takes for a captured graph of some hundred launches, generously."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes, on one GPU.

    total: of the GPU. available: not in use by anybody. share: of the total that may be used.
    weights, activations, graphs: estimated, or measured where `measured` says so. block_bytes: of
    one KV block; num_blocks: how many fit, or were asked for. block_size, max_model_len: for the
    reader. step_bytes: estimates activations and graphs together for another
    (max_num_batched_tokens, max_num_seqs).
    """

    device: str
    total: int
    available: int
    share: float
    weights: int
    activations: int
    graphs: int
    block_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    step_bytes: Callable[[int, int], int] = field(repr=False, compare=False)
    measured: bool = False

    @property
    def budget(self) -> int:
        """Bytes that may be used in all, by the weights too."""
        return min(int(self.total * self.share), self.available)

    @property
    def room(self) -> int:
        """Blocks that fit beside the rest; one more is the null block."""
        left = self.budget - self.weights - self.activations - self.graphs
        return max(0, left // self.block_bytes - 1)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the cache holds."""
        return self.num_blocks * self.block_size

    def with_blocks(self, asked: int | None) -> "MemoryPlan":
        """The plan with as many blocks as fit, or as were asked for.

        CapacityError, with numbers and settings that would fit, where that is not to be had.
        """
        count = min(self.room, 2**31 - 2) if asked is None else asked
        least = 1 if asked is None else asked
        if self.room < least:
            raise CapacityError(self._too_small(least))
        return replace(self, num_blocks=count)

    def _too_small(self, wanted: int) -> str:
        wanted_bytes = (wanted + 1) * self.block_bytes
        needs = self.weights + self.activations + self.graphs + wanted_bytes
        text = (
            f"{self.device} has {gib(self.available)} available of {gib(self.total)}, "
            f"{gib(self.budget)} may be used, and this takes {gib(needs)}: weights "
            f"{gib(self.weights)}, activations {gib(self.activations)}, graphs "
            f"{gib(self.graphs)}, {wanted} KV blocks {gib(wanted_bytes)}. "
        )
        if self.room >= 1:
            memory = (self.room + 1) * self.block_bytes * 100 // GIB / 100
            return text + (
                f"num_blocks of at most {self.room}, or {memory:.2f} GiB of KV cache, would fit"
            )
        if smaller := self._smaller(self.budget - self.weights - wanted_bytes):
            tokens, seqs = smaller
            return text + f"max_num_batched_tokens={tokens} and max_num_seqs={seqs} would fit"
        share = ceil(102 * needs / self.total) / 100
        if share <= 0.98 and needs < self.available:
            return text + f"gpu_memory={share:.2f} would fit"
        return text + "a smaller model, or one with INT4 weights, is needed on this GPU"

    def ran_out(self, error: Exception) -> CapacityError:
        """What to raise where the GPU did not give what was planned; error: what torch says."""
        said = " ".join(". ".join(str(error).split(". ")[:2]).split())
        return CapacityError(
            f"{self.device} ran out of memory while the model was brought up, which was planned as "
            f"weights {gib(self.weights)}, activations {gib(self.activations)}, graphs "
            f"{gib(self.graphs)} and {self.num_blocks} KV blocks of {gib(self.block_bytes)} in "
            f"{gib(self.budget)} ({said}): perhaps others use this GPU too; a lower gpu_memory or "
            f"num_blocks leaves them more, a max_num_batched_tokens of "
            f"{max(1, self.max_num_batched_tokens // 2)} takes less"
        )

    def _smaller(self, spare: int) -> tuple[int, int] | None:
        """max_num_batched_tokens and max_num_seqs whose steps fit in so many bytes."""
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        # Where more was measured than estimated, that holds for smaller steps too.
        more = max(1.0, (self.activations + self.graphs) / self.step_bytes(tokens, seqs))
        while tokens >= 32:
            tokens, seqs = tokens // 2, max(1, seqs // 2)
            if self.step_bytes(tokens, seqs) * more <= spare:
                return tokens, seqs
        return None

    def __str__(self) -> str:
        kind = "measured" if self.measured else "estimated"
        lengths = [n for n in (1024, 8192, 32768, 131072) if n < self.max_model_len]
        fits = ", ".join(
            f"{min(self.num_tokens // n, self.max_num_seqs)} x {n}"
            for n in [*lengths, self.max_model_len]
            if self.num_tokens >= n
        )
        return (
            f"memory of {self.device}, {gib(self.total)} ({gib(self.budget)} to be used):\n"
            f"  weights      {gib(self.weights):>10}  {kind}\n"
            f"  activations  {gib(self.activations):>10}  {kind}, {self.max_num_batched_tokens} "
            f"tokens a step\n"
            f"  graphs       {gib(self.graphs):>10}  {kind}\n"
            f"  KV cache     {gib((1 + self.num_blocks) * self.block_bytes):>10}  "
            f"{self.num_blocks} blocks of {self.block_size} tokens: {self.num_tokens} tokens\n"
            f"  requests x tokens that fit at once: {fits or 'none of full length'}"
        )


def estimate(
    config: ModelConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    int4: bool,
    max_model_len: int,
) -> MemoryPlan:
    """The plan of a GPU before anything is on it, and before blocks are chosen."""
    available, total = torch.cuda.mem_get_info(device)
    parts = partial(_step_parts, config, dtype, cache.block_size, max_model_len)
    activations, graphs = parts(scheduler.budget, scheduler.seats)
    return MemoryPlan(
        device=f"{torch.cuda.get_device_name(device)} ({device})",
        total=total,
        available=available,
        share=cache.gpu_memory,
        weights=estimate_weights(config, dtype, int4=int4),
        activations=activations,
        graphs=graphs,
        block_bytes=block_bytes(config, cache.block_size, dtype),
        block_size=cache.block_size,
        num_blocks=0,
        max_model_len=max_model_len,
        max_num_seqs=scheduler.seats,
        max_num_batched_tokens=scheduler.budget,
        step_bytes=lambda tokens, seqs: sum(parts(tokens, seqs)),
    )


def _step_parts(
    config: ModelConfig, dtype: torch.dtype, block_size: int, max_model_len: int, tokens: int,
    seqs: int,
) -> tuple[int, int]:  # fmt: skip
    """Bytes of activations, tables among them, and of graphs, for steps of that size."""
    activations = estimate_activations(config, dtype, tokens, seqs)
    tables = estimate_tables(block_size, max_model_len, seqs)
    return activations + tables, estimate_graphs(config, tokens, seqs)


def estimate_weights(config: ModelConfig, dtype: torch.dtype, *, int4: bool) -> int:
    """Bytes of all weights; with int4, of linear layers but for the head in INT4."""
    size = 0.0
    for name, shape in tensor_shapes(config).items():
        packed = int4 and "proj" in name and len(shape) == 2
        size += prod(shape) * (INT4_BYTES if packed else dtype.itemsize)
    return int(size)


def estimate_activations(
    config: ModelConfig, dtype: torch.dtype, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """Bytes of the largest step besides weights and KV: of its widest layer, and of sampling."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    widest = max(3 * config.intermediate_size, heads) + 4 * config.hidden_size
    # Logits, in 16 and in 32 bits, and float64 probabilities.
    sampling = max_num_seqs * config.vocab_size * (dtype.itemsize + 4 + 8)
    return max_num_batched_tokens * widest * dtype.itemsize + sampling


def estimate_tables(block_size: int, max_model_len: int, max_num_seqs: int) -> int:
    """Bytes of the token ids of all sequences, their block tables, and those of a step."""
    return 4 * max_num_seqs * (max_model_len + 2 * -(-max_model_len // block_size))


def estimate_graphs(config: ModelConfig, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Bytes of all graphs: the result of each, activations of the largest, the driver's."""
    sizes, mixed = ladder(max_num_seqs), mixed_ladder(max_num_batched_tokens)
    width = 3 * config.intermediate_size + 8 * config.hidden_size
    results = sum(sizes) * config.vocab_size * 4 + sum(mixed) * config.hidden_size * 2
    largest = max(sizes[-1], mixed[-1]) * width * 2
    return results + largest + (len(sizes) + len(mixed)) * _GRAPH_BYTES
