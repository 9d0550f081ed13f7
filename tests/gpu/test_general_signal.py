"""The kernels of images and signals on a GPU, against their definitions and torch in float64."""

import pytest
import torch

from billfish.errors import KernelArgumentError
from billfish.kernels import general
from billfish.kernels.general import _fft_plan as plan
from billfish.kernels.general import bilateral_gpu, convolve2d_gpu, fft_gpu, fir_gpu, sobel_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DOUBLES = (torch.float64, torch.complex128)


def draw(*shape, dtype=torch.float32, seed=0):
    rng = torch.Generator("cuda").manual_seed(seed)
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, generator=rng, dtype=dtype, device="cuda")
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(*shape, generator=rng, dtype=wide, device="cuda").to(dtype)


def check_fft(kind, x, n, bound=1.0, **options):
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    norm = "forward" if kind in ("ifft", "irfft") else "backward"
    want = getattr(torch.fft, kind)(wide, n, norm=norm)
    got = fft_gpu.fft(x, n, kind, 1.0, **options)
    assert got.shape == want.shape
    limit = (1e-14 if got.dtype in DOUBLES else 1e-6) * bound
    assert (got - want).norm() <= limit * want.norm()
    return got


SIZES = (*(2**i for i in range(15)), 3, 7, 25, 100, 243, 360, 625, 1000, 1440, 2401, 3125, 10_000)


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(n, torch.complex64) for n in SIZES]
    + [(n, torch.complex128) for n in (1, 8, 512, 8192, 2**14, 243, 360, 2401)],
)
def test_fft(n, dtype):
    for rows in (1, 3, 130):
        x = draw(rows, n, dtype=dtype)
        check_fft("fft", x, n)
        if rows == 3:
            check_fft("fft", x, n, fused=False)


@pytest.mark.parametrize("kind", ["fft", "ifft", "rfft", "irfft"])
@pytest.mark.parametrize(
    ("n", "dtype"),
    [(n, torch.complex64) for n in (1, 2, 60, 127, 512, 999, 4096, 48_000)]
    + [(n, torch.complex128) for n in (60, 127, 4096)],
)
def test_kinds_of_fft(kind, n, dtype):
    x = draw(5, n // 2 + 1 if kind == "irfft" else n, dtype=dtype)
    x = x.real.contiguous() if kind == "rfft" else x
    check_fft(kind, x, n, 4.0)
    check_fft(kind, x, n, 4.0, fused=False)


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(n, torch.float32) for n in (2, 6, 50, 60, 98, 256, 4096, 32768)]
    + [(n, torch.float64) for n in (60, 1024)],
)
def test_fft_of_pairs_of_reals(n, dtype):
    for rows in (1, 3, 130):
        for given in (n, n + 1, n - 1, n // 2):
            check_fft("rfft", draw(rows, given, dtype=dtype), n, 2.0)
    check_fft("rfft", draw(3 * n + 1, dtype=dtype)[1:].view(3, n), n, 2.0)
    x = draw(1000, n, dtype=dtype)
    first = check_fft("rfft", x, n, 2.0)
    check_fft("rfft", x[:9], n, 2.0, folded=False)
    # Always the same bits, and a row's are its own.
    for _ in range(10):
        assert torch.equal(general.rfft(x), first)
    x[500] = torch.nan
    others = torch.arange(1000, device="cuda") != 500
    assert torch.equal(general.rfft(x)[others], first[others])


@pytest.mark.parametrize("n", [2**15, 2**18, 2**20, 2**22, 2**24, 44_100, 3**13, 1_234_567])
@pytest.mark.parametrize("kind", ["fft", "irfft"])
def test_fft_of_large_sizes(kind, n):
    x = draw(1 if n > 10**6 else 3, n if kind == "fft" else n // 2 + 1, dtype=torch.complex64)
    check_fft(kind, x, n, 4.0)


def test_fft_of_a_million_points():
    check_fft("fft", draw(2, 10**6, dtype=torch.complex64), 10**6, 4.0)


def test_fft_is_the_same_from_run_to_run():
    for n in (512, 1000, 2**20):
        x = draw(4, n, dtype=torch.complex64)
        first = general.fft(x)
        for _ in range(20):
            assert torch.equal(general.fft(x), first)


@pytest.mark.sanitize
def test_fft_of_a_few_rows():
    for n in (12, 64, 11):
        check_fft("fft", draw(3, n, dtype=torch.complex64), n)
    check_fft("irfft", draw(3, 97, dtype=torch.complex64), 192, limit=128)


IMAGES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8)
MODES = ("constant", "reflect", "replicate", "circular")
SHAPES = ((3, 33, 47), (1, 1080, 1920), (2, 257, 1025), (70, 32, 32))
WINDOWS = ((3, 3), (1, 9), (11, 5), (31, 31))  # one for each shape: each window is compiled for
# All modes in float32, each other type in one of them.
KINDS = [*((mode, torch.float32) for mode in MODES),
         *zip(MODES, (d for d in IMAGES if d != torch.float32), strict=True)]  # fmt: skip
ROUNDING = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2.0**-8,
            torch.float16: 2.0**-11}  # fmt: skip


