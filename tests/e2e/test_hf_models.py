"""Every architecture against transformers, from Hugging Face directories and from GGUF files."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from billfish import LLM, SamplingParams
from billfish.config import CacheConfig, SchedulerConfig
from billfish.layers.linear import Linear, QuantLinear
from tests.e2e import gguf_twin, tiny_hf
from tests.e2e.test_against_oracle import logits_of, oracle_logits
from tests.e2e.tiny_hf import model_of

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
TWINS = (
    "llama", "llama biased, odd", "llama linear", "llama llama3", "llama yarn", "qwen2", "qwen3",
    "gemma2", "gemma3", "phi3", "phi3 short", "phi3 long", "smollm3",
)  # fmt: skip
LENGTHS = (40, 3, 61, 17)


def load(path: Path, name: str, block_size: int = 16, chunk: int = 512, **options: Any) -> LLM:
    return LLM(
        str(path),
        dtype="float32",
        cache=CacheConfig(num_blocks=1024 // block_size, block_size=block_size),
        scheduler=SchedulerConfig(
            max_model_len=tiny_hf.VARIANTS[name].max_model_len, max_num_batched_tokens=chunk
        ),
        **options,
    )


@functools.cache
def prompts() -> list[list[int]]:
    """Random tokens; the longest share their first 32."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 259, (80,), generator=draw).tolist()
    return [tokens[:length] for length in LENGTHS]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def first_tokens(outputs: list) -> list[tuple[int, ...]]:
    """Of each answer, as many tokens as SHORT asks for."""
    return [output.token_ids[: SHORT.max_tokens] for output in outputs]


def assert_follows(model: Any, outputs: list, count: int) -> None:
    """Fed what we generated, transformers chooses each token as we did; by induction it would
    have generated the same."""
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert len(output.token_ids) == count
        logits = oracle_logits(model, [*prompt, *output.token_ids])
        choices = logits[:, : tiny_hf.TOKENS].argmax(-1)  # the rows behind are no tokens
        assert list(output.token_ids) == choices[len(prompt) - 1 : -1].tolist()


@pytest.fixture(scope="module")
def served(saved):
    """Each model served plainly, and the tokens it gives."""

    @functools.cache
    def serve(name: str) -> tuple[LLM, list]:
        llm = load(saved(name), name)
        return llm, llm.generate(prompts(), GREEDY)

    return serve


@pytest.mark.parametrize("name", tiny_hf.VARIANTS)
def test_logits_and_greedy_tokens_are_those_of_transformers(served, name: str) -> None:
    llm, outputs = served(name)
    tokens = [*prompts()[2], *outputs[2].token_ids]
    assert_close(logits_of(llm, tokens), oracle_logits(model_of(name), tokens))
    assert_follows(model_of(name), outputs, 64)


@pytest.mark.parametrize("name", tiny_hf.VARIANTS)
def test_chunks_and_prefix_hits_change_no_token(served, saved, name: str) -> None:
    expected = first_tokens(served(name)[1])
    llm = load(saved(name), name, block_size=5, chunk=7)
    assert first_tokens(llm.generate(prompts(), SHORT)) == expected
    before = llm.stats().prefix_hits
    alone = [llm.generate(prompt, SHORT)[0] for prompt in prompts()]
    assert first_tokens(alone) == expected
    assert llm.stats().prefix_hits - before == sum(length - length % 5 for length in LENGTHS)


@pytest.mark.parametrize("name", TWINS)
def test_a_gguf_file_of_the_same_model_gives_the_same(served, tmp_path: Path, name: str) -> None:
    _, outputs = served(name)
    llm = load(gguf_twin.write(model_of(name), tmp_path / "twin.gguf"), name)
    tokens = [*prompts()[2], *outputs[2].token_ids]
    assert_close(logits_of(llm, tokens), oracle_logits(model_of(name), tokens))
    assert first_tokens(llm.generate(prompts(), SHORT)) == first_tokens(outputs)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "phi3"])
def test_int4_gguf_files_are_read_exactly(tmp_path: Path, name: str) -> None:
    variant = tiny_hf.VARIANTS[name]
    model = tiny_hf.build(
        tiny_hf.Variant(
            variant.model, {**variant.options, "intermediate_size": 128},
            config_class=variant.config_class,
        )
    )  # fmt: skip
    llm = load(gguf_twin.write(model, tmp_path / "int4.gguf", Type.Q4_0), name)
    layer = llm.executor.model.layers[0]
    assert isinstance(layer.attention.qkv_proj, QuantLinear)
    assert isinstance(layer.mlp.gate_up_proj, QuantLinear)
    tokens = prompts()[2]
    assert_close(logits_of(llm, tokens), oracle_logits(model, tokens))


