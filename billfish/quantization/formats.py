"""Which INT4 format a Hugging Face checkpoint is in, from its quantization_config."""

from collections.abc import Callable, Mapping
from typing import Any

from billfish.errors import CheckpointError, shown
from billfish.quantization.awq import AWQFormat
from billfish.quantization.compressed_tensors import CompressedTensorsFormat
from billfish.quantization.gptq import GPTQFormat
from billfish.quantization.hqq import HQQFormat
from billfish.quantization.scheme import Format, Scheme, Settings, TensorSpec

__all__ = ["Format", "Scheme", "TensorSpec", "read_format"]

_FORMATS: dict[str, Callable[[Settings], Format]] = {
    "gptq": GPTQFormat,
    "awq": AWQFormat,
    "compressed-tensors": CompressedTensorsFormat,
    "hqq": HQQFormat,
}


def read_format(config: Mapping[str, Any] | None, file: str) -> Format | None:
    """The format that config.json's `quantization_config` names; None: the weights are dense.

    Also takes the files that older checkpoints have beside config.json: quantize_config.json of
    GPTQ and quant_config.json of AWQ. file: where config stands, for messages.

    Raises CheckpointError, naming the format, for one that is not supported, and for settings that
    are missing, of the wrong type or contradictory.
    """
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise CheckpointError(
            file, f"must be an object, got {shown(config)}", tensor="quantization_config"
        )
    settings = Settings(config, file)
    method = _method(settings)
    if method not in _FORMATS:
        bits = settings.values.get("bits", settings.values.get("num_bits"))
        width = f" of {bits} bits" if type(bits) is int else ""
        supported = ", ".join(_FORMATS)
        settings.fail(
            "quant_method",
            f"the format {method[:40]!r}{width} is not supported (supported: {supported}, GGUF)",
        )
    return _FORMATS[method](settings)


def _method(settings: Settings) -> str:
    if "quant_method" in settings:
        return settings.text("quant_method").lower()
    # Files from before the key was made.
    if "w_bit" in settings:
        return "awq"
    if "bits" in settings and ("desc_act" in settings or "damp_percent" in settings):
        return "gptq"
    if "load_in_4bit" in settings or "load_in_8bit" in settings:
        return "bitsandbytes"
    return settings.text("quant_method")
