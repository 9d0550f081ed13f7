"""A comparison without a GPU, made once; and records that are made up."""

import copy

import pytest

pytest.importorskip("triton")

from billfish.compare import build, records
from billfish.compare.records import Record

FAMILIES = ("marlin", "paged_attention", "general")
HEAD = {
    "device": "a GPU of the tests", "date": "2026-01-02", "commit": "0" * 40,
    "versions": {"torch": "1"}, "command": "none",
}  # fmt: skip


@pytest.fixture(scope="session")
def recorded():
    """The records of benchmarks/."""
    return records.recorded()


@pytest.fixture(scope="session")
def _document(recorded):
    return build.comparison(recorded, FAMILIES, gpu=None)


@pytest.fixture
def document(_document):
    """The comparison as a machine without a GPU makes it; a copy, to be changed."""
    return copy.deepcopy(_document)


def general_records(origin="recorded"):
    """Records of the general kernels, which are made up."""
    row = {"kernel": "transpose", "domain": "data", "size": "8 x 8", "dtype": "float32",
           "bytes": 512, "flops": 0, "floor_us": 2.0}  # fmt: skip
    rows = [{**row, "impl": "billfish", "us": 2.5}, {**row, "impl": "torch", "us": 3.25},
            {**row, "impl": "wrong one"}]  # fmt: skip
    switched = {"family": "general", "domain": "data", "kernel": "transpose",
                "case": "8 x 8 float32", "bytes": 512, "floor_us": 2.0}  # fmt: skip
    ablation = [
        {**switched, "technique": "all", "setting": "on", "us": 2.5},
        {**switched, "technique": "tiles in shared memory", "setting": "off", "us": 7.75},
        {**switched, "technique": "something new, 4 threads", "setting": "32", "us": 3.5},
    ]
    steps = [{"step": "naive", "size": "8 x 8", "us": 9.5, "bytes": 1536, "floor_us": 2.0}]
    head = {**HEAD, "rates": {"copy_gbps": 4000, "tflops": {"float16": 700.5}}}
    return {
        name: records.checked(Record(name, origin, head, found), name)
        for name, found in (("general", rows), ("ablation_general", ablation), ("tutorial", steps))
    }


@pytest.fixture(scope="session")
def complete(recorded):
    """A comparison in which the records of the general kernels are made up."""
    return build.comparison({**recorded, **general_records()}, FAMILIES, gpu=None)
