"""What each family is: its techniques, what they are good for, and the code that does them.

No figures are here. A technique names the rows of the records that measure it, and the symbols that
implement it, which `links` finds. The general kernels' techniques come from what is recorded of
them; TOPICS says which kind of technique each is and where it is.
"""

from dataclasses import dataclass
from typing import NamedTuple

MARLIN = "billfish.kernels.marlin"
PAGED = "billfish.kernels.paged_attention"
GENERAL = "billfish.kernels.general"


class Rows(NamedTuple):
    """Which rows of a record are with a technique, and which without.

    key: the field that tells them apart. case: fields that name a case. where: what a row must have
    besides.
    """

    record: str
    key: str
    on: str
    off: str
    case: tuple[str, ...] = ("case",)
    where: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Technique:
    """One technique: what it does, the switch that turns it off, its code, and its rows.

    sources: the first that has rows is used. settings: rows of a setting that is not on or off
    (record, technique).
    """

    name: str
    what: str
    switch: str
    code: tuple[str, ...]
    sources: tuple[Rows, ...] = ()
    settings: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """answer: what sets it apart, in a sentence. code: the operation, and what measures it."""

    name: str
    title: str
    package: str
    page: str
    answer: str
    function: str
    focus: str
    memory: str
    uses: str
    code: tuple[str, ...]
    techniques: tuple[Technique, ...] = ()


def _gemm(off: str) -> Rows:
    return Rows("ablation_gemm", "technique", "all on", off)


def _attention(off: str, on: str = "all") -> Rows:
    return Rows("ablation_attention", "technique", on, off)


def _moved(mode: str, off: str) -> Rows:
    return Rows("attention_movement", "impl", "billfish", off, ("batch",), (("mode", mode),))


_GEMM, _SCHEDULE = f"{MARLIN}.hopper_gemm", f"{MARLIN}.hopper_schedule"
_QUEUE = f"{MARLIN}.hopper_queue"
_FEED, _DECODE = f"{PAGED}.hopper_decode_feed", f"{PAGED}.hopper_decode"

