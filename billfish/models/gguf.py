"""A model built from a GGUF file: its configuration, its weights, their names and row order."""

from collections.abc import Iterable

import torch
from torch import Tensor

from billfish.checkpoint.ggml import GGMLType
from billfish.checkpoint.gguf import GGUFFile
from billfish.config import ModelConfig
from billfish.errors import CheckpointError, shown
from billfish.kernels import cpu_native
from billfish.layers.linear import Linear
from billfish.models.architecture import Architecture
from billfish.models.decoder import CausalLM, tensor_shapes
from billfish.models.gguf_config import ROPE_TENSORS
from billfish.models.registry import ARCHITECTURES
from billfish.models.weights import LoadOptions, WeightSource
from billfish.quantization import gguf as gguf_types
from billfish.quantization.gguf import Int4Groups

# Hugging Face's name of a part of a layer to GGUF's.
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Where there are norms behind the sub-layers, one name means another place.
_POST_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def architecture_of(file: GGUFFile) -> Architecture:
    """Raises CheckpointError for one that is not supported."""
    name = file.metadata.text("general.architecture")
    known = {a.gguf: a for a in ARCHITECTURES if a.gguf is not None}
    if name not in known:
        raise CheckpointError(
            file.path,
            f"architecture {shown(name)} is not supported (supported: {', '.join(known)})",
        )
    return known[name]


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's shape from the metadata. Raises CheckpointError for what is not supported."""
    read = architecture_of(file).from_gguf
    assert read is not None
    return read(file)


def has_int4(file: GGUFFile) -> bool:
    """Whether most weights are INT4."""
    infos = file.tensors.values()
    int4 = sum(info.nbytes for info in infos if info.type in gguf_types.INT4_TYPES)
    return 2 * int4 > sum(info.nbytes for info in infos)


def load_model(
    file: GGUFFile, config: ModelConfig, *, max_len: int, options: LoadOptions
) -> tuple[CausalLM, "GGUFWeights"]:
    """Builds the model, INT4 tensors kept in INT4 and all others converted to the dtype asked for.

    max_len: longest sequence, in tokens, that positions are prepared for. Raises CheckpointError,
    before anything is loaded, for a missing, unknown or misshapen tensor.
    """
    weights = GGUFWeights(file, config, options)
    weights.check(tensor_shapes(config))
    model = CausalLM(config, weights, max_len)
    if isinstance(model.lm_head, Linear):
        model.lm_head.q8_0 = weights.head_in_q8_0()
    return model, weights


class GGUFWeights(WeightSource):
    """The weights of a GGUF file."""

    def __init__(self, file: GGUFFile, config: ModelConfig, options: LoadOptions) -> None:
        super().__init__(file.path, options, len(file.tensors.keys() - set(ROPE_TENSORS)))
        self._file, self._config = file, config
        self._interleaved = architecture_of(file).interleaved
        self._layer_names = _LAYER_NAMES | (_POST_NORM_NAMES if config.post_norms else {})

    def stored_name(self, name: str) -> str:
        """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
        module, _, kind = name.rpartition(".")
        if module in _TOP_NAMES:
            return f"{_TOP_NAMES[module]}.{kind}"
        _, _, index, part = module.split(".", 3)
        return f"blk.{index}.{self._layer_names[part]}.{kind}"

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Compares the tensor table with what the architecture has."""
        table = self._file.tensors
        expected = {self.stored_name(name): shape for name, shape in shapes.items()}
        for name, shape in expected.items():
            if name not in table:
                raise CheckpointError(self.path, "is missing", tensor=name)
            if table[name].shape != shape:
                reason = f"has shape {list(table[name].shape)}, expected {list(shape)}"
                raise CheckpointError(self.path, reason, tensor=name)
            if table[name].type not in gguf_types.SUPPORTED_TYPES:
                reason = f"type {table[name].type.name} is not supported"
                raise CheckpointError(self.path, reason, tensor=name)
        self._refuse(table.keys() - expected.keys() - set(ROPE_TENSORS))

    def _refuse(self, unknown: Iterable[str]) -> None:
        for name in sorted(unknown):
            reason = f"is not part of a {self._config.architecture} model"
            raise CheckpointError(self.path, reason, tensor=name)

    def dense(self, name: str) -> Tensor:
        info = self._file.tensors[self.stored_name(name)]
        tensor = gguf_types.dequantize(self._file.data(info.name), info.type, info.shape)
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(self.path, "holds values not finite", tensor=info.name)
        rows = self._row_order(name)
        return tensor if rows is None else tensor[rows]

    def int4_groups(self, name: str) -> Int4Groups | None:
        info = self._file.tensors[self.stored_name(f"{name}.weight")]
        if info.type not in gguf_types.INT4_TYPES:
            return None
        with self._naming(name):
            groups = gguf_types.int4_groups(self._file.data(info.name), info.type, info.shape)
        self._done(f"{name}.weight")
        rows = self._row_order(f"{name}.weight")
        if rows is None:
            return groups
        zeros, offsets = (None if t is None else t[rows] for t in (groups.zeros, groups.offsets))
        codes, scales = groups.codes[rows], groups.scales[rows]
        return Int4Groups(codes, scales, zeros, offsets, groups.group_size)

    def head_in_q8_0(self) -> Tensor | None:
        """The bytes of the head, where the file has it in Q8_0 and decoding steps may read that."""
        name = "model.embed_tokens" if self._config.tie_embeddings else "lm_head"
        info = self._file.tensors[self.stored_name(f"{name}.weight")]
        readable = self.device.type == "cpu" and self.dtype == torch.bfloat16
        if info.type != GGMLType.Q8_0 or not readable or cpu_native.why_not() is not None:
            return None
        # A copy: a file that is cut short while it is mapped would end the process.
        return torch.from_numpy(self._file.data(info.name).copy())

    def release(self, name: str) -> None:
        self._file.release(self.stored_name(name))

    def has_bias(self, name: str) -> bool:
        return self.stored_name(f"{name}.bias") in self._file.tensors

    def _row_order(self, name: str) -> Tensor | None:
        """Where to find each row of a projection that GGUF stores in another order, else None.

        llama.cpp's converter interleaves the two halves of every query and key head, because its
        rotary embedding turns neighbouring dimensions; ours turns halves, as Hugging Face's does.
        """
        heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}
        part = name.split(".")[-2]
        if not self._interleaved or part not in heads:
            return None
        rows = torch.arange(heads[part] * self._config.head_dim)
        return rows.view(heads[part], self._config.head_dim // 2, 2).transpose(1, 2).flatten()
