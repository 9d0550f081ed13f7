"""From a model's name to its parts, whatever kind of file it is in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from billfish.checkpoint import sampling_defaults
from billfish.checkpoint.directory import ModelDirectory
from billfish.checkpoint.gguf import GGUFFile
from billfish.checkpoint.locate import locate
from billfish.checkpoint.metadata import Metadata
from billfish.checkpoint.sampling_defaults import SamplingDefaults
from billfish.config import ModelConfig
from billfish.errors import CheckpointError
from billfish.models import gguf, hf
from billfish.models.decoder import CausalLM
from billfish.models.weights import LoadOptions, WeightSource
from billfish.tokenizer import Tokenizer, from_directory, from_gguf


class OpenModel:
    """A model whose weights have not been loaded yet.

    path: of its file or directory. int4: most of its weights are INT4. build: makes the network for
    sequences of up to so many tokens. Once `load` has, num_int4_layers counts the linear layers in
    INT4, and `rounding` says what rounding to INT4 has cost, "" where nothing was rounded.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        tokenizer: Tokenizer,
        sampling_defaults: SamplingDefaults,
        int4: bool,
        build: Callable[[int, LoadOptions], tuple[CausalLM, WeightSource]],
    ) -> None:
        tokens, rows = tokenizer.vocab_size, config.vocab_size
        if tokens > rows:
            raise CheckpointError(
                str(path), f"the tokenizer has {tokens} tokens, the embedding only {rows} rows"
            )
        self.path, self.config, self.tokenizer = path, config, tokenizer
        self.sampling_defaults, self.int4 = sampling_defaults, int4
        self.num_int4_layers, self.rounding = 0, ""
        self._build = build

    def load(self, max_len: int, options: LoadOptions) -> CausalLM:
        """The network, for sequences of up to max_len tokens, on the device of the options.

        Raises CheckpointError, before anything is loaded, for a tensor that is missing or does not
        fit.
        """
        network, weights = self._build(max_len, options)
        self.num_int4_layers = weights.num_int4_layers
        self.rounding = describe_rounding(weights)
        return network.to(options.device)  # what was not loaded: tables of angles


@contextmanager
def open_model(name: str) -> Iterator[OpenModel]:
    """Open a model by its path or name (see `locate`); close its files at the end.

    Raises CheckpointError for one that cannot be served.
    """
    path = locate(name)
    if path.is_dir():
        with ModelDirectory.open(path) as directory:
            yield _from_directory(path, directory)
    else:
        with GGUFFile.open(path) as file:
            yield _from_gguf(path, file)


def _from_gguf(path: Path, file: GGUFFile) -> OpenModel:
    config = gguf.read_config(file)
    return OpenModel(
        path,
        config,
        from_gguf(file.metadata, str(path)),
        sampling_defaults.from_gguf(file.metadata),
        gguf.has_int4(file),
        lambda max_len, options: gguf.load_model(file, config, max_len=max_len, options=options),
    )


def _from_directory(path: Path, directory: ModelDirectory) -> OpenModel:
    config = hf.read_config(directory)
    generation = directory.json("generation_config.json") or Metadata({}, str(path))
    return OpenModel(
        path,
        config,
        from_directory(path),
        sampling_defaults.from_generation_config(generation),
        hf.quantization_of(directory) is not None,
        lambda max_len, options: hf.load_model(directory, config, max_len=max_len, options=options),
    )


def describe_rounding(weights: WeightSource) -> str:
    """What rounding to INT4 while loading has cost; empty where nothing was rounded."""
    errors = weights.rounding_errors
    if not errors:
        return ""
    mean, worst = sum(errors.values()) / len(errors), max(errors, key=errors.__getitem__)
    return (
        f"{len(errors)} linear layers rounded to INT4 (nearest, groups of 128): mean relative "
        f"error {mean:.4f}, largest {errors[worst]:.4f} in {worst}"
    )
