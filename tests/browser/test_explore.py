"""The page Explore in a browser, read from the disk: no server, no other host."""

import pytest

LISTS = ("file", "dtype", "size", "measure")


@pytest.fixture
def page(chromium, book):
    """The page, and what its scripts complained about or asked for elsewhere."""
    path = book / "book" / "explore.html"
    if not path.is_file():
        pytest.skip(f"no page Explore in {book}: run `make book`")
    page = chromium.new_page()
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on(
        "request",
        lambda request: (
            request.url.startswith(("file:", "data:", "blob:"))
            or page.faults.append(request.url)
        ),
    )
    page.goto(path.as_uri())
    page.wait_for_selector("#explore-figure svg")
    yield page
    page.close()


def said(page, id: str) -> str:
    return page.text_content(f"#explore-{id}")


def values(page, id: str) -> list[str]:
    return page.eval_on_selector_all(
        f"#explore-{id} option", "options => options.map(option => option.value)"
    )


def choose(page, id: str, value: str) -> None:
    if page.is_visible(f"#explore-{id}"):
        page.select_option(f"#explore-{id}", value)


def test_occupancy_by_keyboard(page):
    assert said(page, "fit").startswith("12 blocks live on an SM of the NVIDIA H200")
    page.focus("#explore-registers")
    page.keyboard.press("ArrowDown")
    assert said(page, "fit").startswith("16 blocks")
    assert page.input_value("#explore-kernel") == ""
    page.fill("#explore-registers", "256")
    assert "can't run on the NVIDIA H200" in said(page, "fit")
    page.fill("#explore-registers", "")
    assert said(page, "fit").startswith("Type whole numbers")
    page.fill("#explore-registers", "16")
    page.focus("[data-for=shared]")
    page.keyboard.press("End")
    assert page.locator(".explore-binds b").first.inner_text() == "shared memory"
    assert said(page, "fit").startswith("1 block lives")
    assert page.faults == []


def test_the_figure_by_keyboard(page):
    page.focus("#explore-figure")
    seen = [said(page, "row")]
    for key in ("ArrowRight", "End", "ArrowDown", "Home"):
        page.keyboard.press(key)
        seen.append(said(page, "row"))
    assert len(set(seen)) == len(seen)
    assert all("NVIDIA H200, driver" in row and "commit" in row for row in seen)
    assert page.locator(".explore-ring").count() == 1
    assert page.faults == []


def test_every_choice_draws_something(page):
    def each(*ids):
        if not ids:
            label = page.get_attribute("#explore-figure", "aria-label")
            chosen = [page.input_value(f"#explore-{id}") for id in LISTS]
            assert int(label.split()[-2]) > 0, chosen
            assert "NaN" not in page.inner_html("#explore-figure"), chosen
            return
        for value in values(page, ids[0]):
            choose(page, ids[0], value)
            each(*ids[1:])

    each(*LISTS)
    assert page.faults == []


def test_the_numbers_can_be_read_as_a_table(page):
    assert not page.is_visible("#explore-table")
    page.focus("#explore-numbers")
    page.keyboard.press("Space")
    assert page.is_visible("#explore-table")
    first = page.inner_text("#explore-table tbody tr").split("\t")
    assert first[0] == "4194304 × 32" and "1.000" in first
    assert page.faults == []


def test_on_paper_the_table_and_the_picture_stand_in_their_place(page):
    shown = page.locator(".explore-fallback")
    assert [one.is_visible() for one in shown.all()] == [False, False]
    page.emulate_media(media="print")
    assert [one.is_visible() for one in shown.all()] == [True, True]
    assert not page.locator(".explore-card").first.is_visible()
    page.emulate_media(media="screen")