MARLIN_TECHNIQUES = (
    Technique(
        "Asynchronous loads",
        "One producer warp asks the copy engine (TMA) for packed weights, scales and activations "
        "and goes on; arrival is counted by a barrier in shared memory. Warps that compute never "
        "issue a load from global memory. Without: a queue of one stage, so that nothing is in "
        "flight while the tensor cores work.",
        'HopperConfig(stages=1), in the ablation "queue depth 1"',
        (f"{_QUEUE}:Queue.load_weights", f"{_QUEUE}:Queue.load_x", f"{_GEMM}:_produce"),
        (Rows("ablation_gemm", "technique", "all on", "queue depth 1"),),
    ),
    Technique(
        "Circular queue in shared memory",
        "Stages of 128 columns are filled in a ring: while consumers empty one, the next ones are "
        "on their way. Depth decides how many bytes are in flight, and so how much of the memory's "
        "latency is hidden. Without: two stages.",
        "HopperConfig(stages=...)",
        (f"{_QUEUE}:Queue", f"{_QUEUE}:Queue.advance", f"{MARLIN}.hopper_plan:max_stages"),
        (_gemm("deep queue"),),
        ("ablation_gemm", "queue depth"),
    ),
    Technique(
        "Stream-K",
        "Tiles rarely divide evenly among multiprocessors. The steps of the tiles that are left "
        "over are dealt out evenly instead; the last block to reach a shared tile adds up the "
        "parts in a fixed order. Without: whole tiles only, and idle multiprocessors.",
        "HopperConfig(stream_k=False)",
        (f"{MARLIN}.hopper_plan:divide", f"{_SCHEDULE}:Schedule", f"{_SCHEDULE}:finish_tile"),
        (_gemm("stream_k"),),
    ),
    Technique(
        "Equal parts",
        "Where tiles are shared, each gets a number of blocks of its own, so that no block adds up "
        "in two tiles, and the last to arrive loads up to eight sums at a time. Without: even "
        "shares of a grid that fills the GPU.",
        "HopperConfig(parts=0)",
        (f"{MARLIN}.hopper_plan:divide", f"{_SCHEDULE}:_finish_shared|if out.TOGETHER == 1"),
        (_gemm("equal parts"),),
    ),
    Technique(
        "Owners of tiles",
        "A large tile that is shared belongs to a block, which computes its first steps after all "
        "else; others have computed the last ones before all else and left their sums. The owner "
        "adds them to its own, which never leave its registers. Without: even shares of the steps, "
        "and every block leaves its sums.",
        "HopperConfig(owned=False)",
        (
            f"{MARLIN}.hopper_plan:_owned",
            f"{_SCHEDULE}:Schedule.helper",
            f"{_SCHEDULE}:_finish_owned",
        ),
        (_gemm("owners of tiles"),),
    ),
    Technique(
        "Double buffering",
        "A warpgroup dequantizes the second half of a stage while the tensor cores multiply the "
        "first. Without: each product is waited for before the next half is dequantized.",
        "HopperConfig(overlap=False, carry=False)",
        (f"{_GEMM}:_sum|a1 = _dequantize", f"{_GEMM}:_sum|if not how.OVERLAP"),
        (_gemm("double buffering"),),
    ),
    Technique(
        "Carried products",
        "The last product of a stage runs on while the first half of the next stage is "
        "dequantized. Without: products end with their stage.",
        "HopperConfig(carry=False)",
        (f"{_GEMM}:_sum_carried",),
        (_gemm("carried products"),),
    ),
    Technique(
        "Weights leave L2 first",
        "Every weight is read once, so its lines are marked to be evicted first, and leave the "
        "cache to what is read again. Without: no policy.",
        "HopperConfig(stream_weights=False)",
        (f"{MARLIN}.hopper_plan:Plan.cache_hints",),
        (_gemm("weights leave L2 first"),),
    ),
    Technique(
        "Activations stay in L2",
        "X is read by every block of rows, so its lines are marked to be evicted last. Without: "
        "no policy.",
        "HopperConfig(keep_x=False)",
        (f"{MARLIN}.hopper_plan:Plan.cache_hints", f"{_QUEUE}:Queue.load_x"),
        (_gemm("X leaves L2 last"),),
    ),
    Technique(
        "Grouped raster",
        "Tiles that run at the same time share rows of W and X, so that L2 serves them twice. "
        "Without: tiles in row order.",
        "HopperConfig(group_m=1)",
        (f"{_SCHEDULE}:Schedule.place",),
        (_gemm("grouped raster"),),
    ),
    Technique(
        "Programmatic dependent launch",
        "The weight queue fills while the kernel before still drains: only activations have to "
        "wait for it. Without: kernels start when the one before has ended.",
        "HopperConfig(pdl=False)",
        (f"{_GEMM}:_produce|if PDL:", f"{_GEMM}:_consume|if how.PDL"),
        (_gemm("early launch"),),
    ),
    Technique(
        "Early launch along a layer",
        "The same over the four products of a Llama-3-8B layer in a row, each on the result of the "
        "one before.",
        "HopperConfig(pdl=False) for all of them",
        ("billfish.bench.gemm_chain:chain", f"{_GEMM}:_produce|if PDL:"),
        (
            Rows(
                "gemm_chain",
                "technique",
                "products, early launch on",
                "products, early launch off",
            ),
        ),
    ),
    Technique(
        "Scale on sums",
        "With groups of 128 columns, fp32 sums of a group are scaled instead of its weights: fewer "
        "operations a weight. Without: the scale goes to every fragment.",
        "HopperConfig(sum_scale=False)",
        (f"{_GEMM}:_sum|if how.SUM_SCALE", f"{_GEMM}:_rows"),
        (_gemm("scale on sums"),),
    ),
    Technique(
        "Several blocks a multiprocessor",
        "Two or three blocks share a multiprocessor: one's tile ends while another's queue is "
        "full. Without: one block.",
        "HopperConfig(blocks_per_sm=1, grid_per_sm=1)",
        (f"{MARLIN}.configs:HopperConfig", f"{MARLIN}.hopper_plan:register_budget"),
        (_gemm("several blocks a multiprocessor"),),
    ),
)

PAGED_TECHNIQUES = (
    Technique(
        "Fused write",
        "QK-norm, rotary embedding and the write of keys and values into their blocks are one "
        "launch; nothing is written twice. Without: torch operations, then a write.",
        "rotate_and_write, or torch operations and write_kv",
        (f"{PAGED}.cache_write:_write_kernel", f"{PAGED}.cache_write:_transform"),
        (_attention("fused write"), _moved("rotate and write", "separate")),
    ),
    Technique(
        "Fused block read",
        "A producer warp walks the block table and fetches blocks straight into shared memory. "
        "Without: blocks are gathered into a contiguous tensor first, then attended to.",
        "attend, or a gather and attention over its result",
        (f"{_FEED}:produce", f"{_FEED}:_fetch_tile"),
        (_attention("fused block read"),),
    ),
    Technique(
        "One-launch block copy",
        "All copies of a step, over all layers, keys and values, in one kernel that reads every "
        "source before it writes a destination. Without: one copy after the other.",
        "copy_blocks, or a copy for each pair",
        (f"{PAGED}.block_copy:_copy_kernel", f"{PAGED}.block_copy:launch_copy"),
        (_attention("one launch"), _moved("copy", "one by one")),
    ),
    Technique(
        "16-byte accesses",
        "A thread moves 16 bytes an instruction. Without: 4 bytes, as a cache forces that does not "
        "begin at a multiple of 16 bytes.",
        "an aligned cache, or one that begins 4 bytes past a boundary",
        (f"{PAGED}.block_copy:_copy_kernel|value = tl.load", f"{PAGED}.block_copy:as_words"),
        (_attention("16-byte accesses"), _moved("copy", "4 bytes a thread")),
    ),
    Technique(
        "Split-KV",
        "Long sequences are cut into parts of equal work for every multiprocessor, planned on the "
        "device once a step and put together in a fixed order. Without: one part a request.",
        "AttentionPlan.allocate(batch_invariant=True)",
        (f"{PAGED}.planner:_split_requests", f"{_DECODE}:_share_result"),
        (_attention("split-KV"),),
    ),
    Technique(
        "GQA packing",
        "The query heads that share a KV head are rows of one tensor-core tile, so that keys and "
        "values are read once for all of them. Without: every query head reads them anew.",
        "one attend, or one for each head of a group",
        (f"{_DECODE}:_load_queries|row // rows.GROUP", f"{PAGED}.hopper_rows:Rows"),
        (_attention("GQA packing"),),
    ),
    Technique(
        "Programmatic dependent launch",
        "A layer's decode kernel starts while the kernel ahead drains. Without: after its end.",
        "hopper_decode.decode(overlap=False)",
        (f"{_FEED}:produce|if PDL", f"{_DECODE}:_consume|if PDL"),
        (_attention("programmatic dependent launch"),),
    ),
    Technique(
        "Heads in turn",
        "Prefill draws its work a section of heads at a time, as many as keep their keys in L2. "
        "Without: all heads together.",
        "hopper_prefill.L2_BYTES",
        (f"{PAGED}.hopper_prefill:_section",),
        (_attention("heads in turn"),),
    ),
    Technique(
        "Hopper kernel",
        "Copy engine, barriers and warp specialization in Gluon. Without: the portable Triton "
        "kernel on the same GPU.",
        "hopper_decode and hopper_prefill, or decode and prefill",
        (f"{_DECODE}:_decode_kernel", f"{PAGED}.decode:_decode_kernel"),
        (_attention("Hopper kernel"),),
    ),
)

