"""Chains of element-wise operations on the CPU: what an expression may hold, and what it gives."""

import pytest
import torch
from torch.library import opcheck

from billfish.errors import KernelArgumentError
from billfish.kernels import general
from billfish.kernels.general.elementwise import parse
from tests.kernels.elementwise_cases import CHAINS, draw


@pytest.mark.parametrize("expression", CHAINS)
def test_chains(expression):
    inputs = CHAINS[expression]()
    want = general.elementwise_reference(expression, **inputs)
    got = general.elementwise(expression, **inputs)
    assert got.is_contiguous()
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    torch.testing.assert_close(got, want, equal_nan=True)


def test_against_float64():
    x, y, z = draw(5, 7), draw(7, seed=1), draw(5, 1, seed=2)
    got = general.elementwise("silu(x) * y + 0.5 * z", x=x, y=y, z=z)
    wide = x.double()
    want = wide / (1 + (-wide).exp()) * y.double() + z.double() / 2
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_half_floats_are_rounded_once():
    x = draw(1000).to(torch.bfloat16)
    got = general.elementwise("(x + 256) - 256", x=x)
    torch.testing.assert_close(got.float(), x.float(), rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize(
    ("expression", "count"),
    [("x + y", 3), ("x * x + x * x", 3), ("x ** 4", 4), ("2 * 3 * x", None), ("+x", 1)],
)
def test_what_is_said_twice_is_one_node(expression, count):
    nodes = parse(expression, ("x", "y") if "y" in expression else ("x",))
    used = {i for node in nodes for i in node.operands} | {len(nodes) - 1}
    if count:
        assert len([node for node in nodes if node.op != "number"]) == count
    else:
        assert [nodes[i].value for i in used if nodes[i].op == "number"] == [6]


BAD = [
    "x.data", "x[0]", "__import__('os')", "(lambda: x)()", "x if x else x", "x < x < x", "f'{x}'",
    "x @ x", "x // 2", "x % 2", "x ** x", "x ** 9", "x ** 1.5", "[x]", "x and x", "not x", "'x'",
    "None", "True", "2", "y", "unknown(x)", "exp(x, x)", "exp(x=x)", "exp(*x)", "exp(2) * x",
    "1 / 0 * x", "x; x", "x = x", "", "(", "x + \0", "x" + " + x" * 2000,
    "(" * 500 + "x" + ")" * 500, "x" + "".join(f" + {i}" for i in range(400)),
    "1j * x", "where(x, x, x)", "x & x", "~x", "x + " + "9" * 30, "x < 2 ** 8 ** 8",
    "1e300 ** 8 * x",
    "x + " + "(" * 30 + "9" + " ** 8)" * 30,
]  # fmt: skip


@pytest.mark.parametrize("expression", BAD, ids=lambda text: text[:20].replace("\0", "NUL"))
def test_nothing_else_is_an_expression(expression):
    with pytest.raises(KernelArgumentError):
        general.elementwise(expression, x=draw(3))


def test_bad_inputs():
    x = draw(3)
    for call in (
        lambda: general.elementwise("x + y", x=x, y=draw(4)),
        lambda: general.elementwise("x", x=x, y=x),
        lambda: general.elementwise("x + a", x=x, a=2.0),
        lambda: general.elementwise("x", x=x.to(torch.complex64)),
        lambda: general.elementwise("x", x=x.requires_grad_()),
        lambda: general.elementwise("x + y", x=draw(3), y=draw(3).to("meta")),
        lambda: general.elementwise("x - b", x=torch.ones(3) > 0, b=torch.ones(3) > 0),
        lambda: general.elementwise(3, x=draw(3)),
        lambda: general.elementwise("1 + 2"),
    ):
        with pytest.raises(KernelArgumentError):
            call()


def test_the_operation_as_torch_sees_it():
    op = torch.ops.billfish.elementwise.default
    for inputs in ([draw(3, 4), draw(4)], [draw(3, 4).half(), torch.tensor(2.0)]):
        opcheck(op, (inputs, "x * y + 1", ["x", "y"]))
    compiled = torch.compile(
        lambda x: general.elementwise("exp(x) + 1", x=x), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(draw(3)), draw(3).exp() + 1)


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("x ** 9", "got '9', expected an exponent of 1 to 8"),
        ("x + y", r"got 'y', expected inputs \(x\), numbers"),
        ("x.abs()", r"got 'x.abs\(\)', expected inputs"),
        ("x * (1 / 0)", "got '0', expected numbers"),
        ("x +", "got 'x \\+', expected an expression of Python"),
    ],
)
def test_what_is_wrong_with_an_expression_is_named(expression, says):
    with pytest.raises(KernelArgumentError, match=says):
        general.elementwise(expression, x=torch.ones(2))