def close(got, want, size):
    """want: in float64; size: of what was added."""
    if got.dtype == torch.uint8:
        assert (got - want.clamp(0, 255)).abs().max() < 0.51
        return
    unit = ROUNDING[got.dtype]
    exact = 1e-13 if got.dtype == torch.float64 else 3e-6
    assert bool(((got - want).abs() <= unit * want.abs() + exact * size).all())


def convolved(x, weights, mode, value):
    height, width = weights.shape
    pads = (width // 2, width // 2, height // 2, height // 2)
    fill = {"value": value} if mode == "constant" else {}
    around = torch.nn.functional.pad(x.double()[:, None], pads, mode=mode, **fill)
    total = torch.zeros_like(x, dtype=torch.float64)
    for down in range(height):
        for across in range(width):
            part = around[:, 0, down : down + x.shape[1], across : across + x.shape[2]]
            total += weights[down, across].double() * part
    return total


@pytest.mark.parametrize(("mode", "dtype"), KINDS)
def test_convolve2d(mode, dtype):
    value = 0.1 if mode == "constant" else 0.0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for shape, window in zip(SHAPES, WINDOWS, strict=True):
        x, weights = draw(*shape, dtype=dtype), draw(*window, dtype=wide, seed=1)
        size = 8.0 * weights.abs().sum().item() * (32 if dtype == torch.uint8 else 1)
        want = convolved(x, weights, mode, value)
        for reuse in (True, False):
            got = convolve2d_gpu.convolve2d(x, weights, mode, value, reuse=reuse)
            close(got, want, size)


@pytest.mark.parametrize(("mode", "dtype"), KINDS)
def test_separable_convolve2d(mode, dtype):
    value = 0.1 if mode == "constant" else 0.0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for shape, (down, across) in zip(SHAPES, WINDOWS, strict=True):
        x = draw(*shape, dtype=dtype)
        column, row = draw(down, dtype=wide, seed=1), draw(across, dtype=wide, seed=2)
        weights = column.double()[:, None] * row.double()
        size = 8.0 * weights.abs().sum().item() * (32 if dtype == torch.uint8 else 1)
        want = convolved(x, weights, mode, value)
        for fused in (True, False):
            got = convolve2d_gpu.separable_convolve2d(x, column, row, mode, value, fused=fused)
            close(got, want, size)


@pytest.mark.parametrize(("mode", "dtype"), [k for k in KINDS if k[1] != torch.float64])
def test_sobel(mode, dtype):
    for shape in SHAPES:
        x = draw(*shape, dtype=dtype)
        smooth, difference = (torch.tensor(v, device="cuda") for v in ([1.0, 2, 1], [-1.0, 0, 1]))
        across = convolved(x, smooth[:, None] * difference, mode, 0.0)
        down = convolved(x, difference[:, None] * smooth, mode, 0.0)
        want, angle = torch.hypot(across, down), torch.atan2(down, across)
        for fused in (True, False):
            magnitude, direction = sobel_gpu.sobel(x, mode, fused=fused)
            close(magnitude, want, 2000.0 if dtype == torch.uint8 else 8.0)
            turn = (direction - angle + torch.pi) % (2 * torch.pi) - torch.pi
            # An angle is as sure as the gradient is long.
            assert bool((turn.abs() * want <= 2e-6 * want + 1e-4).all())


@pytest.mark.parametrize(("mode", "dtype"), [k for k in KINDS if k[1] != torch.float64])
def test_bilateral(mode, dtype):
    sigma = 50.0 if dtype == torch.uint8 else 1.0
    for shape, radius in (((3, 33, 47), 15), ((1, 300, 517), 5), ((2, 64, 64), 0)):
        x = draw(*shape, dtype=dtype)
        want = general.bilateral_reference(x.double().cpu(), radius, 2.0, sigma, mode).cuda()
        for options in ({}, {"table": False}, {"reuse": False}):
            got = bilateral_gpu.bilateral(x, radius, 2.0, sigma, mode, **options)
            close(got, want, 8.0)


@pytest.mark.sanitize
def test_images_of_a_few_pixels():
    for mode in MODES:
        x = draw(2, 9, 11)
        weights = draw(5, 7)
        close(
            convolve2d_gpu.convolve2d(x, weights, mode, 0.0), convolved(x, weights, mode, 0.0), 99
        )
        convolve2d_gpu.separable_convolve2d(x, weights[:, 0].contiguous(), weights[0], mode, 0.0)
        sobel_gpu.sobel(x, mode)
        bilateral_gpu.bilateral(x, 3, 1.0, 1.0, mode)


@pytest.mark.parametrize(
    ("dtype", "rows", "n"),
    [(torch.float32, 1, 1), (torch.float32, 3, 1000), (torch.float32, 2, 1_000_003),
     (torch.float32, 5000, 64), (torch.float64, 3, 1000), (torch.bfloat16, 2, 1_000_003),
     (torch.float16, 5000, 64)],
)  # fmt: skip
def test_fir(dtype, rows, n):
    for count in (1, 2, 5, 64, 500):
        x, state = draw(rows, n, dtype=dtype), draw(rows, count - 1, dtype=dtype, seed=1)
        taps = draw(count, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        want = general.fir_reference(x.double(), taps.double(), state.double())
        for reuse in (True, False):
            got = fir_gpu.fir(x, taps, state, reuse=reuse)
            close(got, want, 8.0 * taps.abs().sum().item())


@pytest.mark.parametrize("count", [511, 512, 5000])
def test_fir_of_a_stream(count):
    x, taps = draw(3, 100_000), draw(count, seed=1)
    want = general.fir_reference(x.double(), taps.double())
    state, parts = None, []
    for piece in x.split([1, 49_999, 50_000], 1):
        part, state = general.fir(piece, taps, state)
        parts.append(part)
    assert (torch.cat(parts, 1) - want).norm() <= 2e-6 * want.norm()
    assert torch.equal(state, x[:, -(count - 1) :])


TABLES = {
    "fft, a size of its own": (lambda x: general.fft(x).real, (3, 8), 2.0),
    "fft, by a chirp": (lambda x: general.fft(x).real, (3, 1009), 30.0),
    "rfft": (lambda x: general.rfft(x).real, (3, 250), 20.0),
    "bilateral": (lambda x: general.bilateral(x, 1.25, 0.75), (2, 40, 30), 1.0),
}


def forget_tables():
    for function in (plan.table, plan.turns, plan.chirp, plan.unfolding, bilateral_gpu._near):
        function.cache_clear()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("name", TABLES)
def test_tables_are_not_made_under_capture(name):
    """It says so, and a call before makes them."""
    call, shape, _ = TABLES[name]
    x = draw(*shape)
    want = call(x)
    forget_tables()
    with (
        pytest.raises(KernelArgumentError, match="cannot be captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        call(x)
    torch.cuda.synchronize()
    assert torch.equal(call(x), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x)
    x.copy_(draw(*shape, seed=1))
    graph.replay()
    assert torch.equal(out, call(x))


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("name", TABLES)
def test_tables_outlive_the_graphs_of_torch_compile(name):
    """They are made while its graphs' memory is in use, and are not part of it."""
    call, shape, size = TABLES[name]
    torch._dynamo.reset()
    forget_tables()
    compiled = torch.compile(lambda x: call(x) * 2, mode="reduce-overhead")
    for seed in range(5):
        x = draw(*shape, seed=seed)
        got = compiled(x).clone()
        torch.testing.assert_close(got, call(x) * 2, rtol=1e-5, atol=1e-6 * size)
        forget = [torch.full((1 << 16,), 7.0, device="cuda") for _ in range(50)]
        del forget
    torch._dynamo.reset()
