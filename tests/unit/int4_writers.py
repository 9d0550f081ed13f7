"""Writes INT4 weights as checkpoint formats define them. Shares nothing with the readers.

A `Matrix` is codes, scales and zero points; each writer gives the tensors of a layer, by the names
after the layer's. compressed-tensors has a library that writes it, and is not written here.
"""

from dataclasses import dataclass

import numpy as np
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Matrix:
    """codes int [N, K], scales float16 [N, G], zeros [N, G] (integers, or float16 for HQQ), group:
    the group of each column [K]."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group: np.ndarray

    def values(self) -> np.ndarray:
        """The definition, in float64: exact."""
        scales, zeros = (t.astype(np.float64)[:, self.group] for t in (self.scales, self.zeros))
        return scales * (self.codes - zeros)


def matrix(n, k, group_size, *, seed=0, zeros=None, act_order=False) -> Matrix:
    """Random codes and scales. zeros: None for any of 0..15, a number for all, or "float".
    act_order: a number draws the order of columns, alike for all matrices of as many."""
    rng = np.random.default_rng(seed)
    size = k if group_size == -1 else group_size
    groups = -(-k // size)
    group = np.arange(k) // size
    if act_order:
        group = np.random.default_rng(int(act_order)).permutation(group)
    if zeros is None:
        zero_points = rng.integers(0, 16, (n, groups))
    elif zeros == "float":
        zero_points = rng.uniform(-3, 18, (n, groups)).astype(np.float16)
    else:
        zero_points = np.full((n, groups), zeros)
    scales = (rng.uniform(0.01, 2, (n, groups)) * rng.choice([-1, 1], (n, groups))).astype(
        np.float16
    )
    return Matrix(rng.integers(0, 16, (n, k)), scales, zero_points, group)


def pack(values: np.ndarray, order=tuple(range(8))) -> torch.Tensor:
    """[R, 8 C] -> int32 [R, C]: bits 4 i of a word hold value order[i] of its eight."""
    eights = values.reshape(values.shape[0], -1, 8).astype(np.uint32)
    words = np.zeros(eights.shape[:2], np.uint32)
    for place, index in enumerate(order):
        words |= eights[:, :, index] << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def tensor(array: np.ndarray, dtype=None) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype))


def gptq(m: Matrix, version: int, *, g_idx=True) -> dict[str, torch.Tensor]:
    """version 1 stores zero points minus 1, 0 as 15."""
    zeros = (m.zeros - 1) % 16 if version == 1 else m.zeros
    tensors = {
        "qweight": pack(m.codes).t().contiguous(),
        "qzeros": pack(zeros.T),
        "scales": tensor(m.scales.T),
    }
    if g_idx:
        tensors["g_idx"] = tensor(m.group, np.int32)
    return tensors


def awq(m: Matrix) -> dict[str, torch.Tensor]:
    return {
        "qweight": pack(m.codes.T, AWQ_ORDER),
        "qzeros": pack(m.zeros.T, AWQ_ORDER),
        "scales": tensor(m.scales.T),
    }


def hqq(m: Matrix, group_size: int, compute_dtype="torch.float16") -> dict[str, torch.Tensor]:
    """As HQQLinear.state_dict gives it for safetensors: text as its bytes, flags as uint8."""
    n, k = m.codes.shape
    size = k if group_size == -1 else group_size
    rows = m.codes.reshape(-1, size).astype(np.uint8)
    half = len(rows) // 2

    def text(value):
        return torch.tensor([ord(letter) for letter in value], dtype=torch.uint8)

    def flag(value):
        return torch.tensor(int(value), dtype=torch.uint8)

    def integer(value):
        return torch.tensor(value, dtype=torch.int32)

    return {
        "W_q": tensor(rows[:half] << 4 | rows[half:]),
        "scale": tensor(m.scales.reshape(-1, 1)),
        "zero": tensor(m.zeros.reshape(-1, 1)),
        "shape": torch.tensor([n, k]),
        "nbits": integer(4), "group_size": integer(size), "axis": integer(1),
        "packing": text("4bit_u8"), "unpack_view_dtype": text("torch.uint8"),
        "compute_dtype": text(compute_dtype),
        "view_as_float": flag(False), "quant_scale": flag(False), "quant_zero": flag(False),
        "offload_meta": flag(False), "encoded_state_dict": flag(True),
        "stores_quant_config": flag(True), "channel_wise": flag(True), "optimize": flag(True),
        "round_zero": flag(False),
    }  # fmt: skip


def gptq_config(group_size=128, **other):
    return {
        "quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": False, "sym": True,
        "damp_percent": 0.01, "static_groups": False, "true_sequential": True, **other,
    }  # fmt: skip


def awq_config(group_size=128, **other):
    return {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": None, **other,
    }  # fmt: skip


def hqq_config(group_size=64, **other):
    weights = {
        "nbits": 4, "group_size": None if group_size == -1 else group_size, "axis": 1,
        "channel_wise": True, "optimize": True, "round_zero": False, "view_as_float": False,
    }  # fmt: skip
    return {
        "quant_method": "hqq",
        "quant_config": {
            "weight_quant_params": {**weights, **other},
            "scale_quant_params": None,
            "zero_quant_params": None,
            "offload_meta": False,
        },
        "skip_modules": ["lm_head"],
    }


def compressed_config(group_size=128, *, symmetric=True, ignore=("lm_head",), **other):
    weights = {
        "num_bits": 4, "type": "int", "symmetric": symmetric,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
        "dynamic": False, "observer": "minmax", "observer_kwargs": {}, "block_structure": None,
        "actorder": None, **other,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {**group, "input_activations": None, "output_activations": None}
        },
    }
