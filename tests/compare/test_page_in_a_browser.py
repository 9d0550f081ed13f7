"""The report in a real Chromium: what a person sees and does."""

import itertools
import json
import os
import random
import shutil

import pytest

from billfish.compare import build, report
from billfish.compare.figures import shown
from tests.compare.conftest import FAMILIES, general_records

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: install it (on Debian: apt-get install chromium)"
)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
         "--disable-background-networking", "--disable-component-update")  # fmt: skip
PATIENCE_MS = 90_000


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=list(FLAGS), timeout=PATIENCE_MS
        )
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser, document, tmp_path):
    """open_page(**context options): the report, which asks for nothing and logs no error."""
    contexts, problems = [], []
    path = tmp_path / "comparison.html"

    def open_it(shown=document, **options):
        path.write_text(report.page(shown, folder=tmp_path))
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text))
        page.on("request", lambda r: r.url == path.as_uri() or problems.append(r.url))
        page.goto(path.as_uri())
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert problems == []


def test_what_is_shown(open_page, document):
    page = open_page()
    assert page.locator("h1").inner_text().startswith("What is the difference between a Marlin")
    for name, family in document["families"].items():
        claim = family["claims"]["answer"][0]
        assert claim["label"] in page.locator(f"#answer .f-{name}.answer").inner_text()
    assert page.locator("#no-gpu").is_visible()
    assert json.loads(page.locator("#data").inner_text()) == document
    ratio = document["families"]["marlin"]["techniques"][2]["cases"][0]["ratio"]
    cell = page.locator("#marlin-2 .ratio data").first
    assert not cell.is_visible()
    page.locator("#overview").get_by_text("Stream-K", exact=True).click()
    cell.wait_for(state="visible")
    assert cell.inner_text() == shown(ratio, "x")
    for chart in page.locator("svg:visible").all():
        box = chart.bounding_box()
        assert box["width"] > 200
        assert box["height"] > 50
    assert page.locator("svg:visible").count() >= 15


def test_no_words_run_out_of_a_chart(open_page, recorded):
    """With general kernels too, whose names are long; their figures are made up."""
    made = general_records()
    for name in ("linear_cross_entropy fwd+bwd", "rotary_embedding"):
        rows = made["ablation_general"].rows
        rows += [{**row, "kernel": name, "domain": "training"} for row in rows[:2]]
    long = build.comparison({**recorded, **made}, FAMILIES, gpu=None)
    page = open_page(long)
    outside = """() => [...document.querySelectorAll('svg')].filter(s => s.checkVisibility())
        .filter(s => {
          const box = s.getBoundingClientRect();
          return [...s.querySelectorAll('text')].some(t => {
            const b = t.getBoundingClientRect();
            return b.left < box.left - 12 || b.right > box.right + 12;
          });
        }).map(s => s.getAttribute('aria-label'))"""
    for width in (1280, 375):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(outside) == []


def test_names_in_a_roofline_do_not_overlap(open_page, recorded):
    """Dozens of kernels that compute, made up, in a heap under the roof."""
    made = general_records()
    row = made["general"].rows[0]
    draw = random.Random(0)
    made["general"].rows.extend(
        {**row, "kernel": f"kernel_{number}", "dtype": "float16", "bytes": 10**8,
         "flops": round(10 ** draw.uniform(8, 13)), "us": draw.uniform(50, 5000)}
        for number in range(40)
    )  # fmt: skip
    page = open_page(build.comparison({**recorded, **made}, FAMILIES, gpu=None))
    names = page.evaluate("""() => [...document.querySelectorAll('.wide svg text.name')].map(t => {
        const b = t.getBoundingClientRect();
        return [t.textContent, b.left, b.right, b.top + 3, b.bottom - 3];
    })""")
    assert len({name for name, *_ in names}) == len(names) > 20
    for (_, *one), (_, *two) in itertools.combinations(names, 2):
        assert one[1] <= two[0] or two[1] <= one[0] or one[3] <= two[2] or two[3] <= one[2]


def test_the_table_of_records_fits_its_page(open_page, document):
    """However many commits a record's rows are from."""
    document["records"]["gemm"]["earlier"] = {f"{i:040x}": 12 for i in range(5)}
    page = open_page(document)
    assert "12 rows of 000000000000" in page.inner_text("#records")
    table = page.locator("#records .table-wrap")
    assert table.evaluate("e => e.scrollWidth - e.clientWidth") <= 0


def test_any_width(open_page):
    page = open_page()
    for width in (320, 375, 768, 1280):
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_light_and_dark(open_page):
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = (open_page(color_scheme=s).evaluate(ground) for s in ("light", "dark"))
    assert light != dark
    page = open_page(color_scheme="light")
    button = page.locator("#theme")
    for said, expected in (("light", light), ("dark", dark), ("as the system", light)):
        button.click()
        assert button.get_attribute("aria-label") == f"Colours: {said}"
        assert page.evaluate(ground) == expected


def test_by_keyboard_and_pointer(open_page):
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    chart = page.locator("#kernels svg:visible").first
    chart.focus()
    page.keyboard.press("ArrowRight")
    tip = page.locator("#tip")
    assert "The roof" in tip.inner_text()
    page.keyboard.press("ArrowRight")
    assert "The roof" not in tip.inner_text()
    assert "TFLOP/s" in tip.inner_text()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    page.locator("#marlin svg:visible .mark circle").first.hover()
    assert "FP16" in tip.inner_text()


def test_a_comparison_from_elsewhere_runs_nothing(open_page, document):
    """A document may be anybody's: what it says is text, and no script of it runs."""
    family = document["families"]["marlin"]
    for key in ("title", "function", "focus"):
        family[key] = "<img src=x onerror='document.title = 1'><script>document.title = 1</script>"
    page = open_page(document)
    assert page.title() == "Three kernel families, measured - Billfish"
    assert page.locator("img").count() == 0


def test_on_paper_all_code_is_open(open_page):
    page = open_page()
    assert page.locator("details[open]").count() == 0
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.emulate_media(media="print")
    assert page.locator(".top").is_hidden()
    assert page.locator("#marlin-0 pre").first.is_visible()
