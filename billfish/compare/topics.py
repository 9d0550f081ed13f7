"""The techniques of the general kernels: those that `billfish bench general` switches off.

The benchmark names them; here is the kind of each, what is done without it, and where its code is.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import billfish
from billfish.compare.links import exists

GENERAL = "billfish.kernels.general"
_FOLDER = Path(billfish.__file__).parent / "kernels" / "general"


class Topic(NamedTuple):
    """A technique of a general kernel. kind: a key of catalogue.KINDS. code: its symbols."""

    domain: str
    kernel: str
    technique: str
    kind: str
    what: str
    code: tuple[str, ...]


class _Known(NamedTuple):
    kind: str
    what: str
    code: tuple[str, ...]


_GATED = _Known(
    "fused",
    "Activation and product in one pass over gate and up. Without: torch operations, each of which "
    "reads and writes all of it.",
    ("gpu:_gated_kernel",),
)
_TRANSFORM = _Known(
    "shared",
    "All passes of a transform in one launch: a row stays in registers, and changes threads "
    "through shared memory between passes. Without: a launch a pass, through memory.",
    ("fft_gpu:_fft_kernel", "fft_gpu:_passes"),
)
_REUSE = _Known(
    "cached",
    "A value that is read serves several results, out of a register. Without: it is read again for "
    "each product.",
    (),
)
_GRADIENTS = "Gradients of all inputs from one read of what they need. Without: a pass for each."

KNOWN: dict[tuple[str, str], _Known] = {
    ("transpose", "tiles in shared memory"): _Known(
        "coalesced",
        "Tiles are turned around in shared memory, so that reads and writes are both runs of "
        "memory. Without: rows are read as runs and written element by element.",
        ("transpose_gpu:_transpose_kernel", "transpose_gpu:transpose_copy"),
    ),
    ("histogram", "bins in shared memory"): _Known(
        "shared",
        "Each program counts in shared memory and adds its counts once. Without: an atomic in "
        "device memory for every value.",
        ("histogram_gpu:_histogram_kernel", "_ptx:tally", "_ptx:halves"),
    ),
    ("reduce", "one launch"): _Known(
        "synchronized",
        "The last program to finish, which an atomic counter tells, adds up the parts. Without: a "
        "second launch.",
        ("reduce_gpu:_reduce_kernel|if FUSED", "reduce_gpu:_finish"),
    ),
    ("compact", "scan in the same pass"): _Known(
        "fused",
        "Places are found by the scan in the pass that writes. Without: a scan first, whose result "
        "is written and read.",
        ("compact_tiles:compact_kernel", "_ptx_look_back:gather", "compact_gpu:_scatter_kernel"),
    ),
    ("scan", "look-back"): _Known(
        "synchronized",
        "One pass: tiles hand their sums on by decoupled look-back. Without: each tile waits for "
        "the one before it.",
        ("scan_gpu:_scan_kernel", "_ptx_look_back:look_back", "scan_tiles:scan_kernel"),
    ),
    ("segment_reduce", "balanced pieces"): _Known(
        "synchronized",
        "Long segments are cut into pieces of one size. Without: a program a segment, however "
        "long.",
        ("segment_reduce_gpu:_segment_kernel", "segment_reduce_gpu:_owner"),
    ),
    ("softmax", "row in registers"): _Known(
        "cached",
        "A row stays in registers between its sum and its result. Without: it is read twice.",
        ("softmax_gpu:_softmax_kernel|if RESIDENT", "softmax_gpu:softmax"),
    ),
    ("add_rms_norm", "residual added in the norm"): _Known(
        "fused",
        "The residual is added where the row is in registers anyway. Without: an addition first, "
        "whose result is written and read.",
        ("gpu:_rms_norm_kernel",),
    ),
    ("rms_norm", "gradients in one pass"): _Known(
        "fused", _GRADIENTS, ("layer_norm_gpu:_norm_backward_kernel",)
    ),
    ("layer_norm", "gradients in one pass"): _Known(
        "fused", _GRADIENTS, ("layer_norm_gpu:_norm_backward_kernel",)
    ),
    ("silu_mul", "fused"): _GATED,
    ("gelu_tanh_mul", "fused"): _GATED,
    ("silu_mul", "gradients in one pass"): _Known("fused", _GRADIENTS, ("gpu:silu_mul_backward",)),
    ("gelu_tanh_mul", "gradients in one pass"): _Known(
        "fused", _GRADIENTS, ("gpu:gelu_tanh_mul_backward",)
    ),
    ("rotary_embedding", "query and key in one launch"): _Known(
        "fused",
        "Query and key are turned in one launch, and angles are read once for some heads. Without: "
        "two launches.",
        ("rotary_gpu:rotary_embedding",),
    ),
    ("sort", "one sweep"): _Known(
        "synchronized",
        "A pass is one launch that reads keys once: tiles learn by decoupled look-back where their "
        "digits go. Without: counting, adding up and moving are three launches that read twice.",
        ("sort_gpu:_pass_kernel", "_ptx:split"),
    ),
    ("heat_equation", "coalesced"): _Known(
        "coalesced",
        "A warp's values follow each other in memory. Without: the fast side of a tile is laid "
        "along z, so that each value is of another line.",
        ("stencil_gpu:_step_kernel", "stencil_gpu:heat_equation"),
    ),
    ("heat_equation", "one step a launch"): _Known(
        "cached",
        "Planes stay in registers for as long as they are neighbours; those along y are in the L1 "
        "cache. Without: so many steps in one march through the grid, which is read and written "
        "once for all of them, but each goes through the L2 cache for its neighbours along y.",
        ("stencil_gpu:_step_kernel", "stencil_gpu:_march_kernel"),
    ),
    ("nbody_acceleration", "tiles in shared memory"): _Known(
        "shared",
        "A warp reads a tile of bodies together and hands it around through shared memory. "
        "Without: each thread reads each body from memory, through its caches.",
        ("nbody_gpu:_nbody_kernel",),
    ),
    ("cross_entropy", "maximum and sum in one read"): _Known(
        "fused",
        "The maximum and the sum of a row come from one read, the sum rescaled where a larger "
        "value is met. Without: a row is read for its maximum first, then again.",
        ("cross_entropy_gpu:_loss_kernel",),
    ),
    ("fft", "one launch"): _TRANSFORM,
    ("rfft", "one launch"): _TRANSFORM,
    ("rfft", "pairs of reals"): _Known(
        "fused",
        "Pairs of reals are transformed as complex values, half as many, and unfolded before they "
        "are written. Without: as complex values of which half are 0.",
        ("fft_gpu:_unfolded", "_fft_triton:mirrored"),
    ),
    ("convolve2d", "reuse"): _REUSE._replace(code=("convolve2d_gpu:_convolve2d_kernel",)),
    ("bilateral", "reuse"): _REUSE._replace(code=("bilateral_gpu:_bilateral_kernel",)),
    ("fir", "reuse"): _REUSE._replace(code=("fir_gpu:_accumulate", "fir_gpu:_fir_kernel")),
    ("bilateral", "table"): _Known(
        "cached",
        "The weights of distances are read from a table. Without: each program computes them.",
        ("bilateral_gpu:bilateral",),
    ),
    ("separable_convolve2d", "fused"): _Known(
        "fused",
        "Both directions in one launch. Without: two, and what is between is written and read.",
        ("convolve2d_gpu:_side_kernel",),
    ),
    ("separable_convolve2d", "two launches"): _Known(
        "cached",
        "A launch a direction, four columns to a thread, each value read once for all of them. "
        "Without: one launch, whose programs filter rows of their neighbours, too.",
        ("convolve2d_gpu:_side_kernel", "_image_triton:quads"),
    ),
    ("sobel", "fused"): _Known(
        "fused",
        "Both gradients and their length from one read. Without: two convolutions and a third "
        "launch.",
        ("sobel_gpu:_gradient_kernel",),
    ),
    ("sample", "bisection, no sort"): _Known(
        "cached",
        "A row is read once. The border of the kept tokens is found by bisection over the bits of "
        "the logits of the likeliest, in registers. Without: a row is sorted.",
        ("sample_gpu:_choose_near", "_sample_triton:_choose_among"),
    ),
    ("matmul", "tiles in groups"): _Known(
        "cached",
        "Programs that run together take tiles of a block of the result, and share in L2 what they "
        "read. Without: tiles row by row.",
        ("matmul_gpu:_matmul_kernel", "matmul_gpu:matmul"),
    ),
    ("matmul", "queue"): _Known(
        "shared",
        "Tiles are read some steps ahead into a queue in shared memory. Without: a queue of so "
        "many stages.",
        ("matmul_gpu:_matmul_kernel", "matmul_gpu:config"),
    ),
    ("matmul", "tiles by the copy engine"): _Known(
        "shared",
        "Whole tiles come by the copy engine. Without: threads copy them.",
        ("matmul_gpu:_matmul_kernel|if TMA",),
    ),
    ("matmul", "fused"): _Known(
        "fused",
        "Bias, activation and residual are applied to the sums in registers. Without: the product "
        "is written and read again for them.",
        ("matmul_gpu:_store", "matmul_gpu:_epilogue_kernel"),
    ),
    ("spmv", "long rows in pieces"): _Known(
        "synchronized",
        "Long rows are cut into pieces, so that no program works longer than others. Without: each "
        "row is done where it is met.",
        ("spmv_gpu:spmv",),
    ),
    ("elementwise", "fused"): _Known(
        "fused",
        "A whole expression in one pass, made from its text. Without: a launch an operation.",
        ("elementwise_gpu:elementwise",),
    ),
    ("option_price", "fused"): _Known(
        "fused",
        "A path lives in registers from its random numbers to its payoff. Without: all paths are "
        "written first and read again.",
        ("monte_carlo_gpu:_paths_kernel", "monte_carlo_gpu:option_price"),
    ),
    ("adamw_step", "one pass"): _Known(
        "fused",
        "One pass over parameter, gradient and moments. Without: three.",
        ("adamw_gpu:_adamw_kernel", "adamw_gpu:adamw_step"),
    ),
}

KIND_WORDS = (
    ("synchronized", ("look-back", "balanced", "barrier", "atomic", "in pieces", "sweep")),
    ("coalesced", ("coalesced", "layout", "transposed")),
    ("shared", ("shared",)),
    ("fused", ("fused", "one launch", "one pass", "same pass", "in one", "epilogue", "steps")),
    ("cached", ("register", "chunk", "cache", "l2", "resident", "evict", "raster", "reuse")),
)
"""What the name of a technique says of its kind, where nothing else is known of it."""


def topic_of(domain: str, kernel: str, technique: str) -> Topic:
    """What is known of a technique; of an unknown one, its kind by its name, and its kernel."""
    base = kernel.partition(" ")[0]
    known = KNOWN.get((base, technique))
    if known and all(exists(f"{GENERAL}.{symbol}") for symbol in known.code):
        code = tuple(f"{GENERAL}.{symbol}" for symbol in known.code)
        return Topic(domain, kernel, technique, known.kind, known.what, code)
    words = technique.lower()
    kind = next((k for k, found in KIND_WORDS if any(word in words for word in found)), "other")
    module = _module_of(base)
    where = f"{GENERAL}.{module}:{base}" if module else f"{GENERAL}.__init__:__all__"
    what = known.what if known else _switches(module)
    return Topic(domain, kernel, technique, kind, what, (where,))


def _module_of(kernel: str) -> str:
    """The module that has a kernel's function, that for a GPU before others; "" for none."""
    paths = sorted(_FOLDER.glob("*.py"), key=lambda path: not path.stem.endswith("_gpu"))
    names = (path.stem for path in paths)
    return next((name for name in names if exists(f"{GENERAL}.{name}:{kernel}")), "")


def _switches(module: str) -> str:
    """What a kernel's own file says of its switches: the paragraph of its docstring."""
    path = _FOLDER / f"{module.removesuffix('_gpu')}.py"
    if not module or not path.exists():
        return ""
    paragraphs = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split(
        "\n\n"
    )
    told = (
        " ".join(each.split())
        for each in paragraphs
        if each.startswith(("The technique's", "The techniques'"))
    )
    return next(told, "").replace("`", "")


def benchmarked() -> Iterator[Topic]:
    """All that the benchmark switches off, measured or not."""
    from billfish.bench import general

    seen = set()
    for case in general.all_cases():
        for technique in case.settings:
            key = (case.domain, case.kernel, technique)
            if key not in seen:
                seen.add(key)
                yield topic_of(*key)
