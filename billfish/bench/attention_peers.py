"""Attention kernels that billfish is compared with, each as calls on the parts of a batch.

FlashAttention-3 (_vllm_fa3_C.abi3.so) and the first paged attention, versions 1 and 2
(_C_stable_libtorch.abi3.so), as the vllm 0.23.0 wheel carries them, plain or .xz.
"""

import lzma
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from billfish.bench.attention_cases import DTYPE, HEAD_DIM, Batch, Case
from billfish.bench.turns import Call
from billfish.kernels.paged_attention import AttentionMetadata

LARGEST_SECOND_CACHE = 20e9
"""Bytes of cache up to which it is laid out a second time, as the first paged attention wants."""


def peers_in(folder: str) -> dict[str, Callable[[Batch], list[Call]]]:
    """The peers whose libraries are in a folder."""
    found: dict[str, Callable[[Batch], list[Call]]] = {}
    if _loaded(folder, "_vllm_fa3_C.abi3.so"):
        found["fa3"] = fa3
    if _loaded(folder, "_C_stable_libtorch.abi3.so"):
        found["paged_attention_v1"] = partial(paged_attention, version=1)
        found["paged_attention_v2"] = partial(paged_attention, version=2)
    return found


def _loaded(folder: str, name: str) -> bool:
    """Load a library from a folder, plain or .xz; whether it is there."""
    paths = sorted(Path(folder).rglob(f"{name}*"))  # the plain one first
    if not paths:
        return False
    path = paths[0]
    if path.suffix == ".xz":
        plain = Path(tempfile.mkdtemp(), path.stem)
        plain.write_bytes(lzma.decompress(path.read_bytes()))
        path = plain
    torch.ops.load_library(str(path))
    return True


def fa3(batch: Batch) -> list[Call]:
    """FlashAttention-3 over the same blocks."""
    case, op = batch.case, torch.ops._vllm_fa3_C
    most_new, most = max(case.query_lens), max(case.seq_lens)

    def call(m: AttentionMetadata, schedule: Tensor | None) -> Tensor:
        # Positions as in the library's schema: causal, no window, no soft cap.
        out: Tensor = op.fwd(
            batch.query, *batch.caches, *[None] * 4, m.query_start, None, None, None, m.seq_lens,
            most_new, most, m.block_table, *[None] * 8, HEAD_DIM**-0.5, True, -1, -1, 0.0, True,
            schedule, 0, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip
        return out

    def schedule_of(m: AttentionMetadata) -> Tensor | None:
        if most_new > 1:
            return None
        schedule: Tensor = op.get_scheduler_metadata(
            len(case.seq_lens), 1, most, case.heads_q, case.heads_kv, HEAD_DIM, HEAD_DIM, DTYPE,
            m.seq_lens, m.query_start, None, None, None, None, case.block_size, 0, True, -1, -1,
            False, 0, None, 0,
        )  # fmt: skip
        return schedule

    return [partial(call, part, schedule_of(part)) for part in batch.parts]


def paged_attention(batch: Batch, version: int) -> list[Call]:
    """Decode only; keys [blocks, heads, D / 8, block_size, 8], values [blocks, heads, D,
    block_size].
    """
    case, op = batch.case, torch.ops._C
    if max(case.query_lens) > 1 or batch.caches.nbytes > LARGEST_SECOND_CACHE:
        return []
    keys = batch.caches[0].unflatten(3, (-1, 8)).permute(0, 2, 3, 1, 4).contiguous()
    values = batch.caches[1].permute(0, 2, 3, 1).contiguous()
    unit = torch.ones((), device="cuda")
    most = max(case.seq_lens)
    parts = (len(case.seq_lens), case.heads_q, -(-most // 512))
    sums, tops = torch.empty(2, *parts, device="cuda")
    partial_out = torch.empty(*parts, HEAD_DIM, dtype=DTYPE, device="cuda")

    def call(m: AttentionMetadata) -> Tensor:
        out = torch.empty_like(batch.query)
        step = (
            batch.query, keys, values, case.heads_kv, HEAD_DIM**-0.5, m.block_table, m.seq_lens,
            case.block_size, most, None, "auto", unit, unit, 0, 0, 0, 64, 0,
        )  # fmt: skip
        if version == 1:
            op.paged_attention_v1(out, *step)
        else:
            op.paged_attention_v2(out, sums, tops, partial_out, *step)
        return out

    return [partial(call, part) for part in batch.parts]


def gathered(case: Case, m: AttentionMetadata, cache: Tensor) -> Tensor:
    """Contiguous [R, heads, length, HEAD_DIM] keys or values of equally long sequences."""
    used = m.block_table[:, : -(-case.seq_lens[0] // case.block_size)].long()
    return cache[used].flatten(1, 2)[:, : case.seq_lens[0]].transpose(1, 2)


def _cudnn(case: Case, query: Tensor, k: Tensor, v: Tensor) -> Tensor:
    new = case.query_lens[0]
    x = query.unflatten(0, (-1, new)).transpose(1, 2)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        y = scaled_dot_product_attention(x, k, v, is_causal=new > 1, enable_gqa=True)
    return y.transpose(1, 2).flatten(0, 1)


def contiguous(batch: Batch) -> list[Call]:
    """cuDNN over keys and values in one piece; only for requests that are all of one length."""
    case = batch.case
    if not case.uniform:
        return []
    caches = [[gathered(case, m, c).contiguous() for c in batch.caches] for m in batch.parts]
    return [partial(_cudnn, case, batch.query, k, v) for k, v in caches]


def gather_then_attend(batch: Batch) -> list[Call]:
    """What fused block reading saves: copy the blocks together, then attend."""
    case = batch.case

    def call(m: AttentionMetadata) -> Tensor:
        k, v = (gathered(case, m, c) for c in batch.caches)
        return _cudnn(case, batch.query, k, v)

    return [partial(call, part) for part in batch.parts] if case.uniform else []
