"""`billfish compare`, and what it does where something is wrong."""

import inspect
import json
import re
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from billfish.cli import app
from billfish.compare import measure, records
from billfish.errors import ConfigError, RecordError
from tests.compare.conftest import HEAD

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: compare would measure it"
)


def run(*arguments):
    """The command's output; what it raises is raised."""
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def raised(*arguments):
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    return result.exception


def test_in_the_terminal_and_as_files(tmp_path):
    said = run("--out", tmp_path / "new")
    assert "Recorded results: nothing was measured here." in said
    assert re.search(r"Recorded on NVIDIA H200, 20\d\d-\d\d-\d\d, by commit: \w+ [0-9a-f]{7}", said)
    assert "Stream-K" in said
    document = json.loads((tmp_path / "new" / "comparison.json").read_text())
    page = (tmp_path / "new" / "comparison.html").read_text()
    assert document["made"]["gpu"] is None

    again = tmp_path / "again.html"
    run("--from", tmp_path / "new" / "comparison.json", "--html", again)
    assert again.read_text().count("<data") == page.count("<data")


def test_what_has_no_record_is_not_measured(tmp_path, monkeypatch):
    for path in records.folder().glob("*.json"):
        if path.stem != "ablation_gemm":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    assert "not measured" in run("--family", "marlin", "--out", tmp_path / "a.html")
    assert "not measured yet" in (tmp_path / "a.html").read_text()


def test_one_family_and_links_to_the_web(tmp_path):
    run("--family", "marlin", "--json", tmp_path / "a.json", "--out", tmp_path / "b.html",
        "--source-url", "https://host.example/tree")  # fmt: skip
    assert list(json.loads((tmp_path / "a.json").read_text())["families"]) == ["marlin"]
    page = (tmp_path / "b.html").read_text()
    assert 'href="https://host.example/tree/billfish/kernels/marlin/' in page
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.html"]


