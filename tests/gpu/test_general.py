"""The general kernels on a GPU, against the CPU's; runs of programs in parallel, many times over.

What no interpreter can show is here: look-back among programs that run at once, parts that meet by
atomics, and whether the bits are the same from run to run where that is promised.
"""

import pytest
import torch

from billfish.kernels import general
from billfish.kernels.general import (
    adamw_gpu,
    compact_gpu,
    elementwise_gpu,
    gpu,
    histogram_gpu,
    layer_norm_gpu,
    reduce_gpu,
    rotary_gpu,
    sample_gpu,
    scan_gpu,
    segment_reduce_gpu,
    softmax_gpu,
    sort_gpu,
    transpose_gpu,
)
from tests.kernels.elementwise_cases import CHAINS
from tests.kernels.small_transformer import loss_curves

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SIZES = (0, 1, 31, 4095, 4096, 4097, 100_003, 10_000_019)
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
         torch.int8, torch.uint8)  # fmt: skip


def draw(*shape, dtype=torch.float32, seed=0):
    rng = torch.Generator("cuda").manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=rng, device="cuda").to(dtype)
    low = 0 if dtype == torch.uint8 else -100
    return torch.randint(low, 100, shape, generator=rng, dtype=dtype, device="cuda")


def close(got, want, spread):
    """spread: the magnitude of what was added, over which rounding errors are measured."""
    if not got.dtype.is_floating_point:
        assert torch.equal(got, want)
        return
    unit = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2.0**-8,
            torch.float16: 2.0**-11}[got.dtype]  # fmt: skip
    bound = unit * want.abs() + (1e-14 if got.dtype == torch.float64 else 3e-6) * spread + 1e-6
    assert bool(((got.double() - want).abs() <= bound).all())


def exact(x):
    return x.double() if x.dtype.is_floating_point else x.long()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", TYPES)
def test_scan(dtype, n):
    x = draw(1 if n > 10**6 else 3, n, dtype=dtype) / (64 if dtype == torch.float16 else 1)
    x = x.to(dtype)
    want = exact(x).cumsum(1)
    for deterministic in (False, True):
        got = scan_gpu.scan(x, False, "sum", deterministic)
        close(got, want, max(n, 1) ** 0.5)
        before = scan_gpu.scan(x, True, "sum", deterministic)
        close(before[:, 1:], want[:, :-1], max(n, 1) ** 0.5)
        assert not before[:, :1].any()
    if n:
        assert torch.equal(scan_gpu.scan(x, False, "max", False), x.cummax(1).values)


@pytest.mark.parametrize(
    ("dtype", "n"), [(torch.float32, 16_384), (torch.bfloat16, 16_379), (torch.int64, 8192)]
)
def test_scan_of_rows_that_registers_hold(dtype, n):
    x = draw(5, n, dtype=dtype)
    close(scan_gpu.scan(x, False, "sum", False), exact(x).cumsum(1), n**0.5)


@pytest.mark.sanitize
def test_scan_of_a_few_tiles():
    x = draw(2, 300, dtype=torch.int32)
    assert torch.equal(scan_gpu.scan(x, False, "sum", False, block=128), x.cumsum(1))


def test_scan_a_hundred_times():
    """Tiles so small that thousands look back at once: integers always come out the same."""
    x = draw(1, 2_000_003, dtype=torch.int64)
    want = x.cumsum(1)
    for _ in range(100):
        assert torch.equal(scan_gpu.scan(x, False, "sum", False, block=128), want)
    small = x.to(torch.int32)
    for _ in range(100):
        got = scan_gpu.scan(small, False, "max", False, block=128)
        assert torch.equal(got, small.cummax(1).values)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", TYPES)
