"""Reading weights ahead: beside which launches it begins, and the kernel's machine code."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from billfish.models import random_weights
from billfish.worker import read_ahead_gpu
from billfish.worker.device_runner import DeviceRunner
from billfish.worker.read_ahead import ReadAhead, Wish
from tests.compile.offline import fake_device, machine_code

if knobs.runtime.interpret:
    pytest.skip("compiles, so not with TRITON_INTERPRET=1", allow_module_level=True)

CPU = torch.device("cpu")
WISHES = [Wish("attention", "o", 7), Wish("o", "gate_up", 8), Wish("down", "qkv", 9)]


@pytest.fixture
def events(monkeypatch) -> list[object]:
    """What is read, how much, and when streams wait for each other, in order."""
    seen: list[object] = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = "beside"

        def wait_stream(self, other: object) -> None:
            seen.append(f"{self.name} waits")

    main = Stream(None)
    main.name = "main"
    fakes = {
        "Stream": Stream, "current_stream": lambda: main, "stream": lambda stream: nullcontext(),
        "is_current_stream_capturing": lambda: True,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(read_ahead_gpu, "read", lambda weights, most: seen.append((weights, most)))
    return seen


def model_of(**changes):
    config = random_weights.shape("tiny")
    return random_weights.load_model(
        config, dtype=torch.bfloat16, device="cpu", max_len=64, **{"int4": True, **changes}
    )


def run_layer(layer) -> None:
    """Its products, in the order of a step."""
    x = torch.zeros(1, layer.attention.qkv_proj.in_features, dtype=torch.bfloat16)
    layer.attention.qkv_proj(x)
    layer.attention.o_proj(x)
    gated = layer.mlp.gate_up_proj(x)
    layer.mlp.down_proj(gated[:, : layer.mlp.down_proj.in_features])


def test_weights_are_read_beside_what_comes_before_their_product(events) -> None:
    model = model_of()
    ahead = ReadAhead(model, CPU, WISHES)
    first, second = model.layers
    with torch.inference_mode(), ahead.active():
        run_layer(first)
        run_layer(second)

    def units(layer):
        return layer.weight.tensors[0]

    waits = "beside waits"
    assert events == [
        waits, (units(first.attention.o_proj), 7), waits, (units(first.mlp.gate_up_proj), 8),
        waits, (units(second.attention.qkv_proj), 9),
        waits, (units(second.attention.o_proj), 7), waits, (units(second.mlp.gate_up_proj), 8),
        "main waits",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "expected"), [(1, ["few"]), (4, ["few"]), (5, ["more"]), (8, ["more"]), (9, [])]
)
def test_the_first_entry_that_fits_a_step_says_what_is_read(count, expected) -> None:
    begun: list[str] = []

    def entry(name: str) -> SimpleNamespace:
        return SimpleNamespace(active=lambda: begun.append(name) or nullcontext())

    runner = SimpleNamespace(_read_ahead=[(4, entry("few")), (8, entry("more"))])
    with DeviceRunner._reading_ahead(runner, count):
        assert begun == expected


def test_nothing_is_read_outside_of_a_capture_nor_of_dense_weights(events, monkeypatch) -> None:
    dense = model_of(int4=False)
    with torch.inference_mode(), ReadAhead(dense, CPU, WISHES).active():
        for layer in dense.layers:
            for product in (layer.attention.qkv_proj, layer.attention.o_proj):
                product(torch.zeros(1, product.weight.shape[1], dtype=torch.bfloat16))
    model = model_of()
    ahead = ReadAhead(model, CPU, WISHES)
    with torch.inference_mode():
        run_layer(model.layers[0])
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        with ahead.active():
            run_layer(model.layers[0])
    assert events == []


@pytest.mark.parametrize(
    ("size", "most", "expected"),
    [
        (4095, 1 << 40, None),  # not one chunk
        (4096 * 128 * 3, 1 << 40, (384, 3, 3)),
        (4096 * 128 * 3 + 8192, 1 << 40, (386, 4, 4)),
        (4096 * 128 * 3, 4096 * 256, (384, 3, 2)),
        (4096 * 128 * 3, 0, (384, 3, 1)),
    ],
)
def test_each_program_reads_the_beginning_of_its_share(
    size: int, most: int, expected: tuple[int, int, int] | None, monkeypatch
) -> None:
    """(chunks, chunks of a program, of these read)"""
    launched = []
    kernel = {(128,): lambda start, *numbers, **_: launched.append(numbers)}
    monkeypatch.setattr(read_ahead_gpu, "_read_ahead_kernel", kernel)
    read_ahead_gpu.read(SimpleNamespace(nbytes=size), most)
    assert launched == ([] if expected is None else [expected])


def test_the_kernel_asks_the_copy_engine() -> None:
    with fake_device(90):
        kernel = read_ahead_gpu._read_ahead_kernel.warmup(
            torch.zeros(4096, dtype=torch.int32), 100, 4, 3, THREADS=64, num_warps=2, grid=(128,)
        )
        code = machine_code(kernel)
    assert code.count("UBLKPF.L2")
    assert code.spill_bytes == 0
