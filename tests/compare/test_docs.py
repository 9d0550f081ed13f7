"""Links of the documentation: files are there, and have the symbols that a link names."""

import bisect
import json
import re
from pathlib import Path

import pytest

from billfish.compare import links
from billfish.compare.catalogue import FAMILIES as CATALOGUE
from billfish.compare.catalogue import KINDS
from billfish.compare.topics import benchmarked

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def found(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return LINK.findall(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for words, target in found(page):
        path, _, place = target.partition("#")
        if target.startswith(("http://", "https://")):
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), (words, target)
        if place and there.suffix == ".md":
            heads = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert place in slugs, target


def test_what_a_rounded_head_costs_is_what_is_recorded():
    page = (ROOT / "docs" / "gpu_engine.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "head_rounding.json").read_text())["rows"]
    for row in rows:
        share, mean = f"{100 * row['same_best']:.1f}%", f"{row['logprob_mean']:.3f}"
        said = rf"{row['head']}(?: gives the same best token)? in {share}.*?off by {mean}"
        assert re.search(said, page), row
    assert {row["head"] for row in rows} == {"int8", "int4"}


def test_times_of_the_engine_in_sentences_are_those_recorded():
    rows = {
        name: json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())["rows"]
        for name in ("engine_gpu", "engine_cache")
    }
    page = (ROOT / "docs" / "gpu_engine.md").read_text()
    tpot, dense = (
        {
            row["batch"]: row["value"]
            for row in rows["engine_gpu"]
            if row["measure"] == "tpot_ms" and row["prompt"] == 512
            if (row["weights"], row["head"]) == (weights, "bfloat16")
        }
        for weights in ("int4", "dense")
    )
    lead = {batch: f"{value / tpot[batch]:.2f}x" for batch, value in dense.items()}
    assert f"INT4 is {lead[1]} as fast for one request and {lead[128]} for 128." in page
    said = " / ".join(f"{tpot[batch]:.1f}" for batch in (1, 32, 256))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"for 1 / 32 / 256 requests in {said} ms" in readme
    start = {
        row["compiled"]: row["value"] - row["phases"]["imports"]
        for row in rows["engine_gpu"]
        if row["measure"] == "start_s"
    }
    said = f"without its imports it takes {start['warm']:.1f} seconds, the first one"
    assert f"{said} {start['cold']:.0f}." in page
    by_memory = sorted(rows["engine_cache"], key=lambda row: (row["num_blocks"], row["value"]))
    for apart, blocks in zip(by_memory[::2], by_memory[1::2], strict=True):
        assert apart["num_blocks"] == blocks["num_blocks"]
        assert (apart["reserve_tokens"], blocks["reserve_tokens"]) == (16384, None)
        said = f"{blocks['requests_s']:.1f} of them a second against {apart['requests_s']:.1f}"
        said += f", done after {blocks['mean_request_s']:.2f} seconds on average against"
        assert f"{said} {apart['mean_request_s']:.2f}" in page


NUMBER = r"\d[\d,]*(?:\.\d+)?"
TIMES = re.compile(rf"((?:{NUMBER}(?:, and |, | and | to | against )?)+) ?(µs|us|ms)\b")


def figures(value):
    """All numbers of a record."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from figures(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_times_in_sentences_are_figures_of_a_record(page):
    """Some record has a number that rounds to each, perhaps in the next larger unit."""
    files = (ROOT / "benchmarks").glob("*.json")
    known = sorted({n for file in files for n in figures(json.loads(file.read_text()))})
    text = re.sub(r"<!-- table.*?end of table -->|^```.*?^```|^\|.*?$", "", page.read_text(),
                  flags=re.MULTILINE | re.DOTALL)  # fmt: skip
    for match in TIMES.finditer(" ".join(text.split())):
        for said in re.findall(NUMBER, match[1]):
            digits = said.strip(",").replace(",", "")
            half = 0.51 * 10.0 ** -len(digits.partition(".")[2])
            for scale in (1.0, 1000.0) if match[2] == "ms" else (1.0,):
                least, most = (scale * (float(digits) + end) for end in (-half, half))
                at = bisect.bisect_left(known, least)
                if at < len(known) and known[at] <= most:
                    break
            else:
                pytest.fail(f"{digits} {match[2]} is in no record: ... {match[0]} ...")


@pytest.mark.parametrize("family", CATALOGUE, ids=lambda family: family.name)
def test_the_page_of_a_family_explains_its_techniques(family):
    """Each has a diagram, or shares one, and its code is linked."""
    page = (ROOT / family.page).read_text()
    linked = set(re.findall(r"\]\(\.\./([\w/]+\.py)\)", page))
    explained = re.findall(r"^\*\*(.+?)\*\*.*?(?=^\*\*|^#)", page, re.MULTILINE | re.DOTALL)
    drawn = re.findall(r"^\*\*(?:(?!^\*\*|^#)[\s\S])*?^```\n", page.replace("\r", ""), re.MULTILINE)
    assert len(explained) == len(drawn) >= 5
    for technique in family.techniques or benchmarked():
        files = {links.resolve(name)["file"] for name in technique.code}
        assert files & linked, technique
        assert family.techniques or f"**{KINDS[technique.kind]}.**" in page


@pytest.mark.parametrize("page", ["w4a16.md", "paged_attention.md", "general.md"])
def test_links_name_symbols_of_their_files(page):
    checked = 0
    for words, target in found(ROOT / "docs" / page):
        for symbol in re.findall(r"`([A-Za-z_][\w.]*)`", words):
            path = (ROOT / "docs" / target).resolve()
            if path.suffix == ".py" and path.is_relative_to(ROOT / "billfish"):
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                assert links.exists(f"{module}:{symbol}"), (symbol, target)
                checked += 1
    assert checked > 5
