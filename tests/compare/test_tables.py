"""Tables of the documentation say what the records say."""

import re
from pathlib import Path

import pytest

from billfish.bench.tutorial import STEPS
from billfish.compare import build, tables
from billfish.compare.markdown import commits_of, devices_of
from billfish.compare.records import Record
from billfish.errors import RecordError
from tests.compare.conftest import HEAD, general_records

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def cells(table):
    """Rows of a table of Markdown, without its head."""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_documentation_is_of_these_records(document):
    places = {}
    for path in PAGES:
        page = path.read_text()
        assert page == tables.filled(page, document), f"{path.name} is old: run `make tables`"
        places |= dict.fromkeys((match[2] for match in tables.PLACE.finditer(page)), path.name)
        assert page.count("<!-- ") == 2 * len(tables.PLACE.findall(page))
    assert set(places) == set(tables.TABLES)


def test_figures_of_general_kernels(complete):
    table = tables.TABLES["general data"](complete)
    assert cells(table) == [["`transpose` 8 x 8 float32", "2.5", "80.0%", "torch", "3.25", "1.30x"]]
    assert "1 of 1 are at 0.95 of their best peer's speed or faster, 0 of 1 at 90%" in table
    assert f"{HEAD['device']}, {HEAD['date']}, commit 000000000000; torch 1." in table
    assert tables.TABLES["general signal"](complete) == "Not measured yet."
    found = {row[0]: row[1:] for row in cells(tables.TABLES["techniques"](complete))}
    code = "[`{}`](../billfish/kernels/general/transpose_gpu.py)"
    linked = ", ".join(map(code.format, ("_transpose_kernel", "transpose_copy")))
    assert found["transpose: tiles in shared memory"] == [linked, "1", "3.10x"]
    assert found["sobel: fused"][1:] == ["0", tables.NOT_YET]


def test_a_case_that_came_out_wrong_is_told():
    made = general_records()
    made["general"].rows[0].pop("us")
    document = build.comparison(made, ("general",), gpu=None)
    assert document["charts"]["general"] == []
    assert "`transpose` 8 x 8 float32 | wrong result" in tables.TABLES["general data"](document)


def test_steps_of_the_tutorial(complete):
    rows = cells(tables.TABLES["tutorial"](complete))
    assert [row[0] for row in rows] == list(STEPS)
    assert rows[1] == ["naive", "201 MB", "9.5", "21.1%"]
    assert rows[2][2:] == ["not measured yet"] * 2


def test_blocks_beside_room_set_aside(document):
    assert "not recorded" not in tables.TABLES["cache"](document) or not document["charts"]["cache"]
    row = {"measure": "output_tok_s", "impl": "billfish", "batch": 256, "prompt": 512}
    rows = [
        {**row, "num_blocks": blocks, "reserve_tokens": reserve, "value": value}
        for blocks, reserve, value in (
            (60000, None, 9000.0), (60000, 16384, 6000.0), (16384, None, 8000.0),
            (16384, 16384, 2000.0), (512, 16384, 1.0),
        )
    ]  # fmt: skip
    made = {"engine_cache": Record("engine_cache", "recorded", HEAD, rows)}
    table = tables.TABLES["cache"](build.comparison(made, ("paged_attention",), gpu=None))
    room = "16,384 tokens a request"
    assert cells(table) == [
        ["60,000", room, "6000", "9000", "1.50x"],
        ["16,384", room, "2000", "8000", "4.00x"],
    ]


def product(impl, m, us, **changes):
    row = {"n": 64, "k": 128, "m": m, "dtype": "float16", "group_size": 128, "impl": impl}
    return {**row, **changes, **({} if us is None else {"us": us})}


def test_products_beside_their_peers():
    rows = [
        product("billfish", 1, 2.0), product("marlin", 1, 5.0), product("humming", 1, 4.0),
        product("cublas", 1, 3.0), product("billfish", 8, 2.5), product("marlin", 8, None),
        product("cublas", 16, 3.0),
    ]  # fmt: skip
    other = {"dtype": "bfloat16", "group_size": 32}
    formats = [
        product("billfish", 1, 4.0),
        product("cublas", 1, 3.0),
        product("billfish", 8, 4.0, **other),
    ]
    made = {
        name: Record(name, "recorded", HEAD, found)
        for name, found in (("gemm", rows), ("gemm_formats", formats))
    }
    document = build.comparison(made, ("marlin",), gpu=None)
    table = tables.TABLES["products"](document)
    assert cells(table) == [["64 x 128", "2 (2.00, 1.50)", "2.5 (–, –)"]]
    assert "geometric mean (least): M = 1: 2.00 (2.00)." in table
    assert "Behind cuBLAS by more than 5%: none." in table
    assert cells(tables.TABLES["products of other formats"](document)) == [
        ["64 x 128, float16, groups of 128", "4 (–, 0.75)", "–"],
        ["64 x 128, bfloat16, groups of 32", "–", "4 (–, –)"],
    ]
    behind = "Behind cuBLAS by more than 5%: 64 x 128, float16, groups of 128 at M = 1."
    assert behind in tables.TABLES["products of other formats"](document)
    assert tables.TABLES["products switched"](document) == "Not measured yet."
    assert tables.TABLES["products of a layer"](document) == "Not measured yet."


