"""What a directory must not be to be served, code that must never run, and the memory it takes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from billfish import LLM, SamplingParams
from billfish.config import CacheConfig
from billfish.errors import CheckpointError, ConfigError

HIDDEN, INNER, VOCAB = 32, 48, 260
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def shapes(hidden: int = HIDDEN, inner: int = INNER, layers: int = 2) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,),
    }  # fmt: skip
    for i in range(layers):
        layer = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 2, hidden),
            "self_attn.v_proj": (hidden // 2, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        found.update({f"model.layers.{i}.{name}.weight": size for name, size in layer.items()})
    return found


def write(path: Path, sizes: dict[str, tuple[int, ...]], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    tensors = {
        name: (draw.random(size, np.float32) - np.float32(0.5)).astype(np.float16)
        for name, size in sizes.items()
    }
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={text: i for i, text in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def load(path: Path, **options: Any) -> LLM:
    return LLM(str(path), dtype="float32", cache=CacheConfig(num_blocks=8), **options)


Change = Callable[[dict[str, np.ndarray]], Any]


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def with_one(name: str, values: np.ndarray) -> Change:
    return lambda tensors: tensors.update({name: values})


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "tensor", "reason"),
    [
        (without(UP), UP, "is missing"),
        (without("model.norm.weight"), "model.norm.weight", "is missing"),
        (
            with_one(UP, np.zeros((HIDDEN, INNER), np.float16)), UP,
            r"has shape \[32, 48\], expected \[48, 32\]",
        ),
        (with_one(UP, np.zeros((INNER, HIDDEN), np.int8)), UP, "dtype I8 is not supported"),
        (with_one(UP, np.full((INNER, HIDDEN), np.nan, np.float16)), UP, "not finite"),
        (with_one(UP, np.full((INNER, HIDDEN), -np.inf, np.float32)), UP, "not finite"),
        (
            with_one("model.layers.0.mlp.up_proj.bias", np.zeros(INNER, np.float16)),
            "model.layers.0.mlp.up_proj.bias", "is not part of a llama model",
        ),
        (
            with_one("model.layers.2.mlp.up_proj.weight", np.zeros(2, np.float16)),
            "model.layers.2.mlp.up_proj.weight", "is not part of a llama model",
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(tmp_path: Path, change: Change, tensor: str, reason: str) -> None:
    path = write(tmp_path, shapes())
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=reason) as error:
        load(path)
    assert error.value.tensor == tensor
    assert error.value.file in (str(path), str(path / "model.safetensors"))


def test_tensors_that_are_known_and_not_needed(tmp_path: Path) -> None:
    path = write(tmp_path, shapes())
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, path / "model.safetensors")
    assert load(path).generate("a", SamplingParams(max_tokens=2))


@pytest.mark.parametrize(
    ("config", "key", "reason"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "architectures", "'FalconForCausalLM' is not"),
        ({"architectures": ["LlamaForTokenClassification"]}, "architectures", "is not supported"),
        ({"architectures": []}, "architectures", "at least one"),
        ({"architectures": None, "model_type": "mamba"}, "model_type", "'mamba' is not supported"),
        ({"hidden_size": 0}, "hidden_size", "from 1"),
        ({"hidden_size": "32"}, "hidden_size", "must be an integer, but is str"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers", "must be from 1"),
        ({"num_hidden_layers": 2**14}, "num_hidden_layers", "16384 layers cannot be made of 20"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "must be finite"),
        ({"rope_theta": 10**400}, "rope_theta", "must be finite"),
        ({"rope_scaling": {"type": "magic"}}, "rope_scaling.rope_type", "'magic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "is missing"),
        ({"rope_scaling": 7}, "rope_scaling", "must be an object"),
        ({"hidden_act": "relu"}, None, "activation 'relu' is not supported"),
        ({"num_key_value_heads": 3}, None, "must be a multiple of num_kv_heads"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
         "quantization_config.quant_method", "'bitsandbytes'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": 128}},
         "quantization_config.bits", "8 bits is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method",
         "'fp8'"),
    ],
)  # fmt: skip
def test_configurations_that_are_not_served(
    tmp_path: Path, config: dict[str, Any], key: str | None, reason: str
) -> None:
    path = write(tmp_path, shapes(), **config)
    with pytest.raises(CheckpointError, match=reason) as error:
        load(path)
    assert error.value.file == str(path / "config.json")
    assert error.value.tensor == key
    assert len(str(error.value)) < 600


def test_planted_code_never_runs(tmp_path: Path) -> None:
    """Files that transformers would import where it trusts a model."""
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    auto_map = {name: f"planted.{name}" for name in names}
    path = write(tmp_path / "m", shapes(), auto_map=auto_map, trust_remote_code=True)
    (path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["planted.AutoTokenizer", None]}})
    )
    ran = tmp_path / "ran"
    planted = f"open({str(ran)!r}, 'w')\nclass AutoConfig: pass\n"
    for name in ("planted", "configuration_llama", "modeling_llama", "conftest", "__init__",
                 "tokenization_llama", "setup", "sitecustomize"):  # fmt: skip
        (path / f"{name}.py").write_text(planted)
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + bytes(ran) + b"'\ntR.")
    assert load(path).generate("a", SamplingParams(max_tokens=2))[0].num_output_tokens == 2
    assert not ran.exists()
    assert not {"planted", "modeling_llama"} & set(sys.modules)
    # An architecture that only such code knows is refused, whatever it says.
    other = write(tmp_path / "n", shapes(), auto_map=auto_map, architectures=["PlantedModel"])
    (other / "planted.py").write_text(planted)
    with pytest.raises(CheckpointError, match="'PlantedModel' is not supported"):
        load(other)
    assert not ran.exists()


def test_quantize_takes_int4_only(tmp_path: Path) -> None:
    path = write(tmp_path, shapes())
    with pytest.raises(ConfigError, match="quantize must be None or \"int4\", got 'int8'"):
        load(path, quantize="int8")


def test_the_command_line_rounds_and_says_what_it_costs(tmp_path: Path) -> None:
    path = write(tmp_path, shapes())
    program = [sys.executable, "-c", "from billfish.cli import main; main()"]
    options = ["--quantize", "int4", "--max-tokens", "2", "--kv-memory", "0.01"]
    command = [*program, "generate", "--model", str(path), *options, "a"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stderr.split())
    assert "14 linear layers rounded to INT4" in said
    assert "mean relative error 0.0" in said


def test_sampling_defaults_are_those_of_generation_config(tmp_path: Path) -> None:
    path = write(tmp_path, shapes())

    def defaults(**values: Any) -> Any:
        (path / "generation_config.json").write_text(json.dumps(values))
        return load(path).checkpoint_defaults

    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}
    assert defaults(do_sample=True, **given, _from_model_config=True).options == given
    assert defaults(do_sample=False, temperature=0.6).options == {"temperature": 0.0}
    assert defaults(bos_token_id=1, top_p=None, num_beams=1).options == {}
    assert defaults(num_beams=4, typical_p=0.5).ignored == ("num_beams", "typical_p")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p"):
        defaults(top_p=7.0)


MEASURE = """
import sys
from pathlib import Path
from billfish.loading import open_model
from billfish.models.weights import LoadOptions
import torch

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

