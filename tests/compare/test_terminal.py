"""The comparison in a terminal: it fits any width from 80, and says what the document says."""

import copy
import io
import re

import pytest
from rich.console import Console

from billfish.compare import build, terminal
from billfish.compare.figures import shown
from tests.compare.conftest import FAMILIES


def at_width(document, width):
    console = Console(file=io.StringIO(), width=width)
    terminal.show(document, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 99, 100, 119, 120, 200])
def test_it_fits_and_nothing_is_cut(complete, width):
    said = at_width(complete, width)
    assert max(map(len, said.splitlines())) <= width
    assert "…" not in said
    words = " ".join(re.sub(r"[│─╭╮╰╯]", " ", said).split())
    assert terminal.FLOOR in words
    for title in ("Marlin", "PagedAttention", "General CUDA kernels: Parallel data processing"):
        assert re.search(rf"^{title} *$", said, re.MULTILINE)
    assert ("code" in said.split("\nMarlin ")[-1].split("─")[0]) == (width >= 140)


def test_a_technique_is_said_with_its_best_case(complete):
    lines = at_width(complete, 200).splitlines()
    for family in complete["families"].values():
        for technique in filter(lambda each: each["cases"], family["techniques"]):
            (line,) = [x for x in lines if x.startswith(f" {technique['name']}  ")
                       and technique["code"][0]["file"] in x]  # fmt: skip
            best = max(technique["cases"], key=lambda case: case["ratio"])
            for figure in (shown(best["ratio"], "x"), shown(best["with_us"]),
                           shown(best["without_us"]), best["case"]):  # fmt: skip
                assert f" {figure} " in line


def test_what_was_not_measured_is_one_line_a_family():
    document = build.comparison({}, FAMILIES, gpu=None)
    said = " ".join(at_width(document, 80).split())
    missing = [t["name"] for t in document["families"]["general"]["techniques"] if not t["cases"]]
    assert f"General CUDA kernels, not measured yet: {', '.join(missing)}" in said


def test_words_of_a_document_are_no_markup(complete):
    complete = copy.deepcopy(complete)
    family = complete["families"]["marlin"]
    family["title"] = family["techniques"][0]["name"] = "[red]x[/red]"
    for width in (80, 200):
        assert "[red]x[/red]" in at_width(complete, width)
