"""`billfish quantize`: what it writes, read by transformers with compressed-tensors and by us."""

import gc
import json
import math
import os
import shutil
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from billfish import LLM
from billfish.checkpoint.gguf import GGUFFile
from billfish.cli import app
from billfish.config import CacheConfig, SchedulerConfig
from billfish.errors import CapacityError, CheckpointError, ConfigError
from billfish.export.layerwise import LayerRunner
from billfish.export.quantize import QuantizeOptions, quantize_checkpoint
from billfish.export.source import open_source
from billfish.export.texts import read_texts, sequences
from billfish.models.decoder import DecoderLayer
from billfish.models.weights import LoadOptions
from billfish.quantization.calibrated import quantize_matrix, round_to_grid
from billfish.quantization.formats import read_format
from billfish.tokenizer import from_directory
from tests.e2e import gguf_twin, tiny_hf
from tests.e2e.test_against_oracle import logits_of, oracle_logits
from tests.e2e.tiny_hf import model_of

SMALL = {"sequence_length": 64, "num_sequences": 6, "num_held": 3}
IDS = list(range(5, 45))


def run(model: Path, out: Path, progress: Any = None, **options: Any) -> Any:
    return quantize_checkpoint(str(model), out, QuantizeOptions(**SMALL | options), progress)


def by_transformers(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def by_us(path: Path, max_model_len: int | None = None) -> LLM:
    return LLM(
        str(path),
        dtype="float32",
        cache=CacheConfig(num_blocks=64),
        scheduler=SchedulerConfig(max_model_len=max_model_len),
    )


def all_tensors(path: Path) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        result |= load_file(file)
    return result


def perplexity(model: Any, text: str, path: Path) -> float:
    """By transformers, of the pieces that are measured."""
    tokenizer = from_directory(path)
    ids = sequences(tokenizer, text, "", length=SMALL["sequence_length"], number=SMALL["num_held"])
    with torch.inference_mode():
        logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return math.exp(loss)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"method": "rtn", "group_size": 32}),
        ("qwen2", {"group_size": 64, "symmetric": False, "damping": 0.1}),
        ("gemma2", {"group_size": 16, "dtype": "bfloat16", "act_order": False}),
        ("phi3 short", {"group_size": -1}),
        ("smollm3", {"method": "rtn", "group_size": 128, "symmetric": False, "dtype": "float16"}),
    ],
)
def test_transformers_reads_the_same_numbers(
    saved, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path, out = saved(name), tmp_path / "out"
    report = run(path, out, **options)
    theirs, llm = by_transformers(out), by_us(out, tiny_hf.VARIANTS[name].max_model_len)
    config = json.loads((out / "config.json").read_text())
    format = read_format(config["quantization_config"], "config.json")
    stored, original = all_tensors(out), all_tensors(path)
    assert report.nbytes == sum(tensor.nbytes for tensor in stored.values())
    dtype = getattr(torch, options.get("dtype", "float32"))
    for key, values in theirs.state_dict().items():
        layer = key.removesuffix(".weight")
        scheme = format.scheme(layer) if f"{layer}.weight_packed" in stored else None
        if scheme is None:
            if key in original:  # not a head that is the embedding
                assert torch.equal(values, original[key].to(dtype).float()), key
                assert stored[key].dtype == dtype
            continue
        parts = {part: stored[f"{layer}.{part}"] for part in scheme.tensors(*values.shape)}
        assert parts["weight_scale"].dtype == dtype
        assert torch.equal(scheme.int4_groups(parts, *values.shape).dequantize(), values), key
        error = (values - original[key]).norm() / original[key].norm()
        assert report.errors[layer] == pytest.approx(float(error), rel=1e-3)
        assert 0.005 < error < 0.3
    assert len(report.errors) == report.num_layers == sum("_proj.weight" in k for k in original)
    ours = logits_of(llm, IDS)
    assert (ours - oracle_logits(theirs, IDS)).norm() <= 1e-4 * ours.norm()
    for file in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / file).read_bytes() == (path / file).read_bytes()
    # The perplexities are those of both models, by transformers.
    held = read_texts(None, None).held
    assert report.perplexity_before == pytest.approx(
        perplexity(model_of(name), held, path), rel=1e-4
    )
    assert report.perplexity_after == pytest.approx(perplexity(theirs, held, path), rel=1e-4)


def test_gguf_becomes_a_directory(tmp_path: Path) -> None:
    """The same as from the directory that the GGUF file was made of."""
    model = model_of("llama")
    path = gguf_twin.write(model, tmp_path / "model.gguf")
    run(path, tmp_path / "out", method="rtn", group_size=32, dtype="float32")
    run(tiny_hf.save(model, tmp_path / "dir"), tmp_path / "other", method="rtn", group_size=32)
    ours, other = all_tensors(tmp_path / "out"), all_tensors(tmp_path / "other")
    assert ours.keys() == other.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, other[name]), name
    llm, theirs = by_us(tmp_path / "out"), by_transformers(tmp_path / "out")
    logits = logits_of(llm, IDS)
    assert (logits - oracle_logits(theirs, IDS)).norm() <= 1e-4 * logits.norm()
    with GGUFFile.open(path) as file:
        assert "tokenizer.ggml.tokens" in file.metadata
    reference = LLM(str(path), dtype="float32", cache=CacheConfig(num_blocks=64))
    for text in ("Hello, world", "größe\n\n 日本"):
        assert llm.tokenizer.encode(text) == reference.tokenizer.encode(text)
    assert llm.tokenizer.eos_token_ids == reference.tokenizer.eos_token_ids


