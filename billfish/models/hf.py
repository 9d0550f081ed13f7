"""A model built from a Hugging Face directory: its configuration, its weights and their names."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from billfish.checkpoint.directory import ModelDirectory
from billfish.config import ModelConfig
from billfish.errors import CheckpointError, KernelArgumentError, shown
from billfish.models.architecture import Architecture
from billfish.models.decoder import CausalLM, tensor_shapes
from billfish.models.registry import ARCHITECTURES
from billfish.models.weights import LoadOptions, WeightSource
from billfish.quantization.formats import Format, Scheme, read_format
from billfish.quantization.int4 import Int4Groups

_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_FLOATS = ("F32", "F16", "BF16")
# Tables of frequencies that old checkpoints carry; ours are made from the configuration.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


def architecture_of(directory: ModelDirectory) -> Architecture:
    """By config.json's `architectures`, or by its model_type where that is missing."""
    config = directory.config
    by_class = {name: a for a in ARCHITECTURES for name in a.classes}
    if config.get("architectures") is None:
        by_type = {a.model_type: a for a in ARCHITECTURES}
        return _found(config.text("model_type"), by_type, config.path, "model_type")
    return _found(config.strings("architectures")[0], by_class, config.path, "architectures")


def _found(name: str, known: Mapping[str, Architecture], path: str, key: str) -> Architecture:
    if name not in known:
        reason = f"{shown(name)} is not supported (supported: {', '.join(known)})"
        raise CheckpointError(path, reason, tensor=key)
    return known[name]


def read_config(directory: ModelDirectory) -> ModelConfig:
    """The model's shape from config.json. Raises CheckpointError for what is not supported."""
    config = architecture_of(directory).from_hf(directory.config)
    if config.num_layers > len(directory.tensors):
        reason = f"{config.num_layers} layers cannot be made of {len(directory.tensors)} tensors"
        raise CheckpointError(directory.config.path, reason, tensor="num_hidden_layers")
    return config


def quantization_of(directory: ModelDirectory) -> Format | None:
    """The INT4 format of the directory, None if it is dense.

    It stands in config.json, or in a file that older checkpoints have beside it. Raises
    CheckpointError for a format that is not supported.
    """
    section = directory.config.get("quantization_config")
    if section is not None:
        return read_format(section, directory.config.path)
    for name in ("quantize_config.json", "quant_config.json"):
        settings = directory.json(name)
        if settings is not None:
            return read_format(dict(settings), settings.path)
    return None


def load_model(
    directory: ModelDirectory, config: ModelConfig, *, max_len: int, options: LoadOptions
) -> tuple[CausalLM, "HFWeights"]:
    """Builds the model, INT4 layers kept in INT4 and all others converted to the dtype asked for.

    max_len: longest sequence, in tokens, that positions are prepared for. Raises CheckpointError,
    before anything is loaded, for a missing, unknown or misshapen tensor.
    """
    weights = HFWeights(directory, config, options)
    return CausalLM(config, weights, max_len), weights