options = LoadOptions(torch.float16, quantize=sys.argv[3] or None)
with open_model(sys.argv[1]) as small:  # what is imported and set up once is not counted
    small.load(64, options)
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = memory("VmRSS")
with open_model(sys.argv[2]) as model:
    network = model.load(64, options)
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back to the system on Linux")
@pytest.mark.parametrize("quantize", ["", "int4"])
def test_loading_takes_the_memory_of_the_file_and_a_layer(
    tmp_path: Path, record_property: Callable[[str, Any], None], quantize: str
) -> None:
    hidden, inner, layers = 1024, 2048, 6
    sizes = shapes(hidden, inner, layers)
    path = write(
        tmp_path / "large", sizes, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers,
    )  # fmt: skip
    small = write(tmp_path / "small", shapes())
    command = [sys.executable, "-c", MEASURE, str(small), str(path), quantize]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    layer = 2 * (3 * hidden**2 + 3 * hidden * inner)
    file = (path / "model.safetensors").stat().st_size
    record_property("megabytes", [int(result.stdout) / 1e6, file / 1e6, layer / 1e6])
    assert int(result.stdout) < file + layer


def test_divisors_too_large_for_a_float_are_refused(tmp_path: Path) -> None:
    divisors = {"short_factor": [10**400] * 8, "long_factor": [1] * 8}
    path = write(tmp_path, shapes(), rope_scaling={"type": "longrope", **divisors})
    with pytest.raises(CheckpointError, match=r"short_factor: holds an integer too large"):
        load(path)