def nearest_int4(weight: torch.Tensor) -> torch.Tensor:
    """Symmetric rounding to 16 levels, with a scale for each 128 columns, written out plainly."""
    rounded = torch.empty_like(weight)
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], 128):
            group = weight[row, start : start + 128]
            extreme = group[group.abs().argmax()]
            scale = extreme / -8
            rounded[row, start : start + 128] = (group / scale).round().clamp(-8, 7) * scale
    return rounded


@pytest.mark.parametrize("name", ["llama biased, odd", "phi3"])
def test_rounding_to_int4_while_loading(tmp_path: Path, caplog, name: str) -> None:
    options = {**tiny_hf.VARIANTS[name].options, "num_hidden_layers": 2}
    model = tiny_hf.build(tiny_hf.Variant(tiny_hf.VARIANTS[name].model, options))
    path = tiny_hf.save(model, tmp_path / "model")
    with caplog.at_level("INFO", logger="billfish"):
        llm = load(path, name, quantize="int4")
    errors = []
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 2 and ".layers." in key:
                rounded = nearest_int4(parameter)
                errors.append(float((rounded - parameter).norm() / parameter.norm()))
                parameter.copy_(rounded)
    assert llm.num_int4_layers == len(errors)
    assert f"{len(errors)} linear layers rounded to INT4" in llm.rounding
    assert f"mean relative error {sum(errors) / len(errors):.3f}" in llm.rounding
    assert llm.rounding in caplog.text
    layer = llm.executor.model.layers[0]
    assert isinstance(layer.attention.qkv_proj, QuantLinear)
    assert isinstance(llm.executor.model.lm_head, Linear)
    tokens = prompts()[2]
    assert_close(logits_of(llm, tokens), oracle_logits(model, tokens))


def test_in_shards(saved, tmp_path: Path) -> None:
    llm = load(saved("qwen3"), "qwen3")
    path = tiny_hf.save(model_of("qwen3"), tmp_path / "shards", max_shard_size="100KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    links = tmp_path / "links"  # as huggingface_hub keeps them
    links.mkdir()
    for file in path.iterdir():
        (links / file.name).symlink_to(file)
    tokens = prompts()[2]
    assert torch.equal(logits_of(load(links, "qwen3"), tokens), logits_of(llm, tokens))


def test_a_multimodal_gemma_3_serves_its_language_model(saved, tmp_path: Path) -> None:
    """The names that its checkpoints have, old and new, and weights of a tower beside them."""
    from safetensors.torch import load_file, save_file

    expected = logits_of(load(saved("gemma3"), "gemma3"), prompts()[2])
    tensors = load_file(saved("gemma3") / "model.safetensors")
    for number, prefix in enumerate(("language_model.model.", "model.language_model.")):
        path = tiny_hf.save(model_of("gemma3"), tmp_path / str(number))
        renamed = {prefix + name.removeprefix("model."): t for name, t in tensors.items()}
        save_file({**renamed, "vision_tower.x": torch.zeros(3)}, path / "model.safetensors")

        def wrap(config: dict[str, Any]) -> None:
            inner = dict(config)
            config.clear()
            config.update(
                architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3",
                text_config=inner,
            )  # fmt: skip

        tiny_hf.rewrite(path / "config.json", wrap)
        assert torch.equal(logits_of(load(path, "gemma3"), prompts()[2]), expected)


@pytest.mark.parametrize("name", ["gemma3", "llama llama3", "phi3 long", "qwen2"])
def test_configurations_of_older_versions(served, saved, tmp_path: Path, name: str) -> None:
    """They have rope_theta and rope_scaling where later ones have rope_parameters."""

    def older(config: dict[str, Any]) -> None:
        parameters = config.pop("rope_parameters")
        local = parameters.get("sliding_attention")
        rope = dict(parameters.get("full_attention", parameters))
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        if local:
            config["rope_local_base_freq"] = local["rope_theta"]
            config["sliding_window_pattern"] = 6
            del config["layer_types"]
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}

    path = tiny_hf.save(model_of(name), tmp_path / "old")
    tiny_hf.rewrite(path / "config.json", older)
    llm, _ = served(name)
    assert load(path, name).model_config == llm.model_config