class HFWeights(WeightSource):
    """The weights of a directory; its tensors are held against the configuration at once."""

    def __init__(
        self, directory: ModelDirectory, config: ModelConfig, options: LoadOptions
    ) -> None:
        self._directory, self._config = directory, config
        architecture = architecture_of(directory)
        self._zero_centred = architecture.zero_centred_norms
        self._stored = _names_here(directory, architecture)
        self._schemes: dict[str, Scheme] = {}
        self._shapes = tensor_shapes(config)
        super().__init__(str(directory.path), options, self._check(quantization_of(directory)))

    def stored_name(self, name: str) -> str:
        return self._stored.get(name, name)

    def dense(self, name: str) -> Tensor:
        tensor = self._view(name)
        low, high = tensor.aminmax() if tensor.numel() else (torch.zeros(()),) * 2
        if not bool((low.isfinite() & high.isfinite()).all()):
            self._fail(name, "holds values not finite")
        return tensor

    def tensor(self, name: str) -> Tensor:
        # A copy in any case: the memory of the file is given back, and files can change.
        values = self.dense(name).to(self.device, self.dtype, copy=True)
        self._done(name)
        return values

    def norm(self, name: str) -> Tensor:
        if not self._zero_centred:
            return self.tensor(name)
        values = (1.0 + self.dense(name).float()).to(self.device, self.dtype)
        self._done(name)
        return values

    def int4_groups(self, name: str) -> Int4Groups | None:
        scheme = self._schemes.get(name)
        if scheme is None:
            return None
        n, k = self._shapes[f"{name}.weight"]
        specs = scheme.tensors(n, k)
        present = [part for part in specs if f"{name}.{part}" in self._stored]
        read = [part for part in present if specs[part].shape is not None]
        parts = {part: self._view(f"{name}.{part}") for part in read}
        with self._naming(name):
            groups = scheme.int4_groups(parts, n, k)
        for part in present:
            self._done(f"{name}.{part}")
        return groups

    def has_bias(self, name: str) -> bool:
        return f"{name}.bias" in self._stored

    def release(self, name: str) -> None:
        self._directory.release(self._stored[name])

    def _check(self, format: Format | None) -> int:
        """Holds the tensors against the configuration; returns how many will be loaded."""
        expected: set[str] = set()
        for name, shape in self._shapes.items():
            layer, _, kind = name.rpartition(".")
            linear = kind == "weight" and len(shape) == 2 and layer != "model.embed_tokens"
            scheme = format.scheme(layer) if format is not None and linear else None
            if scheme is None:
                self._check_tensor(name, shape, _FLOATS)
                expected.add(name)
            else:
                self._schemes[layer] = scheme
                expected |= self._check_quantized(layer, scheme, *shape)
        for name, stored in self._stored.items():
            ignored = name.endswith(_IGNORED_SUFFIX) or (
                name == "lm_head.weight" and self._config.tie_embeddings
            )
            if name not in expected and not ignored:
                reason = f"is not part of a {self._config.architecture} model"
                raise CheckpointError(self._directory.file_of(stored), reason, tensor=stored)
        return len(expected)

    def _check_quantized(self, layer: str, scheme: Scheme, n: int, k: int) -> set[str]:
        try:
            specs = scheme.tensors(n, k)
        except KernelArgumentError as error:
            raise CheckpointError(
                self._directory.config.path, str(error), tensor=self.stored_name(layer)
            ) from error
        expected = set()
        for part, spec in specs.items():
            name = f"{layer}.{part}"
            if name in self._stored or spec.required:
                self._check_tensor(name, spec.shape, sorted(spec.dtypes))
                expected.add(name)
        # Some quantizers write a bias of zeros for every layer.
        if f"{layer}.bias" in self._stored:
            self._check_tensor(f"{layer}.bias", (n,), _FLOATS)
            expected.add(f"{layer}.bias")
        return expected

    def _check_tensor(self, name: str, shape: tuple[int, ...] | None, dtypes: Any) -> None:
        if name not in self._stored:
            raise CheckpointError(str(self._directory.path), "is missing", tensor=name)
        info = self._directory.tensors[self._stored[name]]
        if shape is not None and info.shape != shape:
            self._fail(name, f"has shape {list(info.shape)}, expected {list(shape)}")
        if info.dtype not in dtypes:
            self._fail(
                name, f"dtype {info.dtype} is not supported (supported: {', '.join(dtypes)})"
            )

    def _view(self, name: str) -> Tensor:
        """The tensor as it stands in the file, sharing its memory, which cannot be written."""
        stored = self._stored[name]
        info = self._directory.tensors[stored]
        data = self._directory.data(stored)
        if info.offset % (_DTYPES[info.dtype].itemsize or 1):
            data = data.copy()  # a file may place it at an odd address
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
            tensor = torch.from_numpy(data)
        return tensor.view(_DTYPES[info.dtype]).view(info.shape)

    def _fail(self, name: str, reason: str) -> None:
        stored = self._stored[name]
        raise CheckpointError(self._directory.file_of(stored), reason, tensor=stored)


def _names_here(directory: ModelDirectory, architecture: Architecture) -> dict[str, str]:
    """The name in the files of each tensor, by its name here."""
    names: dict[str, str] = {}
    for stored in directory.tensors:
        if stored.startswith(architecture.others):
            continue
        name = stored
        for there, here in architecture.renamed:
            if stored.startswith(there):
                name = here + stored.removeprefix(there)
                break
        names[name] = stored
    return names
