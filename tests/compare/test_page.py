"""The page: every figure is the document's, every link leads to code, nothing is from elsewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import billfish
from billfish.compare import build, report
from billfish.compare.figures import Figure, number, say, shown, sized, traced
from tests.compare.conftest import FAMILIES, general_records

ROOT = Path(billfish.__file__).parents[1]


class Parsed(HTMLParser):
    """data: (place, value, text); marks: (title, places); text: what is visible besides; links."""

    SILENT = ("script", "style", "pre", "code", "title")
    VOID = ("meta", "line", "rect", "circle", "path", "br", "link", "input")

    def __init__(self, html):
        super().__init__()
        self.stack, self.data, self.marks, self.links, self.text = [], [], [], [], []
        self.loads, self.ids = [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.loads += [attributes[k] for k in ("src", "srcset", "poster") if k in attributes]
        if tag == "link":
            self.loads.append(attributes["href"])
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag not in self.VOID:
            self.stack.append((tag, attributes))
        if tag == "a":
            self.links.append(attributes)
        if tag == "data":
            self.data.append([attributes["data-path"], float(attributes["value"]), ""])
        if "data-paths" in attributes:
            self.marks.append(["", attributes["data-paths"].split("\n")])

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        assert tag in self.VOID, tag

    def handle_endtag(self, tag):
        while self.stack and self.stack.pop()[0] != tag:
            pass

    def handle_data(self, text):
        tags = [tag for tag, _ in self.stack]
        kinds = " ".join(a.get("class") or "" for _, a in self.stack).split()
        if tags[-1:] == ["data"]:
            self.data[-1][2] += text
        elif tags[-1:] == ["title"] and "svg" in tags:
            self.marks[-1][0] += text
        elif not set(tags) & set(self.SILENT) and not set(kinds) & {"tick", "id", "mark"}:
            self.text.append(text)


def at(document, pointer):
    for key in pointer.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        document = document[int(key) if isinstance(document, list) else key]
    return document


def strings(tree):
    if isinstance(tree, dict):
        for value in tree.values():
            yield from strings(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from strings(value)
    elif isinstance(tree, str):
        yield tree


NAMES = ("FP16", "INT4", "W4A16", "16-bit", "16 bits", "H200", "L2", "3%", "100%", "Llama-3-8B",
         "FlashAttention-3", "paged_attention v1", "paged_attention v2", "4x fewer bits", "A'",
         "4 bytes a thread", "at 1.", "of 512 tokens", "of 128 columns", "32 query heads",
         "8 KV heads", "bf16")  # fmt: skip
"""What has digits and is no measurement."""


def without(text, parts):
    """The text without these, the longest first. Whole numbers only: 2 is no part of 12 or 2.5."""
    for part in parts:
        if part in text:
            text = re.sub(rf"(?<![\d.,]){re.escape(part)}(?![\d]|[.,]\d)", " ", text)
    return text


def longest_first(parts):
    """Those that have digits, as they are and with spaces for underscores."""
    found = {each for part in parts for each in (part, part.replace("_", " "))}
    return sorted((each for each in found if re.search(r"\d", each)), key=len, reverse=True)


@pytest.mark.parametrize("which", ["recorded", "complete"])
def test_every_figure_is_the_documents(document, complete, which):
    document = complete if which == "complete" else document
    page = Parsed(report.page(document))
    assert len(page.data) > 500
    for place, value, text in page.data:
        there = at(document, place)
        assert value == pytest.approx(there, rel=1e-11)
        assert text in {shown(there), shown(there, "x"), shown(there, "%"), sized(there)}
    assert len(page.marks) > 500
    names = longest_first([*strings(document), *NAMES])
    for title, places in page.marks:
        assert places
        values = [at(document, place) for place in places]
        said = [f(v) for v in values for f in (shown, sized)]
        said += [shown(v, unit) + unit for v in values for unit in "x%"]
        assert any(word in title for word in said)
        rest = re.sub(r"(thread |logical )?block \d+", "", title)  # the name of a place
        rest = without(without(rest, names), longest_first(said))
        assert not re.search(r"\d", rest), (title, rest)


def test_no_other_figures_are_visible(complete):
    page = Parsed(report.page(complete))
    allowed = [(r["commit"] or "")[:12] for r in complete["records"].values()]
    allowed += [f"{k} {v}" for r in complete["records"].values() for k, v in r["versions"].items()]
    allowed = longest_first([*allowed, *strings(complete), *NAMES])
    for text in filter(re.compile(r"\d").search, page.text):
        rest = without(text, allowed)
        assert not re.search(r"\d", rest), (text, rest)


COMPARED = {
    "marlin": (
        "Asynchronous loads", "Circular queue in shared memory", "Stream-K", "Double buffering",
        "Weights leave L2 first", "Activations stay in L2", "Programmatic dependent launch",
    ),
    "paged_attention": (
        "Fused write", "Fused block read", "One-launch block copy", "Split-KV", "GQA packing",
    ),
}  # fmt: skip
DRAWN = (
    "Roofline: every kernel", "How near every kernel comes to its floor",
    "What each technique is worth", "Speed-up over FP16 by number of tokens",
    "Block tables of three sequences", "Loads, dequantization and products of a queue in time",
    "Decode beside attention over a contiguous cache", "beside the best of their peers",
)  # fmt: skip


def test_what_is_compared_and_drawn(document):
    """Every technique of the families has its row, with a link to code; every picture is there."""
    html = report.page(document)
    labels = re.findall(r'<svg[^>]*aria-label="([^"]+)"', html)
    for title in DRAWN:
        assert any(title in label for label in labels), title
    assert "ideal: 4x fewer bits" in html
    for family, names in COMPARED.items():
        found = {t["name"]: t for t in document["families"][family]["techniques"]}
        for name in names:
            assert found[name]["code"]
            assert found[name]["switch"]
            assert f">{name}<" in html
    kinds = {t["kind"] for t in document["families"]["general"]["techniques"]}
    assert kinds >= {"coalesced", "shared", "fused", "cached"}
    for name, family in document["families"].items():
        for row in ("function", "focus", "memory", "techniques", "performance", "uses"):
            assert family["claims"][row], (name, row)


def test_every_kernel_recorded_is_under_the_roof(document, recorded):
    drawn = {(p["family"], p["kernel"]) for p in document["charts"]["kernels"]}
    timed = [r for r in recorded["general"].rows if r["impl"] == "billfish" and "us" in r]
    assert {("general", row["kernel"]) for row in timed} <= drawn
    modes = {r["mode"] for r in recorded["attention"].rows if r["impl"] == "billfish"}
    assert {("paged_attention", mode) for mode in modes} <= drawn
    assert ("marlin", "INT4 product") in drawn


def test_a_changed_figure_changes_the_page(document):
    place = "/families/marlin/techniques/2/cases/0/without_us"
    before = report.page(document)
    case = document["families"]["marlin"]["techniques"][2]["cases"][0]
    recorded_us, case["without_us"] = case["without_us"], 123456.5
    after = report.page(document)
    (shown_before,) = [text for p, _, text in Parsed(before).data if p == place]
    (shown_after,) = [text for p, _, text in Parsed(after).data if p == place]
    assert (shown_before, shown_after) == (shown(recorded_us), "123,456")
    bar = f'style="width:{100 * case["with_us"] / case["without_us"]:.1f}%"'
    assert bar in after
    assert before.count(bar) < after.count(bar)


def test_only_figures_of_the_document_can_be_shown():
    figure = traced({"a/b": [{"us": 2}]})["a/b"][0]["us"]
    assert (figure, figure.path) == (2, "/a~1b/0/us")
    assert 'data-path="/a~1b/0/us">2</data>' in number(figure)
    said = say("{} us, {x}, {%}, {b}", figure, figure, figure, figure)
    assert said.text == "2 us, 2.00x, 2.0%, 2 bytes"
    assert said.paths == (figure.path,) * 4
    for made in (figure * 2, 3.5, 7):
        with pytest.raises(TypeError):
            number(made)
        with pytest.raises(TypeError):
            say("{}", made)
    assert isinstance(max(figure, Figure(1, "/x")), Figure)


@pytest.mark.parametrize(
    ("value", "text"),
    [(6.38, "6.38"), (11.8, "11.8"), (14322.44, "14,322"), (20585, "20,585"), (0.5, "0.5"),
     (1234.56, "1235"), (16384, "16,384"), (0, "0")],
)  # fmt: skip
def test_figures_as_text(value, text):
    assert shown(value) == text


def test_links_to_code_lead_to_files(document, tmp_path):
    page = Parsed(report.page(document, folder=tmp_path))
    code = [a["href"] for a in page.links if a.get("class") == "code"]
    assert len(code) > 40
    for href in code:
        path, lines = re.fullmatch(r"(.+\.py)#L(\d+)-L(?=\d)(\d+)", href).group(1, 3)
        assert int(lines) <= len((tmp_path / path).resolve().read_text().splitlines())
    inside = [a["href"] for a in page.links if a["href"].startswith("#")]
    assert {href[1:] for href in inside} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_links_to_code_on_the_web(document):
    page = Parsed(report.page(document, source_url="https://host.example/p/blob/main/"))
    code = [a["href"] for a in page.links if a.get("class") == "code"]
    root = "https://host.example/p/blob/main/"
    assert all((ROOT / h.removeprefix(root).partition("#")[0]).is_file() for h in code)


def test_the_page_needs_nothing_else(document):
    html = report.page(document)
    assert Parsed(html).loads == []
    assert not re.search(
        r"url\((?!data:)|@import|https?://", html.partition('type="application/json"')[0]
    )
    assert "default-src 'none'" in html
    assert re.search(r"script-src 'sha256-[\w+/]{43}='", html)
    assert "<!-- " not in html.partition("<script")[0]


def test_without_a_gpu_nothing_is_said_to_be_measured(document):
    html = report.page(document)
    assert 'id="no-gpu"' in html
    assert "nothing on this page was measured here" in html
    assert "NVIDIA H200, 2026-12-01" in html
    assert 'class="tag measured"' not in html


def test_with_a_gpu_what_is_recorded_is_marked(recorded):
    document = build.comparison(
        {**recorded, **general_records("measured")}, FAMILIES, gpu="a GPU & more", seconds=7.0,
        left_out=["<nothing>: no time left"],
    )  # fmt: skip
    html = report.page(document)
    assert 'id="no-gpu"' not in html
    assert "a GPU &amp; more" in html
    assert "&lt;nothing&gt;: no time left" in html
    assert 'class="tag measured"' in html
    assert 'class="tag recorded"' in html


@pytest.mark.parametrize("families", [("marlin",), ("paged_attention",), ("general",), FAMILIES])
def test_without_any_record_the_page_says_so(families):
    html = report.page(build.comparison({}, families, gpu=None))
    page = Parsed(html)
    families = [place for place, *_ in page.data if place.startswith("/families")]
    # What the engine counts without a GPU is there, and places in the code.
    assert all("/code/" in p or "/paged_attention/claims/" in p for p in families)
    assert html.count('class="missing">not measured yet') > 5


def test_text_of_records_is_no_html(recorded):
    changed = general_records()
    for record in changed.values():
        record.head["device"] = "<script>alert(1)</script>"
        for row in record.rows:
            for key in ("kernel", "case", "size", "step"):
                if key in row:
                    row[key] = f"{row[key]}<b>"
            row["technique"] = row.get("technique", "") and row["technique"] + "</script>"
    for row in changed["ablation_general"].rows:
        row["technique"] = row["technique"].replace("all</script>", "all")
    html = report.page(build.comparison(changed, ("general",), gpu=None))
    body, _, rest = html.partition('<script type="application/json"')
    assert "<script>alert" not in body
    assert "<b>:" not in body
    assert rest.count("</script>") == 2