def test_switches_and_layers_of_products():
    row = {"family": "marlin", "kernel": "hopper_gemm", "bytes": 64, "floor_us": 1.0}
    times = {"all on": 2.0, "stream_k": 3.0, "deep queue": 5.0, "queue depth 4": 2.5}
    rows = [
        {**row, "technique": name, "setting": "off", "case": "64x128 M=1", "us": us}
        for name, us in times.items()
    ]
    chain = {"case": "chain M=1", "technique": "products", "us": 3.0, "bytes": 9, "floor_us": 2.0}
    made = {
        name: Record(name, "recorded", HEAD, found)
        for name, found in (("ablation_gemm", rows), ("gemm_chain", [chain]))
    }
    document = build.comparison(made, ("marlin",), gpu=None)
    found = dict(cells(tables.TABLES["products switched"](document)))
    assert found == {
        "nothing": "2", "Stream-K": "3", "Circular queue in shared memory": "5",
        "queue of 4 stages": "2.5", "floor: the bytes at the rate of one long read": "1",
    }  # fmt: skip
    layer = cells(tables.TABLES["products of a layer"](document))
    assert layer == [["chain M=1", "products", "3", "2", "1.50"]]


def test_a_whole_model_on_a_gpu():
    row = {"impl": "billfish", "measure": "tpot_ms", "batch": 1, "prompt": 512, "value": 2.0}
    many = {**row, "measure": "output_tok_s", "batch": 1000, "prompt": 220000}
    slow, quick = (
        {"kind": kind, "steps": steps, "tokens": 2048, "seconds": seconds, "waited": 0.125}
        for kind, steps, seconds in (("decode, up to 32", 1500, 1.5), ("prompts", 2, 3.0))
    )
    start = {**row, "measure": "start_s", "prompt": 64, "compiled": "cold", "value": 12.5}
    ours = [
        {**row, "batch": 32, "prompt": 8192, "value": 10.0}, {**row, "head": "bfloat16"},
        {**row, "head": "int8", "value": 1.75}, {**row, "weights": "dense", "value": 4.0},
        {**row, "sampling": '{"temperature": 1.0, "top_k": 40}', "prompt": 128, "value": 2.5},
        {**start, "phases": {"imports": 4.0, "graphs": 1.5}},
        {**many, "seats": 512, "value": 14000.0, "steps": [slow, quick]},
        {**many, "seats": 1000, "value": 13000.0, "steps": [quick]}, {**many, "value": 12000.0},
    ]  # fmt: skip
    theirs = [
        {**row, "impl": "vllm-marlin", "value": 3.0}, {**row, "impl": "vllm-bf16", "value": 4.8},
        {**row, "impl": "vllm-machete", "value": 3.5},
    ]  # fmt: skip
    step = {"part": "o", "batch": 1, "us": 287.8, "floor_us": 67.3}
    gaps = {"part": "gaps", "batch": 1, "us": 20.2}
    made = {
        name: Record(name, "recorded", HEAD, rows)
        for name, rows in
        (("engine_gpu", ours), ("engine_vllm", theirs), ("step", [step, gaps]))
    }  # fmt: skip
    document = build.comparison(made, ("paged_attention",), gpu=None)

    def table(name: str) -> list[list[str]]:
        return cells(tables.TABLES[f"engine {name}"](document))

    assert table("decode") == [
        ["billfish", "2", "10"],
        ["with the head in INT8", "1.75", "–"],
        ["billfish, bfloat16 weights", "4", "–"],
        ["vLLM, INT4, recorded", "3", "–"],
        ["vLLM's time over ours", "1.50x", "–"],
    ]
    assert tables.TABLES["engine prefill"](document) == "Not measured yet."
    assert table("sampling") == [["temperature 1.0, top_k 40", "2.5"]]
    assert table("starts") == [["first", "12.5", "4", "1.5"]]
    assert table("many") == [
        ["billfish, up to 512 at a time", "14,000"], ["billfish, up to 1,000 at a time", "13,000"],
        ["billfish", "12,000"],
    ]  # fmt: skip
    assert table("many steps") == [
        ["prompts", "2", "2,048", "3.00", "0.12"],
        ["decode, up to 32", "1,500", "2,048", "1.50", "0.12"],
    ]
    assert table("step") == [["o", "288", "67"], ["gaps", "20", "–"]]


