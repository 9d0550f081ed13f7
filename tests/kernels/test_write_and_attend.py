"""A layer's attention in one call: the same bits as its two operations, prepared once a step."""

from dataclasses import replace

import pytest
import torch

from billfish.errors import KernelArgumentError
from billfish.kernels import paged_attention as pa
from billfish.kernels.paged_attention import cpu_decode

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 4
STEPS = {
    "one in a row": ([[3, 4, 5]], [10], [1]),
    "one scattered": ([[5, 3, 4]], [10], [1]),
    "alike": ([[1, 2], [4, 3]], [7, 8], [1, 1]),
    "of many lengths": ([[1], [2, 3], [*range(4, 24)]], [3, 8, 80], [1, 1, 1]),
    "mixed": ([[1, 2], [3, 4]], [6, 7], [1, 3]),
}


def arguments(name, dtype, *, heads=6, kv_heads=2, head_dim=16):
    tables, seq_lens, query_lens = STEPS[name]
    rng = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 30, BLOCK, kv_heads, head_dim, generator=rng).to(dtype)
    tokens = sum(query_lens)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=rng).to(dtype)
    metadata = pa.AttentionMetadata.build(tables, seq_lens, query_lens, BLOCK)
    positions = torch.tensor(
        [n - q + i for n, q in zip(seq_lens, query_lens, strict=True) for i in range(q)]
    )
    options = {"positions": positions, "cos_sin": torch.rand(90, head_dim // 2, generator=rng)}
    return (*qkv.split((heads, kv_heads, kv_heads), dim=1), *cache, metadata), options


def two_operations(query, key, value, k_cache, v_cache, metadata, *, positions, cos_sin, **options):
    query = pa.rotate_and_write(
        query, key, value, k_cache, v_cache, metadata.slot_mapping,
        positions=positions, cos_sin=cos_sin,
    )  # fmt: skip
    return pa.attend(query, k_cache, v_cache, metadata, **options)


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"sliding_window": 5}, {"soft_cap": 2.0}])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STEPS)
def test_the_bits_of_two_operations(name, dtype, options):
    (*tensors, k_cache, v_cache, metadata), angles = arguments(name, dtype)
    caches = (k_cache.clone(), v_cache.clone())
    expected = two_operations(*tensors, k_cache, v_cache, metadata, **angles, **options)
    with torch.inference_mode():
        for _ in range(2):  # a second layer finds what the first prepared
            out = pa.write_and_attend(*tensors, *caches, metadata, **angles, **options)
            assert torch.equal(out, expected)
            assert out.is_contiguous()
    assert torch.equal(caches[0], k_cache)
    assert torch.equal(caches[1], v_cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in STEPS if name != "mixed"])
def test_decoding_is_prepared_once(name, dtype, monkeypatch):
    call, angles = arguments(name, dtype)
    made = []
    monkeypatch.setattr(
        cpu_decode.rotary, "angles_of",
        lambda *a, original=cpu_decode.rotary.angles_of: made.append(a) or original(*a),
    )  # fmt: skip
    with torch.inference_mode():
        for _ in range(3):
            pa.write_and_attend(*call, **angles)
    prepared = name != "one scattered" or dtype == torch.float32
    assert len(made) == (1 if prepared else 3)


def test_another_table_and_other_slots_are_not_those_prepared():
    (*tensors, metadata), angles = arguments("alike", torch.float32)
    other = {**angles, "cos_sin": angles["cos_sin"].flip(0).contiguous()}
    moved = replace(metadata, slot_mapping=torch.tensor([-1, 12]))
    with torch.inference_mode():
        pa.write_and_attend(*tensors, metadata, **angles)
        for step, options in ((metadata, other), (moved, angles)):
            caches = [cache.clone() for cache in tensors[3:]]
            expected = two_operations(*tensors, step, **options)
            out = pa.write_and_attend(*tensors[:3], *caches, step, **options)
            assert torch.equal(out, expected)
            assert torch.equal(caches[0], tensors[3])


@pytest.mark.parametrize(
    ("name", "dtype"), [("slot_mapping", torch.int32), ("block_table", torch.int64),
                        ("seq_lens", torch.int64), ("query_start", torch.int64)],
)  # fmt: skip
def test_metadata_of_other_integers_is_refused(name, dtype):
    (*tensors, metadata), options = arguments("alike", torch.float32)
    metadata = replace(metadata, **{name: getattr(metadata, name).to(dtype)})
    with torch.inference_mode(), pytest.raises(KernelArgumentError, match=name):
        pa.write_and_attend(*tensors, metadata, **options)


def changed(**values):
    return lambda call, options: (call, {**options, **values})


def cache_of(shape, dtype=torch.float32):
    caches = (torch.zeros(shape, dtype=dtype),) * 2
    return lambda call, options: ((*call[:3], *caches, call[5]), options)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (changed(scale=float("nan")), "scale"),
        (changed(positions=None), "positions"),
        (changed(positions=torch.arange(3)), "positions"),
        (changed(positions=torch.tensor([1, 90])), "positions"),
        (changed(cos_sin=torch.zeros(90, 7)), "cos_sin"),
        (cache_of((30, BLOCK, 2, 8)), "key"),
        (cache_of((30, BLOCK, 2)), "k_cache"),
        (cache_of((2, BLOCK, 2, 16)), "slot_mapping"),
        (cache_of((30, BLOCK, 2, 16), torch.float64), "k_cache"),
        (lambda call, options: ((call[0][:, :5], *call[1:]), options), "query"),
        (lambda call, options: ((call[0], call[1][:1], *call[2:]), options), "value|key"),
    ],
)
def test_wrong_arguments_write_nothing(change, match):
    call, options = arguments("alike", torch.float32)
    call, options = change(call, options)
    before = call[3].clone()
    with torch.inference_mode():
        for _ in range(2):
            with pytest.raises(KernelArgumentError, match=match):
                pa.write_and_attend(*call, **options)
    if match != "query":
        assert torch.equal(call[3], before)


def test_a_block_outside_the_cache_is_refused():
    call, options = arguments("alike", torch.float32)
    call[5].block_table[1, 0] = 99
    with torch.inference_mode(), pytest.raises(KernelArgumentError, match="block_table"):
        pa.write_and_attend(*call, **options)


def test_compiles_to_the_two_operations():
    call, options = arguments("of many lengths", torch.bfloat16)
    expected = pa.write_and_attend(*call, **options)
    torch.compiler.reset()
    compiled = torch.compile(pa.write_and_attend, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*call, **options), expected)
