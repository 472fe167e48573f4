"""The slides in a browser: all fits, nothing is loaded, the keyboard goes through."""

import pytest

from tests.test_slides import the_slides

# Names the elements of each slide that leave the slide, or cover its foot.
OVERFLOWS = """() =>
  [...document.querySelectorAll(".slides section:not(.stack)")].flatMap((slide) => {
    const shown = [slide, slide.parentElement];
    const before = shown.map((element) => element.style.display);
    shown.forEach((element) => { element.style.display = "block"; });
    const edge = slide.getBoundingClientRect();
    const foot = slide.querySelector(".foot").getBoundingClientRect().top;
    const found = [...slide.querySelectorAll("h1, h2, .body *")].filter((element) => {
      const box = element.getBoundingClientRect();
      const outside = box.right > edge.right - 40 || box.left < edge.left;
      return box.width && (outside || box.bottom > foot + 2);
    });
    shown.forEach((element, i) => { element.style.display = before[i]; });
    const heading = slide.querySelector("h1, h2").textContent;
    return found.map((element) => `${heading}: ${element.tagName}`);
  })"""
LOADED = "performance.getEntriesByType('resource').map((each) => each.name)"
POSITION = "[Reveal.getIndices().h, Reveal.getIndices().v]"


@pytest.fixture(scope="module")
def opened(chromium, tmp_path_factory):
    """Opens the file of a part, as a file, and returns the page and what it said."""
    folder = tmp_path_factory.mktemp("slides")
    the_slides().main(folder)
    page, said = chromium.new_page(), []
    page.set_viewport_size({"width": 1280, "height": 720})
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))

    def open_part(number: int):
        said.clear()
        page.goto("about:blank")
        page.goto((folder / f"part_{number}.html").as_uri())
        page.wait_for_function("Reveal.isReady()")
        return page, said

    yield open_part
    page.close()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_slide_fits_and_nothing_is_loaded(opened, number):
    page, said = opened(number)
    assert page.evaluate(OVERFLOWS) == []
    loaded = page.evaluate(LOADED)
    assert [name for name in loaded if not name.startswith("data:")] == []
    assert said == []


def test_a_slide_that_is_too_full_is_seen(opened):
    page, _ = opened(1)
    body = page.locator(".slides section:not(.stack) .body").nth(3)
    body.evaluate("body => { body.innerHTML += '<p>more</p>'.repeat(40); }")
    assert "P" in {each.rpartition(": ")[2] for each in page.evaluate(OVERFLOWS)}


def test_the_right_arrow_goes_through_all_slides(opened):
    page, _ = opened(3)
    seen = set()
    for _ in range(page.evaluate("Reveal.getTotalSlides()")):
        seen.add(tuple(page.evaluate(POSITION)))
        page.keyboard.press("ArrowRight")
    assert len(seen) == page.evaluate("Reveal.getTotalSlides()")
    assert page.evaluate("Reveal.isLastSlide()")


def test_the_speaker_view_opens_without_a_server(opened, chromium):
    page, _ = opened(1)
    page.keyboard.press("ArrowRight")
    with chromium.expect_page() as window:
        page.keyboard.press("s")
    window.value.get_by_text("A language model reads a text").first.wait_for()
    window.value.close()
