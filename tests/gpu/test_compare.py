"""The comparison on a GPU: everything that it wants to measure can be measured.

It takes about three minutes: `make gpu PART=tests/gpu/test_compare.py GPU_JOBS=1`.
"""

import pytest
import torch

from billfish.bench import tutorial
from billfish.compare import build, measure, records, report, roof_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FAMILIES = ("marlin", "paged_attention", "general")


@pytest.mark.parametrize("step", tutorial.STEPS)
def test_steps_of_the_tutorial(step):
    layer, _ = tutorial.STEPS[step]
    for channels, pixels in ((1, 1), (33, 70), tutorial.SIZE):
        torch.manual_seed(0)
        inputs = tutorial.draw(channels, pixels, "cuda")
        assert tutorial.error_of(layer, inputs) < tutorial.TOLERANCE


def test_compare_quick():
    done = measure.measure(FAMILIES, quick=True)
    expected = ("no time left", "kernel's", "kernels'")  # there are switches on Hopper only
    failed = [each for each in done.left_out if not each.endswith(expected)]
    assert failed == []
    assert {"gemm", "attention", "ablation_attention"} <= set(done.records)
    document = build.comparison(
        {**records.recorded(), **done.records}, FAMILIES, gpu=torch.cuda.get_device_name(),
        seconds=done.seconds, left_out=done.left_out,
    )  # fmt: skip
    drawn = document["charts"]["kernels"]
    assert drawn == roof_data.kernels(done.records, FAMILIES)  # none of those that are recorded
    assert {point["family"] for point in drawn} == set(FAMILIES)
    assert "Measured here" in report.page(document)
