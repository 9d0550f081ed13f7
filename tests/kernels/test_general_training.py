"""Kernels of training on the CPU: against float64, by autograd, and as torch sees them."""

from importlib import import_module

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional

from billfish.errors import KernelArgumentError
from billfish.kernels import general
from tests.kernels.general_inputs import draw
from tests.kernels.small_transformer import loss_curves

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def close(got, want, slack=1e-5):
    unit = ROUNDING[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=2 * unit, atol=slack + unit / 8)


def gradients(function, inputs, dy=None):
    """(result, gradients) of leaves made of the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(torch.ones_like(out) if dy is None else dy.to(out.dtype))
    return out.detach(), [leaf.grad for leaf in leaves]


def same_gradients(function, reference, inputs, dy=None, slack=1e-5):
    out, grads = gradients(function, inputs, dy)
    want, wanted = gradients(reference, [x.double() for x in inputs], dy)
    close(out, want, slack)
    for grad, exact, x in zip(grads, wanted, inputs, strict=True):
        assert grad.dtype == x.dtype
        close(grad, exact, slack)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (0, 8), (7, 33), (2, 3, 64), (5,)])
def test_layer_norm(dtype, shape):
    x, dy = draw(*shape, dtype=dtype) + 3, draw(*shape, dtype=dtype, seed=1)
    weight, bias = draw(shape[-1], dtype=dtype, seed=2), draw(shape[-1], dtype=dtype, seed=3)
    slack = 1e-4 if dtype == torch.float32 else 4e-2 if dtype == torch.bfloat16 else 1e-2
    eps = 1e-2
    same_gradients(
        lambda x, w, b: general.layer_norm(x, w, b, eps),
        lambda x, w, b: general.layer_norm_reference(x, w, b, eps), (x, weight, bias), dy, slack,
    )  # fmt: skip
    same_gradients(
        lambda x, w: general.layer_norm(x, w, None, eps),
        lambda x, w: general.layer_norm_reference(x, w, None, eps), (x, weight), dy, slack,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (0, 8), (7, 33), (2, 3, 64)])
def test_rms_norm_has_a_derivative(dtype, shape):
    x, dy = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    weight = draw(shape[-1], dtype=dtype, seed=2)
    same_gradients(
        lambda x, w: general.rms_norm(x, w, 1e-3),
        lambda x, w: general.rms_norm_reference(x, w, 1e-3), (x, weight), dy, 1e-4,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_no_program_holds(dtype):
    """On a GPU, too, norms of rows of any length: these launch nothing of ours."""
    gpu = pytest.importorskip("billfish.kernels.general.gpu")
    from billfish.kernels.general import layer_norm_gpu

    size = gpu.WIDEST + 1
    x, dy, residual = (draw(2, size, dtype=dtype, seed=seed) for seed in range(3))
    weight, bias = draw(size, dtype=dtype, seed=3), draw(size, dtype=dtype, seed=4)
    wide = x.double(), weight.double()
    close(gpu.rms_norm(x, weight, 1e-3), general.rms_norm_reference(*wide, 1e-3))
    normed, total = gpu.add_rms_norm(x, residual, weight, 1e-3)
    assert torch.equal(total, x + residual)
    close(normed, general.rms_norm_reference(total.double(), weight.double(), 1e-3))
    got = layer_norm_gpu.layer_norm(x, weight, bias, 1e-3)
    close(got, general.layer_norm_reference(*wide, bias.double(), 1e-3))
    for centre in (True, False):
        found = layer_norm_gpu.norm_backward(dy, x, weight, 1e-3, centre)
        want = list(general.norm_backward_reference(dy.double(), *wide, 1e-3, centre))
        want[2] = want[2] * centre
        for part, exact in zip(found, want, strict=True):
            assert part.dtype == dtype
            close(part, exact, 1e-4)


def test_rms_norm_of_a_sum_has_a_derivative():
    def ours(x, residual, weight):
        out, total = general.rms_norm(x, weight, 1e-5, residual)
        return out * 2 + total * 3

    def theirs(x, residual, weight):
        total = x + residual
        return general.rms_norm_reference(total, weight, 1e-5) * 2 + total * 3

    same_gradients(ours, theirs, (draw(4, 16), draw(4, 16, seed=1), draw(16, seed=2)), draw(4, 16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), [((1,), 0), ((3, 1), 1), ((0, 4), -1), ((4, 0), 1),
                                            ((5, 70), -1), ((3, 17, 2), 1)])  # fmt: skip
def test_softmax(dtype, shape, dim):
    x, dy = 3 * draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    same_gradients(
        lambda x: general.softmax(x, dim),
        lambda x: general.softmax_reference(x.movedim(dim, -1)).movedim(-1, dim)
        if x.numel() else x * 1.0,
        (x,), dy, 2e-3 if dtype != torch.float32 else 1e-6,
    )  # fmt: skip
    assert general.softmax(x, dim).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (6, 50), (5, 3)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(dtype, shape, reduction):
    logits = 3 * draw(*shape, dtype=dtype)
    target = torch.arange(shape[0]) % shape[1]
    target[1:2] = -100
    same_gradients(
        lambda x: general.cross_entropy(x, target, reduction=reduction),
        lambda x: functional.cross_entropy(x, target, reduction=reduction), (logits,), None, 1e-5,
    )  # fmt: skip
    exact = general.cross_entropy_reference(logits.double(), target)
    close(general.cross_entropy(logits, target, reduction="none"), exact)


def test_cross_entropy_of_none():
    assert general.cross_entropy(draw(0, 4), torch.zeros(0, dtype=torch.int64)).isnan()
    ignored = torch.full((3,), -100)
    assert general.cross_entropy(draw(3, 4), ignored).isnan()
    assert general.cross_entropy(draw(3, 4) * torch.nan, ignored, reduction="sum") == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 4, 100, None])
def test_linear_cross_entropy(dtype, chunk):
    x, weight = draw(11, 16, dtype=dtype), draw(40, 16, dtype=dtype, seed=1)
    target = torch.arange(11)
    target[3] = -100
    same_gradients(
        lambda x, w: 2 * general.linear_cross_entropy(x, w, target, chunk=chunk),
        lambda x, w: 2 * functional.cross_entropy(x @ w.t(), target), (x, weight), None,
        {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype],
    )  # fmt: skip


def test_linear_cross_entropy_of_many_classes_in_float16():
    """Of the mean, each of these gradients of logits is less than 2^-24, the least of the dtype."""
    x, weight = draw(4096, 4, dtype=torch.float16), draw(5000, 4, dtype=torch.float16, seed=1) / 16
    target = torch.zeros(4096, dtype=torch.int64)
    leaf = weight.clone().requires_grad_()
    general.linear_cross_entropy(x, leaf, target).backward()
    exact = weight.double().requires_grad_()
    functional.cross_entropy(x.double() @ exact.t(), target).backward()
    error = (leaf.grad.double() - exact.grad)[1:].norm() / exact.grad[1:].norm()
    assert error < 3e-3


@pytest.mark.parametrize(
    ("rows", "dtype", "chunk"),
    [(2064, torch.bfloat16, 2064), (2065, torch.bfloat16, 1024), (1025, torch.float16, 1024),
     (2000, torch.float32, 1024), (0, torch.bfloat16, 1)],
)  # fmt: skip
def test_linear_cross_entropy_chooses_its_chunks(monkeypatch, rows, dtype, chunk):
    """1024 rows, or all of bfloat16 where that needs no more memory."""
    module = import_module("billfish.kernels.general.cross_entropy")
    found, compute = [], module._linear_cross_entropy
    monkeypatch.setattr(
        module, "_linear_cross_entropy", lambda *given: (found.append(given[4]), compute(*given))[1]
    )
    x, weight = draw(rows, 16, dtype=dtype), draw(5, 16, dtype=dtype, seed=1)
    general.linear_cross_entropy(x, weight, torch.zeros(rows, dtype=torch.int64))
    assert found == [chunk]


def test_linear_cross_entropy_memory_is_a_chunk(monkeypatch):
    """No tensor with as many elements as all logits is ever made."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self.size = max(self.size, tensor.numel())
            return out

    x, weight = draw(256, 8).requires_grad_(), draw(100, 8).requires_grad_()
    target = torch.arange(256) % 100
    with Largest() as largest:
        general.linear_cross_entropy(x, weight, target, chunk=16).backward()
    assert largest.size == 256 * 8  # x, more than 16 * 100 logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (0, 8), (7, 66), (2, 3, 64), (6,)])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations_have_derivatives(name, shape, dtype):
    x, dy = 3 * draw(*shape, dtype=dtype), draw(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=1)
    slack = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    reference = getattr(general, f"{name}_reference")
    same_gradients(getattr(general, name), reference, (x,), dy, slack)
    # What the definition of the derivative says is what autograd says of that of the operation.
    leaf = x.double().requires_grad_()
    (grad,) = torch.autograd.grad(reference(leaf), leaf, dy.double())
    wanted = getattr(general, f"{name}_backward_reference")(dy.double(), x.double())
    torch.testing.assert_close(grad, wanted, rtol=1e-9, atol=1e-12)


