"""Tables of the documentation say what the records say."""

import re
from pathlib import Path

import pytest

from billfish.bench.tutorial import STEPS
from billfish.compare import build, tables
from billfish.compare.records import Record
from billfish.errors import RecordError
from tests.compare.conftest import FAMILIES, HEAD, general_records

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def cells(table):
    """Rows of a table of Markdown, without its head."""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return rows[2:]


@pytest.fixture(scope="module")
def complete(recorded):
    """With general kernels too, which are made up."""
    return build.comparison({**recorded, **general_records()}, FAMILIES, gpu=None)


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
    assert found["transpose: tiles in shared memory"] == ["1", "3.10x"]
    assert "sobel: fused" not in found


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
    rows = [{**row, "value": 9000.0}, {**row, "value": 3000.0, "reserve_tokens": 16384}]
    made = {"engine_cache": Record("engine_cache", "recorded", HEAD, rows)}
    table = tables.TABLES["cache"](build.comparison(made, ("paged_attention",), gpu=None))
    assert cells(table)[0][:2] == ["blocks", "9000"]
    assert cells(table)[1] == ["room for 16,384 tokens a request", "3000", "3.00x"]


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