def test_scan_of_long_rows(dtype, op):
    """Many rows of many tiles, apart in memory; NaN goes on to the end of its row."""
    x = draw(40, 100_003, dtype=dtype)[::2]
    if dtype.is_floating_point:
        x = x / 64
        x[3, 50_000] = torch.nan
    if op == "sum":
        want = exact(x).cumsum(1)
    else:
        want = (x.cummax(1) if op == "max" else x.cummin(1)).values
    for block in (None, 512):
        got = scan_gpu.scan(x, False, op, False, block=block)
        before = scan_gpu.scan(x, True, op, False, block=block)
        if op == "sum":
            numbers = want == want
            close(got[numbers], want[numbers], 320.0)
            assert torch.equal(got.isnan(), want.isnan())
        else:
            assert torch.equal(got.nan_to_num(), want.nan_to_num())
            assert torch.equal(before[:, 1:].nan_to_num(), want[:, :-1].nan_to_num())
        assert torch.equal(before[:, 1:].isnan(), want[:, :-1].isnan())


def test_scan_deterministic():
    x = draw(1, 3_000_001)
    first = general.scan(x, deterministic=True)
    for _ in range(20):
        assert torch.equal(general.scan(x, deterministic=True), first)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", TYPES)
def test_reduce(dtype, n):
    x = draw(n, dtype=dtype)
    whole = x.view(1, n, 1)
    first = reduce_gpu.reduce(whole, "sum")
    close(first.view(()), exact(x).sum(), max(n, 1) ** 0.5)
    for fused in (True, False):
        for _ in range(10):
            assert torch.equal(reduce_gpu.reduce(whole, "sum", fused=fused), first)
    if n:
        assert torch.equal(general.reduce(x, op="min"), x.min())


@pytest.mark.parametrize("shape", [(1000, 1000), (7, 100_000), (100_000, 7), (3, 5000, 65)])
@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_a_dimension(shape, dim):
    x = draw(*shape)
    close(general.reduce(x, dim), x.double().sum(dim), shape[dim] ** 0.5)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_segment_reduce(dtype, balanced):
    lengths = torch.cat((torch.full((500,), 3), torch.tensor([1_000_000, 0, 0, 8192, 8193, 1])))
    offsets = torch.cat((torch.zeros(1), lengths.cumsum(0))).long()
    x = draw(int(offsets[-1]), dtype=dtype)
    want = general.segment_reduce_reference(exact(x), offsets)
    for kind in (torch.int32, torch.int64):
        bounds = offsets.to("cuda", kind)
        got = segment_reduce_gpu.segment_reduce(x, bounds, "sum", balanced=balanced)
        close(got, want, 1000.0)
        again = segment_reduce_gpu.segment_reduce(x, bounds, "sum", balanced=balanced)
        assert torch.equal(got, again)


@pytest.mark.parametrize(
    "shape", [(1, 1), (4096, 4096), (4097, 4095), (3, 100_000), (70_000, 2, 3)]
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_transpose(shape, dtype):
    x = draw(*shape).to(dtype)
    want = x.mT.contiguous()
    assert torch.equal(general.transpose(x), want)
    whole = x.view(-1, *x.shape[-2:])
    assert torch.equal(transpose_gpu.transpose_copy(whole, tiled=False).view(want.shape), want)


@pytest.mark.parametrize("bins", [1, 32, 100, 256, 4096, 8193, 100_000, 8 * 24576, 400_000])
@pytest.mark.parametrize("skewed", [False, True])
def test_histogram(bins, skewed):
    x = torch.randint(-5, bins + 5, (5_000_011,), device="cuda")
    if skewed:
        x[1000:] = bins // 2
    want = torch.bincount(x[(x >= 0) & (x < bins)], minlength=bins)
    for private in (True, False):
        got = histogram_gpu.histogram(x, bins, 0.0, 1.0, private=private)
        assert torch.equal(got, want)


@pytest.mark.parametrize(("n", "bins"), [(1_000_003, 200), (4_200_001, 50_000)])
def test_histogram_of_floats(n, bins):
    x = draw(n)
    x[7], x[8], x[9] = float("nan"), float("inf"), -float("inf")
    got = general.histogram(x, bins, -2.0, 2.0)
    assert torch.equal(got.cpu(), general.histogram(x.cpu(), bins, -2.0, 2.0))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.int64])
