"""The operations as torch sees them: schemas, fake tensors, torch.compile, the cost of a call."""

import importlib
import inspect
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from billfish.errors import KernelArgumentError
from billfish.kernels import general, marlin
from billfish.kernels import paged_attention as pa


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def packed(dtype, k=64, **options):
    rng = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, k), dtype=torch.uint8, generator=rng)
    scales = torch.rand(64, -(-k // 32), generator=rng) * 0.1
    return marlin.pack(codes, scales, group_size=32, dtype=dtype, **options)


def calls():
    """Each operation by name: its public function and good arguments."""
    cache = draw(2, 2, 5, 4, 2, 16)
    step = pa.AttentionMetadata.build([[1, 2], [3]], [6, 3], [3, 1], 4)
    query, key = draw(4, 4, 16), draw(4, 2, 16)
    one, two = torch.tensor([1]), torch.tensor([2])
    options = {"sliding_window": 3, "soft_cap": 2.0, "sinks": draw(4)}
    rotary = (query, key, torch.arange(4), draw(8, 16))
    permutation = torch.arange(64).flip(0) // 32
    return {
        "w4a16_matmul": (marlin.w4a16_matmul, (draw(3, 64), packed(torch.float32), draw(64)), {}),
        "w4a16_matmul int4": (
            marlin.w4a16_matmul, (draw(2, 3, 64, dtype=torch.bfloat16), packed(torch.bfloat16)), {},
        ),
        "w4a16_matmul act-order": (
            marlin.w4a16_matmul, (draw(3, 64), packed(torch.float32, g_idx=permutation)), {},
        ),
        "w4a16_matmul epilogues": (
            marlin.w4a16_matmul, (draw(3, 64), packed(torch.float32, silu_mul=True), draw(64)),
            {"residual": draw(3, 32), "batch_invariant": True},
        ),
        "w4a16_matmul no rows": (marlin.w4a16_matmul, (draw(0, 64), packed(torch.float32)), {}),
        "write_kv": (pa.write_kv, (key, key, cache[0, 0].clone(), cache[0, 1].clone(),
                                   step.slot_mapping), {}),
        "rotate_and_write": (
            pa.rotate_and_write,
            (query, key, key.flip(0), cache[0, 0].clone(), cache[0, 1].clone(), step.slot_mapping),
            {"positions": torch.arange(4), "cos_sin": draw(8, 16)},
        ),
        "rotate_and_write norms": (
            pa.rotate_and_write,
            (query, key, key.flip(0), cache[0, 0].clone(), cache[0, 1].clone(), step.slot_mapping),
            {"q_norm": draw(16), "k_norm": draw(16)},
        ),
        "attend": (pa.attend, (query, cache[0, 0], cache[0, 1], step), {}),
        "attend options": (pa.attend, (query, cache[0, 0], cache[0, 1], step), options),
        "copy_blocks": (pa.copy_blocks, (cache, one, two), {}),
        "swap_blocks": (pa.swap_blocks, (cache, cache.clone(), one, two), {}),
        "rms_norm": (general.rms_norm, (draw(3, 8), draw(8), 1e-5), {}),
        "add_rms_norm": (general.rms_norm, (draw(3, 8), draw(8), 1e-5, draw(3, 8)), {}),
        "rotary_embedding": (general.rotary_embedding, rotary, {}),
        "silu_mul": (general.silu_mul, (draw(3, 8),), {}),
        "gelu_tanh_mul": (general.gelu_tanh_mul, (draw(3, 8),), {}),
    }  # fmt: skip


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the billfish operations that pass, with their arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "billfish":
            self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", calls())
def test_opcheck(name):
    function, arguments, options = calls()[name]
    with Recorder() as recorder:
        function(*arguments, **options)
    ((op, args, kwargs),) = recorder.seen
    assert op.name() == f"billfish::{name.split()[0]}"
    opcheck(op, args, kwargs)


def test_opcheck_of_the_log_sum_exp():
    """An output that the operation writes into an argument."""
    function, arguments, _ = calls()["attend"]
    with Recorder() as recorder:
        _, lse = function(*arguments, return_lse=True)
    ((op, args, kwargs),) = recorder.seen
    assert args[-1] is lse
    opcheck(op, args, kwargs)
    compiled = torch.compile(partial(pa.attend, return_lse=True), backend="aot_eager")
    assert all(map(torch.equal, compiled(*arguments), function(*arguments, return_lse=True)))


def outputs(result):
    return [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("name", calls())
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(name):
    function, arguments, options = calls()[name]
    real = outputs(function(*arguments, **options))
    with Recorder() as recorder:
        function(*arguments, **options)
    op, args, kwargs = recorder.seen[0]
    with FakeTensorMode() as mode:
        to_fake = lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
        fake_args, fake_kwargs = torch.utils._pytree.tree_map(to_fake, (args, kwargs))
        fake = outputs(op(*fake_args, **fake_kwargs))
    for one, other in zip(fake, real, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@pytest.mark.parametrize("name", calls())
def test_inference_gives_the_same_without_the_dispatcher(name):
    """Plain tensors in inference go past torch's dispatcher; a mode that watches it sees all."""
    function, arguments, options = calls()[name]
    _, watched, _ = calls()[name]
    with torch.no_grad():
        plain = outputs(function(*arguments, **options))
        with Recorder() as recorder:
            expected = outputs(function(*watched, **options))
    assert len(recorder.seen) == 1
    plain += [a for a in arguments if isinstance(a, torch.Tensor)]
    expected += [a for a in watched if isinstance(a, torch.Tensor)]
    for one, other in zip(plain, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", calls())
def test_the_default_device_of_torch_is_not_that_of_the_work(name):
    """As with torch.set_default_device("cuda"); "meta" is there on every machine."""
    function, arguments, options = calls()[name]
    expected = outputs(function(*arguments, **options))
    _, again, _ = calls()[name]
    with torch.device("meta"):
        got = outputs(function(*again, **options))
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_metadata_from_lists_is_where_it_is_asked_for():
    with torch.device("meta"):
        step = pa.AttentionMetadata.build([[1, 2], [3]], [6, 3], [3, 1], 4)
    assert step.slot_mapping.tolist() == [7, 8, 9, 14]
    assert step.block_table.tolist() == [[1, 2], [3, -1]]


def layer(x, weight, norm, cos_sin, cache, step):
    """A step of a small model: every operation of a layer, by its public function."""
    hidden, residual = general.rms_norm(x, norm, 1e-5, x)
    qkv = marlin.w4a16_matmul(hidden, weight).view(-1, 8, 8)
    positions = torch.arange(x.shape[0])
    query, key = general.rotary_embedding(qkv[:, :4], qkv[:, 4:6], positions, cos_sin)
    pa.write_kv(key, qkv[:, 6:], cache[1, 0], cache[1, 1], step.slot_mapping)
    attended = pa.attend(query, cache[1, 0], cache[1, 1], step).flatten(1)
    pa.copy_blocks(cache, torch.tensor([1]), torch.tensor([4]))
    return general.silu_mul(attended), residual


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compile_without_a_graph_break(backend, dtype):
    step = pa.AttentionMetadata.build([[1, 2], [3]], [5, 2], [5, 2], 4)
    cache = draw(2, 2, 5, 4, 2, 8, dtype=dtype)
    inputs = (draw(7, 64, dtype=dtype), packed(dtype), draw(64, dtype=dtype), draw(8, 8))
    expected_cache = cache.clone()
    expected = layer(*inputs, expected_cache, step)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for got, wanted in zip(compiled(*inputs, cache, step), expected, strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(cache, expected_cache)
    assert not torch.equal(cache[:, :, 4], draw(2, 2, 5, 4, 2, 8, dtype=dtype)[:, :, 4])


def test_errors_keep_their_type_under_compile():
    torch.compiler.reset()
    compiled = torch.compile(general.silu_mul, backend="eager")
    with pytest.raises(KernelArgumentError, match="gate_up"):
        compiled(torch.zeros(2, 7))


PAGED_ATTENTION = ("write_kv", "rotate_and_write", "attend", "copy_blocks", "swap_blocks")


GPU_OPERATIONS = {
    "marlin": ("w4a16_matmul",),
    "paged_attention": PAGED_ATTENTION,
    "general": ("rms_norm", "add_rms_norm", "silu_mul", "gelu_tanh_mul"),
}


@pytest.mark.parametrize("family", GPU_OPERATIONS)
def test_every_operation_has_its_function_for_a_gpu(family):
    """They are imported by name at the first call, which no machine without a GPU makes."""
    pytest.importorskip("triton")
    gpu = importlib.import_module(f"billfish.kernels.{family}.gpu")
    ops = [getattr(torch.ops.billfish, name).default for name in GPU_OPERATIONS[family]]
    for op in ops:
        function = getattr(gpu, op.name().removeprefix("billfish::").partition(".")[0])
        schema = [argument.name for argument in op._schema.arguments]
        assert list(inspect.signature(function).parameters) == schema


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_changes_no_result(grad):
    generator = torch.Generator().manual_seed(0)
    image, window = (torch.randn(n, n, generator=generator) for n in (16, 5))
    calls = (
        lambda: general.matmul(image, image),
        lambda: general.convolve2d(image, window),
        lambda: general.fir(image, window[0])[0],
    )
    with torch.set_grad_enabled(grad):
        for call in calls:
            with torch.autocast("cpu"):
                inside = call()
            assert torch.equal(inside, call())


def test_what_is_no_tensor_or_number_is_told():
    x, large = torch.ones(2, 2), 10**5000
    points, masses, leaf = torch.ones(2, 3), torch.ones(2), torch.ones(2, requires_grad=True)
    for call in (
        lambda: general.sort(x, [1]),
        lambda: general.sample([[1.0]], seed=0),
        lambda: general.sample(x, seed=large),
        lambda: general.sample(x, temperature=leaf, seed=0),
        lambda: general.sample(x, temperature=masses.cfloat(), seed=0),
        lambda: general.fft(x, norm=[]),
        lambda: general.convolve2d(x, x[:1, :1], value=large),
        lambda: general.gaussian(1e308),
        lambda: general.gaussian(large, 3),
        lambda: general.heat_equation([1], 0.1),
        lambda: general.heat_equation(x[None], "abc"),
        lambda: general.heat_equation(x[None], 0.1, value=leaf[0]),
        lambda: general.nbody_acceleration(points, [1]),
        lambda: general.nbody_acceleration(points, masses, G="1"),
        lambda: general.leapfrog_step(points, points, masses, points),
        lambda: general.option_price("1", 1, 0, 0.1, 1, paths=1),
        lambda: general.option_price(masses.cfloat(), 1, 0, 0.1, 1, paths=1),
        lambda: general.option_price(1, 1, 0, 0.1, 1, paths=1, call="put"),
        lambda: general.spmv(masses, [0], torch.tensor([0, 2]), masses),
        lambda: general.matmul(x, [1]),
        lambda: general.rotary_embedding(x[None], x[None], [0], x),
        lambda: general.silu_mul(None),
    ):
        with pytest.raises(KernelArgumentError):
            call()
