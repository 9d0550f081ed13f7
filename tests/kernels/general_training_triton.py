"""The kernels of training, run in Triton's interpreter against float64.

Run by test_general_training_triton.py in a process of its own. By hand:
TRITON_INTERPRET=1 pytest tests/kernels/general_training_triton.py
"""

import pytest
import torch

from billfish.kernels import general
from billfish.kernels.general import (
    adamw_gpu,
    cross_entropy_gpu,
    gpu,
    layer_norm_gpu,
    rotary_gpu,
    softmax_gpu,
)
from tests.kernels.general_inputs import draw

DTYPES = (torch.float32, torch.float16)


def close(got, want, slack=1e-5):
    unit = {torch.float32: 2e-6, torch.float16: 2.0**-11}[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=unit, atol=slack, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (0, 8), (7, 33), (2, 3, 64)])
def test_layer_norm(dtype, shape):
    x = draw(*shape, dtype=dtype) + 3
    weight, bias = draw(shape[-1], dtype=dtype, seed=2), draw(shape[-1], dtype=dtype, seed=3)
    for b in (bias, None):
        got = layer_norm_gpu.layer_norm(x, weight, b, 1e-2)
        wide = None if b is None else b.double()
        close(got, general.layer_norm_reference(x.double(), weight.double(), wide, 1e-2), 2e-5)


def test_layer_norm_of_a_view_far_from_zero():
    x = (draw(6, 100) + 1000)[::2, 10:74]
    got = layer_norm_gpu.layer_norm(x, torch.ones(64), None, 1e-5)
    want = general.layer_norm_reference(x.double(), torch.ones(64).double(), None, 1e-5)
    close(got, want, 1e-3)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_backward(monkeypatch, dtype, centre, fused):
    monkeypatch.setattr(layer_norm_gpu, "PROGRAMS", 3)
    for rows, size in ((0, 8), (1, 1), (3, 40), (8, 33)):
        x, dy = draw(rows, size, dtype=dtype), draw(rows, size, dtype=dtype, seed=1)
        weight = draw(size, dtype=dtype, seed=2)
        got = layer_norm_gpu.norm_backward(dy, x, weight, 1e-2, centre, fused=fused)
        want = general.norm_backward_reference(
            dy.double(), x.double(), weight.double(), 1e-2, centre
        )
        for part, exact in zip(got[: 2 + centre], want, strict=False):
            assert part.dtype == dtype
            close(part, exact, 5e-5)
        assert centre or not got[2].any()


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(dtype, resident):
    for rows, n in ((1, 1), (3, 70), (2, 256), (0, 5), (5, 0)):
        x, dy = 5 * draw(rows, n, dtype=dtype), draw(rows, n, dtype=dtype, seed=1)
        block = None if resident else 64
        y = softmax_gpu.softmax(x, resident=resident, block=block)
        close(y, torch.softmax(x.double(), -1), 1e-6)
        got = softmax_gpu.softmax_backward(dy, y, resident=resident, block=block)
        close(got, general.softmax_backward_reference(dy.double(), y.double()), 1e-6)