def test_compact(dtype, n):
    x = draw(n, dtype=dtype)
    for keep in (draw(n, seed=1) > 0, draw(n) > 9, draw(n) < 9):
        for fused in (True, False):
            out, count = compact_gpu.compact(x, keep, fused=fused)
            assert torch.equal(out[: count.item()], x[keep])
            assert not out[count.item() :].any()
    if n > 9:  # no address is a multiple of 16 bytes
        out, count = compact_gpu.compact(x[9:], keep[9:])
        assert torch.equal(out[: count.item()], x[9:][keep[9:]])


def test_compact_without_gluon(monkeypatch):
    monkeypatch.setattr(compact_gpu, "gluon_supported", lambda: False)
    x, keep = draw(100_003), draw(100_003, seed=1) > 0
    out, count = compact_gpu.compact(x, keep)
    assert torch.equal(out[: count.item()], x[keep])
    assert not out[count.item() :].any()


def test_compact_a_hundred_times():
    """Tiles so small that thousands look back at once."""
    x, keep = draw(2_000_003), draw(2_000_003, seed=1) > 0
    want = x[keep]
    for _ in range(100):
        out, count = compact_gpu.compact(x, keep, block=1024)
        assert count.item() == len(want)
        assert torch.equal(out[: len(want)], want)
        assert not out[len(want) :].any()


