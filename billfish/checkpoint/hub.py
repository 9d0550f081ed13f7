"""Model repositories of the Hugging Face Hub: what is needed of one, fetched once and kept."""

import re
from pathlib import Path

from billfish.checkpoint.directory import INDEX, SINGLE
from billfish.checkpoint.files import read_json
from billfish.errors import CheckpointError

_REPOSITORY = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", re.ASCII)
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)  # and no pattern
_SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json", INDEX,
    "quantize_config.json", "quant_config.json",
)  # fmt: skip


def is_repository(name: str) -> bool:
    """Whether name has the form "organization/model"."""
    return _REPOSITORY.fullmatch(name) is not None


def fetch(repository: str) -> Path:
    """The directory with the files of a repository, fetched unless they are kept from before.

    Shows progress on standard error; of the weights, only the safetensors files that belong to the
    model are fetched, and no code. Where they are kept, and who may read what, is as
    huggingface_hub has it (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE). Raises CheckpointError where there
    is no such repository, no network and nothing kept, or no safetensors.
    """
    directory = _snapshot(repository, list(_SMALL_FILES))
    if not (directory / "config.json").exists():
        raise CheckpointError(repository, "has no config.json, so it is not a model")
    weights = [SINGLE]
    if (directory / INDEX).exists():
        weight_map = read_json(str(directory / INDEX), 1 << 26).get("weight_map")
        names = weight_map.values() if isinstance(weight_map, dict) else ()
        weights += sorted({name for name in names if _SHARD.fullmatch(str(name))})
    directory = _snapshot(repository, [*_SMALL_FILES, *weights])
    if not any((directory / name).exists() for name in weights):
        raise CheckpointError(repository, f"has neither {SINGLE} nor {INDEX}")
    return directory


def _snapshot(repository: str, names: list[str]) -> Path:
    # Imported here: it takes half a second, which a local file need not wait for.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, allow_patterns=names))
    except GatedRepoError as error:
        reason = "asks you to accept its terms first: do so on its page, then set HF_TOKEN"
        raise CheckpointError(repository, reason) from error
    except RepositoryNotFoundError as error:
        reason = "no such file or directory, and no such repository (private ones need HF_TOKEN)"
        raise CheckpointError(repository, reason) from error
    except LocalEntryNotFoundError as error:
        reason = (
            "no such file or directory; as a repository it has not been fetched before, and the "
            "network cannot be reached now (or HF_HUB_OFFLINE forbids it)"
        )
        raise CheckpointError(repository, reason) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(repository, f"cannot be fetched: {text}") from error