@pytest.mark.parametrize("resident", [True, False])
def test_softmax_of_infinities(resident):
    """Masked logits, more of them than a block holds; nothing but infinities; NaN; a view."""
    x = draw(5, 400)[:, ::2].clone()
    x[0, :130] = -torch.inf
    x[1] = -torch.inf
    x[2, 7] = torch.nan
    x[3, 100:] = 3e38
    want = torch.softmax(x.double(), -1)
    got = softmax_gpu.softmax(x, resident=resident, block=None if resident else 64)
    close(got, want)
    view = draw(6, 300)[::2, 5:200]
    got = softmax_gpu.softmax(view, resident=resident, block=None if resident else 64)
    close(got, torch.softmax(view.double(), -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_of_rows_shared_by_programs(monkeypatch, dtype):
    """The interpreter runs one program after another: those that the first waits for have not
    begun. It computes what they would tell."""
    monkeypatch.setattr(softmax_gpu, "_SHARE", {2: (256, 16, 1), 4: (256, 32, 1)})
    for rows, n in ((2, 64), (3, 200), (1, 520)):
        x, out = 5 * draw(rows, n + 8, dtype=dtype)[:, :n], torch.empty(rows, n, dtype=dtype)
        if rows == 3:
            x[0], x[1, :130], x[2, 150] = -torch.inf, -torch.inf, torch.nan
        softmax_gpu._shared_softmax(x, out, patience=2)
        close(out, torch.softmax(x.double(), -1), 1e-6)


def test_softmax_of_a_part_alone(monkeypatch):
    """One program runs of those that share a row: its part is right, and it tells of the others to
    the bit what they tell themselves."""
    monkeypatch.setattr(softmax_gpu, "_SHARE", {4: (256, 32, 1)})
    kernel, told = softmax_gpu._shared_softmax_kernel, []
    x, out = 5 * draw(1, 200), torch.zeros(1, 200)

    class Programs:
        def __init__(self, count=None):
            self.count = count

        def __getitem__(self, grid):
            def launch(x, out, state, *rest, **options):
                kernel[(self.count or grid[0],)](x, out, state, *rest, **options)
                told.append(state[: grid[0]])

            return launch

    for count in (1, None):
        monkeypatch.setattr(softmax_gpu, "_shared_softmax_kernel", Programs(count))
        out.zero_()
        softmax_gpu._shared_softmax(x, out, patience=3)
        done = 200 if count is None else 52  # 13 of 50 times 4 words
        close(out[:, :done], torch.softmax(x.double(), -1)[:, :done], 1e-6)
        assert not out[:, done:].any()
    assert torch.equal(*told)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy(dtype):
    for rows, classes in ((1, 1), (5, 70), (4, 200), (0, 3)):
        logits = (5 * draw(2 * rows, classes + 8, dtype=dtype))[::2, 8:]
        target = torch.arange(rows) * 37 % classes
        target[1:2] = -100
        if classes == 200:
            logits[:, :128] = -torch.inf  # whole blocks of what is masked
            target[0], target[2], target[3] = 130, 199, 128
        loss, total = cross_entropy_gpu.cross_entropy(logits, target, -100, block=64)
        close(loss, general.cross_entropy_reference(logits.double(), target))
        twice = cross_entropy_gpu.cross_entropy(logits, target, -100, online=False, block=64)
        close(twice[0], general.cross_entropy_reference(logits.double(), target))
        dloss = draw(rows, seed=4)
        got = cross_entropy_gpu.cross_entropy_backward(dloss, logits, total, target, -100, block=64)
        leaf = logits.double().requires_grad_()
        general.cross_entropy_reference(leaf, target).backward(dloss.double())
        close(got, leaf.grad)
        summed = cross_entropy_gpu.cross_entropy_backward(
            torch.ones(()).expand(rows), logits, total, target, -100, block=64
        )
        assert summed.shape == logits.shape


def test_a_target_out_of_range_is_no_number():
    loss, _ = cross_entropy_gpu.cross_entropy(draw(3, 9), torch.tensor([9, -1, 2]), -100, block=16)
    assert loss.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("chunk", [3, 50])
def test_linear_cross_entropy(chunk):
    x, weight = draw(7, 16), draw(90, 16, seed=1)
    target = torch.arange(7)
    target[3] = -100
    got = cross_entropy_gpu.linear_cross_entropy(x, weight, target, -100, chunk, True, block=32)
    leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
    loss = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].t(), target)
    loss.backward()
    wanted = (loss.detach(), *(6 * leaf.grad for leaf in leaves), torch.tensor(1 / 6).double())
    for part, want in zip(got, wanted, strict=True):
        close(part, want)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw(dtype, fused):
    for size in (0, 1, 300):
        param, moments = draw(size, dtype=dtype), [torch.zeros(size), torch.zeros(size)]
        for step in range(1, 4):
            grad = draw(size, dtype=dtype, seed=step)
            wide = [x.double() for x in (param, grad, *moments)]
            want = general.adamw_reference(*wide, step, 0.1, (0.9, 0.99), 1e-8, 0.1)
            adamw_gpu.adamw_step(
                param, grad, *moments, step, 0.1, 0.9, 0.99, 1e-8, 0.1, fused=fused, block=128
            )
            for part, exact in zip((param, *moments), want, strict=True):
                close(part, exact, 1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_backward(dtype, name, fused):
    reference = getattr(general, f"{name}_backward_reference")
    backward = getattr(gpu, f"{name}_backward")
    for shape in ((1, 2), (0, 8), (3, 2, 70)):
        x, dy = 3 * draw(*shape, dtype=dtype), draw(*shape[:-1], shape[-1] // 2, dtype=dtype)
        close(backward(dy, x, fused=fused), reference(dy.double(), x.double()))
    far = torch.tensor([[-200.0, 200.0, -1e4, 1e30, -1e30, 1.0, 1.0, 1.0, 1.0, 1.0]])
    got = backward(torch.ones(1, 5), far, fused=fused)
    assert got[0, :5].tolist() == pytest.approx([0, 1, 0, 1, 0], abs=1e-6)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding(dtype, fused):
    for tokens, heads, key_heads, size, rotary_dim in (
        (3, 4, 2, 16, 16), (2, 3, 1, 20, 6), (0, 2, 1, 8, 8), (2, 1, 5, 8, 4)
    ):  # fmt: skip
        qkv = draw(tokens, heads + key_heads, size, dtype=dtype)
        query, key = qkv.split((heads, key_heads), 1)
        positions = torch.arange(tokens) * 3 % 5
        table = draw(5, rotary_dim, seed=1)
        wide = query.double(), key.double()
        got = rotary_gpu.rotary_embedding(query, key, positions, table, fused=fused)
        for part, want in zip(
            got, general.rotary_embedding_reference(*wide, positions, table.double()), strict=True
        ):
            close(part, want, 1e-3 if dtype == torch.float16 else 1e-5)
            assert part.is_contiguous()
        leaves = [x.requires_grad_() for x in wide]
        out = general.rotary_embedding_reference(*leaves, positions, table.double())
        grads = torch.autograd.grad(out, leaves, wide)
        back = rotary_gpu.rotary_embedding_backward(query, key, positions, table, fused=fused)
        for part, want in zip(back, grads, strict=True):
            close(part, want, 1e-3 if dtype == torch.float16 else 1e-5)
    x = draw(3, 1, 4)
    outside, _ = rotary_gpu.rotary_embedding(x, x, torch.tensor([0, -1, 7]), draw(7, 4))
    assert outside.isnan().all(2).flatten().tolist() == [False, True, True]
