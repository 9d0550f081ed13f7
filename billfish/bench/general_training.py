"""Cases of `billfish bench general`: training and inference of models."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from billfish.bench.general_case import Case, Function, compiled
from billfish.kernels import general

DOMAIN = "training"


def cases() -> list[Case]:
    half = torch.bfloat16
    return [
        rms_norm(8192, 4096, half),
        rms_norm(16384, 8192, half),
        add_rms_norm(8192, 4096, half),
        layer_norm(8192, 4096, half),
        rms_norm_gradient(8192, 4096, half),
        layer_norm_gradient(8192, 4096, half),
        softmax(8192, 4096, half),
        softmax(2048, 128256, half),
        softmax_gradient(8192, 4096, half),
        silu_mul(8192, 14336, half),
        gelu_tanh_mul(8192, 14336, half),
        silu_mul_gradient(8192, 14336, half),
        gelu_tanh_mul_gradient(8192, 14336, half),
        rotary_embedding(8192, 32, 8, 128, half),
        cross_entropy(4096, 128256, half),
        linear_cross_entropy(8192, 4096, 128256, None, half),
        sample(256, 128256, half),
        sample(16, 128256, half),
        adamw_step(1 << 27, torch.float32),
        adamw_step(1 << 27, half),
    ]


def tiny() -> list[Case]:
    single = torch.float32
    return [
        rms_norm(5, 40, single),
        add_rms_norm(5, 40, single),
        layer_norm(5, 40, single),
        rms_norm_gradient(5, 40, single),
        layer_norm_gradient(5, 40, single),
        softmax(5, 40, single),
        softmax_gradient(5, 40, single),
        silu_mul(5, 40, single),
        gelu_tanh_mul(5, 40, single),
        silu_mul_gradient(5, 40, single),
        gelu_tanh_mul_gradient(5, 40, single),
        rotary_embedding(5, 4, 2, 16, single),
        cross_entropy(6, 70, single),
        linear_cross_entropy(7, 16, 60, 3, single),
        sample(6, 300, single),
        adamw_step(300, single),
    ]


def with_gradients(function: Function, *, wide: bool = False) -> Function:
    """(inputs, gradient of the result) -> (result, gradients of the inputs that want one).

    wide: in float64.
    """

    def call(*inputs: Any) -> tuple[Tensor, ...]:
        *given, dy = inputs
        if wide:
            given = [
                x.detach().double().requires_grad_(x.requires_grad)
                if isinstance(x, Tensor) and x.is_floating_point() else x
                for x in given
            ]  # fmt: skip
        leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
        with torch.enable_grad():
            out = function(*given)
            grads = torch.autograd.grad(out, leaves, dy.to(out.dtype))
        return out.detach(), *grads

    return call


def wide(function: Function) -> Function:
    """function of its inputs in float64."""
    return lambda *inputs: function(
        *(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
    )


def with_liger(function: Function) -> Function:
    """function(liger_kernel.transformers.functional, *inputs)"""
    return lambda *inputs: function(import_module("liger_kernel.transformers.functional"), *inputs)


def _drawn(*shapes: tuple[int, ...], dtype: torch.dtype, grads: int = 0) -> Callable[..., Any]:
    """Normal numbers of these shapes; the first `grads` want gradients."""

    def draw(device: torch.device) -> tuple[Tensor, ...]:
        drawn = tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)
        for x in drawn[:grads]:
            x.requires_grad_()
        return drawn

    return draw


def _torch_peers(function: Function, gradients: bool = False) -> dict[str, Function]:
    peers = {"torch": function, "torch.compile": compiled(function)}
    return {n: with_gradients(f) for n, f in peers.items()} if gradients else peers


EPS = 1e-5


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def _rms_exact(x: Tensor, weight: Tensor) -> Tensor:
    return general.rms_norm_reference(x, weight, EPS)


def rms_norm(rows: int, size: int, dtype: torch.dtype) -> Case:
    moved = rows * size * dtype.itemsize
    return Case(
        domain=DOMAIN, kernel="rms_norm", size=f"{rows} x {size}", dtype=dtype,
        draw=_drawn((rows, size), (size,), dtype=dtype),
        run=lambda x, w: general.rms_norm(x, w, EPS), reference=wide(_rms_exact),
        read=moved, written=moved,
        peers=_torch_peers(_rms)
        | {"liger": with_liger(lambda f, x, w: f.liger_rms_norm(x, w, EPS))},
    )  # fmt: skip


def add_rms_norm(rows: int, size: int, dtype: torch.dtype) -> Case:
    def chain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return _rms(total, weight), total

    def exact(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = (x + residual).double()
        return _rms_exact(total, weight.double()), total

    moved = 2 * rows * size * dtype.itemsize
    return Case(
        domain=DOMAIN, kernel="add_rms_norm", size=f"{rows} x {size}", dtype=dtype,
        draw=_drawn((rows, size), (rows, size), (size,), dtype=dtype),
        run=lambda x, r, w: general.rms_norm(x, w, EPS, r), reference=exact,
        read=moved, written=moved, peers=_torch_peers(chain),
        settings={"residual added in the norm": {
            "off": lambda x, r, w: (general.rms_norm(t := x + r, w, EPS), t)}},
    )  # fmt: skip


def layer_norm(rows: int, size: int, dtype: torch.dtype) -> Case:
    moved = rows * size * dtype.itemsize
    return Case(
        domain=DOMAIN, kernel="layer_norm", size=f"{rows} x {size}", dtype=dtype,
        draw=_drawn((rows, size), (size,), (size,), dtype=dtype),
        run=general.layer_norm, read=moved, written=moved,
        reference=wide(lambda x, w, b: general.layer_norm_reference(x, w, b, EPS)),
        peers=_torch_peers(lambda x, w, b: functional.layer_norm(x, w.shape, w, b, EPS))
        | {"liger": with_liger(lambda f, x, w, b: f.liger_layer_norm(x, w, b, EPS))},
    )  # fmt: skip


def _two_passes(centre: bool) -> Function:
    """Forward, then the gradients of x and of the weights in passes of their own."""

    def call(x: Tensor, weight: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        from billfish.kernels.general import layer_norm_gpu

        *bias, dy = rest
        if centre:
            out = general.layer_norm(x, weight, bias[0], EPS)
        else:
            out = general.rms_norm(x, weight, EPS)
        grads = layer_norm_gpu.norm_backward(dy, x, weight, EPS, centre, fused=False)
        return out, *grads[: 3 if centre else 2]

    return call


def rms_norm_gradient(rows: int, size: int, dtype: torch.dtype) -> Case:
    moved = rows * size * dtype.itemsize
    return Case(
        domain=DOMAIN, kernel="rms_norm fwd+bwd", size=f"{rows} x {size}", dtype=dtype,
        draw=_drawn((rows, size), (size,), (rows, size), dtype=dtype, grads=2),
        run=with_gradients(lambda x, w: general.rms_norm(x, w, EPS)),
        reference=with_gradients(_rms_exact, wide=True), read=3 * moved, written=2 * moved,
        peers=_torch_peers(_rms, gradients=True) | {"liger": with_gradients(with_liger(
            lambda f, x, w: f.liger_rms_norm(x, w, EPS, in_place=False)))},
        settings={"gradients in one pass": {"off": _two_passes(False)}},
    )  # fmt: skip


def layer_norm_gradient(rows: int, size: int, dtype: torch.dtype) -> Case:
    moved = rows * size * dtype.itemsize
    return Case(
        domain=DOMAIN, kernel="layer_norm fwd+bwd", size=f"{rows} x {size}", dtype=dtype,
        draw=_drawn((rows, size), (size,), (size,), (rows, size), dtype=dtype, grads=3),
        run=with_gradients(lambda x, w, b: general.layer_norm(x, w, b, EPS)),
        reference=with_gradients(
            lambda x, w, b: general.layer_norm_reference(x, w, b, EPS), wide=True),
        read=3 * moved, written=2 * moved,
        peers=_torch_peers(
            lambda x, w, b: functional.layer_norm(x, w.shape, w, b, EPS), gradients=True,
        ) | {"liger": with_gradients(with_liger(
            lambda f, x, w, b: f.liger_layer_norm(x, w, b, EPS)))},
        settings={"gradients in one pass": {"off": _two_passes(True)}},
    )  # fmt: skip


def softmax(rows: int, n: int, dtype: torch.dtype) -> Case:
    def off(x: Tensor) -> Tensor:
        from billfish.kernels.general import softmax_gpu

        return softmax_gpu.softmax(x, resident=False)

    moved = rows * n * dtype.itemsize
    return Case(
        domain=DOMAIN, kernel="softmax", size=f"{rows} x {n}", dtype=dtype,
        draw=_drawn((rows, n), dtype=dtype), run=general.softmax,
        reference=wide(general.softmax_reference), read=moved, written=moved,
        peers=_torch_peers(lambda x: x.softmax(-1))
        | {"liger": with_liger(lambda f, x: f.liger_softmax(x))},
        settings={"row in registers": {"off": off}} if n <= 16384 else {},
    )  # fmt: skip


def softmax_gradient(rows: int, n: int, dtype: torch.dtype) -> Case:
    def off(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        from billfish.kernels.general import softmax_gpu

        y = softmax_gpu.softmax(x, resident=False)
        return y, softmax_gpu.softmax_backward(dy, y, resident=False)

    moved = rows * n * dtype.itemsize
    return Case(
        domain=DOMAIN, kernel="softmax fwd+bwd", size=f"{rows} x {n}", dtype=dtype,
        draw=_drawn((rows, n), (rows, n), dtype=dtype, grads=1),
        run=with_gradients(general.softmax),
        reference=with_gradients(general.softmax_reference, wide=True),
        read=3 * moved, written=2 * moved,
        peers=_torch_peers(lambda x: x.softmax(-1), gradients=True)
        | {"liger": with_gradients(with_liger(lambda f, x: f.liger_softmax(x)))},
        settings={"row in registers": {"off": off}},
        tolerance=2e-2 if dtype.itemsize == 2 else None,
    )  # fmt: skip


def _gated(kernel: str, run: Function, exact: Function, chain: Function, liger: str,
           rows: int, size: int, dtype: torch.dtype) -> Case:  # fmt: skip
    moved = rows * size * dtype.itemsize
    return Case(
        domain=DOMAIN, kernel=kernel, size=f"{rows} x {size}", dtype=dtype,
        draw=_drawn((rows, 2 * size), dtype=dtype), run=run, reference=wide(exact),
        read=2 * moved, written=moved,
        peers=_torch_peers(chain)
        | {"liger": with_liger(lambda f, x: getattr(f, liger)(*x.chunk(2, -1)))},
        settings={"fused": {"off": chain}},
    )  # fmt: skip


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def geglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.gelu(gate, approximate="tanh") * up


def silu_mul(rows: int, size: int, dtype: torch.dtype) -> Case:
    return _gated("silu_mul", general.silu_mul, general.silu_mul_reference, swiglu,
                  "liger_swiglu", rows, size, dtype)  # fmt: skip


def gelu_tanh_mul(rows: int, size: int, dtype: torch.dtype) -> Case:
    return _gated("gelu_tanh_mul", general.gelu_tanh_mul, general.gelu_tanh_mul_reference, geglu,
                  "liger_geglu", rows, size, dtype)  # fmt: skip


def _gated_gradient(kernel: str, exact: Function, chain: Function, liger: str,
                    rows: int, size: int, dtype: torch.dtype) -> Case:  # fmt: skip
    run = getattr(general, kernel)

    def off(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        from billfish.kernels.general import gpu

        return run(x), getattr(gpu, f"{kernel}_backward")(dy, x, fused=False)

    moved = rows * size * dtype.itemsize
    return Case(
        domain=DOMAIN, kernel=f"{kernel} fwd+bwd", size=f"{rows} x {size}", dtype=dtype,
        draw=_drawn((rows, 2 * size), (rows, size), dtype=dtype, grads=1),
        run=with_gradients(run), reference=with_gradients(exact, wide=True),
        read=5 * moved, written=3 * moved,
        peers=_torch_peers(chain, gradients=True) | {"liger": with_gradients(with_liger(
            lambda f, x: getattr(f, liger)(*x.chunk(2, -1))))},
        settings={"gradients in one pass": {"off": off}},
    )  # fmt: skip


def silu_mul_gradient(rows: int, size: int, dtype: torch.dtype) -> Case:
    return _gated_gradient("silu_mul", general.silu_mul_reference, swiglu, "liger_swiglu",
                           rows, size, dtype)  # fmt: skip


def gelu_tanh_mul_gradient(rows: int, size: int, dtype: torch.dtype) -> Case:
    return _gated_gradient("gelu_tanh_mul", general.gelu_tanh_mul_reference, geglu,
                           "liger_geglu", rows, size, dtype)  # fmt: skip


def rotary_embedding(
    tokens: int, heads: int, key_heads: int, size: int, dtype: torch.dtype
) -> Case:
    def draw(device: torch.device) -> tuple[Tensor, ...]:
        query = torch.randn(tokens, heads, size, device=device).to(dtype)
        key = torch.randn(tokens, key_heads, size, device=device).to(dtype)
        angles = torch.randn(tokens, size // 2, device=device)
        table = torch.cat((angles.cos(), angles.sin()), -1)
        return query, key, torch.arange(tokens, device=device), table

    def off(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        from billfish.kernels.general import rotary_gpu

        query, key, positions, table = inputs
        return rotary_gpu.rotary_embedding(query, key, positions, table, fused=False)

    def chain(query: Tensor, key: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
        turned = []
        for x in (query, key):
            low, high = x.float().chunk(2, -1)
            turned.append(torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(dtype))
        return tuple(turned)

    def exact(query: Tensor, key: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        return general.rotary_embedding_reference(
            query.double(), key.double(), positions, table.double()
        )

    moved = tokens * (heads + key_heads) * size * dtype.itemsize
    return Case(
        domain=DOMAIN, kernel="rotary_embedding", size=f"{tokens} x {heads}+{key_heads} x {size}",
        dtype=dtype, draw=draw, run=general.rotary_embedding, reference=exact,
        read=moved + tokens * (4 * size + 8), written=moved, peers=_torch_peers(chain),
        settings={"query and key in one launch": {"off": off}},
    )  # fmt: skip


def _drawn_targets(rows: int, classes: int, device: torch.device) -> Tensor:
    return torch.randint(0, classes, (rows,), device=device)


def cross_entropy(rows: int, classes: int, dtype: torch.dtype) -> Case:
    """Loss and gradient: the logits are read twice, the gradient is written."""

    def draw(device: torch.device) -> tuple[Tensor, ...]:
        logits = torch.randn(rows, classes, device=device).to(dtype).requires_grad_()
        return logits, _drawn_targets(rows, classes, device), torch.ones((), device=device)

    def off(logits: Tensor, target: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        from billfish.kernels.general import cross_entropy_gpu as gpu

        loss, total = gpu.cross_entropy(logits, target, -100, online=False)
        each = (dy / rows).expand(rows)
        return loss.mean(), gpu.cross_entropy_backward(each, logits, total, target, -100)

    moved = rows * classes * dtype.itemsize
    return Case(
        domain=DOMAIN, kernel="cross_entropy fwd+bwd", size=f"{rows} x {classes}", dtype=dtype,
        draw=draw, run=with_gradients(general.cross_entropy),
        reference=with_gradients(functional.cross_entropy, wide=True),
        read=2 * moved, written=moved,
        peers=_torch_peers(functional.cross_entropy, gradients=True)
        | {"liger": with_gradients(with_liger(lambda f, x, t: f.liger_cross_entropy(x, t)))},
        settings={"maximum and sum in one read": {"off": off}},
    )  # fmt: skip


def linear_cross_entropy(
    rows: int, size: int, classes: int, chunk: int | None, dtype: torch.dtype
) -> Case:
    """Three products of matrices: the logits, and the gradients of x and of the weight."""

    def draw(device: torch.device) -> tuple[Tensor, ...]:
        x = torch.randn(rows, size, device=device).to(dtype).requires_grad_()
        weight = (torch.randn(classes, size, device=device) / size**0.5).to(dtype)
        target = _drawn_targets(rows, classes, device)
        return x, weight.requires_grad_(), target, torch.ones((), device=device)

    def chain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(x @ weight.t(), target)

    return Case(
        domain=DOMAIN, kernel="linear_cross_entropy fwd+bwd",
        size=f"{rows} x {size} x {classes}", dtype=dtype, draw=draw,
        run=with_gradients(lambda x, w, t: general.linear_cross_entropy(x, w, t, chunk=chunk)),
        reference=with_gradients(chain, wide=True),
        read=(2 * rows * size + 2 * classes * size) * dtype.itemsize,
        written=(rows * size + classes * size) * dtype.itemsize,
        flops=6 * rows * size * classes,
        peers=_torch_peers(chain, gradients=True) | {"liger": with_gradients(with_liger(
            lambda f, x, w, t: f.liger_fused_linear_cross_entropy(x, w, t)))},
        settings={"logits in chunks": {"off": with_gradients(
            lambda x, w, t: general.linear_cross_entropy(x, w, t, chunk=rows))}},
        tolerance=2e-2 if dtype.itemsize == 2 else None,
    )  # fmt: skip


RATES = (3e-4, 0.9, 0.95, 1e-8, 0.1)  # lr, beta1, beta2, eps, weight decay


def adamw_step(n: int, dtype: torch.dtype) -> Case:
    lr, beta1, beta2, eps, decay = RATES

    def draw(device: torch.device) -> tuple[Tensor, ...]:
        param, grad = (torch.randn(n, device=device).to(dtype) for _ in range(2))
        return param, grad, torch.randn(n, device=device), torch.rand(n, device=device)

    def run(param: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        general.adamw_step(param, grad, m, v, 7, lr, (beta1, beta2), eps, decay)
        return param, m, v

    def off(param: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        from billfish.kernels.general import adamw_gpu

        adamw_gpu.adamw_step(param, grad, m, v, 7, *RATES, fused=False)
        return param, m, v

    def exact(param: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return general.adamw_reference(param, grad, m, v, 7, lr, (beta1, beta2), eps, decay)

    def in_place(param: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        kept = param, m, v
        for old, new in zip(kept, exact(param, grad, m, v), strict=True):
            old.copy_(new)
        return kept

    def torch_fused(param: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        torch._fused_adamw_(
            [param], [grad], [m], [v], [], [torch.full((), 7.0, device=param.device)],
            lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps, amsgrad=False,
            maximize=False,
        )  # fmt: skip
        return param, m, v

    peers = _torch_peers(in_place)
    if dtype == torch.float32:
        peers["torch fused"] = torch_fused
    return Case(
        domain=DOMAIN, kernel="adamw_step", size=f"{n}", dtype=dtype, draw=draw, run=run,
        reference=wide(exact), read=n * (2 * dtype.itemsize + 8), written=n * (dtype.itemsize + 8),
        peers=peers, settings={"one pass": {"off": off}},
    )  # fmt: skip


TOP_K, TOP_P, TEMPERATURE = 50, 0.95, 0.8


def sample(rows: int, size: int, dtype: torch.dtype) -> Case:
    """Tokens of temperature, top-k and top-p. What differs by its random numbers is right where
    every token is one of those that may be drawn."""

    def draw(device: torch.device) -> tuple[Tensor, ...]:
        logits = (3 * torch.randn(rows, size, device=device)).to(dtype)
        return logits, torch.arange(rows, device=device)

    def off(logits: Tensor, seeds: Tensor) -> Tensor:
        from billfish.kernels.general import sample_gpu

        each = seeds.double()
        options = (TEMPERATURE, TOP_P, 0.0, 0.0)
        numbers = torch.stack([torch.full_like(each, number) for number in options], 1)
        integers = torch.stack((seeds, torch.full_like(seeds, TOP_K)), 1)
        zeros = torch.zeros_like(seeds)
        return sample_gpu.draw_tokens(logits, numbers, integers, zeros, False, bisect=False)

    def kept(logits: Tensor, seeds: Tensor) -> Tensor:
        probs, order = (
            (logits.double() / TEMPERATURE).softmax(-1).sort(descending=True, stable=True)
        )
        probs[:, TOP_K:] = 0
        probs /= probs.sum(1, keepdim=True)
        wanted = (probs.cumsum(1) - probs < TOP_P + 1e-9) & (probs > 0)
        return torch.zeros_like(wanted).scatter_(1, order, wanted)

    def outside(tokens: Tensor, allowed: Tensor) -> float:
        return 1.0 - float(allowed.gather(1, tokens.long().unsqueeze(1)).double().mean())

    def by_torch(logits: Tensor, seeds: Tensor) -> Tensor:
        values, order = logits.float().topk(TOP_K, -1)
        probs = (values / TEMPERATURE).softmax(-1)
        probs = torch.where(probs.cumsum(-1) - probs < TOP_P, probs, 0.0)
        # The largest of probabilities over exponential numbers is drawn with those probabilities.
        chosen = (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
        return order.gather(-1, chosen).squeeze(-1)

    def by_flashinfer(logits: Tensor, seeds: Tensor) -> Tensor:
        sampling = import_module("flashinfer.sampling")
        tokens: Tensor = sampling.top_k_top_p_sampling_from_logits(
            logits.float() / TEMPERATURE, TOP_K, TOP_P, filter_apply_order="top_k_first"
        )
        return tokens

    return Case(
        domain=DOMAIN, kernel="sample", size=f"{rows} x {size}", dtype=dtype, draw=draw,
        run=lambda logits, seeds: general.sample(
            logits, TEMPERATURE, TOP_K, TOP_P, seed=seeds),
        reference=kept, error=outside, tolerance=0.0,
        read=rows * size * dtype.itemsize, written=8 * rows,
        peers={"torch": by_torch, "flashinfer": by_flashinfer},
        settings={"bisection, no sort": {"off": off}},
    )  # fmt: skip
