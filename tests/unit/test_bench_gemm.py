"""What `billfish bench gemm` and `billfish bench tune` take and write; nothing is timed."""

import json
import os
from concurrent.futures import BrokenExecutor
from dataclasses import asdict
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from billfish.bench import gemm, tune
from billfish.errors import ConfigError
from billfish.kernels.marlin import hopper_launch, tuning
from billfish.kernels.marlin.configs import Gpu, HopperConfig, hopper_config

GPU = Gpu("Some GPU", 132)


@pytest.mark.parametrize(
    "options",
    [
        ["--chain", "--shapes", "64x64"], ["--chain", "--peers", "here"], ["--formats", "--dtype",
         "bf16"], ["--ablation", "--peers", "here"], ["--ablation", "--group-size", "32"],
        ["--chain", "--ablation"], ["--shapes", "64"], ["--shapes", "0x8"], ["--rows", "a"],
        ["--rows", "0"], ["--dtype", "fp8"], [],
    ],
)  # fmt: skip
def test_options_that_would_have_no_effect_are_refused(options, capsys):
    out = ["--out", "x.json"] if options else []
    with pytest.raises(SystemExit) as ended:
        gemm.parsed([*out, *options])
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--rows", "x"], ["--rows", ""], ["--shapes", "64"]])
def test_numbers_that_are_none_are_told_by_tune(options, capsys):
    with pytest.raises(SystemExit):
        tune.main(options)
    assert f"{options[0]}: invalid" in capsys.readouterr().err


def test_good_options():
    options = gemm.parsed(["--out", "x", "--shapes", "64x128,8x16", "--rows", "1,40"])
    assert options.shapes == [(64, 128), (8, 16)]
    assert options.rows == [1, 40]


def test_a_process_that_ends_before_it_has_compiled_is_told():
    with pytest.raises(BrokenExecutor):
        gemm.compile_all([], 1, [partial(os._exit, 1)])


@pytest.fixture
def timed(monkeypatch):
    """`tune` on a machine without a GPU: {configuration: (microseconds, result)} to be set."""
    wanted = {}
    launched = []

    def launch(x, units, product, config):
        launched.append(config)
        return torch.ones(x.shape[0], product.outputs) * wanted.get(config, (1, 1.0))[1]

    def time_configs(weights, n, m, configs):
        return {name: (wanted.get(config, (9.0, 1))[0], 0.0) for name, config in configs.items()}

    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, device: randn(*size))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("billfish.kernels.marlin.workspace.gpu_of", lambda device: GPU)
    monkeypatch.setattr(
        tune, "packed_copies", lambda n, k: [torch.zeros(-(-n // 64), -(-k // 128), 1056).int()]
    )
    monkeypatch.setattr(hopper_launch, "launch", launch)
    monkeypatch.setattr(tune, "time_configs", time_configs)
    monkeypatch.setattr(tune, "compile_all", lambda forms, jobs: list(forms))
    return wanted, launched


def test_the_fastest_right_configuration_gets_a_row_where_it_wins(timed, tmp_path):
    wanted, launched = timed
    out = tmp_path / "some_gpu.json"
    default = hopper_config(8, (64, 32, 1056), Gpu("", 132))
    others = [config for config in tune.candidates(8) if config != default]
    wanted[default] = (10.0, 1.0)
    wanted[others[0]] = (5.0, 1.01)  # the fastest, but wrong
    wanted[others[1]] = (8.0, 1.0)
    old = {"n": 4096, "k": 4096, "m": 8, "us": 1.0, "us_by_rule": 2.0, "config": {}}
    kept = {**old, "n": 64, "m": 1}
    head = {"device": "Some GPU", "commit": "before"}
    out.write_text(json.dumps({**head, "rows": [old, kept]}))
    run = ["--shapes", "4096x4096", "--rows", "8,16", "--out", str(out)]
    tune.main(run)
    assert {default, *others} <= set(launched)
    written = json.loads(out.read_text())
    first, second = written["rows"]
    assert first == {**kept, "commit": "before"}
    assert (second["n"], second["k"], second["m"]) == (4096, 4096, 8)
    assert (second["us"], second["us_by_rule"]) == (8.0, 10.0)
    assert HopperConfig(**second["config"]) == others[1]
    assert "commit" not in second  # that of the file
    assert written["command"] == "billfish bench tune " + " ".join(run)
    wanted[default], wanted[others[1]] = (9.1, 1.0), (9.0, 1.0)  # 1%: not worth a row
    tune.main(run)
    assert [row["n"] for row in json.loads(out.read_text())["rows"]] == [64]


def test_rows_that_were_timed_in_a_layer_are_left(timed, tmp_path, capsys):
    wanted, launched = timed
    out = tmp_path / "some_gpu.json"
    layer = {
        "commit": "then", "n": 4096, "k": 4096, "m": 8, "timed": "layer", "us": 40.0,
        "us_by_rule": 45.0, "config": {"rows": 64, "consumers": 1, "tile_m": 8, "stages": 3},
    }  # fmt: skip
    out.write_text(json.dumps({"commit": "before", "rows": [layer]}))
    best = {m: tune.candidates(m)[3] for m in (8, 16)}
    wanted.update(dict.fromkeys(best.values(), (1.0, 1.0)))
    tune.main(["--shapes", "4096x4096", "--rows", "8,16", "--out", str(out)])
    first, second = json.loads(out.read_text())["rows"]
    assert first == layer
    assert (second["m"], HopperConfig(**second["config"])) == (16, best[16])
    assert best[8] not in launched  # nothing is timed for a row that stays
    assert "4096x4096 M=8: left as it is" in capsys.readouterr().out
    tune.main(["--shapes", "4096x4096", "--rows", "8", "--out", str(out)])
    assert [row["m"] for row in json.loads(out.read_text())["rows"]] == [8, 16]


def test_what_was_tuned_is_what_runs(timed, tmp_path, monkeypatch):
    wanted, _ = timed
    path = tmp_path / "tuned" / "some_gpu.json"
    monkeypatch.setattr(tuning, "table_path", lambda name: path)
    tuning._table.cache_clear()
    default = hopper_config(16, (64, 32, 1056), GPU)
    best = next(config for config in tune.candidates(16) if config != default)
    wanted[best] = (1.0, 1.0)
    tuning._table.cache_clear()
    tune.main(["--shapes", "4096x4096", "--rows", "16"])
    tuning._table.cache_clear()
    assert hopper_config(13, (64, 32, 1056), GPU) == best
    assert hopper_config(8, (64, 32, 1056), GPU) == hopper_config(8, (64, 32, 1056), Gpu("", 132))
    tuning._table.cache_clear()


def test_a_row_holds_what_is_not_by_default():
    config = HopperConfig(rows=64, consumers=2, tile_m=16, stages=4, pdl=False)
    changed = tune._changed(config)
    assert changed == {"rows": 64, "consumers": 2, "tile_m": 16, "stages": 4, "pdl": False}
    assert asdict(HopperConfig(**changed)) == asdict(config)


def test_tune_refuses(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match="does not run"):
        tune.main(["--rows", "8"])
    with pytest.raises(ConfigError, match=r"--rows: got \[7\]"):
        tune.main(["--rows", "7"])