FAMILIES = (
    Family(
        "marlin",
        "Marlin",
        MARLIN,
        "docs/w4a16.md",
        "Weights are what is scarce. One operation, built so that four-bit weights stream through "
        "the GPU without a pause and are widened on the way to the tensor cores.",
        "Multiplies 16-bit activations with INT4 weights (W4A16).",
        "Reading weights: a quarter of the bytes of FP16, as fast as memory gives them, and "
        "dequantized in registers on their way to the tensor cores.",
        "Weights are packed once in fragment order and streamed through a circular queue in shared "
        "memory; only activations stay in L2; nothing dequantized is ever written.",
        "Serving with few tokens a step (1 to 64): chat, speculative decoding, many samples a "
        "prompt. With hundreds of tokens a step arithmetic decides, and INT4 saves memory only.",
        (f"{MARLIN}:w4a16_matmul", "billfish.bench.gemm:run_case"),
        MARLIN_TECHNIQUES,
    ),
    Family(
        "paged_attention",
        "PagedAttention",
        PAGED,
        "docs/paged_attention.md",
        "Memory is what is scarce. Keys and values lie in small blocks, wherever there is room, so "
        "that more requests fit; attention finds them through a table and must not be slower for "
        "it.",
        "Attention over a KV cache kept in blocks: write, read, copy and swap them.",
        "Memory that is not wasted: more requests fit, so that every step serves more of them. The "
        "kernels must not pay for it: blocks are read where they lie.",
        "Fixed-size blocks, found through a block table, counted, shared and copied on write; a "
        "request takes a block when it needs one and wastes at most the rest of its last.",
        "Large-scale serving, parallel sampling, beam search, shared prefixes, long contexts.",
        (f"{PAGED}:attend", "billfish.bench.attention:run_case"),
        PAGED_TECHNIQUES,
    ),
    Family(
        "general",
        "General CUDA kernels",
        GENERAL,
        "docs/general.md",
        "Nothing in particular is scarce. Every problem has a bound of its own, memory or "
        "arithmetic, and a handful of techniques bring a kernel there; the other two are made of "
        "them.",
        "Everything else that a model or a numerical program computes on a GPU.",
        "No one bottleneck: each kernel is brought to the bound that holds for it, by coalesced "
        "access, shared memory, fusion, caching and synchronization.",
        "Contiguous arrays; registers and shared memory hold what is used again, and intermediate "
        "results are never written.",
        "Training and inference, parallel data processing, scientific computing and simulation, "
        "image and signal processing.",
        (f"{GENERAL}:__all__", "billfish.bench.general:compare"),
    ),
)

DOMAINS = {
    "data": "Parallel data processing",
    "training": "Training and inference",
    "science": "Scientific computing and simulation",
    "signal": "Image and signal processing",
}

KINDS = {
    "coalesced": "Coalesced access",
    "shared": "Shared memory",
    "fused": "Fusion",
    "cached": "Caching",
    "synchronized": "Synchronization, balance",
    "other": "Other techniques",
}

ROWS = {
    "answer": "In short",
    "function": "Primary function",
    "focus": "Optimization focus",
    "memory": "Memory management",
    "techniques": "Key techniques",
    "performance": "Performance",
    "uses": "Use cases",
}
"""The rows of the table of the families. What is said of one in words has the key as its field;
what techniques are worth is the techniques' own, all other figures are claims."""