def test_derivatives_of_gates_far_from_zero():
    x = torch.tensor([[-200.0, 200.0, -30.0, 1e30, -1e30, 1.0, 1.0, 1.0, 1.0, 1.0]])
    for function in (general.silu_mul, general.gelu_tanh_mul):
        _, (grad,) = gradients(function, (x,))
        want = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
        torch.testing.assert_close(grad[0, :5], want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [16, 6])
def test_rotary_embedding_has_a_derivative(dtype, rotary_dim):
    qkv = draw(5, 7, 16, dtype=dtype)
    positions = torch.tensor([3, 0, 9, 9, 1])
    angles = draw(10, rotary_dim // 2, seed=1)
    table = torch.cat((angles.cos(), angles.sin()), -1)

    def ours(query, key):
        return torch.cat(general.rotary_embedding(query, key, positions, table), 1)

    def reference(query, key):
        return torch.cat(
            general.rotary_embedding_reference(query, key, positions, table.double()), 1
        )

    dy = draw(5, 6, 16, dtype=dtype, seed=2)
    inputs = (qkv[:, :4], qkv[:, 4:6])
    same_gradients(ours, reference, inputs, dy, 1e-6 if dtype == torch.float32 else 1e-2)
    with pytest.raises(KernelArgumentError, match="cos_sin"):
        general.rotary_embedding(*inputs, positions, table.requires_grad_())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 1001])
