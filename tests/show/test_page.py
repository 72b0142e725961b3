"""The page in a browser, where there is one."""

import threading
from itertools import pairwise

import pytest

from opteq.show import iteration
from opteq.show.settings import MEANINGS
from tests.conftest import PATIENCE

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
playwright.expect.set_options(timeout=PATIENCE)

WIDE, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture
def open_page(browser, server):
    """Opens the page and waits until its first image is there; errors of the script fail the test."""
    contexts, errors = [], []

    def open_page(viewport=WIDE, settle=True, **options):
        context = browser.new_context(viewport=viewport, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.address)
        if settle:
            settled(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


def settled(page):
    """Wait until what was asked for is shown, and what is certain about it."""
    playwright.expect(page.locator("#way")).to_have_attribute("aria-busy", "false")
    playwright.expect(page.locator("#certificate")).to_have_attribute("aria-busy", "false")


def test_it_shows_the_equilibrium_first(open_page):
    page = open_page()
    assert page.locator("h1").inner_text() == "small"
    assert page.locator("#place").inner_text() == "z*"
    assert page.locator("#images button[aria-pressed=true]").count() == 1
    assert page.locator("#certificate dt").all_inner_texts() == [
        "Distance to the optimum",
        "What the equilibrium is",
        "Robust radius",
    ]
    assert page.locator("#certificate dd").first.inner_text().startswith("‖z - z*‖ is at most")
    assert page.locator("#residual .tolerance").count() == 1


def test_the_true_class_stands_beside_the_prediction(open_page, viewer, png):
    page = open_page()
    predicted = page.locator("#label").inner_text()
    said = "right" if predicted == "yes" else "wrong"
    assert page.locator("#truth").inner_text() == f"{said}: the true class is yes"
    page.set_input_files("#file", {"name": "four.png", "mimeType": "image/png", "buffer": png[0]})
    playwright.expect(page.locator("#images button")).to_have_count(4)
    playwright.expect(page.locator("#truth")).to_be_hidden()


def held(monkeypatch, viewer, name):
    """Has a method of the viewer wait for the event that is returned."""
    event, method = threading.Event(), getattr(viewer, name)

    def wait(*arguments):
        assert event.wait(PATIENCE / 1000)
        return method(*arguments)

    monkeypatch.setattr(viewer, name, wait)
    return event


def test_it_says_what_it_waits_for_and_for_how_long(open_page, server, viewer, monkeypatch):
    event = held(monkeypatch, viewer, "equilibrium")
    page = open_page(settle=False)
    # No curves without points and no choices without effect.
    playwright.expect(page.locator("#progress")).to_have_text("Following the image to its equilibrium … 1 s")
    assert page.locator("#images img").first.is_visible()
    assert page.locator("#results").is_hidden()
    event.set()
    settled(page)
    assert page.locator("#results").is_visible()
    assert page.locator("#progress").is_hidden()


def test_the_first_certificate_is_said_to_take_longest_until_it_has_come(open_page, viewer, monkeypatch):
    event = held(monkeypatch, viewer, "certificate")
    page = open_page(settle=False)
    hint = page.get_by_text("The first certificate takes longest")
    playwright.expect(hint).to_be_visible()
    event.set()
    settled(page)
    playwright.expect(hint).to_be_hidden()
    page.locator("#images button").nth(1).click()
    settled(page)
    playwright.expect(hint).to_be_hidden()


def test_pictures_of_a_hidden_variable_are_named_so(open_page, server, hidden_viewer, monkeypatch):
    page = open_page()
    assert page.locator("#pictures .state figcaption").first.inner_text() == "z, all channels, 8×8"
    assert page.locator("#read").is_hidden()
    monkeypatch.setattr(server, "viewer", hidden_viewer)
    page = open_page()
    assert page.locator("#pictures .state figcaption").first.inner_text() == "y, all channels, 8×8"
    assert page.locator("#read").is_visible()


def test_a_certificate_that_takes_long_keeps_nothing_else_waiting(open_page, viewer, monkeypatch):
    event = held(monkeypatch, viewer, "certificate")
    page = open_page(settle=False)
    first = page.locator("#certificate dd").first
    playwright.expect(first).to_have_text("Computing … 1 s")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#place").inner_text() != "z*"
    page.locator("#epsilon").fill("32")
    playwright.expect(page.locator("#attacked-card")).to_be_visible()
    assert first.inner_text().startswith("Computing")
    event.set()
    settled(page)
    assert first.inner_text().startswith("‖z - z*‖")


def test_the_newest_image_is_certified_and_none_that_was_left(open_page, viewer, monkeypatch):
    asked, begun = [], threading.Event()
    event = held(monkeypatch, viewer, "certificate")
    certificate = viewer.certificate

    def begin(key, *rest):
        asked.append(key)
        begun.set()
        return certificate(key, *rest)

    monkeypatch.setattr(viewer, "certificate", begin)
    page = open_page(settle=False)
    playwright.expect(page.locator("#results")).to_be_visible()
    assert begun.wait(PATIENCE / 1000)
    for number in (1, 2):
        before = page.locator("#input").get_attribute("src")
        page.locator("#images button").nth(number).click()
        playwright.expect(page.locator("#input")).not_to_have_attribute("src", before)
    event.set()
    settled(page)
    assert asked == ["test-0", *["test-2"] * 3]


def test_thumbnails_of_a_phone_show_that_they_go_on(open_page):
    assert open_page().locator("#more").is_hidden()
    page = open_page(PHONE)
    assert page.locator("#more").is_visible()
    # In one row.
    tops = page.evaluate("[...document.querySelectorAll('#images button')].map(b => b.offsetTop)")
    assert len(set(tops)) == 1


def test_states_that_the_slider_leaves_out_are_told_of(open_page, monkeypatch):
    page = open_page()
    hint = page.locator("#skipped")
    assert hint.inner_text() == (
        "Beyond z¹⁰ the slider leaves states out, ever more of them; the curves show all."
    )
    monkeypatch.setattr(iteration, "_KEPT", range(iteration.MOST_STEPS))
    page.locator("#images button").nth(1).click()
    playwright.expect(hint).to_be_hidden()


def test_what_is_held_in_the_hand_is_told_of_no_keys(open_page):
    page = open_page()
    assert page.get_by_text("Keys: ←").is_visible()
    assert page.locator("#drop").inner_text().strip() == "Drop an image here, or choose a file"
    page = open_page(PHONE, is_mobile=True, has_touch=True)
    assert page.get_by_text("Keys: ←").is_hidden()
    assert page.locator("#drop").inner_text().strip() == "Choose a picture of your own"


def test_no_picture_stands_alone_on_a_phone(open_page):
    page = open_page(PHONE)
    tops = page.evaluate("[...document.querySelectorAll('#pictures figure')].map(f => f.offsetTop)")
    assert min(map(tops.count, tops)) > 1


def test_keys_step_and_play(open_page):
    page = open_page()
    last = int(page.locator("#step").get_attribute("max"))
    drawn = page.locator("#pictures .state img").first
    at_end = drawn.get_attribute("src")
    for _ in range(last):
        page.keyboard.press("ArrowLeft")
    assert page.locator("#place").inner_text() == "z⁰"
    assert drawn.get_attribute("src") != at_end
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")
    assert page.locator("#place").inner_text() == "z¹"
    page.keyboard.press("Space")
    assert page.locator("#play").inner_text() == "Pause"
    playwright.expect(page.locator("#place")).to_have_text("z*")
    playwright.expect(page.locator("#play")).to_have_text("Play")
    page.keyboard.press("Space")
    page.keyboard.press("Space")
    assert page.locator("#play").inner_text() == "Play"


def test_everything_is_reached_and_named_by_the_keyboard(open_page):
    page = open_page()
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.title"))
    assert {
        "test image 1, yes",
        "file",
        "play",
        "step",
        "attention",
        "regulariser",
        "reset",
        "epsilon",
    } <= set(seen)
    nameless = page.evaluate(
        "[...document.querySelectorAll('input, select, button')].filter("
        "  e => !(e.labels?.length || e.textContent.trim() || e.querySelector('img[alt]')?.alt))"
        ".map(e => e.id)"
    )
    assert nameless == []
    assert page.evaluate("[...document.images].filter(i => !i.alt && !i.hidden).length") == 0


def test_another_image_by_a_click(open_page):
    page = open_page()
    before = page.locator("#input").get_attribute("src")
    page.locator("#images button").nth(1).click()
    playwright.expect(page.locator("#input")).not_to_have_attribute("src", before)
    settled(page)
    assert page.locator("#images button").nth(1).get_attribute("aria-pressed") == "true"


def test_an_own_image_and_a_bad_file(open_page, png):
    page = open_page()
    page.set_input_files("#file", {"name": "four.png", "mimeType": "image/png", "buffer": png[0]})
    playwright.expect(page.locator("#images button")).to_have_count(4)
    assert page.locator("#images button[aria-pressed=true]").get_attribute("title") == "four.png"
    settled(page)
    page.set_input_files("#file", {"name": "bad.png", "mimeType": "image/png", "buffer": b"no image"})
    playwright.expect(page.locator("#error")).to_be_visible()
    assert page.locator("#error").inner_text().startswith("bad.png is not an image that can be read;")
    assert page.locator("#file").input_value() == ""
    page.locator("#images button").first.click()
    playwright.expect(page.locator("#error")).to_be_hidden()


def test_an_own_image_that_is_opened_again_after_a_reload_is_there_once(open_page, png):
    page = open_page()
    four, five = (
        {"name": f"{name}.png", "mimeType": "image/png", "buffer": png[0]} for name in ("four", "five")
    )
    for file in (four, five):
        page.set_input_files("#file", file)
        playwright.expect(page.locator("#images button").first).to_have_attribute("title", file["name"])
    settled(page)
    page.reload()
    settled(page)
    assert page.locator("#images button").count() == 5
    page.set_input_files("#file", four)
    playwright.expect(page.locator("#images button").first).to_have_attribute("title", "four.png")
    assert page.locator("#images button").count() == 5
    assert page.locator("#images button[aria-pressed=true]").get_attribute("title") == "four.png"


def test_an_image_that_is_dropped(open_page, png):
    page = open_page()
    transfer = page.evaluate_handle(
        "bytes => { const t = new DataTransfer();"
        " t.items.add(new File([new Uint8Array(bytes)], 'dropped.png', {type: 'image/png'})); return t; }",
        list(png[0]),
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})
    playwright.expect(page.locator("#images button")).to_have_count(4)
    assert page.locator("#images button").first.get_attribute("title") == "dropped.png"


