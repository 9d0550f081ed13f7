"""What every general operation keeps: it says what it does, leaves its inputs as they are, takes
views, and tells what it cannot take."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from billfish.bench import general as bench
from billfish.errors import KernelArgumentError
from billfish.kernels import general
from tests.kernels.general_calls import EMPTY, VIEWS, calls, of_nothing
from tests.kernels.test_registration import Recorder, outputs

ROOT = Path(general.__file__).parents[3]
PUBLIC = [name for name in general.__all__ if not name.endswith("reference")]
# Made of other operations, or what those are held against: they have no technique of their own.
COMPOSED = {
    "AdamW", "black_scholes", "gaussian", "ifft", "irfft", "leapfrog_step", "market_paths",
}  # fmt: skip
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.uint16, torch.uint32, torch.float8_e4m3fn,
]  # fmt: skip
SHAPES = [
    (), (0,), (1,), (3,), (8,), (0, 8), (6, 0), (1, 1), (6, 1), (1, 8), (2, 3, 1), (0, 3, 4),
    (2, 0, 4), (1, 1, 1, 1), (1, 1, 1, 1, 2),
]  # fmt: skip


def test_every_operation_is_called_here():
    assert {name.split()[0] for name in calls()} == set(PUBLIC) - {"AdamW", "gaussian"}


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - {"AdamW"}))
def test_it_says_what_it_does(name):
    """Determinism, errors and dtypes, itself or by naming the operation that it is like."""
    text = inspect.getdoc(getattr(general, name)) or ""
    while "eterministic" not in text or "KernelArgumentError" not in text:
        like = re.search(r"(?:else as|as) `(\w+)`", text)
        assert like, f"{name} leaves something open"
        assert like[1] in PUBLIC
        text = inspect.getdoc(getattr(general, like[1])) or ""
    own = inspect.getdoc(getattr(general, name)) or ""
    assert re.search(r"float|integer|dtype|as `|else as|number", own), "of which dtypes"
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert f"`{name}" in pages or name in COMPOSED


def test_every_operation_has_a_technique_that_can_be_switched_off():
    switched = set()
    for domain in bench.DOMAINS:
        for case in import_module(f"billfish.bench.general_{domain}").tiny():
            if any(case.settings.values()):
                switched.add(case.kernel.split()[0])
    # What chunks of logits save is memory: tests/gpu measures it, and so does the benchmark.
    assert set(PUBLIC) - COMPOSED - switched == {"linear_cross_entropy"}


@pytest.mark.parametrize("name", calls())
def test_views_are_as_good_as_what_is_contiguous(name):
    call = calls()[name]
    want = call()
    for view in VIEWS.values():
        for argument in call.tensors:
            given = {argument: view(call.arguments[argument])}
            if call.contiguous:
                if not given[argument].is_contiguous():
                    with pytest.raises(KernelArgumentError, match=argument):
                        call(**given)
                continue
            for got, exact in zip(call(**given), want, strict=True):
                torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_of_nothing():
    """Sizes of 0 give results of size 0, or what is said of none: an identity, NaN for a mean."""
    assert {name.split()[0] for name in EMPTY} | COMPOSED >= set(PUBLIC)
    some = {"reduce", "reduce rows", "segment_reduce", "histogram", "histogram floats",
            "cross_entropy", "linear_cross_entropy"}  # fmt: skip
    for name in EMPTY:
        for out in of_nothing(name):
            if name in some:
                assert out.isnan().all() if "cross_entropy" in name else True
            elif name != "compact" and out.shape[-1:] != (3,):  # the state of a filter stays
                assert out.numel() == 0, name
    assert of_nothing("compact")[1].tolist() == [0]
    assert of_nothing("segment_reduce")[0].tolist() == [0, 0, 0]
    assert of_nothing("reduce")[0].item() == 0
    assert of_nothing("reduce rows")[0].tolist() == [-float("inf")] * 6
    assert of_nothing("histogram")[0].tolist() == [0] * 7


@pytest.mark.parametrize("name", calls())
def test_inputs_are_left_as_they_are(name):
    call = calls()[name]
    before = {argument: tensor.clone() for argument, tensor in call.tensors.items()}
    call()
    for argument, tensor in call.tensors.items():
        assert torch.equal(tensor, before[argument]) == (argument not in call.written)


@pytest.mark.parametrize("name", calls())
def test_it_is_an_operation_of_torch_with_a_fake(name):
    """What runs without numbers, as torch.compile does, has the shapes of what runs with them."""
    call = calls()[name]
    with Recorder() as recorder:
        call()
    assert bool(recorder.seen) == (name not in ("black_scholes",))
    for op, arguments, options in recorder.seen:
        real = outputs(op(*arguments, **options))
        with FakeTensorMode() as mode:
            faked = tree_map_only(torch.Tensor, mode.from_tensor, (arguments, options))
            fake = outputs(op(*faked[0], **faked[1]))
        assert [(x.shape, x.dtype, x.stride()) for x in fake] == [
            (x.shape, x.dtype, x.stride()) for x in real
        ]


def told(call, **given):
    """Whether it is refused; any other error than the one for bad arguments is a failure."""
    try:
        call(**given)
    except KernelArgumentError:
        return True
    return False


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("name", calls())
def test_what_it_cannot_take_it_tells(name):
    """Whatever is given for a tensor: work, or an error that names what is wrong with it."""
    call = calls()[name]
    for argument, tensor in call.tensors.items():
        refused = [told(call, **{argument: tensor.to(dtype)}) for dtype in DTYPES]
        assert any(refused)
        for shape in SHAPES:
            told(call, **{argument: tensor.new_zeros(shape)})
        assert told(call, **{argument: tensor.to("meta")})
        if tensor.dim():
            assert told(call, **{argument: tensor.to_sparse()})
        for wrong in ("a", [1.0, "b"], object()):
            assert told(call, **{argument: wrong})
        for unlikely in (None, 3, float("nan")):
            told(call, **{argument: unlikely})
        if tensor.is_floating_point():
            leaf = tensor.clone().requires_grad_()
            assert told(call, **{argument: leaf}) == (argument not in call.gradients)
            with torch.no_grad():
                assert not told(call, **{argument: leaf})
    for argument in set(call.arguments) - set(call.tensors):
        for value in (None, True, -1, 0, 10**30, 1.5, float("nan"), float("inf"), "x", [1]):
            told(call, **{argument: value})