def test_gptq_loses_less_than_rounding_on_a_real_model(model_path: Path) -> None:
    """Two layers of the demo model: the hidden states stay much closer to the dense ones."""
    options = LoadOptions(dtype=torch.float32)
    with open_source(str(model_path), options) as model, torch.inference_mode():
        texts = read_texts(None, None)
        runner = LayerRunner(model.config, model.weights, 256)
        calibration, held = (
            sequences(model.tokenizer, text, "", length=256, number=number)
            for text, number in ((texts.calibration, 6), (texts.held, 2))
        )
        errors = {}
        dense, inputs = runner.embed(held), runner.embed(calibration)
        states = {"rtn": dense.clone(), "gptq": dense.clone()}
        for index in range(2):
            layer, linears = runner.make_layer(index)
            runner.run(layer, dense)
            weights = [linear.weight for linear in linears]
            for linear in linears:
                linear.weight = round_to_grid(
                    linear.weight, group_size=64, scale_dtype=torch.bfloat16
                ).dequantize()
            runner.run(layer, states["rtn"])
            for linear, weight in zip(linears, weights, strict=True):
                linear.weight = weight
            for linear in linears:
                hessian = runner.watch(layer, linear, inputs).matrix
                linear.weight = quantize_matrix(linear.weight, hessian, group_size=64).dequantize()
            runner.run(layer, inputs)
            runner.run(layer, states["gptq"])
        for method, hidden in states.items():
            errors[method] = float((hidden - dense).square().mean())
    assert errors["gptq"] < 0.6 * errors["rtn"]


def test_one_layer_at_a_time(saved, tmp_path: Path) -> None:
    alive = []

    def progress(*_: Any) -> None:
        gc.collect()
        alive.append(sum(type(each) is DecoderLayer for each in gc.get_objects()))

    gc.collect()  # what other tests have left
    before = sum(type(each) is DecoderLayer for each in gc.get_objects())
    run(saved("llama"), tmp_path / "out", progress)
    assert alive == [before] * (tiny_hf.COMMON["num_hidden_layers"] + 1)


def test_a_cut_run_leaves_nothing(saved, tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(saved("llama"), tmp_path / "out", interrupt)
    assert os.listdir(tmp_path) == []


def test_int4_models_are_refused_unless_asked(saved, model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is INT4 already"):
        run(model_path, tmp_path / "out")
    run(saved("llama"), tmp_path / "once", method="rtn", group_size=32)
    with pytest.raises(CheckpointError, match="is INT4 already") as error:
        run(tmp_path / "once", tmp_path / "twice", method="rtn", group_size=32)
    assert error.value.tensor == "model.layers.0.self_attn.q_proj.weight"
    assert not (tmp_path / "twice").exists()
    run(tmp_path / "once", tmp_path / "twice", method="rtn", group_size=32, requantize=True)
    once, twice = all_tensors(tmp_path / "once"), all_tensors(tmp_path / "twice")
    for name, tensor in once.items():  # the values of a grid are their own nearest ones
        assert torch.equal(tensor, twice[name]), name


def test_weights_that_are_not_finite(saved, tmp_path: Path) -> None:
    path = tmp_path / "source"
    shutil.copytree(saved("llama"), path)
    name = "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(path / "model.safetensors")
    tensors[name][3, 5] = math.inf
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not finite") as error:
        run(path, tmp_path / "out")
    assert name in error.value.tensor
    assert os.listdir(tmp_path) == ["source"]


def test_the_target_and_the_disk(saved, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        run(saved("llama"), tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 1 << 20))
    with pytest.raises(CapacityError, match="only 1 MiB free"):
        run(saved("llama"), tmp_path / "out")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "awq"}, "method must be gptq or rtn, got 'awq'"),
        ({"group_size": 100}, "group_size must be one of"),
        ({"damping": 0.0}, "damping must be between 0 and 1"),
        ({"damping": math.nan}, "damping must be between 0 and 1"),
        ({"damping": "much"}, "damping must be between 0 and 1"),
        ({"device": "tpu"}, "device must be"),
        ({"device": "cuda:999"}, "device cuda:999 is not there"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"sequence_length": 4}, "sequence_length must be an integer from 16 up"),
        ({"num_sequences": 0}, "num_sequences must be an integer from 1 up"),
        ({"sequence_length": 300}, "more than the model's context of 256 tokens"),
        ({"calibration": Path("no/such/file")}, "no/such/file cannot be read"),
    ],
)
def test_wrong_options(saved, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(saved("llama"), tmp_path / "out", **options)
    assert os.listdir(tmp_path) == []


def test_texts_that_are_too_short(saved, tmp_path: Path) -> None:
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_text("a few words")
    long.write_text("many words " * 100)
    for options in ({"calibration": short, "held": long}, {"calibration": long, "held": short}):
        with pytest.raises(ConfigError, match=r"short.txt is too short: 11 tokens"):
            run(saved("llama"), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_columns_that_no_group_divides(saved, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="60 columns, of which no group size divides"):
        run(saved("llama biased, odd"), tmp_path / "out")
    run(saved("llama biased, odd"), tmp_path / "out", group_size=-1)
    llm, theirs = by_us(tmp_path / "out"), by_transformers(tmp_path / "out")
    logits = logits_of(llm, IDS)
    assert (logits - oracle_logits(theirs, IDS)).norm() <= 1e-4 * logits.norm()


def test_the_command(saved, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["quantize", str(saved("llama")), str(out), "--group-size", "32"]
    arguments += ["--sequences", "4", "--held-sequences", "2", "--sequence-length", "64"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "calibrated on 256 tokens of the Python reference manual" in text
    assert "measured on 128 tokens of the last eighth of the Python reference manual" in text
    assert f"INT4 layers {7 * tiny_hf.COMMON['num_hidden_layers']} " in text
    assert " before, " in text
    assert (out / "config.json").exists()
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, ConfigError)