def test_a_model_on_a_gpu_beside_float32():
    row = {"dtype": "bfloat16", "tokens": 1280, "same_best": 1200, "texts": 20, "same_texts": 3,
           "logprob_mean": 0.03, "logprob_max": 0.5}  # fmt: skip
    made = {"engine_agreement": Record("engine_agreement", "recorded", HEAD, [row])}
    table = tables.TABLES["engine agreement"](build.comparison(made, ("marlin",), gpu=None))
    assert cells(table) == [["bfloat16", "1200 of 1280", "0.0300", "0.5000", "3 of 20"]]
    nothing = tables.TABLES["engine agreement"](build.comparison({}, ("marlin",), gpu=None))
    assert nothing.startswith("Not measured yet.")


def test_time_on_the_host():
    host = {"m": 1, "host_us": 3.0, "host_us_torch_matmul": 4.5}
    made = {"gemm": Record("gemm", "recorded", {**HEAD, "host": host}, [product("cublas", 1, 2.0)])}
    table = tables.TABLES["products on the host"](build.comparison(made, ("marlin",), gpu=None))
    assert cells(table) == [["`benchmarks/gemm.json`", "3", "–", "4.5", "–"]]


def test_claims_of_the_families(complete):
    rows = {row[0]: row[1:] for row in cells(tables.TABLES["families"](complete))}
    speed = complete["families"]["marlin"]["claims"]["performance"][0]
    assert f"{speed['label']}: **" in rows["performance"][0]
    for value in speed["values"]:
        assert f"{value:.2f}" in rows["performance"][0]
    assert all(len(row) == 3 for row in rows.values())


def test_a_table_without_a_name_is_refused(complete, tmp_path, monkeypatch):
    page = "a\n<!-- table nothing -->\n<!-- end of table -->\n"
    with pytest.raises(RecordError, match="no such table"):
        tables.filled(page, complete)
    monkeypatch.setattr(tables, "recorded_document", lambda: complete)
    (tmp_path / "a.md").write_text(page.replace("nothing", "tutorial"))
    (tmp_path / "b.md").write_text("no table\n")
    tables.main(str(tmp_path))
    assert re.search(r"\| naive \| 201 MB \| 9.5 \| 21.1% \|\n", (tmp_path / "a.md").read_text())
    assert (tmp_path / "b.md").read_text() == "no table\n"


def test_attention_beside_its_peers(document, monkeypatch):
    row = {"mode": "decode", "case": "1024 x 1", "heads_q": 64, "heads_kv": 8}
    times = {"billfish": 8.0, "fa3": 12.0, "paged_attention_v2": 20.0}
    rows = [{**row, "impl": impl, "us": us} for impl, us in times.items()]
    rows.append({**row, "case": "4096 x 1", "impl": "billfish", "us": 13.0})
    moves = [
        {"mode": mode, "batch": 16, "impl": impl, "us": us}
        for mode, impl, us in (
            ("write", "billfish", 1.5), ("rotate and write", "plain", 2.5), ("copy", "plain", 9.0)
        )
    ]  # fmt: skip
    switched = [
        {"kernel": "hopper_prefill", "technique": technique, "case": "2048", "us": us}
        for technique, us in (("all", 69.0), ("GQA packing", 80.0))
    ]
    made = {"attention": rows, "attention_movement": moves, "ablation_attention": switched}
    monkeypatch.setattr(
        tables.records,
        "recorded",
        lambda: {name: Record(name, "recorded", HEAD, found) for name, found in made.items()},
    )
    table = tables.TABLES["attention decode 64 8"](document)
    assert cells(table) == [
        ["decode 1024 x 1", "8", "12", "20", "1.50", "2.50"],
        ["decode 4096 x 1", "13", "–", "–", "–", "–"],
    ]
    assert tables.TABLES["attention decode 32 8"](document) == "Not measured yet."
    assert cells(tables.TABLES["attention writes"](document)) == [
        ["16", "1.5", "–", "–", "–", "2.5"]
    ]
    assert cells(tables.TABLES["attention prefill switched"](document)) == [
        ["nothing", "69"], ["GQA packing", "80"]
    ]  # fmt: skip
    assert tables.TABLES["attention decode switched"](document) == "Not measured yet."


def test_devices_stand_once_with_their_dates():
    taken = [("b", "2026-01-03"), ("a", "2026-01-02"), ("b", "2026-01-01"), ("b", "2026-01-03")]
    records = [{"device": device, "date": date} for device, date in taken]
    assert devices_of(records) == "a, 2026-01-02; b, 2026-01-01 and 2026-01-03"


@pytest.mark.parametrize(("rows", "said"), [(1, "1 row of 1"), (2, "2 rows of 1")])
def test_rows_of_an_earlier_commit_are_counted(rows, said):
    record = {"commit": "0" * 40, "earlier": {"1" * 40: rows}}
    assert commits_of(record) == f"{'0' * 12} ({said}{'1' * 11})"
