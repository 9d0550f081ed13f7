"""The packed form of GPU weights, and marlin_triton.py run with Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from billfish.errors import KernelArgumentError
from billfish.kernels.marlin import gpu
from billfish.kernels.marlin.packing import pack_units, unpack_units
from billfish.kernels.marlin.weight import PackedWeight, _act_order, pack
from tests.kernels.interpreter import run_in_interpreter


def test_in_interpreter():
    run_in_interpreter("marlin_triton.py")


def draw_matrix(n, k, groups, zero_point, dtype, seed=0):
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=rng)
    scales = torch.randn(n, groups, generator=rng).to(dtype)
    zeros = torch.randint(0, 16, (n, groups), dtype=torch.uint8, generator=rng)
    offsets = torch.randn(n, groups, generator=rng).to(dtype)
    return (
        codes, scales, zeros if zero_point == "integer" else None,
        offsets if zero_point == "offset" else None,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("zero_point", ["symmetric", "integer", "offset"])
@pytest.mark.parametrize(
    ("n", "k", "group_size"),
    [(64, 128, 128), (8, 16, 16), (200, 464, 16), (72, 704, 32), (130, 192, 64), (65, 300, -1)],
)
def test_units_round_trip(n, k, group_size, zero_point, dtype):
    groups = 1 if group_size == -1 else -(-k // group_size)
    codes, scales, zeros, offsets = draw_matrix(n, k, groups, zero_point, dtype)
    second = zeros if zeros is not None else offsets
    units = pack_units(codes, scales, second, group_size, dtype)
    assert units.shape[:2] == (-(-n // 64), -(-k // 128))
    back = unpack_units(units, n, k, group_size, second is not None, dtype)
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1], scales)
    assert (back[2] is None) == (second is None)
    if second is not None:
        assert torch.equal(back[2], second.to(dtype))


def test_units_are_laid_out_as_documented():
    """A single code lands in the word and nibble that the module's docstring names."""
    for row, column in [(0, 0), (9, 1), (63, 127), (37, 74), (16, 8)]:
        codes = torch.zeros(64, 128, dtype=torch.uint8)
        codes[row, column] = 15
        words = pack_units(codes, torch.ones(64, 1), None, 128, torch.float16)[0, 0, :1024]
        warp, r3, r = row // 16, row // 8 % 2, row % 8
        k64, step, k3 = column // 64, column // 16 % 4, column // 8 % 2
        c, k0 = column // 2 % 4, column % 2
        word = (((k64 * 4 + warp) * 8 + r) * 4 + c) * 4 + step
        assert words.nonzero().tolist() == [[word]]
        assert (int(words[word]) & 0xFFFFFFFF) == 15 << (4 * (4 * k0 + 2 * k3 + r3))


def test_padding_adds_nothing():
    """Rows past N and columns past K have a scale (and an offset) of zero."""
    codes, scales, _, offsets = draw_matrix(70, 150, 5, "offset", torch.float16)
    units = pack_units(codes, scales, offsets, 32, torch.float16)
    back = unpack_units(units, 128, 256, 32, True, torch.float16)
    assert not back[1][70:].any()
    assert not back[1][:, 5:].any()
    assert not back[2][70:].any()
    assert not back[2][:, 5:].any()


def packed_for_gpu(codes, scales, zeros, offsets, g_idx, group_size, silu_mul=False):
    """What marlin.pack makes of CUDA tensors, on the CPU: the packing is plain torch."""
    n, k = codes.shape
    g_idx, perm = _act_order(g_idx, k, group_size, scales.shape[1])
    stored = codes if perm is None else codes[:, perm]
    own = {"g_idx": g_idx, "perm": perm}
    own |= gpu.pack(
        stored, scales, zeros, offsets, group_size=group_size, dtype=torch.float16,
        g_idx=g_idx if perm is None else None, silu_mul=silu_mul,
    )  # fmt: skip
    zero_point = "integer" if zeros is not None else "offset" if offsets is not None else None
    return PackedWeight(
        n=n, k=k, group_size=group_size, dtype=torch.float16, zero_point=zero_point or "symmetric",
        silu_mul=silu_mul, **own,
    )  # fmt: skip


