"""A model built from a GGUF file: its configuration, its weights, their names and row order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from billfish.checkpoint.gguf import GGUFFile
from billfish.config import ModelConfig
from billfish.errors import CheckpointError, KernelArgumentError, shown
from billfish.kernels import marlin
from billfish.layers.linear import Linear, MergedLinear, QuantLinear
from billfish.models import llama
from billfish.quantization import gguf as gguf_types
from billfish.quantization.gguf import Int4Groups

Progress = Callable[[int, int], None]
"""Called with (tensors loaded, tensors in all)."""

# Hugging Face's name of a tensor, within its layer or alone, to GGUF's.
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "rope_freqs": "rope_freqs",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a weight: model.layers.3.mlp.up_proj -> blk.3.ffn_up.weight."""
    if name in _TOP_NAMES:
        return f"{_TOP_NAMES[name]}.weight"
    _, _, index, part = name.split(".", 3)
    return f"blk.{index}.{_LAYER_NAMES[part]}.weight"


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's shape from the metadata. Raises CheckpointError for what is not supported."""
    architecture = file.get_str("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            file.path, f"architecture {shown(architecture)} is not supported (supported: llama)"
        )
    if file.get_int("split.count", 0, 2**16, default=1) > 1:
        raise CheckpointError(file.path, "is one part of a split model; join the parts first")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(file.path, "is missing", tensor="token_embd.weight")

    def count(key: str, default: int | None = None) -> int:
        return file.get_int(f"llama.{key}", 1, 2**24, default=default)

    num_layers = count("block_count")
    if num_layers > len(file.tensors):
        raise CheckpointError(
            file.path,
            f"{num_layers} layers cannot be made of {len(file.tensors)} tensors",
            tensor="llama.block_count",
        )
    hidden_size, num_heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", default=max(1, hidden_size // num_heads))
    if count("attention.value_length", default=head_dim) != head_dim:
        raise CheckpointError(file.path, "keys and values of different sizes are not supported")
    rotary_dim = count("rope.dimension_count", default=head_dim)
    if rotary_dim != head_dim:
        raise CheckpointError(
            file.path, f"rotary embedding of {rotary_dim} of {head_dim} dimensions is not supported"
        )
    if file.get_int("llama.expert_count", 0, 2**16, default=0) > 0:
        raise CheckpointError(file.path, "mixture-of-experts models are not supported")
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=file.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden_size,
            intermediate_size=count("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=count("attention.head_count_kv", default=num_heads),
            head_dim=head_dim,
            context_length=count("context_length"),
            rms_norm_eps=file.get_float("llama.attention.layer_norm_rms_epsilon", 0.0, 1.0),
            rope_theta=file.get_float("llama.rope.freq_base", 1.0, 1e12, default=10000.0),
            rope_scaling=_rope_scaling(file),
            rotary_dim=rotary_dim,
            tie_embeddings="output.weight" not in file.tensors,
        )
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(file.path, str(error)) from error


def count_int4_layers(file: GGUFFile) -> int:
    """Linear layers whose weights stay INT4; an embedding is looked up, so it does not."""
    names = (name for name, info in file.tensors.items() if info.type in gguf_types.INT4_TYPES)
    return sum(name != gguf_name("model.embed_tokens") for name in names)


def _rope_scaling(file: GGUFFile) -> float:
    """The factor that positions are divided by. A factor without a type is linear, as llama.cpp
    reads it; files older than the key rope.scaling.factor call it rope.scale_linear."""
    kind = file.get_str("llama.rope.scaling.type", default="linear")
    if kind == "none":
        return 1.0
    if kind == "linear":
        old = file.get_float("llama.rope.scale_linear", 1e-3, 1e6, default=1.0)
        return file.get_float("llama.rope.scaling.factor", 1e-3, 1e6, default=old)
    raise CheckpointError(
        file.path, f"{shown(kind)} is not supported (supported: none, linear)",
        tensor="llama.rope.scaling.type",
    )  # fmt: skip


def load_model(
    file: GGUFFile,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    max_len: int,
    progress: Progress | None = None,
) -> llama.LlamaForCausalLM:
    """Builds the model, INT4 tensors kept in INT4 and all others converted to `dtype`.

    max_len: longest sequence, in tokens, that positions are prepared for. Raises CheckpointError,
    before anything is loaded, for a missing, unknown or misshapen tensor.
    """
    weights = GGUFWeights(file, config, dtype, progress)
    weights.check(llama.tensor_shapes(config))
    return llama.LlamaForCausalLM(config, weights, max_len)


