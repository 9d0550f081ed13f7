"""Images and signals by their public functions, on the CPU; how transforms are cut for a GPU."""

import math

import pytest
import torch
from torch.library import opcheck

from billfish.errors import KernelArgumentError
from billfish.kernels import general
from billfish.kernels.general import _fft_plan as plan
from tests.kernels.general_inputs import draw

DOUBLES = (torch.float64, torch.complex128)


def near(got, want, double):
    assert (got.dtype in DOUBLES) == double
    assert got.shape == want.shape
    assert (got - want).norm() <= (1e-14 if double else 1e-6) * want.norm()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float32, torch.float16])
def test_fft_against_its_definition(dtype):
    for n in (1, 2, 5, 16, 30, 77):
        x = draw(2, n, dtype=dtype)
        for kind in ("fft", "ifft") if dtype.is_complex else ("fft", "ifft", "rfft"):
            scale = 1 / n if kind == "ifft" else 1.0
            want = general.fft_reference(x, n, kind, scale)
            near(getattr(general, kind)(x), want, dtype == torch.complex128)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_irfft_against_its_definition(dtype):
    for n in (1, 2, 7, 24):
        x = draw(2, n // 2 + 1, dtype=dtype)
        want = general.fft_reference(x, n, "irfft", 1 / n)
        near(general.irfft(x, n), want, dtype == torch.complex128)


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_fft_as_torch_has_it(norm):
    x = draw(3, 12, 4, dtype=torch.complex64)
    for dim, n in ((0, None), (1, 20), (-1, 3), (1, None)):
        for kind in ("fft", "ifft", "irfft"):
            got = getattr(general, kind)(x, n, dim, norm)
            torch.testing.assert_close(got, getattr(torch.fft, kind)(x, n, dim, norm))
            assert got.is_contiguous()
    got = general.rfft(x.real, 9, 1, norm)
    torch.testing.assert_close(got, torch.fft.rfft(x.real, 9, 1, norm))


def test_fft_of_nothing_and_of_views():
    assert general.fft(draw(0, 5)).shape == (0, 5)
    assert general.rfft(draw(0, 5)).shape == (0, 3)
    assert not general.fft(draw(2, 0), 3).any()
    x = draw(6, 20, dtype=torch.complex64)[::2, 1::3].conj()
    near(general.fft(x), general.fft_reference(x.resolve_conj(), 7), False)


def test_sizes_are_cut_into_passes():
    for n in (2, 12, 360, 1000, 2**12, 3**5, 7**4):
        assert math.prod(plan.radices(n)) == n
        assert set(plan.radices(n)) <= set(plan.RADICES)
    assert plan.radices(4096) == (16, 16, 16)
    assert plan.size(1000) < 4 * 1000


def test_sizes_are_split():
    """Powers of two up to 2^22 in two launches, up to 2^27 in three; others with few exceptions."""
    for dtype, limit in plan.LIMIT.items():
        for power in range(1, 28):
            parts = plan.split(2**power, limit)
            assert math.prod(parts) == 2**power
            most = 1 if 2**power <= limit else 2 if power <= 20 else 3
            assert len(parts) <= most, (dtype, power)
        for n in (3**9, 44_100, 5**9, 7**8, 2**13 * 7**4, 10**7, 6**10, 7**4 * 3):
            parts = plan.split(n, limit)
            assert math.prod(parts) == n
            columns = plan.COLUMNS if len(parts) > 1 else 1
            assert all(plan.fits(part, limit, columns) for part in parts)
        assert plan.split(11, limit) == ()
        assert plan.split(3**16, limit) in ((), (243, 243, 729), (243, 729, 243), (729, 243, 243))


MODES = ("constant", "reflect", "replicate", "circular")
IMAGES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8)
ROUNDING = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2.0**-8,
            torch.float16: 2.0**-11, torch.uint8: 0.0}  # fmt: skip


def close(got, want):
    """want: in float64."""
    assert got.shape == want.shape
    assert got.is_contiguous()
    if got.dtype == torch.uint8:
        assert (got - want.clamp(0, 255)).abs().max() < 0.501
        return
    unit = ROUNDING[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=unit, atol=unit * 20)


@pytest.mark.parametrize("dtype", IMAGES)
@pytest.mark.parametrize("mode", MODES)
def test_convolve2d(mode, dtype):
    value = 2.5 if mode == "constant" else 0.0
    x, kernel = draw(2, 3, 8, 9, dtype=dtype), draw(3, 5, seed=1)
    for correlate in (False, True):
        want = general.convolve2d_reference(
            x.double().flatten(0, 1), kernel.double(), mode, value, correlate
        )
        close(general.convolve2d(x, kernel, mode, value, correlate), want.view(x.shape))
    column, row = draw(5, seed=2), draw(3, seed=3)
    outer = column.double()[:, None] * row.double()
    want = general.convolve2d_reference(x.double().flatten(0, 1), outer, mode, value)
    close(general.separable_convolve2d(x, column, row, mode, value), want.view(x.shape))


