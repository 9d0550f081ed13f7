"""What the GPU implementation hands to its kernels, which are not run: no GPU needed."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from billfish.errors import KernelArgumentError
from billfish.kernels import paged_attention as pa
from billfish.kernels.paged_attention import AttentionMetadata, _arguments, gpu, planner


@pytest.fixture
def handed(monkeypatch):
    """The tensors that reach the modules of the kernels."""
    seen = []

    def note(*arguments, **options):
        for value in (*arguments, *options.values()):
            seen.extend(value if isinstance(value, tuple) else [value])

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(gpu, "_check", lambda cache: None)
    for module, name in (
        (gpu.cache_write, "write"), (gpu.cache_write, "rotate_and_write"), (gpu.block_copy, "copy"),
        (gpu.decode, "decode"), (gpu.prefill, "prefill"), (planner.AttentionPlan, "split"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, note)
    return seen


def test_each_gpu_gets_its_kernels(monkeypatch):
    """Devices are named by their index: cuda:75 has compute capability 7.5."""
    name = "get_device_capability"
    monkeypatch.setattr(torch.cuda, name, lambda device: divmod(torch.device(device).index, 10))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU, {device}")
    planner.is_hopper.cache_clear()
    for number in (75, 80, 86, 89, 90, 100, 120):
        device = torch.device("cuda", number)
        assert planner.is_hopper(device) == (number == 90)
        stands_for = SimpleNamespace(
            shape=(9, 16, 2, 64), dtype=torch.float16, device=torch.device("cuda", number)
        )
        if number < 80:
            with pytest.raises(KernelArgumentError, match=r"a GPU, cuda:75: .* 8\.0 or newer"):
                gpu._check(stands_for)
        else:
            gpu._check(stands_for)
    planner.is_hopper.cache_clear()


@pytest.mark.parametrize(
    ("match", "dtype", "block_size", "head_dim"),
    [
        ("float16 or bfloat16", torch.float32, 16, 64), ("head_dim", torch.float16, 16, 72),
        ("block_size", torch.float16, 257, 64),
    ],
)  # fmt: skip
def test_what_no_gpu_takes(match, dtype, block_size, head_dim):
    with pytest.raises(KernelArgumentError, match=match):
        gpu._check(torch.zeros(1, block_size, 1, head_dim, dtype=dtype))


def strided(values, dtype):
    """Indices of which a kernel that knows no stride would read every second one wrongly."""
    return torch.tensor([values, values]).to(dtype).T.contiguous()[:, 0]


def integers(handed):
    return [t for t in handed if isinstance(t, torch.Tensor) and not t.is_floating_point()]


def test_indices_arrive_without_strides(handed):
    cache = torch.zeros(2, 2, 9, 16, 2, 64)
    slots = strided([3, 40], torch.int64)
    query = torch.zeros(2, 4, 64)
    new = (query[:, :2], query[:, 2:], cache[0, 0], cache[0, 1], slots)
    gpu.write_kv(*new)
    gpu.rotate_and_write(query, *new, slots, torch.zeros(64, 64), None, None, 1e-6)
    gpu.copy_blocks(cache, strided([1, 2], torch.int64), strided([3, 4], torch.int64))
    lens, starts = strided([20, 40], torch.int32), strided([0, 1, 41], torch.int32)
    table = torch.arange(6, dtype=torch.int32).view(3, 2).T
    query, scores = torch.zeros(41, 4, 64), (0.1, None, None, strided([1, 2, 3, 4], torch.float32))
    gpu.attend(query, cache[0, 0], cache[0, 1], table, lens, starts, 40, 40, *scores, [], 0)
    metadata = AttentionMetadata(table, lens, starts, torch.zeros(41, dtype=torch.int64), 40, 40)
    plan = planner.AttentionPlan.allocate(
        max_requests=2, num_heads=4, num_kv_heads=2, head_dim=64, device="cpu"
    )
    plan.update(metadata)
    found = integers(handed)
    assert len(found) >= 12
    assert all(indices.stride(-1) == 1 for indices in found)
    assert [i.tolist() for i in found[:3]] == [[3, 40]] * 3
    sinks = [t for t in handed if isinstance(t, torch.Tensor) and t.tolist() == [1, 2, 3, 4]]
    assert sinks
    assert all(s.is_contiguous() for s in sinks)


def test_numbers_arrive_as_kernels_take_them(monkeypatch):
    """An integer 1 would be compiled in, and a window of more than 32 bits would overflow."""
    seen = []
    monkeypatch.setattr(pa, "_attend", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(pa, "_rotate_and_write", lambda *arguments: seen.append(arguments))
    cache, query = torch.zeros(2, 2, 16, 1, 64), torch.zeros(1, 1, 64)
    metadata = AttentionMetadata.build([[1]], [5], [1], 16)
    pa.attend(query, *cache, metadata, scale=1, soft_cap=1, sliding_window=2**80)
    pa.rotate_and_write(query, query, query, *cache, metadata.slot_mapping, eps=1)
    (*_, scale, window, cap, _, _, _, _), (*_, eps) = seen
    assert [type(number) for number in (scale, cap, eps)] == [float] * 3
    assert window == 2**30
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: launched.append(arguments)

    monkeypatch.setattr(planner, "_plan_kernel", Kernel())
    plan = planner.AttentionPlan.allocate(
        max_requests=1, num_heads=1, num_kv_heads=1, head_dim=64, sliding_window=2**80, device="cpu"
    )
    plan.split(metadata.seq_lens, metadata.query_start)
    assert all(type(a) is not int or abs(a) < 2**31 for a in launched[0])


def test_tables_from_the_host_are_rows():
    table = torch.arange(6, dtype=torch.int32).view(3, 2).T
    built = AttentionMetadata.build(table, [20, 40], [1, 1], 16)
    assert built.block_table.is_contiguous()
    assert torch.equal(built.block_table, table)


def test_a_plan_without_requests_has_no_list_to_go_by(handed):
    cache, query = torch.zeros(2, 9, 16, 2, 64), torch.zeros(3, 4, 64)
    plan = planner.AttentionPlan.allocate(
        max_requests=2, num_heads=4, num_kv_heads=2, head_dim=64, device="cpu"
    )
    none = torch.zeros(0, dtype=torch.int32)
    table = torch.zeros(0, 4, dtype=torch.int32)
    start = torch.zeros(1, dtype=torch.int32)
    given = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "_runs_hopper_prefill", lambda *_: True)
        hopper = pytest.importorskip("billfish.kernels.paged_attention.hopper_prefill")
        patch.setattr(hopper, "prefill", lambda *_, **options: given.append(options))
        for lens, starts, rows, longest in (
            (none, start, table, 0), (start, torch.tensor([0, 3]).int(), table.new_zeros(1, 4), 3),
        ):  # fmt: skip
            gpu.attend(
                query, *cache, rows, lens, starts, longest, 0, 0.1, None, None, None,
                list(plan.workspace), 1,
            )  # fmt: skip
    assert [(o["plan"] is not None, o["overlap"]) for o in given] == [(False, False), (True, True)]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("to_host", [False, True])
def test_swaps_between_devices_are_not_for_the_cpu(monkeypatch, to_host, mode):
    """Whichever cache comes first. A device that computes nothing stands for the GPU."""

    def refuse(*arguments):
        raise AssertionError("chosen by the first cache alone")

    monkeypatch.setattr(pa, "_swap_blocks", refuse)
    monkeypatch.setattr(_arguments, "check_activation", lambda name, tensor: None)
    caches = [torch.zeros(1, 2, 4, 2, 1, 8, device=device) for device in ("cpu", "meta")]
    with mode():
        pa.swap_blocks(*(caches[::-1] if to_host else caches), torch.tensor([1]), torch.tensor([2]))
    assert not caches[0].any()
