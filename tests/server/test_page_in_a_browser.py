"""The page at / in a real Chromium: what a person sees and does.

The engine is the fake one. Where a test acts while an answer is written, the engine stops by itself
between two steps, so nothing depends on time.
"""

import os
import re
import shutil
from collections.abc import Iterator

import pytest

from billfish.errors import QueueFullError
from billfish.server.fake_engine import ENDLESS, FakeEngine
from tests.server.live import KEY, LiveServer, live

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: install it (on Debian: apt-get install chromium)"
)
expect = sync_api.expect
PATIENCE_MS = 60_000  # a machine may be slow; nothing waits so long on one that is not
expect.set_options(timeout=PATIENCE_MS)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
ANSWER = "Hello! I am a fake model, and this is all I say. 🐟"


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser):
    """open_page(server, **context options): the page, which must not log an error by itself."""
    contexts, problems = [], []

    def open_it(server: LiveServer, ready: bool = True, **options):
        context = browser.new_context(**{"viewport": WIDE, **options})
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda line: (
                problems.append(line.text) if "Content Security Policy" in line.text else None
            ),
        )
        page.goto(server.url)
        if ready:
            expect(page.locator("#state-text")).to_have_text("Ready")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with live(lambda: FakeEngine(num_blocks=256, max_model_len=2048)) as running:
        yield running


@pytest.fixture
def endless() -> Iterator[LiveServer]:
    with live(lambda: FakeEngine("", num_blocks=256, max_model_len=2048)) as running:
        yield running


def send(page, text: str = "Hi") -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def answers(page):
    return page.locator(".sample .text")


def set_field(page, label: str, value: str) -> None:
    page.get_by_role("tab", name="Settings").click()
    page.get_by_label(label, exact=True).fill(value)


class TestChat:
    def test_an_answer_streams(self, endless, open_page):
        page = open_page(endless)
        endless.pause_after(15)
        send(page, "Tell me a story")
        # What is there so far is shown, while there is more to come.
        expect(answers(page)).to_have_text(ENDLESS[:15].strip())
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        expect(page.locator(".answers")).to_have_attribute("aria-busy", "true")
        endless.call(endless.engine.resume)
        expect(answers(page)).to_contain_text(ENDLESS.strip())

    def test_stop_keeps_what_came_and_frees_the_engine(self, endless, open_page):
        page = open_page(endless)
        endless.pause_after(10)
        send(page)
        expect(answers(page)).to_have_text(ENDLESS[:10].strip())
        page.get_by_role("button", name="Stop").click()
        endless.call(endless.engine.resume)
        expect(page.locator(".meta")).to_contain_text("stopped")
        expect(answers(page)).to_have_text(ENDLESS[:10].strip())
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        endless.wait_idle()

    def test_regenerate_asks_the_same_again(self, server, open_page):
        replies = iter(("First answer.", "Second answer."))
        prompts: list[str] = []
        server.engine.executor.reply = lambda prompt: prompts.append(prompt) or next(replies)
        page = open_page(server)
        send(page, "Which is it?")
        expect(answers(page)).to_have_text("First answer.")
        page.get_by_role("button", name="Regenerate").click()
        expect(answers(page)).to_have_text("Second answer.")
        assert prompts[0] == prompts[1]
        expect(page.locator(".user")).to_have_count(1)

    def test_the_conversation_goes_along(self, server, open_page):
        prompts: list[str] = []
        server.engine.executor.reply = lambda prompt: prompts.append(prompt) or ANSWER
        page = open_page(server)
        set_field(page, "System prompt", "Be brief.")
        send(page, "One")
        expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
        send(page, "Two")
        expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
        expect(answers(page).last).to_have_text(ANSWER)
        said = ["Be brief.", "One", ANSWER, "Two"]
        places = [prompts[-1].index(text) for text in said]
        assert places == sorted(places)
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".turn")).to_have_count(0)
        expect(page.get_by_role("heading", name="Ask the model something")).to_be_visible()

    def test_samples_stand_side_by_side(self, server, open_page):
        replies = iter(("left", "other"))
        server.engine.executor.reply = lambda prompt: next(replies)
        page = open_page(server)
        set_field(page, "Samples", "2")
        send(page)
        expect(page.get_by_role("button", name="Continue with this one")).to_have_count(2)
        samples = page.locator(".sample")
        first, second = samples.nth(0).bounding_box(), samples.nth(1).bounding_box()
        assert first["y"] == second["y"]
        assert first["x"] + first["width"] <= second["x"]
        page.get_by_role("button", name="Continue with this one").nth(1).click()
        expect(samples.nth(1)).to_have_class(re.compile("chosen"))
        expect(samples.nth(0)).not_to_have_class(re.compile("chosen"))

    def test_settings_are_sent_and_stay(self, server, open_page):
        page = open_page(server)
        given = {
            "Temperature": "0.5", "Top-p": "0.9", "Top-k": "40", "Min-p": "0.05",
            "Presence penalty": "0.1", "Frequency penalty": "-0.2", "Repetition penalty": "1.1",
            "Most tokens": "5", "Seed": "7",
        }  # fmt: skip
        for label, value in given.items():
            set_field(page, label, value)
        with page.expect_request("**/v1/chat/completions") as sent:
            send(page)
        body = sent.value.post_data_json
        names = [label.lower().replace(" ", "_").replace("-", "_") for label in given]
        names[names.index("most_tokens")] = "max_tokens"
        assert [body[name] for name in names] == [float(value) for value in given.values()]
        assert "n" not in body  # an empty field is left to the server
        expect(page.locator(".meta")).to_contain_text("cut off at the most tokens")
        expect(answers(page)).to_have_text(ANSWER[:5])
        page.reload()
        page.get_by_role("tab", name="Settings").click()
        expect(page.get_by_label("Temperature")).to_have_value("0.5")

    def test_a_wrong_setting_is_not_sent(self, server, open_page):
        page = open_page(server)
        set_field(page, "Top-p", "3")
        page.get_by_role("tab", name="Engine").click()
        send(page)
        expect(page.locator(".turn")).to_have_count(0)
        assert page.evaluate("document.activeElement.id") == "top_p"


