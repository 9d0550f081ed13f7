"""What a comparison says: with every record, without some, and with made-up ones."""

import copy
import json
from pathlib import Path

import pytest

import billfish
from billfish.compare import build, charts_data, links
from billfish.compare.catalogue import FAMILIES as CATALOGUE
from billfish.compare.records import Record
from billfish.compare.topics import GENERAL, KNOWN, benchmarked
from billfish.errors import RecordError
from tests.compare.conftest import FAMILIES, HEAD, general_records

ROOT = Path(billfish.__file__).parents[1]


def all_links(tree):
    if isinstance(tree, dict):
        if "symbol" in tree:
            yield tree
        else:
            for value in tree.values():
                yield from all_links(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from all_links(value)


def techniques(document):
    return {
        (family, t["name"]): t
        for family in document["families"]
        for t in document["families"][family]["techniques"]
    }


def test_every_link_leads_to_its_symbol(document):
    found = list(all_links(document))
    assert len(found) > 40
    for link in found:
        lines = (ROOT / link["file"]).read_text().splitlines()
        assert 1 <= link["first"] <= link["last"] <= len(lines)
        here = lines[link["first"] - 1 : link["last"]]
        assert link["text"].split("\n") == here[: links.EXCERPT]


@pytest.mark.parametrize("family", CATALOGUE, ids=lambda family: family.name)
def test_symbols_of_the_catalogue(family):
    for technique in family.techniques:
        for name in technique.code:
            link = links.resolve(name)
            symbol, _, text = name.partition(":")[2].partition("|")
            first = link["text"].splitlines()
            if text:
                assert text in first[0]
            else:
                wanted = symbol.rpartition(".")[2]
                assert any(
                    f"def {wanted}" in line or f"class {wanted}" in line for line in first[:3]
                )
    assert (ROOT / family.page).exists() or not (ROOT / "docs").exists()


def test_every_technique_that_the_benchmark_switches_is_known():
    """Of one that is not, a report could tell its kernel's name and nothing of what it does."""
    found = {(topic.kernel.partition(" ")[0], topic.technique): topic for topic in benchmarked()}
    assert set(found) == set(KNOWN)
    for key, topic in found.items():
        assert topic.code == tuple(f"{GENERAL}.{symbol}" for symbol in KNOWN[key].code), key
        assert topic.what


@pytest.mark.parametrize(
    "name",
    [
        "billfish.no_such_module:a", "billfish.kernels.marlin.hopper_gemm:Nothing",
        "billfish.kernels.marlin.hopper_queue:Queue.nothing",
        "billfish.kernels.marlin.hopper_gemm:_sum|no such text",
    ],
)  # fmt: skip
def test_a_symbol_that_is_gone_is_an_error(name):
    with pytest.raises(RecordError):
        links.resolve(name)
    assert not links.exists(name)


def test_figures_are_those_of_the_records(document, recorded):
    """A few, by hand from the rows."""
    rows = recorded["ablation_gemm"].rows
    case = {r["technique"]: r for r in rows if r["case"] == "4096x4096 M=1"}
    stream_k = techniques(document)["marlin", "Stream-K"]
    found = next(c for c in stream_k["cases"] if (c["group"], c["case"]) == ("4096x4096", "M=1"))
    on, off = case["all on"], case["stream_k"]
    assert (found["with_us"], found["without_us"]) == (on["us"], off["us"])
    assert found["ratio"] == pytest.approx(off["us"] / on["us"], abs=0.005)
    assert found["with_percent"] == pytest.approx(100 * on["floor_us"] / on["us"], abs=0.05)
    assert found["bytes"] == on["bytes"]

    rows = [r for r in recorded["gemm"].rows if (r["n"], r["k"], r["m"]) == (57344, 8192, 1)]
    times = {r["impl"]: r["us"] for r in rows}
    shape = next(s for s in document["charts"]["speedup"]["shapes"] if s["shape"] == "57344 x 8192")
    point = next(p for p in shape["lines"]["billfish"] if p["m"] == 1)
    assert point["speedup"] == pytest.approx(times["cublas"] / times["billfish"], abs=0.005)


def test_bytes_that_movement_moves(recorded):
    """Where a row says how many bytes a microsecond it moved, it is as many as we say."""
    checked = 0
    for row in recorded["attention_movement"].rows:
        moved = charts_data.bytes_moved(row)
        if moved is not None and row["us"] > 10:
            assert moved / row["us"] / 1e3 == pytest.approx(row["gbps"], rel=0.001, abs=0.06)
            checked += 1
    assert checked > 10


def test_a_changed_record_changes_the_figures(document, recorded):
    changed = copy.deepcopy(recorded)
    for row in changed["ablation_gemm"].rows:
        if row["technique"] == "stream_k":
            row["us"] *= 2
    other = build.comparison(changed, FAMILIES, gpu=None)
    before, after = techniques(document), techniques(other)
    one_by_one = (found["marlin", "Stream-K"]["cases"] for found in (before, after))
    for one, two in zip(*one_by_one, strict=True):
        assert two["without_us"] == 2 * one["without_us"]
        assert two["ratio"] == pytest.approx(2 * one["ratio"], abs=0.011)
    before.pop(("marlin", "Stream-K"))
    assert all(after[key] == value for key, value in before.items())


@pytest.mark.parametrize("lost", ["ablation_gemm", "attention_movement", "gemm", "step"])
def test_what_was_not_measured_has_no_figures(recorded, lost):
    # The general kernels' records have ceilings too.
    gone = {lost, "general", "ablation_general", "tutorial"}
    rest = {name: record for name, record in recorded.items() if name not in gone}
    document = build.comparison(rest, FAMILIES, gpu=None)
    assert lost not in document["records"]
    for technique in techniques(document).values():
        assert technique["record"] != lost
        assert bool(technique["cases"]) == (technique["origin"] != build.MISSING)
    for family in document["families"].values():
        for claim in (each for row in family["claims"].values() for each in row):
            assert not claim["values"] or claim["record"] != lost
    assert (document["charts"]["speedup"] is None) == (lost == "gemm")
    assert (document["charts"]["ceilings"] is None) == (lost == "step")


def test_without_any_record():
    document = build.comparison({}, FAMILIES, gpu=None)
    assert all(not t["cases"] for t in techniques(document).values())
    claims = [c for f in document["families"].values() for r in f["claims"].values() for c in r]
    assert all(bool(c["values"]) == (c["record"] == "counted") for c in claims)


def test_general_kernels_by_domain(recorded):
    document = build.comparison({**recorded, **general_records()}, ("general",), gpu=None)
    assert list(document["families"]) == ["general"]
    found = techniques(document)
    tiles = found["general", "transpose: tiles in shared memory"]
    assert (tiles["domain"], tiles["kind"]) == ("data", "coalesced")
    assert [c["ratio"] for c in tiles["cases"]] == [3.1]
    new = found["general", "transpose: something new, 4 threads"]
    assert (new["kind"], new["cases"][0]["case"]) == ("other", "8 x 8 float32, 32")
    assert new["code"][0]["file"].startswith("billfish/kernels/general/transpose")
    missing = [t for t in found.values() if not t["cases"]]
    assert missing
    assert all(t["origin"] == build.MISSING for t in missing)
    (line,) = document["charts"]["general"]
    assert (line["peer"], line["ratio"], line["percent"]) == ("torch", 1.3, 80.0)
    assert document["charts"]["tutorial"][0]["us"] == 9.5


def test_percents_of_general_kernels_are_of_their_own_floor(recorded):
    """A product in float32 is beside the rate of float32, which its row has, not of 16 bits."""
    made = general_records()
    made["general"].rows[0] |= {"flops": 10**9, "floor_us": 2.0}
    document = build.comparison({**recorded, **made}, ("general",), gpu=None)
    (point,) = document["charts"]["kernels"]
    assert (point["kernel"], point["percent"], point["intensity"]) == ("transpose", 80.0, 1953125)
    counts = document["charts"]["domains"]["data"]
    assert [counts[key] for key in ("cases", "with_peer", "even", "near")] == [1, 1, 1, 0]


def test_shares_of_a_decode_step():
    row = {"model": "m", "weights": "int4", "context": 512, "batch": 4}
    parts = {"head": 10, "attention": 30, "qkv": 20, "norm": 5, "down": 40, "gaps": -5, "step": 100}
    rows = [{**row, "part": part, "us": us} for part, us in parts.items()]
    rows += [{**row, "context": 8192, "part": "step", "us": 900}]
    made = {"step": Record("step", "recorded", HEAD, rows)}
    step = build.comparison(made, FAMILIES, gpu=None)["charts"]["step"]
    (batch,) = step["batches"]
    assert (step["context"], batch["batch"], batch["us"]) == (512, 4, 100)
    assert batch["shares"] == {"marlin": 60, "paged_attention": 30, "general": 5, "other": 10}
    order = [(part["part"], part["family"]) for part in batch["parts"]]
    assert order == [("qkv", "marlin"), ("down", "marlin"), ("attention", "paged_attention"),
                     ("norm", "general"), ("head", "other")]  # fmt: skip


def test_what_is_measured_here_is_not_mixed_with_records(recorded):
    """One roof for one GPU; what is recorded stays marked as recorded."""
    document = build.comparison(
        {**recorded, **general_records("measured")}, FAMILIES, gpu="a GPU", seconds=5.0
    )
    assert document["made"]["origin"] == "measured"
    assert {point["family"] for point in document["charts"]["kernels"]} == {"general"}
    assert document["charts"]["ceilings"] == {
        "record": "general", "gbps": 4000, "tflops": 700.5, "float32": None,
    }  # fmt: skip
    assert document["records"]["gemm"]["origin"] == "recorded"
    assert document["records"]["general"]["file"] is None
    assert techniques(document)["marlin", "Stream-K"]["origin"] == "recorded"


def test_queue_depths(recorded):
    rows = [
        {"family": "marlin", "kernel": "hopper_gemm", "technique": name, "setting": "off",
         "case": "64x128 M=1", "us": us, "bytes": 8, "floor_us": 1.0}
        for name, us in (("all on", 2.0), ("queue depth 1", 5.0), ("queue depth 4", 2.5))
    ]  # fmt: skip
    made = {"ablation_gemm": Record("ablation_gemm", "recorded", recorded["gemm"].head, rows)}
    found = techniques(build.comparison(made, ("marlin",), gpu=None))
    queue = found["marlin", "Circular queue in shared memory"]["settings"]
    settings = [(s["setting"], s["us"], s["percent"]) for s in queue]
    assert settings == [(1, 5.0, 20.0), (4, 2.5, 40.0)]
    assert found["marlin", "Asynchronous loads"]["cases"][0]["ratio"] == 2.5


def test_pictures_are_real(document):
    pictures = document["pictures"]
    blocks = pictures["blocks"]
    held = [block for request in blocks["requests"] for block in request["table"]]
    for block, count in enumerate(blocks["references"]):
        assert held.count(block) == count
        assert (blocks["state"][block] == "used") == (count > 0)
    for request in blocks["requests"]:
        assert len(request["table"]) == -(-request["tokens"] // blocks["block_size"])
    assert any(count > 1 for count in blocks["references"])
    assert "cached" in blocks["state"]

    shares = pictures["stream_k"]
    for division in (shares["with"], shares["without"]):
        steps = {}
        for parts in division["blocks"]:
            for tile, count in parts:
                steps[tile] = steps.get(tile, 0) + count
        assert steps == dict.fromkeys(range(division["tiles"]), division["steps"])
        assert len(division["blocks"]) <= division["slots"]
        assert division["busy_percent"] <= 100
    assert shares["with"]["longest"] < shares["without"]["longest"]

    memory = pictures["memory"]
    assert memory["paged"]["used_percent"] > memory["contiguous"]["used_percent"]
    assert memory["contiguous"]["running"] <= memory["slots"] / memory["reserve_tokens"]


def test_the_timeline_keeps_to_the_barriers(document):
    for key in ("with", "without"):
        run = document["pictures"]["queue"][key]
        events = run["events"]
        ends = {}
        for event in events:
            ends.setdefault((event["lane"], event["step"]), []).append(event)
        for step in range(len([e for e in events if e["lane"] == "load"])):
            (load,) = ends["load", step]
            first, second = ends["dequantize", step]
            one, two = ends["multiply", step]
            assert load["end"] <= first["start"] < first["end"] <= one["start"]
            assert first["end"] <= second["start"]
            assert second["end"] <= two["start"]
            assert one["end"] <= two["start"]
            if step >= run["depth"]:  # a stage is filled again once it has been emptied
                assert ends["multiply", step - run["depth"]][1]["end"] <= load["start"]
            if not run["overlap"]:
                assert one["end"] <= second["start"]


def test_the_document_is_json_and_checked(document):
    again = json.loads(json.dumps(document, allow_nan=False))
    assert build.check(again, "x") == document
    for key in ("format", "records", "charts"):
        with pytest.raises(RecordError):
            build.check({k: v for k, v in document.items() if k != key}, "x")
    with pytest.raises(RecordError):
        build.check({**document, "format": 99}, "x")
