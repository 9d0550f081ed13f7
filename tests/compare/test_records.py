"""Records of measurements: whole, missing or refused."""

import json
import math

import pytest

from billfish.compare import records
from billfish.compare.records import RecordError
from tests.compare.conftest import HEAD

ROW = {"family": "marlin", "kernel": "k", "technique": "t", "setting": "off", "case": "c",
       "us": 1.5, "bytes": 8, "floor_us": 1.0}  # fmt: skip


def written(folder, content):
    path = folder / "ablation_gemm.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_repository_has_records_of_a_gpu():
    found = records.recorded()
    assert {"gemm", "ablation_gemm", "attention", "ablation_attention"} <= set(found)
    assert all(record.origin == "recorded" for record in found.values())


def test_what_is_missing_is_missing(tmp_path):
    assert records.recorded(tmp_path) == {}
    written(tmp_path, {**HEAD, "rows": [ROW]})
    assert list(records.recorded(tmp_path)) == ["ablation_gemm"]


def test_the_place_may_be_missing(monkeypatch, tmp_path):
    monkeypatch.setattr("billfish.__file__", str(tmp_path / "billfish" / "__init__.py"))
    with pytest.raises(RecordError, match="recorded results are missing"):
        records.folder()


DAMAGED = {
    "cut off": json.dumps({**HEAD, "rows": [ROW]})[:-5],
    "empty": "",
    "not an object": "[]",
    "not text": "\udcff",
    "no rows": HEAD,
    "no row": {**HEAD, "rows": []},
    "rows of another kind": {**HEAD, "rows": {"us": 1}},
    "a row of another kind": {**HEAD, "rows": [ROW, 3]},
    "no device": {**{k: v for k, v in HEAD.items() if k != "device"}, "rows": [ROW]},
    "no date": {**HEAD, "date": None, "rows": [ROW]},
    "a commit of another kind": {**HEAD, "commit": 7, "rows": [ROW]},
    "a field less": {**HEAD, "rows": [{k: v for k, v in ROW.items() if k != "us"}]},
    "a time as text": {**HEAD, "rows": [{**ROW, "us": "1.5"}]},
    "a time as a boolean": {**HEAD, "rows": [{**ROW, "us": True}]},
    "no time at all": {**HEAD, "rows": [{**ROW, "us": 0}]},
    "a time before its start": {**HEAD, "rows": [{**ROW, "us": -1.5}]},
    "no number": {**HEAD, "rows": [{**ROW, "us": math.nan}]},
    "endless": {**HEAD, "rows": [{**ROW, "bytes": math.inf}]},
    "a case that is a number": {**HEAD, "rows": [{**ROW, "case": 4}]},
    "a number beyond floats": {**HEAD, "rows": [{**ROW, "us": 10**400}]},
    "a number near 0": {**HEAD, "rows": [{**ROW, "us": 1e-320}]},
    "an error that is none": {**HEAD, "rows": [{**ROW, "rel_err": {}}]},
    "versions that are none": {**HEAD, "versions": {"torch": []}, "rows": [ROW]},
    "rates that are none": {**HEAD, "rates": -1, "rows": [ROW]},
    "a rate that is none": {**HEAD, "rates": {"tflops": {"float16": "fast"}}, "rows": [ROW]},
    "a bandwidth of nothing": {**HEAD, "bandwidth": 0, "rows": [ROW]},
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_record_is_refused(tmp_path, kind):
    if kind == "not text":
        path = tmp_path / "ablation_gemm.json"
        path.write_bytes(b"\xff\xfe{")
    else:
        path = written(tmp_path, DAMAGED[kind])
    with pytest.raises(RecordError) as caught:
        records.recorded(tmp_path)
    assert caught.value.file == str(path)


def test_a_product_that_came_out_wrong_has_no_time(tmp_path):
    row = {"n": 1, "k": 1, "m": 1, "dtype": "float16", "impl": "x", "group_size": 128,
           "rel_err": 0.5}  # fmt: skip
    path = tmp_path / "gemm.json"
    path.write_text(json.dumps({**HEAD, "rows": [row]}))
    assert "us" not in records.recorded(tmp_path)["gemm"].rows[0]
    path.write_text(json.dumps({**HEAD, "rows": [{**row, "us": -2}]}))
    with pytest.raises(RecordError, match="row 0: us"):
        records.recorded(tmp_path)
