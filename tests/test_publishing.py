"""What the book's pages have beside their text."""

import re
from pathlib import Path

import pytest

from tests.helpers import loaded

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def publishing():
    return loaded(ROOT / "book" / "extensions" / "publishing.py")


def test_the_address_of_the_pages_follows_from_the_repository(publishing):
    address = publishing.pages_address("https://github.com/owner/name")
    assert address == "https://owner.github.io/name/"


@pytest.mark.parametrize("url", ["https://git.example/a/b", "https://github.com/a"])
def test_an_address_that_is_no_repository_is_refused(publishing, url):
    with pytest.raises(ValueError, match=re.escape(repr(url))):
        publishing.pages_address(url)


def test_the_footer_says_when_and_where_the_record_was_measured(publishing, tmp_path):
    assert publishing.record_line(tmp_path) == ""
    (tmp_path / "gpu").mkdir()
    for name, day in (("a", "2026-01-02"), ("b", "2026-01-01")):
        text = f"gpu,recorded_at\nNVIDIA H200,{day}\n"
        (tmp_path / "gpu" / f"{name}.csv").write_text(text)
    expected = "Measured on NVIDIA H200, 2026-01-01 to 2026-01-02."
    assert publishing.record_line(tmp_path) == expected
    (tmp_path / "gpu" / "b.csv").write_text("x\n1\n")
    line = publishing.record_line(tmp_path)
    assert line == "Measured on NVIDIA H200, 2026-01-02."


def test_the_course_has_a_record(publishing):
    assert "NVIDIA" in publishing.record_line(ROOT / "notebooks" / "recorded")


def test_icons_that_pages_scripts_and_rules_show_are_kept(publishing):
    css = (
        '.fa-moon:before{content:"\\f186"}.fa-sun:before,.fa-day:before{content:"\\f185"}'
        '.fa-dog:before{content:"\\f6d3"}.tip:after{content:"\\f0eb"}'
        ':root{--note:"\\f303"}.plain:after{content:"x"}'
    )
    codes = publishing.icon_codes(
        css, ['<i class="fa-solid fa-moon">', "add('fa-day')"]
    )
    assert codes == {0xF186, 0xF185, 0xF0EB, 0xF303}


def test_each_fault_of_the_theme_is_mended(publishing):
    """Each mend changes the text that it is for, and leaves a mended one alone."""
    faults = [
        '<script src="../_static/scripts/fontawesome.js?v=1"></script>',
        '<div class="sidebar-primary-items__start sidebar-primary__section">',
        '<a href="x.html">1. Eager</a><details><summary><span></span></summary>',
        '<div role="list" class="citation-list">',
        'mode = localStorage.getItem("mode") || "";',
        'theme = localStorage.getItem("theme") || "";',
    ]
    assert len(faults) == len(publishing.MENDS)
    for text, (pattern, replacement) in zip(faults, publishing.MENDS, strict=True):
        mended = re.sub(pattern, replacement, text)
        assert mended != text
        assert re.sub(pattern, replacement, mended) == mended
