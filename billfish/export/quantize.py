"""`billfish quantize`: a model written out in INT4, as compressed-tensors, one layer at a time."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from billfish.errors import CheckpointError, ConfigError, KernelArgumentError, shown
from billfish.export.directory import DirectoryWriter, check_target
from billfish.export.layerwise import CalibratedLinear, LayerRunner, Written
from billfish.export.source import Source, open_source
from billfish.export.texts import Texts, read_texts, sequences
from billfish.models.decoder import DecoderLayer
from billfish.models.weights import LoadOptions
from billfish.quantization.calibrated import GROUP_SIZES, quantize_matrix, round_to_grid
from billfish.quantization.compressed_tensors import settings_of, tensors_of
from billfish.quantization.int4 import Int4Groups

METHODS = ("gptq", "rtn")
_DTYPES = ("float32", "bfloat16", "float16")
_HEAD = "lm_head"

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, layers done, layers in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """How a model is quantized.

    method: "gptq" or "rtn", round to nearest. group_size: columns that share a scale: 16, 32, 64,
    128, or -1 for all of a row; a layer whose columns it does not divide gets the largest smaller
    one that does. symmetric: without zero points. act_order, damping: see `quantize_matrix`.

    calibration, held: files of text, UTF-8; see `read_texts` for what is taken without.
    num_sequences, num_held: pieces of sequence_length tokens of each that are used at most.

    dtype: of the scales and of all that is not INT4, as written; None: as in the checkpoint, or
    bfloat16 for GGUF. device: where the work is done, in float32. requantize: take layers that are
    INT4 already for dense ones.
    """

    method: str = "gptq"
    group_size: int = 128
    symmetric: bool = True
    act_order: bool = True
    damping: float = 0.01
    calibration: Path | None = None
    held: Path | None = None
    num_sequences: int = 32
    num_held: int = 16
    sequence_length: int = 512
    dtype: str | None = None
    device: str = "cpu"
    requantize: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method must be gptq or rtn, got {shown(self.method)}")
        if self.group_size not in GROUP_SIZES:
            raise ConfigError(
                f"group_size must be one of {GROUP_SIZES}, got {shown(self.group_size)}"
            )
        if type(self.damping) not in (int, float) or not 0 < self.damping < 1:
            raise ConfigError(f"damping must be between 0 and 1, got {shown(self.damping)}")
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ConfigError(f"dtype must be one of {_DTYPES}, got {shown(self.dtype)}")
        _check_device(self.device)
        for name, low in (("num_sequences", 1), ("num_held", 1), ("sequence_length", 16)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= 1 << 20:
                raise ConfigError(f"{name} must be an integer from {low} up, got {shown(value)}")


def _check_device(device: object) -> None:
    found = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", device) if isinstance(device, str) else None
    if found is None:
        raise ConfigError(f'device must be "cpu", "cuda" or "cuda:0", got {shown(device)}')
    if device != "cpu" and int(found[1] or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {device} is not there: {torch.cuda.device_count()} GPUs found")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport:
    """What was done. perplexity_before, perplexity_after: of the held text. errors: of each layer,
    the norm of the difference of its weights over their norm. tokens: used for calibration."""

    perplexity_before: float
    perplexity_after: float
    calibration_text: str
    held_text: str
    tokens: int
    held_tokens: int
    nbytes: int
    num_layers: int
    errors: dict[str, float]


def quantize_checkpoint(
    model: str,
    out: Path,
    options: QuantizeOptions | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Writes `model`, a GGUF file or a Hugging Face directory, to the folder `out` in INT4.

    All linear layers of the blocks become INT4; the embedding, the head and the norms stay as they
    are. Needs the memory of one layer, of the embedding and of the texts' hidden states.

    Raises, before any work, ConfigError for options or texts that do not fit and where `out` is
    taken, CapacityError where the disk is too small, CheckpointError for a model that cannot be
    read, is INT4 already or holds weights that are not finite (these are found on the way; then
    nothing is left behind).
    """
    options = options or QuantizeOptions()
    check_target(out, 0)
    texts = read_texts(options.calibration, options.held)
    load = LoadOptions(dtype=torch.float32, device=options.device)
    with open_source(model, load) as source, torch.inference_mode():
        run = _Run(source, options, texts, progress or (lambda *_: None))
        check_target(out, run.estimated_bytes())
        with DirectoryWriter(out) as writer:
            return run.write_to(writer)