def keys_to_sort(rows, n, dtype):
    x = draw(rows, n, dtype=dtype)
    if dtype.is_floating_point and n > 20:
        x = (x * 64).round() / 64
        nan = torch.tensor(torch.nan, dtype=dtype)
        special = torch.tensor([0.0, -0.0, 0.0, torch.inf, -torch.inf, -0.0], dtype=dtype)
        x[:, 3:9], x[:, 11], x[:, 14] = special.cuda(), nan, nan.neg()
    elif dtype == torch.int64:
        x = x * (1 << 50) + draw(rows, n, dtype=dtype, seed=2)
    return x


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 31), (3, 4097), (1000, 300), (1, 5_000_011)])
@pytest.mark.parametrize("dtype", TYPES)
def test_sort(dtype, shape, descending):
    x = keys_to_sort(*shape, dtype)
    places = torch.sort(x.cpu(), dim=-1, descending=descending, stable=True).indices.cuda()
    for kind in (torch.int64, torch.int32, torch.int16, torch.uint8):
        values = torch.arange(x.numel(), device="cuda").view(shape).to(kind)
        for one_sweep in (True, False):
            keys, moved = sort_gpu.sort_pairs(x, values, descending, one_sweep=one_sweep)
            assert torch.equal(moved, values.gather(1, places))
            want = x.gather(1, places)
            assert torch.equal(keys.view(torch.uint8), want.view(torch.uint8))
    alone = general.sort(x, descending=descending)
    assert torch.equal(alone.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_sort_a_hundred_times(dtype):
    """Many tiles look back at once."""
    x = draw(1, 3_000_017, dtype=dtype)
    values = torch.arange(x.shape[1], device="cuda", dtype=torch.int32)[None]
    want = general.sort(x, values)
    assert torch.equal(want[0], x.sort(dim=1, stable=True).values)
    for _ in range(100):
        keys, moved = general.sort(x, values)
        assert torch.equal(keys, want[0])
        assert torch.equal(moved, want[1])


@pytest.mark.sanitize
def test_sort_of_a_few_tiles():
    x = draw(2, 700, dtype=torch.int16)
    assert torch.equal(general.sort(x), x.sort(1).values)


def test_sort_of_one_digit_and_of_what_is_sorted():
    """All keys of a tile have one digit; and all of a warp."""
    for x in (torch.zeros(1 << 20, device="cuda"), torch.arange(1 << 20, device="cuda").flip(0)):
        values = torch.arange(1 << 20, device="cuda")
        keys, moved = general.sort(x, values)
        want = x.sort(stable=True)
        assert torch.equal(keys, want.values)
        assert torch.equal(moved, want.indices)


@pytest.mark.parametrize("expression", CHAINS)
def test_elementwise(expression):
    inputs = {name: x.cuda() for name, x in CHAINS[expression]().items()}
    want = general.elementwise_reference(expression, **inputs)
    for fused in (True, False):
        got = elementwise_gpu.elementwise(
            list(inputs.values()), expression, list(inputs), fused=fused
        )
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        tight = got.dtype != torch.float16
        torch.testing.assert_close(
            got, want, equal_nan=True, rtol=1e-5 if tight else 2e-3, atol=1e-5 if tight else 2e-3
        )


def test_elementwise_of_large_tensors_and_views():
    x, y = draw(3001, 5003), draw(5003, 3001, seed=1).mT
    got = general.elementwise("silu(x) * y + 0.5 * z", x=x, y=y, z=x[0])
    want = x.double().sigmoid() * x * y + 0.5 * x[0]
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_views_are_read_where_they_lie():
    x = draw(64, 3000)[::2, 5:2900:3]
    close(general.scan(x, 1), x.double().cumsum(1), 100.0)
    close(general.reduce(x, 1), x.double().sum(1), 100.0)
    assert torch.equal(general.transpose(x), x.mT)


HALVES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def near(got, want, slack):
    torch.testing.assert_close(got.double(), want.double(), rtol=ROUNDING[got.dtype], atol=slack)


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (1000, 4096), (4099, 768), (20, 16384)])
def test_norms(shape, dtype, centre):
    x, dy = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    weight, bias = draw(shape[1], dtype=dtype, seed=2), draw(shape[1], dtype=dtype, seed=3)
    wide = x.double(), weight.double()
    if centre:
        got = general.layer_norm(x, weight, bias, 1e-3)
        near(got, general.layer_norm_reference(*wide, bias.double(), 1e-3), 1e-5)
    want = general.norm_backward_reference(dy.double(), *wide, 1e-3, centre)
    first = layer_norm_gpu.norm_backward(dy, x, weight, 1e-3, centre)
    for part, exact in zip(first[: 2 + centre], want, strict=False):
        near(part, exact, 1e-5 * shape[0] ** 0.5 + 1e-4)
    apart = layer_norm_gpu.norm_backward(dy, x, weight, 1e-3, centre, fused=False)
    again = layer_norm_gpu.norm_backward(dy, x, weight, 1e-3, centre)
    for one, other, third in zip(first, again, apart, strict=True):
        assert torch.equal(one, other)
        near(third, one, 1e-5 * shape[0] ** 0.5 + 1e-4)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (1000, 4096), (7, 16385), (5, 128256)])