def test_adamw(dtype, size):
    param, moments = draw(size, dtype=dtype), [torch.zeros(size), torch.zeros(size)]
    exact = [x.double() for x in (param, *moments)]
    for step in range(1, 4):
        grad = draw(size, dtype=dtype, seed=step)
        exact[0] = param.double()  # each step rounds
        exact = list(
            general.adamw_reference(
                exact[0], grad.double(), *exact[1:], step, 0.1, (0.9, 0.99), 1e-8, 0.1
            )
        )
        general.adamw_step(param, grad, *moments, step, 0.1, (0.9, 0.99), 1e-8, 0.1)
        close(param, exact[0])
        close(moments[0], exact[1])
        close(moments[1], exact[2])


def test_a_transformer_trains_to_the_same_loss_curve():
    theirs, ours = loss_curves(torch.device("cpu"))
    assert theirs[-1] < 0.3 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


ONE = torch.zeros(3, dtype=torch.int64)
BAD = {
    "layer norm weight": lambda: general.layer_norm(draw(3, 4), draw(3)),
    "layer norm dtype": lambda: general.layer_norm(draw(3, 4), draw(4).half()),
    "layer norm eps": lambda: general.layer_norm(draw(3, 4), draw(4), eps=-1.0),
    "layer norm bias": lambda: general.layer_norm(draw(3, 4), draw(4), draw(1)),
    "softmax integers": lambda: general.softmax(ONE),
    "softmax dim": lambda: general.softmax(draw(3), 1),
    "cross entropy shape": lambda: general.cross_entropy(draw(3), ONE),
    "cross entropy rows": lambda: general.cross_entropy(draw(4, 3), ONE),
    "cross entropy target": lambda: general.cross_entropy(draw(3, 3), ONE + 3),
    "cross entropy reduction": lambda: general.cross_entropy(draw(3, 3), ONE, reduction="max"),
    "linear weight": lambda: general.linear_cross_entropy(draw(3, 3), draw(3, 4), ONE),
    "linear chunk": lambda: general.linear_cross_entropy(draw(3, 3), draw(3, 3), ONE, chunk=0),
    "adamw moments": lambda: general.adamw_step(draw(3), draw(3), draw(3), draw(3).double(), 1),
    "adamw shape": lambda: general.adamw_step(draw(3), draw(3), draw(3), draw(4), 1),
    "adamw stride": lambda: general.adamw_step(draw(6)[::2], draw(3), draw(3), draw(3), 1),
    "adamw step": lambda: general.adamw_step(draw(3), draw(3), draw(3), draw(3), 0),
    "adamw beta": lambda: general.adamw_step(
        draw(3), draw(3), draw(3), draw(3), 1, betas=(1.0, 0.9)
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    with pytest.raises(KernelArgumentError):
        BAD[name]()


def test_operations_as_torch_sees_them():
    ops = torch.ops.billfish
    x, w = draw(3, 8).requires_grad_(), draw(8).requires_grad_()
    for op, arguments in (
        (ops.layer_norm, (x, w, draw(8).requires_grad_(), 1e-5)),
        (ops.rms_norm, (x, w, 1e-5)),
        (ops.add_rms_norm, (x, draw(3, 8).requires_grad_(), w, 1e-5)),
        (ops.norm_backward, (draw(3, 8), draw(3, 8), draw(8), 1e-5, True)),
        (ops.softmax, (x,)),
        (ops.softmax_backward, (draw(3, 8), draw(3, 8))),
        (ops.cross_entropy, (x, ONE, -100)),
        (ops.cross_entropy_backward, (draw(3), draw(3, 8), draw(3), ONE, -100)),
        (ops.linear_cross_entropy, (draw(3, 8), draw(5, 8), ONE, -100, 2, True)),
        (ops.silu_mul, (x,)),
        (ops.silu_mul_backward, (draw(3, 4), draw(3, 8))),
        (ops.gelu_tanh_mul, (x,)),
        (ops.gelu_tanh_mul_backward, (draw(3, 4), draw(3, 8))),
        (ops.rotary_embedding, (draw(3, 2, 8).requires_grad_(), draw(3, 1, 8), ONE, draw(4, 6))),
        (ops.rotary_embedding_backward, (draw(3, 2, 8), draw(3, 1, 8), ONE, draw(4, 6))),
        (ops.adamw_step, (draw(3), draw(3), draw(3), draw(3).abs(), 1, 0.1, 0.9, 0.9, 1e-8, 0.0)),
    ):
        opcheck(op.default, arguments)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_a_second_derivative_is_refused(name):
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = getattr(general, name)(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