def test_convolution_turns_the_window_around():
    x = torch.zeros(5, 5)
    x[2, 2] = 1
    kernel = draw(3, 3)
    assert torch.equal(general.convolve2d(x, kernel)[1:4, 1:4], kernel)
    assert torch.equal(general.convolve2d(x, kernel, correlate=True)[1:4, 1:4], kernel.flip(0, 1))
    views = draw(6, 12, 10)[::2, ::3, 1:9:2]
    close(general.convolve2d(views, kernel), general.convolve2d(views.clone(), kernel).double())


def test_gaussian():
    weights = general.gaussian(1.5)
    assert weights.shape == (11,)
    assert weights.sum().item() == pytest.approx(1)
    assert weights[5] / weights[6] == pytest.approx(math.exp(0.5 / 1.5**2))
    assert general.gaussian(3, 0).tolist() == [1.0]
    flat = torch.full((4, 5), 7.0)
    close(general.separable_convolve2d(flat, weights, weights, "replicate"), flat.double())


@pytest.mark.parametrize("dtype", IMAGES[1:])
@pytest.mark.parametrize("mode", MODES)
def test_sobel(mode, dtype):
    x = draw(2, 7, 8, dtype=dtype)
    magnitude, direction = general.sobel(x, mode)
    want, angle = general.sobel_reference(x.double(), mode)
    torch.testing.assert_close(magnitude.double(), want, rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(direction.double(), angle, rtol=0, atol=1e-4)


def test_sobel_of_a_slope():
    """Brighter to the right: 0; brighter downwards: a quarter turn."""
    slope = torch.arange(6.0).expand(5, 6)
    magnitude, direction = general.sobel(slope, "replicate")
    assert magnitude[2, 2] == 8
    assert direction[2, 2] == 0
    assert general.sobel(slope.t(), "replicate")[1][2, 2] == pytest.approx(math.pi / 2)
    assert not general.sobel(torch.ones(3, 3))[1].any()


@pytest.mark.parametrize("dtype", IMAGES[1:])
@pytest.mark.parametrize("mode", MODES)
def test_bilateral(mode, dtype):
    x = draw(2, 7, 8, dtype=dtype)
    sigma = 50.0 if dtype == torch.uint8 else 1.0
    want = general.bilateral_reference(x.double(), 2, 1.2, sigma, mode)
    close(general.bilateral(x, 1.2, sigma, 2, mode), want)


def test_bilateral_keeps_edges():
    x = torch.cat((torch.zeros(9, 5), torch.full((9, 5), 100.0)), 1)
    x += draw(9, 10)
    got = general.bilateral(x, 2.0, 10.0)
    assert got[:, :5].max() < 2
    assert got[:, 5:].min() > 98
    assert got[:, :5].std() < 0.6 * x[:, :5].std()


def test_images_of_nothing():
    one = torch.ones(1)
    for shape in ((0, 3, 4), (2, 0, 4), (3, 0)):
        x = draw(*shape)
        assert general.convolve2d(x, one[None]).shape == shape
        assert general.separable_convolve2d(x, one, one).shape == shape
        assert general.sobel(x)[1].shape == shape
        assert general.bilateral(x, 1.0, 1.0).shape == shape


@pytest.mark.parametrize("dtype", IMAGES[:-1])
def test_fir(dtype):
    x, taps = draw(2, 3, 50, dtype=dtype), draw(7)
    want = general.fir_reference(x.double(), taps.double())
    got, state = general.fir(x, taps)
    close(got, want)
    assert torch.equal(state, x[..., -6:])
    turned, state = general.fir(x.transpose(1, 2), taps, dim=1)
    close(turned, want.transpose(1, 2).contiguous())
    assert state.shape == (2, 6, 3)


@pytest.mark.parametrize("count", [1, 2, 9, 512, 700])
def test_fir_of_a_stream(count):
    """Piece by piece as all at once; the shorter of the pieces do not fill the state."""
    x, taps = draw(2, 3000), draw(count, seed=1)
    want = general.fir_reference(x.double(), taps.double())
    whole, end = general.fir(x, taps)
    state, parts = None, []
    for piece in x.split([1, 3, 996, 0, 2000], 1):
        part, state = general.fir(piece, taps, state)
        parts.append(part)
    for got in (whole, torch.cat(parts, 1)):
        assert (got - want).norm() <= 2e-6 * want.norm()
    assert torch.equal(state, end)


IMAGE = torch.zeros(4, 4)

BAD = {
    "convolve even": lambda: general.convolve2d(IMAGE, torch.ones(2, 3)),
    "convolve large": lambda: general.convolve2d(IMAGE, torch.ones(33, 1)),
    "convolve integers": lambda: general.convolve2d(IMAGE, torch.ones(3, 3, dtype=torch.int32)),
    "convolve vector": lambda: general.convolve2d(IMAGE[0], torch.ones(3, 3)),
    "convolve list": lambda: general.convolve2d(IMAGE, [[1.0]]),
    "convolve dtype": lambda: general.convolve2d(IMAGE.long(), torch.ones(3, 3)),
    "convolve device": lambda: general.convolve2d(IMAGE, torch.ones(3, 3, device="meta")),
    "convolve mode": lambda: general.convolve2d(IMAGE, torch.ones(3, 3), "mirror"),
    "convolve value": lambda: general.convolve2d(IMAGE, torch.ones(3, 3), "reflect", 1.0),
    "convolve small": lambda: general.convolve2d(IMAGE, torch.ones(3, 9), "reflect"),
    "convolve wraps": lambda: general.convolve2d(IMAGE, torch.ones(11, 3), "circular"),
    "convolve gradient": lambda: general.convolve2d(IMAGE, torch.ones(3, 3).requires_grad_()),
    "separable matrix": lambda: general.separable_convolve2d(IMAGE, IMAGE[:3, :3], IMAGE[0, :3]),
    "gaussian sigma": lambda: general.gaussian(0.0),
    "gaussian radius": lambda: general.gaussian(9.0),
    "sobel doubles": lambda: general.sobel(IMAGE.double()),
    "sobel small": lambda: general.sobel(IMAGE[:1]),
    "bilateral sigma": lambda: general.bilateral(IMAGE, 0.0, 1.0),
    "bilateral range": lambda: general.bilateral(IMAGE, 1.0, float("nan")),
    "fir scalar": lambda: general.fir(draw(1)[0], draw(2)),
    "fir integers": lambda: general.fir(torch.arange(3), draw(2)),
    "fir no taps": lambda: general.fir(draw(3), draw(0)),
    "fir matrix": lambda: general.fir(draw(3), draw(2, 2)),
    "fir state": lambda: general.fir(draw(2, 3), draw(3), draw(2, 3)),
    "fir state dtype": lambda: general.fir(draw(3), draw(3), draw(2).half()),
    "fir gradient": lambda: general.fir(draw(3).requires_grad_(), draw(3)),
    "fir dim": lambda: general.fir(draw(3), draw(3), dim=1),
    "bilateral radius": lambda: general.bilateral(IMAGE, 1.0, 1.0, 16),
    "fft scalar": lambda: general.fft(draw(1)[0]),
    "fft list": lambda: general.fft([1.0]),
    "fft integers": lambda: general.fft(torch.arange(4)),
    "fft dim": lambda: general.fft(draw(3), dim=1),
    "fft no points": lambda: general.fft(draw(3), 0),
    "fft nothing": lambda: general.fft(draw(2, 0)),
    "fft points": lambda: general.fft(draw(3), 2**26 + 1),
    "fft norm": lambda: general.fft(draw(3), norm="orthogonal"),
    "fft device": lambda: general.fft(draw(3).to("meta")),
    "fft gradient": lambda: general.fft(draw(3).requires_grad_()),
    "rfft complex": lambda: general.rfft(draw(3, dtype=torch.complex64)),
    "irfft of one": lambda: general.irfft(draw(1)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    with pytest.raises(KernelArgumentError):
        BAD[name]()


def test_operations_as_torch_sees_them():
    ops = torch.ops.billfish
    for op, arguments in (
        (ops.fft, (draw(3, 9), 9, "rfft", 1.0)),
        (ops.fft, (draw(3, 9, dtype=torch.complex64), 12, "ifft", 0.5)),
        (ops.fft, (draw(3, 9, dtype=torch.complex128), 16, "irfft", 1.0)),
    ):
        opcheck(op.default, arguments)


def test_image_operations_as_torch_sees_them():
    ops = torch.ops.billfish
    x = draw(2, 5, 6)
    for op, arguments in (
        (ops.convolve2d, (x, draw(3, 3), "reflect", 0.0)),
        (ops.separable_convolve2d, (x, draw(3), draw(5), "constant", 1.0)),
        (ops.sobel, (draw(2, 5, 6, dtype=torch.uint8), "reflect")),
        (ops.fir, (draw(2, 9), draw(3), draw(2, 2))),
        (ops.bilateral, (x, 2, 1.0, 1.0, "replicate")),
    ):
        opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_table_that_is_not_there_yet_cannot_be_captured(monkeypatch):
    """Under capture nothing can be sent to a GPU, and what was half made must not be kept."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    plan.table.cache_clear()
    for make in (plan.table, plan.turns, plan.chirp, plan.unfolding, plan.unpadded):
        with pytest.raises(KernelArgumentError, match="call the operation once before"):
            make(96, torch.complex64, torch.device("cuda", 0))
    assert plan.table(96, torch.complex64, torch.device("cpu")).roots.is_cpu
