"""`billfish bench gemm`, `tune` and `attention` on a GPU: small runs, and what they write."""

import json

import pytest
import torch

pytest.importorskip("triton")

from billfish.bench import attention, gemm, tune
from billfish.kernels.marlin import tuning
from billfish.kernels.marlin.configs import HopperConfig, hopper_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    monkeypatch.setattr("billfish.bench.turns.ROUNDS", 2)
    monkeypatch.setattr("billfish.bench.gemm_cases.COLD_BYTES", 1)
    monkeypatch.setattr(gemm, "COLD_BYTES", 1)


def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def written(path, command):
    record = json.loads(path.read_text())
    assert record["device"] == torch.cuda.get_device_name()
    assert record["versions"]["torch"] == torch.__version__
    assert record["command"].startswith(f"billfish bench {command}")
    return record


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_products(dtype, tmp_path, monkeypatch):
    """Both kernels, right and timed; compiled here and not in processes of their own."""
    monkeypatch.setattr(gemm, "compile_all", lambda *work: None)
    out = tmp_path / "gemm.json"
    gemm.main(["--out", str(out), "--shapes", "512x1024", "--rows", "1,40", "--dtype", dtype])
    record = written(out, "gemm")
    rows = [row for row in record["rows"] if row["impl"] in gemm.OURS]
    assert len(rows) == 4
    assert "cublas" in {row["impl"] for row in record["rows"]}
    for row in rows:
        assert (row["n"], row["k"], row["group_size"]) == (512, 1024, 128)
        assert row["us"] > 0
        assert row["gbps"] > 0
        assert 0 < row["rel_err"] < 2e-2
    assert record["read_gbps"] > 100
    assert record["packed_gcodes_s"] > 0.5  # a model of 70B in two minutes, at the very least
    assert record["host"]["host_us"] > 0


def test_a_wrong_product_is_told_and_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "compile_all", lambda *work: None)
    ours = gemm.OURS["billfish"]

    def wrong(*weights):
        return lambda x: ours(*weights)(x) * 1.1

    monkeypatch.setattr(gemm, "OURS", {"billfish": ours, "wrong": wrong})
    out = tmp_path / "gemm.json"
    gemm.main(["--out", str(out), "--shapes", "512x1024", "--rows", "3"])
    rows = {row["impl"]: row for row in written(out, "gemm")["rows"]}
    assert "us" in rows["billfish"]
    assert "us" not in rows["wrong"]
    assert rows["wrong"]["rel_err"] == pytest.approx(0.1, rel=0.1)


def test_techniques_of_products(tmp_path, monkeypatch):
    hopper()
    monkeypatch.setattr(gemm, "compile_all", lambda *work: None)
    out = tmp_path / "ablation_gemm.json"
    gemm.main(["--out", str(out), "--ablation", "--shapes", "512x1024", "--rows", "1"])
    rows = written(out, "gemm")["rows"]
    assert {row["setting"] for row in rows} >= {"on", "off"}
    named = {row["technique"] for row in rows}
    assert {"stream_k", "early launch", "double buffering", "queue depth 1"} <= named
    assert all(row["us"] > 0 for row in rows)


def test_tuning(tmp_path, monkeypatch):
    """What it finds is a kernel that runs, and the one that is chosen from then on."""
    hopper()
    monkeypatch.setattr(tune, "compile_all", lambda *work: None)
    candidates = tune.candidates
    monkeypatch.setattr(tune, "candidates", lambda m: candidates(m)[:3])
    out = tmp_path / "table.json"
    tune.main(["--shapes", "512x1024", "--rows", "8", "--gain", "-0.9", "--out", str(out)])
    (row,) = written(out, "tune")["rows"]
    assert (row["n"], row["k"], row["m"]) == (512, 1024, 8)
    assert 0 < row["us"] <= row["us_by_rule"]
    monkeypatch.setattr(tuning, "table_path", lambda name: out)
    tuning._table.cache_clear()
    try:
        found = hopper_config(5, (8, 8, 1056), gemm.this_gpu())
        assert found == HopperConfig(**row["config"])
    finally:
        tuning._table.cache_clear()


def test_attention(tmp_path):
    out = tmp_path / "attention.json"
    for mode, case in (("decode", "1024 x 8"), ("chunk", "64 over 8192")):
        attention.main(["--out", str(out), "--heads", "32/8", "--modes", mode, "--only", case])
        rows = written(out, "attention")["rows"]
        names = {row["impl"] for row in rows}
        assert {"billfish", "portable"} <= names
        for row in rows:
            assert row["us"] > 0
            assert row["rel_err"] is None or row["rel_err"] < 2e-2
        assert all(row["case"].startswith(case) for row in rows)
