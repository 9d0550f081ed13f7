"""Which device a model runs on, and what is said where it cannot be the one asked for."""

import warnings

import pytest
import torch

from billfish.config import EngineConfig, SchedulerConfig
from billfish.errors import ConfigError
from billfish.layers.linear import Linear
from billfish.worker import device


def pretend(monkeypatch, *, cuda="13.0", count=1, capability=(9, 0)) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Old GPU")


WRONG = {
    "without CUDA": ({"cuda": None}, "cuda", torch.bfloat16),
    "finds no GPU": ({"count": 0}, "cuda", torch.bfloat16),
    "there are 1 GPUs": ({}, "cuda:1", torch.bfloat16),
    "Old GPU has compute capability 7.5": ({"capability": (7, 5)}, "cuda", torch.float16),
    "float32 runs on a CPU only": ({}, "cuda", torch.float32),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_gpu_that_cannot_be_used_is_one_clear_line(monkeypatch, message: str) -> None:
    machine, name, dtype = WRONG[message]
    pretend(monkeypatch, **machine)
    with pytest.raises(ConfigError, match=message) as error:
        device.choose(name, dtype)
    assert "\n" not in str(error.value)
    if name == "cuda":
        assert device.choose("auto", dtype) == torch.device("cpu")


def test_what_torch_warns_of_is_part_of_the_line(monkeypatch, recwarn) -> None:
    """Of a driver too old it says so in a warning, of many lines, and that there is no GPU."""
    text = (
        "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). "
        "Please update your GPU driver\nby downloading one. (Triggered internally at here.cpp:1.)"
    )

    def unavailable() -> bool:
        warnings.warn(text, stacklevel=1)
        return False

    pretend(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    with pytest.raises(ConfigError) as error:
        device.choose("cuda:0", torch.bfloat16)
    assert "too old (found version 11040): is there one" not in str(error.value)
    assert "is too old (found version 11040)): is there one" in str(error.value)
    assert "\n" not in str(error.value)
    assert not recwarn.list


def test_the_gpu_where_there_is_one(monkeypatch) -> None:
    pretend(monkeypatch, count=2)
    assert device.choose("auto", torch.bfloat16) == torch.device("cuda", 0)
    assert device.choose("cuda:1", torch.float16) == torch.device("cuda", 1)
    assert device.choose("cpu", torch.bfloat16) == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:x", "", 0, None])
def test_names_of_devices(name) -> None:
    with pytest.raises(ConfigError, match="device must be"):
        EngineConfig(model="m", device=name)


def test_defaults_of_a_gpu_give_way_to_what_is_said() -> None:
    assert (SchedulerConfig().budget, SchedulerConfig().seats) == (512, 64)
    on_gpu = SchedulerConfig(max_num_seqs=3).on_gpu()
    assert on_gpu.swap_cost == 0.2  # so that swap_blocks are used where "auto" decides
    assert SchedulerConfig(swap_cost=0.7).on_gpu().swap_cost == 0.7
    assert SchedulerConfig().swap_cost is None
    assert (on_gpu.budget, on_gpu.seats) == (8192, 3)


def test_a_dense_layer_whose_rows_are_alone() -> None:
    """Bit for bit the same for any number of rows beside it."""
    layer = Linear(torch.randn(70, 96, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(300, 96, generator=torch.Generator().manual_seed(1))
    plain = layer(x)
    layer.batch_invariant = True
    together = layer(x)
    torch.testing.assert_close(together, plain)
    for count in (1, 7, 128, 129):
        assert torch.equal(layer(x[:count]), together[:count])
    assert layer(x[:6].view(2, 3, 96)).shape == (2, 3, 70)
