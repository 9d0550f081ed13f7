"""Cases of `billfish bench general`: training and inference of models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
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
        RMS_NORM.forward(8192, 4096, half),
        RMS_NORM.forward(16384, 8192, half),
        add_rms_norm(8192, 4096, half),
        LAYER_NORM.forward(8192, 4096, half),
        RMS_NORM.gradient(8192, 4096, half),
        LAYER_NORM.gradient(8192, 4096, half),
        SOFTMAX.forward(8192, 4096, half),
        replace(SOFTMAX.forward(2048, 128256, half), settings={}),  # too long for registers
        SOFTMAX.gradient(8192, 4096, half),
        SILU_MUL.forward(8192, 14336, half),
        GELU_TANH_MUL.forward(8192, 14336, half),
        SILU_MUL.gradient(8192, 14336, half),
        GELU_TANH_MUL.gradient(8192, 14336, half),
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
        RMS_NORM.forward(5, 40, single),
        add_rms_norm(5, 40, single),
        LAYER_NORM.forward(5, 40, single),
        RMS_NORM.gradient(5, 40, single),
        LAYER_NORM.gradient(5, 40, single),
        SOFTMAX.forward(5, 40, single),
        SOFTMAX.gradient(5, 40, single),
        SILU_MUL.forward(5, 40, single),
        GELU_TANH_MUL.forward(5, 40, single),
        SILU_MUL.gradient(5, 40, single),
        GELU_TANH_MUL.gradient(5, 40, single),
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


@dataclass(frozen=True)
class Operation:
    """Of x [rows, parts * size] and `weights` vectors [size], with derivatives; y is [rows, size].

    exact: its reference. by_torch: in torch's operators. by_liger: (module, *inputs). off: by
    technique, (*inputs) -> y without it; gradient_off: (*inputs, dy) -> y and the gradients. loose:
    the error of gradients in 16 bits that is right, where they are sums of what cancels.
    """

    kernel: str
    run: Function
    exact: Function
    by_torch: Function
    by_liger: Function
    off: Mapping[str, Function]
    gradient_off: Mapping[str, Function]
    weights: int = 0
    parts: int = 1
    loose: float | None = None

    def forward(self, rows: int, size: int, dtype: torch.dtype) -> Case:
        moved = rows * size * dtype.itemsize
        return Case(
            domain=DOMAIN, kernel=self.kernel, size=f"{rows} x {size}", dtype=dtype,
            draw=_drawn(*self._shapes(rows, size), dtype=dtype), run=self.run,
            reference=wide(self.exact), read=self.parts * moved, written=moved,
            peers=_torch_peers(self.by_torch) | {"liger": with_liger(self.by_liger)},
            settings={technique: {"off": call} for technique, call in self.off.items()},
        )  # fmt: skip

    def gradient(self, rows: int, size: int, dtype: torch.dtype) -> Case:
        """Forward and backward: x is read for both, and dy."""
        moved = rows * size * dtype.itemsize
        shapes = self._shapes(rows, size)
        return Case(
            domain=DOMAIN, kernel=f"{self.kernel} fwd+bwd", size=f"{rows} x {size}", dtype=dtype,
            draw=_drawn(*shapes, (rows, size), dtype=dtype, grads=len(shapes)),
            run=with_gradients(self.run), reference=with_gradients(self.exact, wide=True),
            read=(2 * self.parts + 1) * moved, written=(self.parts + 1) * moved,
            peers=_torch_peers(self.by_torch, gradients=True)
            | {"liger": with_gradients(with_liger(self.by_liger))},
            settings={technique: {"off": call} for technique, call in self.gradient_off.items()},
            tolerance=self.loose if dtype.itemsize == 2 else None,
        )  # fmt: skip

    def _shapes(self, rows: int, size: int) -> list[tuple[int, ...]]:
        return [(rows, self.parts * size), *[(size,)] * self.weights]


EPS = 1e-5


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def _rms_exact(x: Tensor, weight: Tensor) -> Tensor:
    return general.rms_norm_reference(x, weight, EPS)


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


RMS_NORM = Operation(
    "rms_norm", lambda x, w: general.rms_norm(x, w, EPS), _rms_exact, _rms,
    lambda f, x, w: f.liger_rms_norm(x, w, EPS, in_place=False),
    {}, {"gradients in one pass": _two_passes(False)}, weights=1,
)  # fmt: skip
LAYER_NORM = Operation(
    "layer_norm", lambda x, w, b: general.layer_norm(x, w, b, EPS),
    lambda x, w, b: general.layer_norm_reference(x, w, b, EPS),
    lambda x, w, b: functional.layer_norm(x, w.shape, w, b, EPS),
    lambda f, x, w, b: f.liger_layer_norm(x, w, b, EPS),
    {}, {"gradients in one pass": _two_passes(True)}, weights=2,
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


def _read_twice(x: Tensor) -> Tensor:
    from billfish.kernels.general import softmax_gpu

    return softmax_gpu.softmax(x, resident=False)


def _read_twice_gradient(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    from billfish.kernels.general import softmax_gpu

    y = softmax_gpu.softmax(x, resident=False)
    return y, softmax_gpu.softmax_backward(dy, y, resident=False)


SOFTMAX = Operation(
    "softmax", general.softmax, general.softmax_reference, lambda x: x.softmax(-1),
    lambda f, x: f.liger_softmax(x),
    {"row in registers": _read_twice}, {"row in registers": _read_twice_gradient}, loose=2e-2,
)  # fmt: skip


def _gated(kernel: str, exact: Function, activation: Function, liger: str) -> Operation:
    run = getattr(general, kernel)

    def chain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        y: Tensor = activation(gate) * up
        return y

    def two_passes(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        from billfish.kernels.general import gpu

        return run(x), getattr(gpu, f"{kernel}_backward")(dy, x, fused=False)

    return Operation(
        kernel, run, exact, chain, lambda f, x: getattr(f, liger)(*x.chunk(2, -1)),
        {"fused": chain}, {"gradients in one pass": two_passes}, parts=2,
    )  # fmt: skip


SILU_MUL = _gated("silu_mul", general.silu_mul_reference, functional.silu, "liger_swiglu")
GELU_TANH_MUL = _gated("gelu_tanh_mul", general.gelu_tanh_mul_reference,
                       partial(functional.gelu, approximate="tanh"), "liger_geglu")  # fmt: skip


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
    """Three products of matrices: the logits, and the gradients of x and of the weight.

    What it is for is memory: chunks of more rows, and gradients over the logits, take no less time.
    """

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
        held=True,
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