class GGUFWeights:
    """The weights of a GGUF file under Hugging Face names; see `billfish.models.llama.Weights`."""

    def __init__(
        self,
        file: GGUFFile,
        config: ModelConfig,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> None:
        self._file, self._config, self._dtype = file, config, dtype
        self._progress = progress
        self._loaded = 0

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Compares the tensor table with what the architecture has; rope_freqs may be absent."""
        table = self._file.tensors
        expected = {gguf_name(name): shape for name, shape in shapes.items()}
        for name, shape in expected.items():
            if name not in table:
                if name == gguf_name("rope_freqs"):
                    continue
                raise CheckpointError(self._file.path, "is missing", tensor=name)
            if table[name].shape != shape:
                reason = f"has shape {list(table[name].shape)}, expected {list(shape)}"
                raise CheckpointError(self._file.path, reason, tensor=name)
            if table[name].type not in gguf_types.SUPPORTED_TYPES:
                reason = f"type {table[name].type.name} is not supported"
                raise CheckpointError(self._file.path, reason, tensor=name)
        for name in table:
            if name not in expected:
                reason = f"is not part of a {self._config.architecture} model"
                raise CheckpointError(self._file.path, reason, tensor=name)

    def tensor(self, name: str) -> Tensor:
        return self._dequantized(name).to(self._dtype)

    def rope_factors(self) -> Tensor | None:
        name = gguf_name("rope_freqs")
        if name not in self._file.tensors:
            return None
        factors = self._dequantized("rope_freqs")
        if not bool((factors > 0).all()):
            reason = "divides frequencies, so all of it must be above 0"
            raise CheckpointError(self._file.path, reason, tensor=name)
        return factors

    def linear(self, *names: str) -> nn.Module:
        types = {self._file.tensors[gguf_name(name)].type for name in names}
        if types.isdisjoint(gguf_types.INT4_TYPES):
            return Linear(torch.cat([self.tensor(name) for name in names]))
        if len(types) == 1:
            return QuantLinear(self._packed(names))
        # Some files keep a part of a merged layer in more bits than the rest: each stays as it is.
        return MergedLinear([self.linear(name) for name in names])

    def _packed(self, names: tuple[str, ...]) -> marlin.PackedWeight:
        """The INT4 tensors called names, one below the other."""
        parts = [self._int4_groups(name) for name in names]

        def merged(field: str) -> Tensor | None:
            tensors = [getattr(part, field) for part in parts]
            return None if tensors[0] is None else torch.cat(tensors)

        with self._naming(*names):
            weight = marlin.pack(
                torch.cat([part.codes for part in parts]),
                torch.cat([part.scales for part in parts]),
                zeros=merged("zeros"),
                offsets=merged("offsets"),
                group_size=parts[0].group_size,
                dtype=self._dtype,
            )
        self._advance(len(names))
        return weight

    def _int4_groups(self, name: str) -> Int4Groups:
        info = self._file.tensors[gguf_name(name)]
        with self._naming(name):
            groups = gguf_types.int4_groups(self._file.data(info.name), info.type, info.shape)
        rows = self._row_order(name)
        if rows is None:
            return groups
        zeros, offsets = (None if t is None else t[rows] for t in (groups.zeros, groups.offsets))
        codes, scales = groups.codes[rows], groups.scales[rows]
        return Int4Groups(codes, scales, zeros, offsets, groups.group_size)

    @contextmanager
    def _naming(self, *names: str) -> Iterator[None]:
        """Says which tensors hold what cannot be a weight, such as a scale that is no number."""
        try:
            yield
        except KernelArgumentError as error:
            tensors = ", ".join(map(gguf_name, names))
            raise CheckpointError(self._file.path, str(error), tensor=tensors) from error

    def _dequantized(self, name: str) -> Tensor:
        info = self._file.tensors[gguf_name(name)]
        tensor = gguf_types.dequantize(self._file.data(info.name), info.type, info.shape)
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(self._file.path, "holds values not finite", tensor=info.name)
        self._advance(1)
        rows = self._row_order(name)
        return tensor if rows is None else tensor[rows]

    def _row_order(self, name: str) -> Tensor | None:
        """Where to find each row of a projection that GGUF stores in another order, else None.

        llama.cpp's converter interleaves the two halves of every query and key head, because its
        rotary embedding turns neighbouring dimensions; ours turns halves, as Hugging Face's does.
        """
        heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}
        part = name.rsplit(".", 1)[-1]
        if part not in heads:
            return None
        rows = torch.arange(heads[part] * self._config.head_dim)
        return rows.view(heads[part], self._config.head_dim // 2, 2).transpose(1, 2).flatten()

    def _advance(self, count: int) -> None:
        self._loaded += count
        if self._progress:
            self._progress(self._loaded, len(self._file.tensors))
