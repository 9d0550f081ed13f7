"""What a model is and how it is served: frozen, validated, the same for every layer."""

import math
import re
from dataclasses import dataclass, field, replace
from typing import Literal

from billfish.errors import ConfigError, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How fast each pair of dimensions turns with the position (RoFormer, arXiv:2104.09864).

    Pair i of rotary_dim / 2 turns by theta ** (-2 i / rotary_dim) a token, changed as `scaling`
    says, for sequences longer than those of the first training, original_context tokens long:

    linear: all divided by `factor` (arXiv:2306.15595), and one by one by `short_divisors` where the
        model serves at most original_context tokens, else by `long_divisors` (LongRoPE,
        arXiv:2402.13753); none where these are empty.
    llama3: divided by `factor` where a turn takes more than original_context / low_freq_factor
        tokens, kept where it takes less than original_context / high_freq_factor, and between them
        in between (Llama 3.1, arXiv:2407.21783).
    yarn: kept where original_context tokens make more than beta_fast turns, divided by `factor`
        where they make fewer than beta_slow, between them in between (YaRN, arXiv:2309.00071).
        truncate: these bounds lie at whole dimensions.

    attention_factor: multiplies sines and cosines, and so, squared, the attention logits.
    """

    theta: float
    scaling: Literal["linear", "llama3", "yarn"] = "linear"
    factor: float = 1.0
    original_context: int = 1
    attention_factor: float = 1.0
    short_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("theta", "factor", "attention_factor", "low_freq_factor", "beta_slow"):
            _check_positive(name, getattr(self, name))
        _check_int("original_context", self.original_context, 1, 2**31 - 1)
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if not getattr(self, low) < getattr(self, high) < math.inf:
                raise ConfigError(f"{high} must be more than {low}")
        if self.scaling == "yarn" and self.theta <= 1:
            raise ConfigError("yarn needs a theta above 1")
        for divisor in (*self.short_divisors, *self.long_divisors):
            _check_positive("what divides a frequency", divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """In what the attention of one layer differs from that of another.

    sliding_window: how many tokens a query sees, its own counted; None: all before it. rope: None
    where positions are not encoded (NoPE, arXiv:2305.19466).
    """

    rope: RopeConfig | None
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None:
            _check_int("sliding_window", self.sliding_window, 1, 2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer, as its checkpoint states it.

    context_length: in tokens. layers: one entry a layer.
    qkv_bias, o_bias, mlp_bias: these projections have one. fused: one tensor holds query, key and
    value, and one gate and up. qk_norm: every head of query and key is normalized before it is
    turned. post_norms: what attention and MLP give is normalized before it is added.
    embedding_scale: multiplies the embeddings. attention_scale: of the attention logits; None:
    1 / sqrt(head_dim). attention_soft_cap, logit_soft_cap: logits become cap * tanh(logit / cap).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    context_length: int
    rms_norm_eps: float
    tie_embeddings: bool
    layers: tuple[LayerConfig, ...]
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim", "context_length", "rotary_dim",
        ):  # fmt: skip
            _check_int(name, getattr(self, name), 1, 2**31 - 1)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ConfigError(
                f"rotary_dim ({self.rotary_dim}) must be even and at most head_dim "
                f"({self.head_dim})"
            )
        if self.activation not in ("silu", "gelu_tanh"):
            raise ConfigError(f"activation {shown(self.activation)} is not supported")
        for name in ("embedding_scale", "attention_scale", "attention_soft_cap", "logit_soft_cap"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        for rope in {layer.rope for layer in self.layers if layer.rope is not None}:
            for divisors in (rope.short_divisors, rope.long_divisors):
                if divisors and len(divisors) != self.rotary_dim // 2:
                    raise ConfigError(
                        f"{len(divisors)} divisors for {self.rotary_dim // 2} frequencies"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache.

    block_size: tokens a block holds. num_blocks: blocks in all, the null block not counted; None
    takes what fits in memory_bytes. memory_bytes: None takes 1 GiB on a CPU and, on a GPU, what is
    left of the share gpu_memory of its memory. prefix_caching: keep full blocks after their
    requests have ended, and let requests that begin with the same tokens share them. swap_blocks:
    blocks of host memory, to which requests can be swapped when num_blocks do not suffice.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None
    gpu_memory: float = 0.92
    prefix_caching: bool = True
    swap_blocks: int = 0

    def __post_init__(self) -> None:
        _check_int("block_size", self.block_size, 1, 256)
        if self.num_blocks is not None:
            _check_int("num_blocks", self.num_blocks, 1, 2**31 - 2)
        if self.memory_bytes is not None:
            _check_int("memory_bytes", self.memory_bytes, 1, 2**63 - 1)
        _check_positive("gpu_memory", self.gpu_memory)
        if self.gpu_memory > 1:
            raise ConfigError(f"gpu_memory must be a share up to 1, got {shown(self.gpu_memory)}")
        if not isinstance(self.prefix_caching, bool):
            raise ConfigError(f"prefix_caching must be a bool, got {shown(self.prefix_caching)}")
        _check_int("swap_blocks", self.swap_blocks, 0, 2**31 - 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What one step may do and how much may wait.

    max_num_batched_tokens: token budget of a step; None: 512 on a CPU, 8192 on a GPU. max_num_seqs:
    most requests running at once; None: 64 on a CPU, 256 on a GPU.
    max_model_len: longest sequence (prompt and output) in tokens; None takes the model's context.
    max_waiting: most requests queued, each sample counted; one more is refused.

    reserve_tokens: set aside room for so many tokens for each request when it starts, as a cache
    that keeps the KV of a request in one piece must do for the longest; to see what blocks are
    worth. None takes blocks as they are needed. equal_chunks: a prompt is cut into pieces of
    max_num_batched_tokens less max_num_seqs, whatever else a step computes; else it takes what the
    others leave.

    preemption: what happens to a request that has to give its blocks to an older one. "recompute":
    they are lost, and its tokens are computed again when there is room. "swap": they are copied to
    host memory and back, as long as there are free `swap_blocks`. "auto": whichever costs less.
    swap_cost: what "auto" takes swapping a token to cost, in units of computing one: its KV bytes
    there and back over the bytes per second of the path, times the tokens per second of prefill.
    For Llama-3-8B with 128 KiB a token, 50 GB/s and 35,000 tokens/s it is 0.18. None: 0.2 on a GPU;
    on a CPU there is no memory apart from that of the KV cache, and "auto" always recomputes.
    """

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_waiting: int = 100_000
    reserve_tokens: int | None = None
    equal_chunks: bool = False
    preemption: Literal["auto", "recompute", "swap"] = "auto"
    swap_cost: float | None = None

    def __post_init__(self) -> None:
        _check_int("max_num_batched_tokens", self.budget, 1, 2**20)
        _check_int("max_num_seqs", self.seats, 1, 2**16)
        _check_int("max_waiting", self.max_waiting, 1, 2**31 - 1)
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 1, 2**31 - 1)
        if not isinstance(self.equal_chunks, bool):
            raise ConfigError(f"equal_chunks must be a bool, got {shown(self.equal_chunks)}")
        if self.equal_chunks and self.budget <= self.seats:
            raise ConfigError(
                f"equal_chunks need a max_num_batched_tokens ({self.budget}) above max_num_seqs "
                f"({self.seats})"
            )
        if self.reserve_tokens is not None:
            _check_int("reserve_tokens", self.reserve_tokens, 1, 2**31 - 1)
        if self.preemption not in ("auto", "recompute", "swap"):
            raise ConfigError(
                f'preemption must be "auto", "recompute" or "swap", got {shown(self.preemption)}'
            )
        if self.swap_cost is not None:
            _check_cost("swap_cost", self.swap_cost)

    @property
    def budget(self) -> int:
        """max_num_batched_tokens, that of a CPU where it is None."""
        return 512 if self.max_num_batched_tokens is None else self.max_num_batched_tokens

    @property
    def seats(self) -> int:
        """max_num_seqs, that of a CPU where it is None."""
        return 64 if self.max_num_seqs is None else self.max_num_seqs

    def on_gpu(self) -> "SchedulerConfig":
        """With what a GPU wants where nothing is said."""
        budget, seats, cost = self.max_num_batched_tokens, self.max_num_seqs, self.swap_cost
        return replace(
            self,
            max_num_batched_tokens=8192 if budget is None else budget,
            max_num_seqs=256 if seats is None else seats,
            swap_cost=0.2 if cost is None else cost,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that `LLM` needs. `dtype` is that of activations and KV: float32, bfloat16 or float16.

    device: "auto" takes a GPU where one can be used; "cpu"; "cuda", or "cuda:1" for the second one.
    head: "int8" or "int4" rounds the head of the model, where it is dense, to be read faster;
    docs/gpu_engine.md says what that costs.
    batch_invariant: what a request gets does not depend, to the last bit, on the requests beside it
    in a step; it costs speed. quantize: "int4" rounds linear layers to it while they are loaded.
    """

    model: str
    dtype: str = "bfloat16"
    device: str = "auto"
    batch_invariant: bool = False
    head: str | None = None
    quantize: str | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(
                f"dtype must be float32, bfloat16 or float16, got {shown(self.dtype)}"
            )
        if not isinstance(self.device, str) or not re.fullmatch(
            r"auto|cpu|cuda(:\d{1,3})?", self.device
        ):
            raise ConfigError(
                f'device must be "auto", "cpu", "cuda" or "cuda:0", got {shown(self.device)}'
            )
        if self.head not in (None, "int8", "int4"):
            raise ConfigError(f'head must be "int8", "int4" or None, got {shown(self.head)}')
        if not isinstance(self.batch_invariant, bool):
            raise ConfigError(f"batch_invariant must be a bool, got {shown(self.batch_invariant)}")
        if self.quantize not in (None, "int4"):
            raise ConfigError(f'quantize must be None or "int4", got {shown(self.quantize)}')
        if not isinstance(self.cache, CacheConfig):
            raise ConfigError(f"cache must be a CacheConfig, got {shown(self.cache)}")
        if not isinstance(self.scheduler, SchedulerConfig):
            raise ConfigError(f"scheduler must be a SchedulerConfig, got {shown(self.scheduler)}")
        check_swap(self.scheduler, self.cache.swap_blocks)

    def invariant(self) -> "EngineConfig":
        """With all that batch_invariant takes: prompts cut alike, and computed as a whole, since
        what is found is computed in other pieces. Only preemption by recomputing is left to change
        bits; give swap_blocks."""
        return replace(
            self,
            scheduler=replace(self.scheduler, equal_chunks=True),
            cache=replace(self.cache, prefix_caching=False),
        )


def check_swap(scheduler: SchedulerConfig, swap_blocks: int) -> None:
    """ConfigError for requests that are to be swapped to nowhere."""
    if scheduler.preemption == "swap" and swap_blocks == 0:
        raise ConfigError('preemption is "swap" but swap_blocks is 0: give blocks of host memory')


def _check_cost(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a number, got {shown(value)}")
    if not 0 <= value < math.inf:  # NaN fails both comparisons
        raise ConfigError(f"{name} must be a number from 0 up, got {shown(value)}")


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a finite number above 0, got {shown(value)}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} must be an integer, got {shown(value)}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be between {low} and {high}, got {shown(value)}")
