"""What `billfish bench general --ablation` times, at sizes of a moment in Triton's interpreter.

Run by test_general_bench_triton.py in a process of its own. By hand:
TRITON_INTERPRET=1 pytest tests/kernels/general_bench_triton.py
"""

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from billfish.bench import general as bench

MODULES = [f"billfish.bench.general_{domain}" for domain in bench.DOMAINS]
CASES = [case for name in MODULES if find_spec(name) for case in import_module(name).tiny()]


@pytest.mark.parametrize("case", [c for c in CASES if c.settings], ids=lambda case: case.name)
def test_switched_techniques_compute_the_same(case):
    impls = {
        f"{technique}: {setting}": function
        for technique, settings in case.settings.items()
        for setting, function in settings.items()
    }
    errors = bench.check(case, impls, torch.device("cpu"))
    assert set(errors) == set(impls)
    assert all(error <= case.limit for error in errors.values()), errors