def test_softmax(shape, dtype, resident):
    x, dy = 4 * draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    y = softmax_gpu.softmax(x, resident=resident)
    near(y, torch.softmax(x.double(), -1), 1e-7)
    got = softmax_gpu.softmax_backward(dy, y, resident=resident)
    near(got, general.softmax_backward_reference(dy.double(), y.double()), 1e-6)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("rows", "n"), [(3000, 16_392), (700, 32_776), (2, 1 << 19), (300, 99_992)]
)
def test_softmax_of_rows_shared_by_programs(rows, n, dtype):
    x = draw(rows, n + 8, dtype=dtype)[:, :n]  # a stride of its own
    nan, inf = float("nan"), float("inf")
    x[0] = -inf
    x[0, -1] = 1.0
    x[1] = -inf
    if rows > 2:
        x[2, 7], x[3, 9], x[4, n // 2 :], x[5] = nan, inf, -inf, 60000.0
        x[6] = 0.0
        x[7] = -60000.0
    want = torch.softmax(x.double(), -1)
    assert softmax_gpu.shares(x)
    for _ in range(3):
        got = softmax_gpu.softmax(x)
        torch.testing.assert_close(
            got.double(), want, rtol=2 * ROUNDING[dtype], atol=1e-7, equal_nan=True
        )
    again = softmax_gpu.softmax(x)
    assert torch.equal(got.nan_to_num(), again.nan_to_num())
    assert not softmax_gpu.shares(draw(2, n + 1, dtype=dtype))


class Few:
    """Launches some of a kernel's programs: the others are never scheduled."""

    def __init__(self, kernel, programs):
        self.kernel, self.programs = kernel, programs

    def __getitem__(self, grid):
        assert self.programs < grid[0]
        return self.kernel[(self.programs,)]


@pytest.mark.parametrize("programs", [1, 15, 37])
@pytest.mark.parametrize("dtype", HALVES)
def test_softmax_needs_no_program_that_is_not_scheduled(monkeypatch, dtype, programs):
    """Those that run do their parts, though the others of their rows never begin."""
    x = 4 * draw(40, 128256, dtype=dtype)
    want = softmax_gpu.softmax(x)
    kernel = softmax_gpu._shared_softmax_kernel
    monkeypatch.setattr(softmax_gpu, "_shared_softmax_kernel", Few(kernel, programs))
    got = torch.full_like(x, -1.0)
    softmax_gpu._shared_softmax(x, got)
    done = got != -1.0
    assert torch.equal(got[done], want[done])
    assert int(done.sum()) == programs * 128256 // 16


@pytest.mark.parametrize("patience", [1, softmax_gpu.PATIENCE])
@pytest.mark.parametrize("graphs", [False, True])
def test_softmax_on_streams_at_once(graphs, patience):
    """Rows shared by as many programs as may be, by more kernels at once than a GPU holds waiting
    programs of; other kernels that wait, and graphs, among them. No patience at all: programs
    compute what others are about to tell, to the bit."""
    xs = [draw(24, 1 << 19, dtype=torch.bfloat16, seed=seed) for seed in range(16)]
    values = draw(1, 10_000_019, dtype=torch.int32)
    sums = values.cumsum(-1)
    want = [torch.softmax(x.double(), -1) for x in xs[:2]]
    first = [softmax_gpu.softmax(x) for x in xs]
    for y, exact in zip(first, want, strict=False):
        near(y, exact, 1e-7)
    outs = [torch.empty_like(x) for x in xs]
    scans = [None] * len(xs)
    streams = [torch.cuda.Stream() for _ in xs]

    def enqueue(k):
        softmax_gpu._shared_softmax(xs[k], outs[k], patience=patience)
        scans[k] = general.scan(values)

    captured = [torch.cuda.CUDAGraph() for _ in xs] if graphs else []
    enqueue(0)  # compiled and loaded before a graph is captured
    torch.cuda.synchronize()
    for k, graph in enumerate(captured):
        with torch.cuda.graph(graph, stream=streams[k]):
            enqueue(k)
    for _ in range(3):
        for out in outs:
            out.fill_(-1)
        torch.cuda.synchronize()
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                captured[k].replay() if graphs else enqueue(k)
        torch.cuda.synchronize()
        assert all(torch.equal(out, y) for out, y in zip(outs, first, strict=True))
        assert all(torch.equal(scan, sums) for scan in scans)


@pytest.mark.parametrize("name", ["scan", "scan in one order", "compact", "sort"])
def test_programs_that_wait_on_streams_at_once(name):
    """Tiles wait for tiles before them only, whose programs run: with many kernels at once too."""
    values = draw(3_000_017, dtype=torch.int32)
    keep = values > 40
    kept = values[keep]
    calls = {
        "scan": (lambda: general.scan(values), values.cumsum(-1)),
        "scan in one order": (lambda: general.scan(values, deterministic=True), values.cumsum(-1)),
        "compact": (lambda: general.compact(values, keep)[0][: len(kept)], kept),
        "sort": (
            lambda: sort_gpu.sort(values[None], False, one_sweep=True)[0],
            values.sort().values,
        ),
    }
    call, want = calls[name]
    call()
    streams = [torch.cuda.Stream() for _ in range(24)]
    torch.cuda.synchronize()
    got = []
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(call())
    torch.cuda.synchronize()
    assert all(torch.equal(one, want) for one in got)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (100, 31), (300, 50257), (64, 128256)])
