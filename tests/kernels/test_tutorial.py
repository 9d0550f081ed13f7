"""docs/write-a-kernel.md: its code runs, is what is timed, and its figures are recorded ones."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from billfish.bench import tutorial
from billfish.compare.figures import shown, sized
from tests.kernels.interpreter import run_in_interpreter

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "write-a-kernel.md"
RECORD = ROOT / "benchmarks" / "tutorial.json"


def code_blocks():
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_in_interpreter():
    run_in_interpreter("tutorial_triton.py")


def functions(source):
    """The text of each function, decorators included."""
    lines = source.splitlines()
    return {
        node.name: "\n".join(lines[node.decorator_list[0].lineno - 1 if node.decorator_list
                                   else node.lineno - 1 : node.end_lineno])
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }  # fmt: skip


def test_the_page_shows_what_is_timed():
    on_page, timed = functions("\n".join(code_blocks())), functions(inspect.getsource(tutorial))
    assert {"reference", "naive", "fused", "coalesced", "tiled"} <= set(on_page)
    for name, text in on_page.items():
        assert timed[name] == text


def test_the_pages_table_is_the_record():
    """Where there is no record there are no figures; where there is one, they are its."""
    line = r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$"
    rows = re.findall(line, PAGE.read_text(), re.MULTILINE)
    table = {step: (nbytes, us, part) for step, nbytes, us, part in rows if step in tutorial.STEPS}
    assert list(table) == list(tutorial.STEPS)
    channels, pixels = tutorial.SIZE
    for step, (_, passes) in tutorial.STEPS.items():
        assert table[step][0] == sized(passes * 4 * channels * pixels)
    if not RECORD.exists():
        assert {row[1:] for row in table.values()} == {("not measured yet",) * 2}
        return
    for row in json.loads(RECORD.read_text())["rows"]:
        percent = shown(100 * row["floor_us"] / row["us"], "%") + "%"
        assert table[row["step"]] == (sized(row["bytes"]), shown(row["us"]), percent)