@pytest.mark.parametrize(
    "arguments",
    [("--family", "cuda"), ("--quick",), ("--quick", "--recorded"), ("--out", "report.pdf"),
     ("--from", "x.json", "--quick"),
     ("--out", "a.json", "--json", "b.json"), ("--source-url", "javascript:alert(1)")],
)  # fmt: skip
def test_what_cannot_be_is_refused(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert isinstance(raised(*arguments), ConfigError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    option, tmp_path, monkeypatch
):
    monkeypatch.setattr("billfish.cli.compare._made", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "x"):
        error = raised(option, path)
        assert isinstance(error, ConfigError)
        assert f"{path} cannot be written" in str(error)


def test_what_was_measured_is_kept_where_the_page_fails(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise ValueError("no page")

    monkeypatch.setattr("billfish.compare.report.page", fails)
    out = tmp_path / "new"
    assert str(raised("--family", "marlin", "--out", out)) == "no page"
    assert [path.name for path in out.iterdir()] == ["comparison.json"]
    monkeypatch.undo()
    run("--from", out / "comparison.json", "--html", out / "comparison.html")


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", '{"format": 1}'])
def test_a_comparison_that_is_none(tmp_path, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    error = raised("--from", path, "--html", tmp_path / "x.html")
    assert isinstance(error, RecordError)
    assert str(path) in str(error)
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("lost", ["families", "charts", "pictures", "records", "made"])
def test_a_comparison_that_lacks_a_part(tmp_path, document, lost):
    for inside in document[lost].values():
        if isinstance(inside, dict) and inside:
            inside.pop(next(iter(inside)), None)
    document[lost].pop("origin" if lost == "made" else list(document[lost])[-1])
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document))
    error = raised("--from", path, "--html", tmp_path / "x.html")
    assert isinstance(error, RecordError)
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("figure", [10**400, "x"], ids=["huge", "text"])
def test_a_comparison_with_a_figure_that_is_none(tmp_path, document, figure):
    """One error that names the file, whatever stands where a figure is to be."""
    path = tmp_path / "a.json"
    document["charts"]["kernels"][0]["us"] = figure
    document["charts"]["speedup"]["ideal"] = figure
    path.write_text(json.dumps(document))
    assert isinstance(raised("--from", path), RecordError)
    assert "not a whole comparison" in str(raised("--from", path))


def test_a_damaged_record_stops_it(tmp_path, monkeypatch):
    (tmp_path / "gemm.json").write_text(json.dumps({**HEAD, "rows": [{"n": 1}]}))
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    error = raised("--html", tmp_path / "x.html")
    assert isinstance(error, RecordError)
    assert "gemm.json: row 0: k is missing" in str(error)
    assert not (tmp_path / "x.html").exists()


ROW = {"family": "marlin", "kernel": "hopper_gemm", "technique": "all on", "setting": "on",
       "case": "64x128 M=1", "us": 2.0, "bytes": 8, "floor_us": 1.0}  # fmt: skip


@pytest.fixture
def plans(monkeypatch):
    """Measuring without a GPU: plans of a test."""
    rates = {"read_gbps": 4500, "copy_gbps": 4200, "tflops": {"float16": 700.0}}
    monkeypatch.setattr(measure, "_rates", lambda: rates)
    made = {}
    monkeypatch.setattr(measure, "PLANS", made)
    return made


def test_what_fails_or_has_no_time_is_left_out(plans):
    now = [0.0]
    taken = []

    def step(name, seconds, fails=False):
        def take():
            now[0] += seconds
            taken.append(name)
            if fails:
                raise RuntimeError("no such instruction\nat line 1")
            return [{**ROW, "case": name}]

        return "ablation_gemm", name, take

    plans["marlin"] = lambda quick, done: iter([step("a", 60), step("b", 1, True), step("c", 60)])
    plans["general"] = lambda quick, done: iter([step("d", 40), step("e", 60), step("f", 1)])
    done = measure.measure(
        ("marlin", "general"), quick=True, say=lambda line: None, clock=lambda: now[0]
    )
    assert taken == ["a", "d", "b", "e"]
    assert done.left_out == [
        "b: RuntimeError: no such instruction", "c: no time left", "f: no time left",
    ]  # fmt: skip
    record = done.records["ablation_gemm"]
    assert record.origin == "measured"
    assert [row["case"] for row in record.rows] == ["a", "d", "e"]
    assert record.head["rates"]["copy_gbps"] == 4200
    assert done.seconds == 161


def test_a_plan_that_fails_costs_its_own_rest(plans):
    def broken(quick, done):
        yield "ablation_gemm", "a", lambda: [ROW]
        raise ImportError("no such module")

    plans["marlin"] = broken
    plans["general"] = lambda quick, done: iter([("ablation_gemm", "b", lambda: [ROW])] * 2)
    done = measure.measure(("marlin", "general"), quick=False, say=lambda line: None)
    assert len(done.records["ablation_gemm"].rows) == 3
    assert done.left_out == ["the rest of a family: ImportError: no such module"]


def pretend_gpu(monkeypatch, capability):
    """A machine with a GPU of this compute capability."""
    for name, value in {
        "is_available": True, "device_count": 1, "get_device_name": "a GPU of the tests",
        "get_device_capability": capability, "empty_cache": None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_a_gpu_that_is_too_old_measures_nothing(monkeypatch, plans):
    pretend_gpu(monkeypatch, (7, 5))
    said = run("--family", "marlin")
    assert "Recorded results: nothing was measured here." in said
    assert "This machine has no GPU that can be used." in said
    with pytest.raises(ConfigError, match=r"a GPU of the tests has compute capability 7\.5"):
        run("--quick")


def test_with_a_gpu_it_measures(plans, monkeypatch, tmp_path):
    asked = []

    def plan(quick, done):
        asked.append(quick)
        yield "ablation_gemm", "one", lambda: [ROW, {**ROW, "technique": "stream_k", "us": 3.0}]

    plans["marlin"] = plan
    pretend_gpu(monkeypatch, (9, 0))
    said = run("--family", "marlin", "--quick", "--json", tmp_path / "a.json")
    assert "Measured here: on a GPU of the tests" in said
    document = json.loads((tmp_path / "a.json").read_text())
    assert asked == [True]
    assert document["made"]["origin"] == "measured"
    assert document["records"]["ablation_gemm"]["device"] == "a GPU of the tests"
    assert document["records"]["gemm"]["origin"] == "recorded"
    found = {t["name"]: t for t in document["families"]["marlin"]["techniques"]}
    assert [c["ratio"] for c in found["Stream-K"]["cases"]] == [1.5]

    said = run("--from", tmp_path / "a.json", "--html", tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    for shown in (said, page):
        assert "Measured elsewhere, shown from a.json" in shown
        assert "Measured here" not in shown

    said = run("--family", "marlin", "--recorded", "--json", tmp_path / "b.json")
    assert asked == [True]
    assert "nothing was measured here" in said
    assert json.loads((tmp_path / "b.json").read_text())["made"]["gpu"] == "a GPU of the tests"


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("quick", [True, False])
def test_the_real_plans_call_what_there_is(monkeypatch, hopper, quick):
    """Without a GPU their steps can be listed: each has a record that a comparison knows, a name of
    its own, and arguments that what it calls takes."""
    monkeypatch.setattr(measure, "_is_hopper", lambda: hopper)
    monkeypatch.setattr("billfish.bench.general.Rates.measured", lambda: None)
    for name, plan in measure.PLANS.items():
        done = measure.Measured()
        steps = list(plan(quick, done))
        assert len({what for _, what, _ in steps}) == len(steps) or name == "general"
        for record, _, take in steps:
            assert record in records.FIELDS
            if isinstance(take, partial):
                inspect.signature(take.func).bind(*take.args, **take.keywords)
            else:
                inspect.signature(take).bind()
        ablated = {record for record, _, _ in steps if record.startswith("ablation")}
        if name == "marlin":
            assert bool(ablated) == hopper == (not done.left_out)
        else:
            assert ablated


def test_records_are_checked_when_they_are_taken(plans):
    plans["marlin"] = lambda quick, done: iter([("ablation_gemm", "x", lambda: [{"us": 1}])])
    with pytest.raises(RecordError, match="measured here: row 0"):
        measure.measure(("marlin",), quick=False, say=lambda line: None)