def test_cross_entropy(rows, classes, dtype):
    logits = (4 * draw(rows, classes, dtype=dtype)).requires_grad_()
    target = torch.arange(rows, device="cuda") * 977 % classes
    target[1::5] = -100
    leaf = logits.detach().double().requires_grad_()
    got = general.cross_entropy(logits, target)
    want = torch.nn.functional.cross_entropy(leaf, target)
    near(got, want, 1e-5)
    got.backward()
    want.backward()
    near(logits.grad, leaf.grad, 1e-7)


@pytest.mark.parametrize("dtype", HALVES)
def test_linear_cross_entropy(dtype):
    x, weight = draw(1000, 256, dtype=dtype) / 16, draw(32000, 256, dtype=dtype, seed=1)
    x, target = x.to(dtype), torch.arange(1000, device="cuda") * 31 % 32000
    ours = [t.clone().requires_grad_() for t in (x, weight)]
    exact = [t.double().requires_grad_() for t in (x, weight)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = general.linear_cross_entropy(ours[0], ours[1], target, chunk=128)
    peak = torch.cuda.max_memory_allocated() - before
    # The weight's gradient in float32, a chunk's part of it, its copy; the logits of a chunk.
    assert peak < 3 * 4 * weight.numel() + 3 * 128 * 32000 * dtype.itemsize + (8 << 20)
    loss.backward()
    want = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), target)
    want.backward()
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-3, atol=1e-3)
    for one, other in zip(ours, exact, strict=True):
        error = (one.grad.double() - other.grad).norm() / other.grad.norm()
        assert error < {torch.float32: 5e-3, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("shape", [(1, 2), (0, 8), (1000, 28672), (7, 3, 202)])
def test_gated_backward(shape, name, dtype):
    x, dy = 3 * draw(*shape, dtype=dtype), draw(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=1)
    want = getattr(general, f"{name}_backward_reference")(dy.double(), x.double())
    for fused in (True, False):
        near(getattr(gpu, f"{name}_backward")(dy, x, fused=fused), want, 1e-5)
    leaf = x.clone().requires_grad_()
    (got,) = torch.autograd.grad(getattr(general, name)(leaf), leaf, dy)
    near(got, want, 1e-5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("tokens", "heads", "key_heads", "size", "rotary_dim"),
    [(0, 2, 1, 64, 64), (1, 32, 8, 128, 128), (3001, 32, 8, 128, 96), (50, 1, 1, 80, 20)],
)
def test_rotary_embedding(tokens, heads, key_heads, size, rotary_dim, dtype):
    qkv = draw(tokens, heads + 2 * key_heads, size, dtype=dtype)
    query, key, _ = qkv.split((heads, key_heads, key_heads), 1)
    positions = torch.randint(0, 4096, (tokens,), device="cuda")
    angles = draw(4096, rotary_dim // 2, seed=1)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    leaves = [x.double().requires_grad_() for x in (query, key)]
    want = general.rotary_embedding_reference(*leaves, positions, table.double())
    grads = torch.autograd.grad(want, leaves, [x.double() for x in (query, key)])
    for fused in (True, False):
        got = rotary_gpu.rotary_embedding(query, key, positions, table, fused=fused)
        back = rotary_gpu.rotary_embedding_backward(query, key, positions, table, fused=fused)
        for part, exact in zip((*got, *back), (*want, *grads), strict=True):
            near(part, exact, 1e-2 if dtype != torch.float32 else 1e-5)
    ours = [x.clone().requires_grad_() for x in (query, key)]
    out = general.rotary_embedding(*ours, positions, table)
    for part, exact in zip(torch.autograd.grad(out, ours, (query, key)), grads, strict=True):
        near(part, exact, 1e-2 if dtype != torch.float32 else 1e-5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (64, 300), (33, 50257), (16, 128256)])
def test_sample(rows, size, dtype):
    """The same tokens as on the CPU, but where float64 sums differ at the number drawn."""
    logits = (3 * draw(rows, size)).to(dtype)
    seeds, positions = torch.arange(rows) * 77, torch.arange(rows) % 9
    options = [
        torch.tensor([column[i % len(column)] for i in range(rows)])
        for column in ((0.0, 0.3, 1.0, 2.0, 1.0), (0, 1, 40, 1000), (1.0, 0.95, 0.5), (0.0, 0.02))
    ]
    want = general.sample(logits.cpu(), *options, seed=seeds, position=positions)
    on_gpu = [x.cuda() for x in (*options, seeds, positions)]
    for _ in range(3):
        got = general.sample(logits, *on_gpu[:4], seed=on_gpu[4], position=on_gpu[5])
        assert int((got.cpu() != want).sum()) <= rows // 50
    numbers = torch.stack((on_gpu[0], on_gpu[2], on_gpu[3], on_gpu[0]), 1).double()
    integers = torch.stack((on_gpu[4], on_gpu[1]), 1)
    sorted_ = sample_gpu.draw_tokens(logits, numbers, integers, on_gpu[5], False, bisect=False)
    assert int((sorted_.cpu() != want).sum()) <= rows // 50
    greedy = general.sample(logits, 0, seed=1)
    assert torch.equal(greedy, logits.argmax(1))


def test_sample_where_little_or_nothing_tells_tokens_apart():
    """A mask leaves a few tokens; all logits are equal; some are no numbers."""
    logits = draw(12, 50257)
    logits[:4, 7:] = -torch.inf
    logits[4:8] = 0.25
    logits[8, 50256], logits[9, 0], logits[10] = torch.nan, torch.inf, -torch.inf
    for top_k, top_p in ((0, 1.0), (3, 1.0), (50, 0.95), (0, 0.9), (5000, 0.5)):
        options = {"top_k": top_k, "top_p": top_p, "seed": 5, "position": 3}
        want = general.sample(logits.cpu(), **options)
        got = general.sample(logits, **options).cpu()
        assert torch.equal(got[:4], want[:4])
        # In 50257 equal steps the sum's last bits may choose a neighbour.
        assert int((got[4:8] - want[4:8]).abs().max()) <= 1
        assert got[8:11].tolist() == [-1, -1, -1]


def test_sample_distribution():
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], device="cuda")
    logits = probs.log().expand(200_000, -1)
    for options, expected in (
        ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.71}, [8 / 17, 6 / 17, 3 / 17, 0, 0]),
    ):
        shares = general.sample(logits, seed=11, **options).bincount(minlength=5) / 200_000
        for share, p in zip(shares.tolist(), expected, strict=True):
            assert abs(share - p) <= 5 * (p * (1 - p) / 200_000) ** 0.5 + 1e-5 * (p > 0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("n", SIZES)
def test_adamw(n, dtype):
    for fused in (True, False):
        param, moments = draw(n, dtype=dtype), [torch.zeros(n, device="cuda") for _ in range(2)]
        for step in range(1, 4):
            grad = draw(n, dtype=dtype, seed=step)
            wide = [t.double() for t in (param, grad, *moments)]
            want = general.adamw_reference(*wide, step, 0.1, (0.9, 0.99), 1e-8, 0.1)
            adamw_gpu.adamw_step(
                param, grad, *moments, step, 0.1, 0.9, 0.99, 1e-8, 0.1, fused=fused
            )
            for part, exact in zip((param, *moments), want, strict=True):
                near(part, exact, 1e-5)


def test_a_transformer_trains_to_the_same_loss_curve():
    theirs, ours = loss_curves(torch.device("cuda"))
    assert theirs[-1] < 0.3 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
