"""INT4 checkpoint formats, bit for bit against what each format defines."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from billfish.errors import CheckpointError, KernelArgumentError
from billfish.kernels import marlin
from billfish.quantization.compressed_tensors import settings_of, tensors_of
from billfish.quantization.formats import read_format
from billfish.quantization.int4 import Int4Groups, merge, simplified
from tests.unit import int4_writers as writers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )

LAYER = "model.layers.0.mlp.up_proj"
SHAPES = [(48, 576), (64, 7392), (16, 256)]

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
sizes = pytest.mark.parametrize("group_size", [32, 64, 128, -1])


def scheme_of(config, layer=LAYER):
    return read_format(config, "config.json").scheme(layer)


def read(config, tensors, n, k):
    """Through the scheme, which must know every tensor there is."""
    scheme = scheme_of(config)
    assert tensors.keys() <= scheme.tensors(n, k).keys()
    return scheme.int4_groups(tensors, n, k)


def check(weight: Int4Groups, m: writers.Matrix) -> None:
    """The parts are the definition's, exactly, and make up its values, exactly.

    With float16 scales every value of the definition is exact in float32, bar one rounding where
    an offset is added; float64 holds all of them.
    """
    assert weight.codes.dtype == torch.uint8
    assert weight.scales.dtype == torch.float32
    assert (weight.codes.numpy() == m.codes).all()
    group = weight.group_of_column().numpy()
    scales = weight.scales.numpy().astype(np.float64)[:, group]
    assert (scales == m.scales.astype(np.float64)[:, m.group]).all()
    if weight.offsets is None:
        zeros = np.full(scales.shape, 8) if weight.zeros is None else weight.zeros.numpy()[:, group]
        assert (zeros == m.zeros[:, m.group]).all()
        assert (weight.dequantize().numpy() == m.values()).all()
    else:
        values = scales * m.codes + weight.offsets.numpy().astype(np.float64)[:, group]
        assert (values == m.values()).all()
        error = np.abs(weight.dequantize().numpy() - m.values())
        assert (error <= 2.0**-24 * (np.abs(scales * m.codes) + np.abs(m.values()))).all()
    packed = marlin.pack(
        weight.codes, weight.scales, zeros=weight.zeros, offsets=weight.offsets,
        g_idx=weight.g_idx, group_size=weight.group_size, dtype=torch.float32,
    )  # fmt: skip
    assert torch.allclose(packed.dequantize(), weight.dequantize(), rtol=1e-6, atol=1e-6)


@shapes
@sizes
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("zeros", [8, None], ids=["sym", "asym"])
@pytest.mark.parametrize("desc_act", [False, True])
def test_gptq(shape, group_size, version, zeros, desc_act):
    m = writers.matrix(*shape, group_size, zeros=zeros, act_order=desc_act)
    config = writers.gptq_config(
        group_size,
        desc_act=desc_act,
        sym=zeros is not None,
        checkpoint_format="gptq" if version == 1 else "gptq_v2",
    )
    weight = read(config, writers.gptq(m, version), *shape)
    check(weight, m)
    assert (weight.zeros is None) == (zeros == 8)
    assert (weight.g_idx is None) == (not desc_act or group_size == -1)


def test_gptq_zero_points_of_version_1_wrap():
    """Every stored value, and so every zero point, 0 as 15 too."""
    for zero in range(16):
        m = writers.matrix(8, 32, 32, zeros=zero)
        tensors = writers.gptq(m, 1)
        assert int(tensors["qzeros"][0, 0]) & 15 == (zero - 1) % 16
        check(read(writers.gptq_config(32), tensors, 8, 32), m)


def test_gptq_static_groups_are_in_order():
    """With static_groups act-order decides only how weights were found: g_idx counts up."""
    m = writers.matrix(16, 256, 64)
    config = writers.gptq_config(64, desc_act=True, static_groups=True)
    weight = read(config, writers.gptq(m, 1), 16, 256)
    check(weight, m)
    assert weight.g_idx is None


def test_gptq_without_g_idx():
    m = writers.matrix(16, 256, 64)
    check(read(writers.gptq_config(64), writers.gptq(m, 1, g_idx=False), 16, 256), m)
    with pytest.raises(KernelArgumentError, match="g_idx: is missing"):
        read(writers.gptq_config(64, desc_act=True), writers.gptq(m, 1, g_idx=False), 16, 256)


def test_gptq_of_an_older_file():
    """quantize_config.json, from before there was a quant_method or a checkpoint_format."""
    config = {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": True, "sym": False,
              "true_sequential": True, "model_name_or_path": None}  # fmt: skip
    m = writers.matrix(48, 576, 128, act_order=True)
    check(read(config, writers.gptq(m, 1), 48, 576), m)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_of_any_width(dtype):
    m = writers.matrix(16, 256, 64)
    tensors = writers.gptq(m, 2)
    tensors["scales"] = tensors["scales"].to(dtype)
    m.scales = tensors["scales"].float().t().numpy()
    weight = read(writers.gptq_config(64, checkpoint_format="gptq_v2"), tensors, 16, 256)
    check(weight, m)


@pytest.mark.parametrize(
    ("size", "smaller"), [(256, 128), (96, 32), (48, 16), (512, 128), (1024, -1), (576, -1)]
)
@pytest.mark.parametrize("desc_act", [False, True])
def test_groups_of_sizes_that_kernels_do_not_have(size, smaller, desc_act):
    m = writers.matrix(16, 576, size, act_order=desc_act)
    weight = read(writers.gptq_config(size, desc_act=desc_act), writers.gptq(m, 1), 16, 576)
    assert weight.group_size == smaller
    check(weight, m)


@shapes
@sizes
def test_awq(shape, group_size):
    n, k = shape
    if group_size != -1 and k % group_size:
        with pytest.raises(KernelArgumentError, match="whole groups"):
            scheme_of(writers.awq_config(group_size)).tensors(n, k)
        return
    m = writers.matrix(n, k, group_size)
    tensors = writers.awq(m)
    check(read(writers.awq_config(group_size), tensors, n, k), m)
    # That the writer above writes what AutoAWQ does: compressed-tensors' converter reads it.
    converter = AutoAWQConverter(group_size=group_size)
    codes, _, zeros = converter._convert_gemm_module(*(tensors[name] for name in (
        "qweight", "scales", "qzeros")))  # fmt: skip
    assert (codes.numpy() + 8 == m.codes).all()
    assert (zeros.numpy() + 8 == m.zeros).all()


def test_awq_of_an_older_file():
    config = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    m = writers.matrix(48, 576, 64)
    check(read(config, writers.awq(m), 48, 576), m)


def compressed(m, group_size, symmetric):
    """By the library: it quantizes the very values, so that it finds the codes again."""
    args = QuantizationArgs(
        num_bits=4, symmetric=symmetric, strategy="channel" if group_size == -1 else "group",
        group_size=None if group_size == -1 else group_size,
    )  # fmt: skip
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {
        "weight": torch.from_numpy(m.values()).float(),
        "weight_scale": writers.tensor(m.scales).float(),
        "weight_zero_point": writers.tensor(m.zeros - 8, np.int8),
    }
    return PackedQuantizationCompressor.compress(state, scheme), scheme


@pytest.mark.parametrize(
    ("shape", "group_size"),
    [(s, g) for s in [*SHAPES, (20, 260), (3, 7392)] for g in (32, 64, 128, -1)
     if g == -1 or s[1] % g == 0],
)  # fmt: skip
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("actorder", [None, "weight", "static"])
def test_compressed_tensors(shape, group_size, symmetric, actorder):
    m = writers.matrix(*shape, group_size, zeros=8 if symmetric else None)
    tensors, scheme = compressed(m, group_size, symmetric)
    config = writers.compressed_config(group_size, symmetric=symmetric, actorder=actorder)
    weight = read(config, tensors, *shape)
    check(weight, m)
    if symmetric or shape[0] > 8:  # of fewer rows the library cannot read its own zero points
        library = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
        assert torch.equal(library, weight.dequantize())


@pytest.mark.parametrize(
    ("shape", "group_size"), [((48, 576), 64), ((20, 260), -1), ((3, 7392), 32), ((64, 7392), -1)]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_written_here(shape, group_size, symmetric):
    """Byte for byte what the library writes."""
    m = writers.matrix(*shape, group_size, zeros=8 if symmetric else None)
    expected, _ = compressed(m, group_size, symmetric)
    config = writers.compressed_config(group_size, symmetric=symmetric)
    weight = read(config, expected, *shape)
    tensors = tensors_of(weight, torch.float32)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name
    with pytest.raises(KernelArgumentError, match="scales: are not exact"):
        tensors_of(weight, torch.bfloat16)


def test_settings_written_here():
    layers = {f"model.layers.{i}.mlp.up_proj": 64 for i in range(9)}
    layers |= {f"model.layers.{i}.mlp.down_proj": 128 for i in range(8)}
    settings = settings_of(layers, symmetric=False, act_order=True, ignore=["lm_head"])
    scheme = QuantizationConfig(**settings).config_groups["group_1"]
    assert (scheme.weights.group_size, scheme.targets) == (64, ["Linear"])
    format = read_format(settings, "config.json")
    assert format.scheme("lm_head") is None
    for layer, size in layers.items():
        assert format.scheme(layer).group_size == size
        assert not format.scheme(layer).symmetric
    assert format.scheme("model.layers.8.mlp.down_proj").group_size == 64


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("actorder", ["group", "dynamic", True])
def test_compressed_tensors_with_act_order(symmetric, actorder):
    """No library of today writes it: columns in order, each with its group in weight_g_idx."""
    m = writers.matrix(48, 576, 64, zeros=8 if symmetric else None, act_order=True)
    plain = replace(m, scales=m.scales[:, m.group], zeros=m.zeros[:, m.group])
    plain.group = np.arange(576)
    tensors, _ = compressed(plain, 1, symmetric)
    tensors["weight_scale"] = writers.tensor(m.scales)
    if not symmetric:
        zeros = compressed(replace(m, codes=m.codes[:, :9], group=np.arange(9)), 1, False)[0]
        tensors["weight_zero_point"] = zeros["weight_zero_point"]
    tensors["weight_g_idx"] = writers.tensor(m.group, np.int32)
    config = writers.compressed_config(64, symmetric=symmetric, actorder=actorder)
    check(read(config, tensors, 48, 576), m)
    # Where the indices were never set the columns are in order.
    tensors["weight_g_idx"].fill_(-1)
    m.group = np.arange(576) // 64
    check(read(config, tensors, 48, 576), m)


@shapes
@sizes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hqq(shape, group_size, dtype):
    n, k = shape
    if group_size != -1 and k % group_size:
        with pytest.raises(KernelArgumentError, match="whole groups"):
            scheme_of(writers.hqq_config(group_size)).tensors(n, k)
        return
    m = writers.matrix(n, k, group_size, zeros="float")
    tensors = writers.hqq(m, group_size, str(dtype))
    for name in ("scale", "zero"):
        tensors[name] = tensors[name].to(dtype)
    m.scales, m.zeros = (tensors[name].float().view(n, -1).numpy() for name in ("scale", "zero"))
    check(read(writers.hqq_config(group_size), tensors, n, k), m)


def test_hqq_text_is_never_evaluated():
    m = writers.matrix(16, 256, 64, zeros="float")
    tensors = writers.hqq(m, 64, "exit(1)")
    check(read(writers.hqq_config(64), tensors, 16, 256), m)


def test_hqq_by_kind_of_layer():
    one = writers.hqq_config(64)["quant_config"]
    two = writers.hqq_config(32)["quant_config"]
    config = {"quant_method": "hqq", "skip_modules": ["lm_head"],
              "quant_config": {"self_attn.q_proj": one, "mlp.up_proj": two}}  # fmt: skip
    assert scheme_of(config).group_size == 32
    assert scheme_of(config, "model.layers.11.self_attn.q_proj").group_size == 64
    assert scheme_of(config, "model.layers.11.self_attn.k_proj") is None


ALL = {
    "gptq": (writers.gptq_config(64, desc_act=True), lambda m: writers.gptq(m, 1)),
    "awq": (writers.awq_config(64), writers.awq),
    "compressed-tensors": (
        writers.compressed_config(64, symmetric=False), lambda m: compressed(m, 64, False)[0],
    ),
    "hqq": (writers.hqq_config(64), lambda m: writers.hqq(m, 64)),
}  # fmt: skip
by_format = pytest.mark.parametrize("name", ALL)


def written(name):
    config, write = ALL[name]
    m = writers.matrix(16, 256, 64, act_order=name == "gptq", zeros="float" if name == "hqq" else 3)
    return config, write(m)


@by_format
def test_names(name):
    assert read_format(ALL[name][0], "config.json").name == name
    assert scheme_of(ALL[name][0], "lm_head") is None


@by_format
def test_every_tensor_is_checked(name):
    config, tensors = written(name)
    specs = scheme_of(config).tensors(16, 256)
    for key in tensors:
        if specs[key].shape is None:
            continue
        wrong = torch.cat([tensors[key].reshape(-1), tensors[key].reshape(-1)[:1]])
        with pytest.raises(KernelArgumentError, match=rf"^{key}: has shape \[.*\], expected \["):
            read(config, {**tensors, key: wrong}, 16, 256)
        with pytest.raises(KernelArgumentError, match=f"^{key}: has dtype torch.float64, expected"):
            read(config, {**tensors, key: tensors[key].double()}, 16, 256)
        if specs[key].required:
            rest = {other: value for other, value in tensors.items() if other != key}
            with pytest.raises(KernelArgumentError, match=f"^{key}: is missing"):
                read(config, rest, 16, 256)


@by_format
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_scales_that_are_not_finite(name, value):
    config, tensors = written(name)
    for key in tensors:
        if tensors[key].is_floating_point():
            damaged = tensors[key].clone()
            damaged.view(-1)[-1] = value
            with pytest.raises(KernelArgumentError, match=f"^{key}: holds values that are not fin"):
                read(config, {**tensors, key: damaged}, 16, 256)


@pytest.mark.parametrize("index", [-1, 4, 2**31 - 1, -(2**31)])
def test_g_idx_out_of_range(index):
    config, tensors = written("gptq")
    tensors["g_idx"][7] = index
    with pytest.raises(KernelArgumentError, match=r"^g_idx: got groups .*, expected 0 to 3"):
        read(config, tensors, 16, 256)


def test_g_idx_against_desc_act():
    m = writers.matrix(16, 256, 64, act_order=True)
    with pytest.raises(KernelArgumentError, match="g_idx: is not in order, though desc_act"):
        read(writers.gptq_config(64), writers.gptq(m, 1), 16, 256)


@pytest.mark.parametrize(
    ("key", "value"),
    [("shape", [16, 128]), ("nbits", 3), ("group_size", 128), ("axis", 0), ("view_as_float", 1),
     ("quant_zero", 1), ("quant_scale", 1)],
)  # fmt: skip
def test_hqq_layers_that_contradict(key, value):
    config, tensors = written("hqq")
    tensors[key] = torch.tensor(value).to(tensors[key].dtype)
    with pytest.raises(KernelArgumentError, match=f"^{key}: holds .*, expected"):
        read(config, tensors, 16, 256)


def test_compressed_shape_that_contradicts():
    config, tensors = written("compressed-tensors")
    tensors["weight_shape"] = torch.tensor([16, 255])
    with pytest.raises(KernelArgumentError, match=r"^weight_shape: holds \[16, 255\], expected"):
        read(config, tensors, 16, 256)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (writers.gptq_config(bits=8), "bits: GPTQ of 8 bits is not supported"),
        (writers.gptq_config(bits=3), "bits: GPTQ of 3 bits is not supported"),
        (writers.gptq_config(checkpoint_format="marlin"), "stored as 'marlin' is not supported"),
        (writers.gptq_config(is_marlin_format=True), "order of the Marlin kernel"),
        (writers.gptq_config(pack_dtype="int16"), "pack_dtype: only int32"),
        (writers.gptq_config(group_size=20), "group_size: got 20, supported"),
        (writers.gptq_config(group_size=0), "group_size: got 0, supported"),
        (writers.gptq_config(group_size="128"), "group_size: must be an integer, got '128'"),
        (writers.gptq_config(group_size=True), "group_size: must be an integer, got True"),
        (writers.gptq_config(desc_act="no"), "desc_act: must be true or false, got 'no'"),
        (writers.gptq_config(bits=None), "bits: is missing"),
        (writers.gptq_config(dynamic=["-:a"]), "dynamic: must be an object"),
        (writers.gptq_config(dynamic={"-:(a+)+$": {}}), "is too complex"),
        (writers.gptq_config(dynamic={"-:(a": {}}), "is not a regular expression"),
        (writers.gptq_config(modules_in_block_to_quantize=[[3]]), "must be lists of names"),
        (writers.awq_config(bits=8), "AWQ of 8 bits is not supported"),
        (writers.awq_config(version="gemv"), "AWQ stored as 'gemv' is not supported"),
        (writers.awq_config(version="gemv_fast"), "AWQ stored as 'gemv_fast' is not supported"),
        (writers.awq_config(version="marlin"), "AWQ stored as 'marlin' is not supported"),
        (writers.awq_config(modules_to_not_convert="lm_head"), "must be a list of strings"),
        (writers.hqq_config(nbits=8), "HQQ of 8 bits is not supported"),
        (writers.hqq_config(axis=0), "axis 0"),
        (writers.hqq_config(view_as_float=True), "codes stored as floats"),
        (writers.compressed_config(num_bits=8), "'pack-quantized' of 8-bit 'int' is not supp"),
        (writers.compressed_config(type="float"), "'pack-quantized' of 4-bit 'float' is not"),
        (writers.compressed_config(strategy="tensor"), "strategy: 'tensor' is not supported"),
        (writers.compressed_config(actorder="other"), "actorder: 'other' is not supported"),
        (writers.compressed_config(dynamic=True), "when they are used are not supported"),
        (writers.compressed_config(ignore=["re:(.*)*x"]), "is too complex"),
        (writers.compressed_config(ignore=["re:["]), "is not a regular expression"),
        (writers.compressed_config() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: is"),
        (writers.compressed_config() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
         "sparsity_config: is not supported"),
        (writers.compressed_config() | {"transform_config": {"config_groups": {"R1": {}}}},
         "transform_config: is not supported"),
        (writers.compressed_config() | {"config_groups": []}, "config_groups: must be an object"),
        *[({**writers.compressed_config(), "format": name}, f"{name}' of 4-bit 'int' is not supp")
          for name in ("int-quantized", "float-quantized", "nvfp4-pack-quantized", "marlin-24")],
        *[({"quant_method": name}, f"the format '{name}' is not supported")
          for name in ("fp8", "fbgemm_fp8", "bitsandbytes", "exl2", "mxfp4", "quanto", "torchao",
                       "aqlm", "modelopt", "auto-round", "eetq")],
        ({"quant_method": "quip", "bits": 2}, "the format 'quip' of 2 bits is not supported"),
        ({"load_in_8bit": True}, "the format 'bitsandbytes' is not supported"),
        ({"quant_method": 4}, "quant_method: must be a string, got 4"),
        ({}, "quant_method: is missing"),
        ([], "quantization_config: must be an object"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(config, reason):
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_format(config, "some/config.json")
    assert caught.value.file == "some/config.json"
    assert caught.value.tensor.startswith("quantization_config")


def test_activations_are_not_supported():
    config = writers.compressed_config()
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(CheckpointError, match="quantized activations are not supported"):
        read_format(config, "config.json")


def test_a_dense_checkpoint_has_no_format():
    assert read_format(None, "config.json") is None


def test_gptq_layers():
    plain = read_format(writers.gptq_config(), "config.json")
    assert plain.scheme(LAYER)
    head = read_format(writers.gptq_config(lm_head=True), "config.json")
    assert head.scheme("lm_head")
    some = writers.gptq_config(modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]])
    assert scheme_of(some)
    assert scheme_of(some, "model.layers.0.mlp.down_proj") is None
    rules = {"-:.*up_proj$": {}, r"+:model\.layers\.(?:3|4)\..*": {"group_size": 32},
             "+:.*k_proj": {"bits": 8}}  # fmt: skip
    dynamic = writers.gptq_config(dynamic=rules)
    assert scheme_of(dynamic) is None
    assert scheme_of(dynamic, "model.layers.3.mlp.up_proj") is None
    assert scheme_of(dynamic, "model.layers.3.mlp.down_proj").group_size == 32
    assert scheme_of(dynamic, "model.layers.5.mlp.down_proj").group_size == 128
    with pytest.raises(CheckpointError, match="GPTQ of 8 bits"):
        scheme_of(dynamic, "model.layers.5.self_attn.k_proj")


def test_awq_layers():
    config = writers.awq_config(modules_to_not_convert=["mlp.up", "layers.1."])
    assert scheme_of(config) is None
    assert scheme_of(config, "model.layers.1.self_attn.q_proj") is None
    assert scheme_of(config, "model.layers.11.self_attn.q_proj")


def test_compressed_layers():
    ignore = ["lm_head", r"re:.*self_attn\.(q|k)_proj$", "model.layers.3.mlp.up_proj"]
    config = writers.compressed_config(ignore=ignore)
    assert scheme_of(config)
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.3.mlp.up_proj", "lm_head"):
        assert scheme_of(config, layer) is None
    assert scheme_of(config, "model.layers.33.mlp.up_proj")
    assert scheme_of(config, "model.layers.0.self_attn.v_proj")


def test_compressed_targets():
    """A name counts more than an expression, and that more than a class."""
    groups = {}
    for size, targets in [(32, ["Linear"]), (64, ["re:.*mlp.*"]), (128, [LAYER])]:
        group = writers.compressed_config(size)["config_groups"]["group_0"]
        groups[f"group_{size}"] = {**group, "targets": targets}
    config = writers.compressed_config() | {"config_groups": groups}
    assert scheme_of(config).group_size == 128
    assert scheme_of(config, "model.layers.1.mlp.up_proj").group_size == 64
    assert scheme_of(config, "model.layers.1.self_attn.q_proj").group_size == 32
    del groups["group_32"]
    assert scheme_of(config, "model.layers.1.self_attn.q_proj") is None


@pytest.mark.parametrize(("n", "k"), [(50, 128), (48, 132)])
def test_shapes_that_cannot_be_packed(n, k):
    with pytest.raises(KernelArgumentError, match="packs"):
        scheme_of(writers.gptq_config(64)).tensors(n, k)


def parts(**changes):
    m = [writers.matrix(n, 256, 64, seed=n, zeros=8) for n in (16, 32, 8)]
    groups = [read(writers.gptq_config(64), writers.gptq(each, 1), len(each.codes), 256)
              for each in m]  # fmt: skip
    groups[1] = replace(groups[1], **changes)
    return groups


def test_merged_parts_are_rows_below_rows():
    for changes in ({}, {"zeros": torch.full((32, 4), 3, dtype=torch.uint8)}):
        groups = parts(**changes)
        whole = merge(groups)
        assert (whole.zeros is None) == (not changes)
        assert torch.equal(whole.dequantize(), torch.cat([g.dequantize() for g in groups]))
    m = writers.matrix(16, 256, 64, act_order=True)
    same = read(writers.gptq_config(64, desc_act=True), writers.gptq(m, 1), 16, 256)
    assert torch.equal(merge([same, same]).dequantize(), torch.cat([same.dequantize()] * 2))
    offsets = [replace(g, offsets=-3 * g.scales) for g in parts()]
    assert torch.equal(merge(offsets).dequantize(), torch.cat([g.dequantize() for g in offsets]))


@pytest.mark.parametrize(
    "changes",
    [
        {"group_size": 128, "scales": torch.ones(32, 2)},
        {"offsets": torch.zeros(32, 4)},
        {"g_idx": torch.randperm(256, dtype=torch.int32) // 64},
    ],
)
def test_parts_that_cannot_be_merged(changes):
    assert merge(parts(**changes)) is None
    assert merge(parts(**changes)[::-1]) is None


def test_simplified_refuses_groups_that_nothing_divides():
    weight = Int4Groups(torch.zeros(2, 60, dtype=torch.uint8), torch.ones(2, 3), None, None, 20)
    with pytest.raises(KernelArgumentError, match="group_size: got 20"):
        simplified(weight)
    irregular = torch.tensor([0] * 300 + [1] * 276, dtype=torch.int32)
    codes = torch.zeros(2, 576, dtype=torch.uint8)
    with pytest.raises(KernelArgumentError, match="groups are not of 256 columns each"):
        simplified(Int4Groups(codes, torch.ones(2, 3), None, None, 256, irregular))