HOSTILE = """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>

```<b onclick=alert(1)>
<svg/onload=window.hacked=1></textarea></pre>
```

`<iframe src="javascript:parent.hacked=1">` **<u>bold</u>** [x](javascript:window.hacked=1)"""


def test_a_hostile_answer_stays_text(server, open_page):
    server.engine.executor.reply = HOSTILE
    page = open_page(server)
    send(page, "<img src=x onerror=window.hacked=1>")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    text = answers(page).inner_text()
    for part in ("<img src=x", "<script>window", "<svg/onload", "<iframe", "<u>bold</u>"):
        assert part in text
    within = "img, script, svg, iframe, u, b, a, textarea"
    assert page.locator(".turn").locator(within).count() == 0
    assert page.evaluate("window.hacked") is None


WITHOUT_END = {
    "spaces": "a" + " " * 200_000 + "b",
    "spaces of a heading": "# " + " " * 200_000 + "x\ny",
    "spaces of a fence": "```" + " " * 200_000 + "`",
    "tildes": "~" * 200_000 + "`",
    "backticks": "`a" * 5_000,
    "stars": "**" * 100_000,
    "lines": "\n \n" * 20_000 + "x",
}


@pytest.mark.parametrize("text", WITHOUT_END.values(), ids=WITHOUT_END.keys())
def test_a_model_that_writes_the_same_without_end_does_not_freeze_the_page(server, open_page, text):
    """Milliseconds, where it was minutes: all of it is shown again with every token."""
    page = open_page(server, ready=False)
    show = """async text => {
        const { Rendered } = await import("/page/text.js");
        const began = performance.now();
        new Rendered(document.createElement("div")).show(text);
        return performance.now() - began;
    }"""
    assert page.evaluate(show, text) < 10_000


def test_copying_where_a_browser_offers_no_clipboard(server, open_page):
    """As for pages that came over plain HTTP from another machine."""
    page = open_page(server)
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    send(page)
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.press("ControlOrMeta+v")
    expect(page.get_by_label("Message", exact=True)).to_have_value(ANSWER)