@pytest.mark.parametrize("zero_point", ["symmetric", "integer", "offset"])
@pytest.mark.parametrize("order", ["plain", "act-order", "slice", "groups without columns"])
def test_gpu_weights_round_trip(order, zero_point):
    n, k, group_size = 72, 250, 64
    rng = torch.Generator().manual_seed(1)
    groups, g_idx = 4, None
    if order == "act-order":
        g_idx = (torch.arange(k) // group_size)[torch.randperm(k, generator=rng)]
    elif order == "slice":
        groups, g_idx = 7, torch.randint(0, 7, (k,), generator=rng)
    elif order == "groups without columns":
        groups, g_idx = 9, torch.randint(0, 3, (k,), generator=rng) * 2
    matrix = draw_matrix(n, k, groups, zero_point, torch.float16)
    weight = packed_for_gpu(*matrix, g_idx, group_size)
    assert weight.layout == ("units-" if order in ("plain", "act-order") else "sliced-") + (
        zero_point
    )
    for got, expected in zip(gpu.unpack(weight), matrix, strict=True):
        assert (got is None) == (expected is None)
        assert expected is None or torch.equal(got, expected)


@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize(("n", "k"), [(128, 256), (72, 250)])
def test_parameters_may_have_any_strides(n, k, silu_mul):
    """Columns first, as checkpoints hold some, or every second value: packed the same on both."""
    for zero_point in ("symmetric", "integer", "offset"):
        matrix = draw_matrix(n, k, -(-k // 64), zero_point, torch.float16)
        columns = [None if t is None else t.t().contiguous().t() for t in matrix]
        apart = [None if t is None else torch.stack((t, t), -1)[..., 0] for t in matrix]
        on_gpu = packed_for_gpu(*matrix, None, 64, silu_mul=silu_mul).tensors[0]
        for codes, scales, zeros, offsets in (columns, apart):
            strided = packed_for_gpu(codes, scales, zeros, offsets, None, 64, silu_mul=silu_mul)
            assert torch.equal(strided.tensors[0], on_gpu)
            weight = pack(
                codes, scales, zeros=zeros, offsets=offsets, group_size=64, dtype=torch.float32,
                silu_mul=silu_mul,
            )  # fmt: skip
            assert torch.equal(weight.unpack()[0], matrix[0])


def test_float32_is_refused_on_a_gpu():
    codes, scales, _, _ = draw_matrix(64, 128, 1, "symmetric", torch.float32)
    with pytest.raises(KernelArgumentError, match="dtype"):
        gpu.pack(
            codes, scales, None, None, group_size=128, dtype=torch.float32, g_idx=None,
            silu_mul=False,
        )  # fmt: skip


@pytest.mark.parametrize("zero_point", ["symmetric", "integer", "offset"])
@pytest.mark.parametrize("order", ["plain", "act-order", "slice"])
@pytest.mark.parametrize("n", [16, 26, 144])
def test_gated_weights_round_trip(n, order, zero_point):
    """Rows of gate and up are stored by turns and come back in order, whatever their number."""
    rng = torch.Generator().manual_seed(2)
    groups, g_idx = 3, None
    if order == "act-order":
        g_idx = (torch.arange(192) // 64)[torch.randperm(192, generator=rng)]
    elif order == "slice":
        g_idx = torch.randint(0, 3, (192,), generator=rng)
    matrix = draw_matrix(n, 192, groups, zero_point, torch.float16)
    weight = packed_for_gpu(*matrix, g_idx, 64, silu_mul=True)
    assert weight.outputs == n // 2
    for got, expected in zip(gpu.unpack(weight), matrix, strict=True):
        assert (got is None) == (expected is None)
        assert expected is None or torch.equal(got, expected)


def test_gate_and_up_rows_stand_side_by_side():
    rows = torch.arange(40).view(40, 1)
    stored = gpu.interleave(rows).flatten().tolist()
    assert stored[:16] == [*range(8), *range(20, 28)]
    assert stored[32:] == [16, 17, 18, 19, 0, 0, 0, 0, 36, 37, 38, 39, 0, 0, 0, 0]


def test_rows_for_tma():
    """Rows that TMA can read are passed on; others are copied, value for value."""
    x = torch.randn(6, 64, dtype=torch.float16)
    assert gpu.aligned_rows(x) is x
    assert gpu.aligned_rows(x[::2]).data_ptr() == x.data_ptr()
    for odd in (x[:, 1:33], x.t()[:6].t(), x[:, :20][:, ::2], x[:1].expand(6, 64), x[:, :63]):
        rows = gpu.aligned_rows(odd)
        assert torch.equal(rows, odd)
        assert rows.data_ptr() % 16 == 0
        assert rows.stride(0) * 2 % 16 == 0
        assert rows.stride(0) >= rows.shape[1]
        assert rows.stride(1) == 1
