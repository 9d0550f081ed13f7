"""`billfish bench general` on a GPU: every case at a tiny size, its peers and its techniques."""

import pytest
import torch

pytest.importorskip("triton")

from billfish.bench import general as bench
from billfish.bench.general_case import is_there

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # What CuPy and torch warn of is not ours to mend: a peer that warns is timed all the same.
    pytest.mark.filterwarnings("default"),
]

CASES = [
    case
    for domain in bench.DOMAINS
    if bench.find_spec(f"billfish.bench.general_{domain}")
    for case in bench.import_module(f"billfish.bench.general_{domain}").tiny()
]
RATES = bench.Rates(4e6, 4e6, 4e6, dict.fromkeys((torch.float32, torch.float16, torch.bfloat16,
                                                  torch.float64), 50e6))  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case(case, monkeypatch):
    """Everything that is there is right and timed; but torch.compile, which takes long."""
    monkeypatch.setattr(bench, "MOST_COPIES", 3)
    peers = [name for name in case.peers if is_there(name) and name != "torch.compile"]
    rows = bench.compare(case, RATES, torch.device("cuda"), peers=peers)
    assert {row["impl"] for row in rows if "us" in row} == {"billfish", *peers}
    # No graph holds what waits for the GPU, which our kernels never do.
    assert rows[0]["graph"]
    assert all(("held_bytes" in row) == case.held for row in rows if "us" in row)
    settings = sum(len(settings) for settings in case.settings.values())
    found = bench.ablate(case, RATES, torch.device("cuda"))
    assert len(found) == (1 + settings if settings else 0)


def test_a_whole_run(tmp_path):
    out, ablation = tmp_path / "general.json", tmp_path / "ablation.json"
    options = ["--kernels", "transpose", "--quick", "--peers", "torch", "--out", str(out),
               "--ablation", str(ablation), "--jobs", "1"]  # fmt: skip
    bench.main([*options, "--compile-only"])
    assert not out.exists()
    bench.main(options)
    for path in (out, ablation):
        found = bench.json.loads(path.read_text())
        assert len(found["rows"]) == 2
        assert found["rates"]["read_gbps"] > 100
        assert all(0 < row["floor_us"] < 2 * row["us"] for row in found["rows"])