def test_a_regulariser_changes_the_features(open_page):
    page = open_page()
    drawn = page.locator("#pictures .state img").first
    trained = drawn.get_attribute("src")
    assert page.locator("#knob-strength").is_disabled()
    assert page.locator("#meaning").inner_text() == ""
    page.select_option("#regulariser", "absolute norm")
    assert page.locator("#meaning").inner_text() == MEANINGS["absolute norm"]
    playwright.expect(drawn).not_to_have_attribute("src", trained)
    weak = drawn.get_attribute("src")
    page.locator("#knob-strength").fill("0")
    playwright.expect(drawn).not_to_have_attribute("src", weak)
    page.locator("#reset").click()
    playwright.expect(drawn).to_have_attribute("src", trained)


def test_attention_and_attack(open_page):
    page = open_page()
    page.locator("#attention").check()
    playwright.expect(page.locator("#heat")).to_be_visible()
    page.locator("#attention").uncheck()
    playwright.expect(page.locator("#heat")).to_be_hidden()
    page.locator("#epsilon").fill("32")
    playwright.expect(page.locator("#attacked-card")).to_be_visible()
    assert page.locator("#epsilon-value").inner_text() == "32/255"
    assert page.locator("#attack-text").inner_text().startswith("The prediction")


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_nothing_is_wider_than_the_page(open_page, viewport):
    page = open_page(viewport)
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_sections_are_evenly_spaced(open_page, viewport):
    page = open_page(viewport)
    boxes = [section.bounding_box() for section in page.locator("section").all()]
    gaps = [below["y"] - above["y"] - above["height"] for above, below in pairwise(boxes)]
    # Of two side by side the second does not lie below.
    assert {round(gap) for gap in gaps if gap > 0} == {16}


def test_dark_where_the_reader_wants_it(open_page):
    def brightness(page):
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour[4:-1].split(", ")))

    assert brightness(open_page(color_scheme="dark")) < 150
    assert brightness(open_page(color_scheme="light")) > 600


def test_a_server_that_has_gone_is_said(open_page, server):
    page = open_page()
    page.route("**/api/**", lambda route: route.abort())
    page.locator("#images button").nth(1).click()
    playwright.expect(page.locator("#error")).to_have_text(
        "The server does not answer; start opteq show again."
    )