class _Run:
    def __init__(
        self, source: Source, options: QuantizeOptions, texts: Texts, progress: Progress
    ) -> None:
        self.source, self.options, self.texts, self.progress = source, options, texts, progress
        self.dtype = getattr(torch, options.dtype) if options.dtype else source.dtype
        self.written = Written(self.dtype, 1.0 if source.zero_centred_norms else 0.0)
        self.errors: dict[str, float] = {}
        layers = [name.removesuffix(".weight") for name in source.shapes if self._is_linear(name)]
        self.group_sizes = {
            layer: self._group_size(source.shapes[f"{layer}.weight"][1]) for layer in layers
        }
        if not options.requantize:
            self._refuse_int4(layers)
        length = options.sequence_length
        if length > source.config.context_length:
            raise ConfigError(
                f"sequence_length {length} is more than the model's context of "
                f"{source.config.context_length} tokens"
            )

        def pieces(text: str, name: str, number: int) -> Tensor:
            return sequences(source.tokenizer, text, name, length=length, number=number)

        self.calibration = pieces(texts.calibration, texts.names[0], options.num_sequences)
        self.held = pieces(texts.held, texts.names[1], options.num_held)

    def estimated_bytes(self) -> int:
        """A little more than what will be written."""
        total = 1 << 24  # the tokenizer and the headers
        for name, shape in self.source.shapes.items():
            total += math.prod(shape) * self.dtype.itemsize
            layer = name.removesuffix(".weight")
            if self._is_linear(name):
                size = self.group_sizes[layer]
                groups = 1 if size == -1 else shape[1] // size
                total += shape[0] * (shape[1] // 2 + groups * 5)
                total -= math.prod(shape) * self.dtype.itemsize
        return total

    def write_to(self, writer: DirectoryWriter) -> QuantizeReport:
        source, config = self.source, self.source.config
        runner = LayerRunner(config, source.weights, self.options.sequence_length)
        before, after = runner.embed(self.held), runner.embed(self.held, self.written)
        inputs = None
        if self.options.method == "gptq":
            inputs = runner.embed(self.calibration, self.written)
        for name in source.shapes:
            if not name.startswith("model.layers."):
                writer.add(name, self._dense(name))
        for index in range(config.num_layers):
            self.progress("Quantizing", index, config.num_layers)
            self._quantize_layer(runner, index, (before, after), inputs, writer)
        self.progress("Measuring", config.num_layers, config.num_layers)
        losses = runner.loss(before, self.held), runner.loss(after, self.held, self.written)
        self._write_files(writer)
        return QuantizeReport(
            perplexity_before=math.exp(losses[0]),
            perplexity_after=math.exp(losses[1]),
            calibration_text=self.texts.names[0],
            held_text=self.texts.names[1],
            tokens=self.calibration.numel() if inputs is not None else 0,
            held_tokens=self.held.numel(),
            nbytes=writer.nbytes,
            num_layers=len(self.group_sizes),
            errors=self.errors,
        )

    def _quantize_layer(
        self,
        runner: LayerRunner,
        index: int,
        held: tuple[Tensor, Tensor],
        inputs: Tensor | None,
        writer: DirectoryWriter,
    ) -> None:
        """Takes all texts through one layer of the model, which is gone when it returns.

        held: the hidden states of the dense model and of the quantized one.
        """
        before, after = held
        layer, linears = runner.make_layer(index)
        runner.run(layer, before)
        self.written.apply(layer)
        for linear in linears:
            self._quantize(runner, layer, linear, inputs, writer)
        if inputs is not None:
            runner.run(layer, inputs)
        runner.run(layer, after)
        for name in self.source.shapes:
            if name.startswith(f"model.layers.{index}.") and not self._is_linear(name):
                writer.add(name, self._dense(name))

    def _quantize(
        self,
        runner: LayerRunner,
        layer: DecoderLayer,
        linear: CalibratedLinear,
        inputs: Tensor | None,
        writer: DirectoryWriter,
    ) -> None:
        """Replaces the weight by its INT4 values, so that what comes behind is calibrated on them,
        and writes it."""
        options, weight = self.options, linear.weight
        size = self.group_sizes[linear.names[0]]
        try:
            if inputs is None:
                groups = round_to_grid(
                    weight, group_size=size, symmetric=options.symmetric, scale_dtype=self.dtype
                )
            else:
                hessian = runner.watch(layer, linear, inputs)
                groups = quantize_matrix(
                    weight,
                    hessian.matrix,
                    group_size=size,
                    symmetric=options.symmetric,
                    act_order=options.act_order,
                    damping=options.damping,
                    scale_dtype=self.dtype,
                )
        except KernelArgumentError as error:
            names = ", ".join(f"{name}.weight" for name in linear.names)
            raise CheckpointError(self.source.weights.path, str(error), tensor=names) from error
        linear.weight = groups.dequantize().to(weight.dtype)
        for name, part, old in zip(
            linear.names, linear.parts(groups).values(), weight.split(linear.rows), strict=True
        ):
            self._write_layer(name, part, old, writer)

    def _write_layer(
        self, name: str, part: Int4Groups, weight: Tensor, writer: DirectoryWriter
    ) -> None:
        norm = float(weight.norm()) or 1.0
        self.errors[name] = float((part.dequantize() - weight).norm()) / norm
        for key, tensor in tensors_of(part, self.dtype).items():
            writer.add(f"{name}.{key}", tensor)

    def _write_files(self, writer: DirectoryWriter) -> None:
        source = self.source
        for name, text in source.files.items():
            writer.write(name, text)
        for path in source.copied:
            writer.copy(path)
        settings = settings_of(
            self.group_sizes,
            symmetric=self.options.symmetric,
            act_order=self.options.method == "gptq" and self.options.act_order,
            ignore=[_HEAD],
        )
        values = {k: v for k, v in source.config_json.items() if k not in ("dtype", "torch_dtype")}
        name = str(self.dtype).removeprefix("torch.")
        writer.finish({**values, "torch_dtype": name, "quantization_config": settings})

    def _dense(self, name: str) -> Tensor:
        """A tensor that stays dense, as the checkpoint has it, in the dtype that is written."""
        values = self.source.weights.dense(name).to(self.dtype, copy=True)
        if not bool(values.isfinite().all()):
            raise CheckpointError(
                self.source.weights.path, f"holds values too large for {self.dtype}", tensor=name
            )
        return values

    @staticmethod
    def _is_linear(name: str) -> bool:
        """Whether a weight is that of a linear layer in a block; norms are vectors."""
        return name.startswith("model.layers.") and name.endswith("_proj.weight")

    def _group_size(self, columns: int) -> int:
        if self.options.group_size == -1:
            return -1
        for size in sorted((s for s in GROUP_SIZES if s > 0), reverse=True):
            if size <= self.options.group_size and columns % size == 0:
                return size
        raise ConfigError(
            f"a layer has {columns} columns, of which no group size divides: use group_size -1"
        )

    def _refuse_int4(self, layers: list[str]) -> None:
        for layer in layers:
            if self.source.is_int4(layer):
                raise CheckpointError(
                    self.source.weights.path,
                    "is INT4 already; to quantize it anew, which loses more than from the "
                    "original, ask for it (requantize, --requantize)",
                    tensor=f"{layer}.weight",
                )