class TestEngineView:
    def test_the_block_map_changes_while_a_request_runs(self, endless, open_page):
        page = open_page(endless)
        blocks = page.locator("#blocks")
        pixels = "canvas => canvas.toDataURL()"
        expect(page.locator("#used-blocks")).to_have_text("0 of 256")
        before = blocks.evaluate(pixels)
        set_field(page, "Samples", "2")
        page.get_by_role("tab", name="Engine").click()
        endless.pause_after(20)
        send(page, "x" * 100)
        expect(page.locator("#requests li")).to_have_count(2)
        expect(page.locator("#requests")).to_contain_text("this chat (sample 2)")
        assert blocks.evaluate(pixels) != before
        # The prompt's first block is shared; the last one of a sample is its own.
        blocks.hover(position={"x": 3, "y": 3})
        readout = page.locator("#block")
        expect(readout).to_have_text(
            "Block 1: shared by this chat (sample 1), this chat (sample 2); reference count 2"
        )
        endless.call(endless.engine.resume)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#requests li")).to_have_count(0)
        blocks.hover(position={"x": 4, "y": 4})
        expect(readout).to_have_text("Block 1: cached, held by no request, reference count 0")

    def test_numbers_and_steps(self, server, open_page):
        page = open_page(server)
        send(page)
        expect(page.locator("#step")).to_have_text(re.compile(r"Step \d+: 0 prefill and 1 decode"))
        expect(page.locator("#ttft")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
        expect(page.locator("#rate")).not_to_have_text("0.0")
        send(page, "Hi again, with the same beginning")
        expect(page.locator("#hits")).not_to_have_text("0 %")
        page.locator("#steps").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#step")).to_contain_text("decode tokens")

    def test_nobody_looks_when_it_is_not_shown(self, server, open_page):
        page = open_page(server, viewport=PHONE)  # the chat is shown, and nothing beside it
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        send(page)
        expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
        assert not any("engine/state" in url for url in asked)
        page.get_by_role("tab", name="Engine").click()
        expect(page.locator("#used-blocks")).to_have_text("0 of 256")
        assert any("engine/state" in url for url in asked)


class TestEverybody:
    def test_by_keyboard_alone(self, server, open_page):
        page = open_page(server)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the message box"
        page.keyboard.press("Enter")
        page.keyboard.type("Hello")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("there")
        page.keyboard.press("Enter")
        expect(page.locator(".user")).to_have_text("Hello\nthere")
        expect(answers(page)).to_have_text(ANSWER)
        expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
        assert page.evaluate("document.activeElement.id") == "message"
        for _ in range(30):  # every control is reached, and seen to be
            page.keyboard.press("Tab")
            where = page.evaluate(
                "(e => [e.id || e.textContent.trim(), getComputedStyle(e).outlineStyle])"
                "(document.activeElement)"
            )
            if where[0] == "blocks":
                break
            assert where[1] != "none" or where[0] == "", where
        assert where == ["blocks", "solid"]
        page.keyboard.press("End")
        expect(page.locator("#block")).to_have_text("Block 256: free, reference count 0")
        page.keyboard.press("Home")
        expect(page.locator("#block")).to_contain_text("Block 1:")
        page.get_by_role("tab", name="Engine").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#settings")).to_be_visible()
        expect(page.get_by_role("tab", name="Settings")).to_be_focused()

    def test_escape_stops(self, endless, open_page):
        page = open_page(endless)
        endless.pause_after(5)
        send(page)
        expect(answers(page)).to_have_text(ENDLESS[:5].strip())
        page.keyboard.press("Escape")
        endless.call(endless.engine.resume)
        expect(page.locator(".meta")).to_contain_text("stopped")

    def test_controls_have_names_and_answers_are_read_out(self, server, open_page):
        page = open_page(server)
        log = page.get_by_role("log", name="Conversation")
        expect(log).to_have_attribute("aria-live", "polite")
        nameless = page.evaluate(
            "[...document.querySelectorAll('button, input, textarea, canvas')].filter(e =>"
            " !(e.textContent.trim() || e.labels?.length || e.ariaLabel"
            " || e.getAttribute('aria-labelledby'))).map(e => e.id)"
        )
        assert nameless == []
        assert page.locator("html").get_attribute("lang") == "en"

    def test_nothing_is_wider_than_a_phone(self, server, open_page):
        server.engine.executor.reply = "long" * 100 + "\n\n```\n" + "code " * 100 + "\n```\n"
        page = open_page(server, viewport=PHONE)
        page.get_by_role("tab", name="Settings").click()
        page.get_by_label("Samples").fill("2")
        page.get_by_role("tab", name="Chat").click()
        send(page, "w" * 300)
        expect(page.get_by_role("button", name="Continue with this one")).to_have_count(2)
        # The controls are on the screen, and large enough to touch.
        box = page.get_by_role("button", name="Send").bounding_box()
        assert box["x"] + box["width"] <= 360
        assert box["height"] >= 32
        inner = "e => e.scrollWidth - e.clientWidth"
        for view in ("Chat", "Engine", "Settings"):
            page.get_by_role("tab", name=view).click()
            for selector in ("html", "#transcript", "#engine", "#settings"):
                assert page.locator(selector).evaluate(inner) <= 0, (view, selector)

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_contrast(self, server, open_page, scheme):
        """WCAG 2.2: 4.5 for text (1.4.3), 3 for controls and graphics (1.4.11)."""
        page = open_page(server, color_scheme=scheme)
        names = page.evaluate(
            "[...document.styleSheets[0].cssRules[0].style].filter(n => n.startsWith('--'))"
        )
        colours = {name: shown(page, name) for name in names}
        for text in ("ink", "muted", "accent", "bad", "good", "wait"):
            for ground in ("ground", "surface", "raised"):
                ratio = contrast(colours[f"--{text}"], colours[f"--{ground}"])
                assert ratio >= 4.5, (text, ground, ratio)
        for one, other, least in (
            ("on-accent", "accent", 4.5), ("surface", "bad", 4.5), ("ink", "user", 4.5),
            ("ink", "bad-ground", 4.5), ("field", "surface", 3), ("field", "ground", 3),
            ("prefill", "surface", 3), ("decode", "surface", 3), ("block-cached", "block-free", 3),
        ):  # fmt: skip
            ratio = contrast(colours[f"--{one}"], colours[f"--{other}"])
            assert ratio >= least, (one, other, ratio)
        assert (luminance(colours["--ground"]) < 0.1) == (scheme == "dark")

    def test_the_colours_can_be_chosen_and_stay(self, server, open_page):
        page = open_page(server, color_scheme="light")
        ground = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(ground)
        toggle = page.get_by_role("button", name="Colours")
        toggle.click()
        assert page.evaluate(ground) == light
        toggle.click()
        dark = page.evaluate(ground)
        assert dark != light
        page.reload()
        assert page.evaluate(ground) == dark
        expect(toggle).to_have_accessible_name("Colours: dark")

    def test_the_block_map_has_the_colours_of_the_theme(self, server, open_page):
        page = open_page(server, color_scheme="dark")
        pixel = """() => {
            const canvas = document.getElementById("blocks");
            if (!canvas.clientHeight) return "nothing yet";
            const [r, g, b] = canvas.getContext("2d").getImageData(2, 2, 1, 1).data;
            return `rgb(${r}, ${g}, ${b})`;
        }"""
        seen = set()
        for _ in ("as the system", "light"):
            free = shown(page, "--block-free")
            page.wait_for_function(f"free => ({pixel})() === free", arg=free)
            seen.add(free)
            page.get_by_role("button", name="Colours").click()
        assert len(seen) == 2

    def test_nothing_blinks_for_those_who_do_not_want_it(self, endless, open_page):
        page = open_page(endless, reduced_motion="reduce")
        endless.pause_after(5)
        send(page)
        expect(answers(page)).to_have_text(ENDLESS[:5].strip())
        name = "getComputedStyle(document.querySelector('.text > p'), '::after').animationName"
        assert page.evaluate(name) == "none"
        endless.call(endless.engine.resume)


def shown(page, name: str) -> str:
    """The colour that a variable of the style sheet has in the theme of now."""
    return page.evaluate(
        """name => {
            document.body.style.color = `var(${name})`;
            const found = getComputedStyle(document.body).color;
            document.body.style.color = "";
            return found;
        }""",
        name,
    )


def luminance(colour: str) -> float:
    """WCAG's relative luminance of rgb(r, g, b)."""
    channels = [int(channel) / 255 for channel in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


class TestTrouble:
    def test_a_key_is_asked_for_and_kept_in_the_tab(self, open_page):
        with live(api_keys=(KEY,)) as server:
            page = open_page(server, ready=False)
            dialog = page.get_by_role("dialog")
            expect(dialog).to_contain_text("The server wants an API key.")
            page.keyboard.type("a-wrong-key")
            page.keyboard.press("Enter")
            expect(dialog).to_contain_text("does not know this API key")
            page.get_by_label("Key", exact=True).fill(KEY)
            page.get_by_role("button", name="Use this key").click()
            expect(dialog).to_be_hidden()
            expect(page.locator("#state-text")).to_have_text("Ready")
            send(page)
            expect(answers(page)).to_have_text(ANSWER)
            assert page.evaluate("JSON.stringify(localStorage)").count(KEY) == 0
            page.reload()
            send(page)
            expect(answers(page)).to_have_text(ANSWER)

    def test_a_chat_refused_for_its_key_goes_on_with_the_right_one(self, open_page):
        with live(api_keys=(KEY,)) as server:
            page = open_page(server, ready=False)
            page.get_by_role("button", name="Cancel").click()
            send(page)
            expect(page.locator(".turn .error")).to_have_text("The server wants an API key.")
            page.get_by_label("Key", exact=True).fill(KEY)
            page.keyboard.press("Enter")
            expect(answers(page)).to_have_text(ANSWER)

    def test_the_engine_dies_in_the_middle(self, endless, open_page):
        page = open_page(endless)
        endless.pause_after(10)
        send(page)
        expect(answers(page)).to_have_text(ENDLESS[:10].strip())
        endless.call(endless.engine.die)
        expect(page.locator(".turn .error")).to_contain_text("The engine ended while it worked on")
        expect(answers(page)).to_have_text(ENDLESS[:10].strip())  # nothing is lost
        expect(page.locator("#state-text")).to_have_text("Not running")
        expect(page.get_by_role("alert").first).to_contain_text("The engine has ended.")
        expect(page.locator("#stale")).to_be_visible()
        endless.call(endless.engine.revive)
        expect(page.locator("#state-text")).to_have_text("Ready")
        expect(page.get_by_role("alert").first).to_be_hidden()
        expect(page.locator("#stale")).to_be_hidden()
        endless.call(endless.engine.resume)
        page.get_by_role("button", name="Try again").click()
        expect(answers(page)).to_contain_text(ENDLESS.strip())

    def test_the_model_is_still_loading(self, open_page):
        with live(lambda: FakeEngine(start_by_hand=True)) as server:
            page = open_page(server, ready=False)
            expect(page.locator("#state-text")).to_have_text("Loading")
            expect(page.get_by_role("alert").first).to_contain_text("0 of 1 parts")
            send(page)
            expect(page.locator(".turn .error")).to_contain_text("still being loaded")
            server.call(server.engine.revive)
            expect(page.locator("#state-text")).to_have_text("Ready")
            page.get_by_role("button", name="Try again").click()
            expect(answers(page)).to_have_text(ANSWER)

    def test_the_queue_is_full(self, server, open_page):
        page = open_page(server)

        async def refuse(_request):
            raise QueueFullError("4096 requests are here already")

        server.engine.submit, real = refuse, server.engine.submit
        send(page)
        expect(page.locator(".turn .error")).to_have_text(
            "The server is busy and its queue is full. Try again in a second."
        )
        server.engine.submit = real
        page.get_by_role("button", name="Try again").click()
        expect(answers(page)).to_have_text(ANSWER)

    def test_the_network_goes(self, server, open_page):
        page = open_page(server)
        page.context.set_offline(True)
        expect(page.locator("#state-text")).to_have_text("No connection")
        send(page)
        expect(page.locator(".turn .error")).to_contain_text("cannot be reached")
        page.context.set_offline(False)
        expect(page.locator("#state-text")).to_have_text("Ready")
        page.get_by_role("button", name="Try again").click()
        expect(answers(page)).to_have_text(ANSWER)

    def test_a_chat_that_is_too_long(self, server, open_page):
        page = open_page(server)
        send(page, "x" * 3000)
        expect(page.locator(".turn .error")).to_contain_text("too long for the model")
