"""The techniques of the general kernels, by domain and kind.

What is recorded of them brings its own names, so these say only what a name means: the kind of
technique, what is done without it, and where its code is.
"""

from typing import NamedTuple

from billfish.compare.links import exists

GENERAL = "billfish.kernels.general"


class Topic(NamedTuple):
    """A technique of a general kernel. kind: a key of catalogue.KINDS. technique: as records name
    it. what: what it does, and what is done without it. code: symbols in the kernel's folder.
    """

    domain: str
    kernel: str
    technique: str
    kind: str
    what: str
    code: tuple[str, ...]

    @property
    def links(self) -> tuple[str, ...]:
        return tuple(f"{GENERAL}.{symbol}" for symbol in self.code)


TOPICS = (
    Topic(
        "data", "transpose", "tiled", "coalesced",
        "Tiles turned around in shared memory, so that reads and writes are both runs of memory. "
        "Without: each row is read as a run and written element by element.",
        ("transpose_gpu:_transpose_kernel", "transpose_gpu:transpose_copy"),
    ),
    Topic(
        "data", "histogram", "private", "shared",
        "Each program counts in shared memory and adds its counts once. Without: an atomic in "
        "device memory for every value.",
        ("histogram_gpu:_histogram_kernel",),
    ),
    Topic(
        "data", "reduce", "fused", "fused",
        "The last program to finish adds up the parts. Without: a second launch.",
        ("reduce_gpu:_reduce_kernel|if FUSED", "reduce_gpu:_finish"),
    ),
    Topic(
        "data", "compact", "fused", "fused",
        "The scan of positions happens in the pass that writes. Without: a scan first, whose "
        "result is written and read.",
        ("compact_gpu:_compact_kernel", "compact_gpu:_scatter_kernel"),
    ),
    Topic(
        "data", "scan", "look-back", "synchronized",
        "One pass: tiles hand their sums on by decoupled look-back. Without: each tile waits for "
        "the one before it.",
        ("scan_gpu:_scan_kernel", "_triton:look_back", "_triton:publish"),
    ),
    Topic(
        "data", "segment_reduce", "balanced", "synchronized",
        "Long segments are cut into pieces of one size. Without: a program a segment, however "
        "long.",
        ("segment_reduce_gpu:_piece_kernel", "segment_reduce_gpu:_pieces_kernel"),
    ),
    Topic(
        "training", "softmax", "resident", "cached",
        "A row stays in registers between its sum and its result. Without: it is read twice.",
        ("softmax_gpu:_softmax_kernel|if RESIDENT", "softmax_gpu:_plan"),
    ),
    Topic(
        "training", "layer_norm_backward", "fused", "fused",
        "Gradients of the input and of the weights in one read. Without: two passes.",
        ("layer_norm_gpu:_norm_backward_kernel",),
    ),
    Topic(
        "training", "adamw", "fused", "fused",
        "One pass over parameter, gradient and moments. Without: three.",
        ("adamw_gpu:_adamw_kernel", "adamw_gpu:adamw_step"),
    ),
    Topic(
        "training", "linear_cross_entropy", "chunk", "cached",
        "The logits of some rows at a time, their gradient written over them. Without: all logits "
        "at once.",
        ("cross_entropy:in_chunks",),
    ),
)  # fmt: skip


def topic_of(domain: str, kernel: str, technique: str) -> Topic:
    """What is known of a recorded technique; of an unknown one, where its kernel is."""
    same = [topic for topic in TOPICS if topic.kernel == kernel]
    exact = [topic for topic in same if topic.technique == technique]
    if exact or len(same) == 1:
        return (exact or same)[0]._replace(domain=domain, technique=technique)
    code = (f"{name}:{kernel}" for name in (f"{kernel}_gpu", kernel))
    found = tuple(symbol for symbol in code if exists(f"{GENERAL}.{symbol}"))[:1]
    return Topic(domain, kernel, technique, "other", "", found or (f"__init__:{'__all__'}",))
