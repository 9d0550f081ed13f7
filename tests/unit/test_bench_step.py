"""The step table worked out by hand: which kernel is what, what it adds, what it must cost."""

from typing import Any, cast

import pytest

from billfish.bench import step
from billfish.bench.engine import Served
from billfish.bench.step import Kernel, Part, costs, exclusive, label, measure, parts_of, table
from billfish.errors import ConfigError
from billfish.models.random_weights import SHAPES
from tests.engine.fake_worker import make_engine

LAYER = ["_rms_norm_kernel", "w4a16", "_write_kernel", "decode", "w4a16", "_rms_norm_kernel"]
FUSED = [*LAYER, "w4a16", "w4a16"]
PARTS = ["norm", "qkv", "rotate and write", "attention", "o", "norm", "gate_up"]


def kernels(names: list[str]) -> list[Kernel]:
    return [Kernel(name, 10.0 * i, 10.0 * i + 8.0) for i, name in enumerate(names)]


def test_labels_of_a_fused_step() -> None:
    names = ["_inputs_kernel", "plan", "gather", *FUSED, *FUSED, "_rms_norm_kernel", "nvjet"]
    names += ["_largest_kernel", "_sample_kernel", "Memcpy DtoH"]
    layer = [*PARTS, "down"]
    want = ["inputs"] * 3 + layer * 2 + ["norm", "head", "sampling", "sampling", "inputs"]
    assert label(kernels(names), fused=True) == want


def test_labels_where_products_take_several_kernels() -> None:
    layer = ["_rms_norm_kernel", "nvjet", "splitk", "_write_kernel", "decode", "nvjet", "splitk",
             "_rms_norm_kernel", "nvjet", "splitk", "_gated_kernel", "nvjet"]  # fmt: skip
    want = ["norm", "qkv", "qkv", "rotate and write", "attention", "o", "o", "norm", "gate_up",
            "gate_up", "gated activation", "down"]  # fmt: skip
    names = [*layer, "_rms_norm_kernel", "nvjet", "splitk", "_sample_kernel"]
    assert label(kernels(names), fused=False) == [*want, "norm", "head", "head", "sampling"]


def test_overlapping_kernels_add_what_is_new() -> None:
    ran = [Kernel("a", 0, 10), Kernel("b", 4, 15), Kernel("c", 5, 12), Kernel("d", 20, 21)]
    assert exclusive(ran) == [10, 5, 0, 1]


def test_costs_of_llama_3_8b() -> None:
    config = SHAPES["llama-3-8b"]
    known = costs(config, 1, 512, int4=True)
    products = sum(known[name].bytes for name in ("qkv", "o", "gate_up", "down"))
    assert products == pytest.approx(32 * 218.1e6 * 4.25 / 8, rel=0.01)  # 218 million a layer
    assert known["head"].bytes == pytest.approx(2 * 128256 * 4096, rel=0.01)
    for head, bytes_of_a_weight in (("int8", 1.0625), ("int4", 0.5625)):
        size = costs(config, 1, 512, int4=True, head=head)["head"].bytes
        assert size == pytest.approx(bytes_of_a_weight * 128256 * 4096, rel=0.01)
    assert known["attention"].bytes == pytest.approx(32 * 512 * 2 * 2 * 1024, rel=0.02)
    assert costs(config, 8, 512, int4=True)["o"].flops == 32 * 2 * 8 * 4096 * 4096
    assert costs(config, 1, 512, int4=False)["o"].bytes == pytest.approx(32 * 2 * 4096**2, rel=0.01)


def test_requests_that_never_decode_together_are_told() -> None:
    """A seat for one of two: they decode one after the other, and then nobody does."""
    engine, _ = make_engine(max_num_seqs=1, eos_token_ids=())
    served = Served(cast(Any, None), engine, vocab_size=256)
    with pytest.raises(ConfigError, match="2 requests of 20 tokens never decode together"):
        measure(served, batch=2, context=20)


@pytest.mark.parametrize("said", ["", "x", "0", "4,-1", "1.5"])
def test_numbers_of_requests(monkeypatch, said: str) -> None:
    monkeypatch.setattr(step, "why_no_gpu", lambda: None)
    with pytest.raises(ConfigError, match="--batch is a number of requests"):
        step.main(["--batch", said])


@pytest.mark.parametrize(
    "option",
    ["--measure", "--batches", "--lengths", "--rounds", "--cache-blocks", "--max-num-seqs"],
)
def test_options_of_other_measurements_are_not_taken(option: str, capsys) -> None:
    with pytest.raises(SystemExit):
        step.main([option, "1"])
    assert "unrecognized arguments" in capsys.readouterr().err


def test_table() -> None:
    config = SHAPES["tiny"]
    steps = kernels((["_copy_kernel", "_rms_norm_kernel", "nvjet", "_sample_kernel"]) * 20)
    parts = parts_of(steps, config, 2, 10, int4=False)
    assert [(part.name, part.calls, part.us) for part in parts] == [
        ("inputs", 1.0, 8.0), ("norm", 1.0, 8.0), ("head", 1.0, 8.0), ("sampling", 1.0, 8.0),
    ]  # fmt: skip
    parts = [Part("head", 1.0, 8.0, known := costs(config, 2, 10, int4=False)["head"])]
    rows, text = table(parts, wall_us=10.0, bandwidth=known.bytes / 4e-6, rate=1e15)
    assert rows[0]["floor_us"] == 4.0
    assert rows[1] == {"part": "gaps", "us": 2.0}
    assert rows[2] == {"part": "step", "us": 10.0, "floor_us": 4.0}
    assert "50%" in text
