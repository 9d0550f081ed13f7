"""Other W4A16 products, for the comparison in bench.gemm.

    cublas            torch.matmul with weights dequantized beforehand
    tinygemm          torch's own, bfloat16 only
    marlin, machete   of the vllm 0.23.0 wheel: its library _C.abi3.so (plain or .xz) in a folder;
                      built for torch 2.11.0 with CUDA 13.0
    humming           the humming-kernels 0.1.20 wheel in that folder, with its own heuristics

A maker packs codes [N, K] and scales [N, G] (symmetric, dtype of the activations) and returns the
product.
"""

import hashlib
import json
import lzma
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Matmul = Callable[[Tensor], Tensor]
Maker = Callable[[Tensor, Tensor, int], Matmul]

# How vLLM writes a scalar type as a number: its bits from bit 8, its bias from bit 17.
_UINT4_BIAS8 = 4 << 8 | 8 << 17 | 1 << 50

PEER_VERSIONS = {"vllm": "0.23.0", "humming-kernels": "0.1.20"}
"""Of the wheels in the folder, which are not installed and so do not tell."""


def unpacked(folder: Path) -> Path:
    """A folder with the libraries and packages of the files in `folder`, kept from run to run:
    what peers compile they look for by the place of their sources."""
    libraries = sorted(folder.rglob("_C.abi3.so*"))[:1]
    wheels = sorted(folder.rglob("humming_kernels*.whl"))[:1]
    files = [(path.name, path.stat().st_size) for path in (*libraries, *wheels)]
    name = hashlib.sha256(repr(files).encode()).hexdigest()[:12]
    kept = Path(tempfile.gettempdir(), f"billfish-peers-{os.getuid()}-{name}")
    if kept.exists():
        return kept
    scratch = Path(tempfile.mkdtemp(prefix="billfish-peers-"))
    for path in libraries:
        opened = lzma.open if path.suffix == ".xz" else open
        with opened(path, "rb") as packed, (scratch / "_C.abi3.so").open("wb") as out:
            shutil.copyfileobj(packed, out)
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(scratch / "humming")
            for item in wheel.infolist():  # extracting drops the right to execute
                mode = item.external_attr >> 16 & 0o777
                if mode:
                    (scratch / "humming" / item.filename).chmod(mode | 0o600)
    try:
        return scratch.rename(kept)
    except OSError:  # another process was faster
        return kept


def makers(folder: Path | None, rows: Sequence[int]) -> dict[str, Maker]:
    """The peers of torch, and those in a folder that `unpacked` made. rows: the M to be timed."""
    found: dict[str, Maker] = {"cublas": cublas, "tinygemm": tinygemm}
    if folder is not None and (folder / "_C.abi3.so").exists():
        torch.ops.load_library(str(folder / "_C.abi3.so"))
        found |= {"marlin": marlin, "machete": machete}
    if folder is not None and (folder / "humming").exists():
        if str(folder / "humming") not in sys.path:
            sys.path.insert(0, str(folder / "humming"))
        found["humming"] = partial(humming, rows=rows, tunings={})
    return found


def _words_along_k(codes: Tensor) -> Tensor:
    """Codes [N, K] -> int32 [K / 8, N], eight consecutive columns a word, as GPTQ stores them."""
    words = codes.t().reshape(-1, 8, codes.shape[0]).to(torch.int32)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device).view(1, 8, 1)
    return (words << shifts).sum(1, dtype=torch.int32)


def cublas(codes: Tensor, scales: Tensor, group_size: int) -> Matmul:
    wide = (codes.float() - 8).view(codes.shape[0], -1, group_size) * scales.float().unsqueeze(2)
    weight = wide.view(codes.shape).to(scales.dtype)
    return lambda x: torch.matmul(x, weight.t())


def tinygemm(codes: Tensor, scales: Tensor, group_size: int) -> Matmul:
    if scales.dtype != torch.bfloat16:
        raise ValueError("bfloat16 only")
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    both = torch.stack((scales, torch.zeros_like(scales)), -1).transpose(0, 1).contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, group_size, both)


def machete(codes: Tensor, scales: Tensor, group_size: int) -> Matmul:
    ops, kind, dtype = torch.ops._C, _UINT4_BIAS8, scales.dtype
    column_major = _words_along_k(codes).t().contiguous().t()
    packed = ops.machete_prepack_B(column_major, dtype, kind, dtype)
    by_group = scales.t().contiguous()
    rest = (None, group_size, None, None, None)
    return lambda x: ops.machete_mm(x, packed, kind, None, by_group, *rest)


def marlin(codes: Tensor, scales: Tensor, group_size: int) -> Matmul:
    """With fp32 reduction and no atomics, as vLLM calls it."""
    ops, (n, k), device = torch.ops._C, codes.shape, codes.device
    none = torch.empty(0, dtype=torch.int32, device=device)
    packed = ops.gptq_marlin_repack(_words_along_k(codes), none, k, n, 4, False)
    order = torch.arange(64, device=device).view(8, 8).t().flatten()
    by_group = scales.t().reshape(-1, 64)[:, order].reshape(-1, n).contiguous()
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    locks = torch.zeros(processors, dtype=torch.int32, device=device)

    def product(x: Tensor) -> Tensor:
        y: Tensor = ops.marlin_gemm(
            x, None, packed, None, by_group, None, None, none, none, none, locks, _UINT4_BIAS8,
            x.shape[0], n, k, True, False, True, False,
        )  # fmt: skip
        return y

    return product


def humming(
    codes: Tensor, scales: Tensor, group_size: int, rows: Sequence[int], tunings: dict[Any, Any]
) -> Matmul:
    """tunings: kept between layers of one shape; all kernels of a shape compile at its first."""
    from humming.kernel.humming import HummingKernel
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    n, k = codes.shape
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": False}
    layer = HummingLayer(
        shape_n=n, shape_k=k, weight_config={**gptq, "sym": True}, torch_dtype=scales.dtype
    ).cuda()
    layer.load_from_tensors({"qweight": _words_along_k(codes), "scales": scales.t().contiguous()})
    layer.transform()
    key = (n, k, group_size, scales.dtype)
    if key not in tunings:
        chosen = {m: dict(get_heuristics_config(layer.humming_config, shape_m=m)) for m in rows}
        shape = json.loads(layer.humming_config.to_str())
        shape.pop("sublayer_name", None)
        kernels = {
            json.dumps(found, sort_keys=True, default=str): found
            for found in ({**shape, **one} for one in chosen.values())
        }
        for found in kernels.values():
            found.pop("num_sms", None)
        HummingKernel.compile_many([(HummingKernel, found) for found in kernels.values()])
        tunings[key] = {m: json.dumps(one) for m, one in chosen.items()}
    return lambda x: layer(x, tuning_config=tunings[key][x.shape[0]])
