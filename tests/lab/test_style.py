"""The look holds in the course's own figures only; its colours are told apart."""

import itertools
import math
import os

import matplotlib as mpl
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.colors import to_hex, to_rgb

from kernels.lab import backend, style
from tests import forks

SOURCE = "NVIDIA H200 · driver 580 · torch 2.11 · triton 3.6 · recorded 2026-11-21"

# ---- colours -------------------------------------------------------------------------

PEERS = ["torch", "torch.compile", "liger", "quack", "tileops", "tutorial"]
TOGETHER = [  # who shares a figure; the copy is dashed and is looked at by itself
    ["eager", "torchscript", "torch", "torch.compile", "program"],
    ["strided", "program", "torch", "torch.compile"],
    ["persistent", "persistent.tiled", "persistent.onerow", "persistent.resident"],
    ["meta", "persistent", "tiled", "unaligned", "torch"],
    ["tiled", "unaligned", "staged"],
    ["unaligned", "cooperative", "windows"],
    ["torch", "torch.compile", "online", "columns"],
    ["tiled", "unaligned", "online", "cooperative", "fastest"],
    [name for name in style.STYLES if name.startswith("online")],
    ["tiled", "fastest", *PEERS],
    ["gradient", *PEERS],
    list(range(len(style.SPARE))),
]
NORMAL = np.eye(3)
VISIONS = {  # of linear RGB: Machado, Oliveira, Fernandes 2009, severity 1.0
    "normal": NORMAL,
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def oklab(colour, vision="normal"):
    """Where a colour lies in Ottosson's Oklab, in hundredths."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    cones = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    axes = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    seen = np.clip(np.array(VISIONS[vision]) @ linear, 0, None)
    return 100 * np.array(axes) @ np.cbrt(np.array(cones) @ seen)


def colour_of(name):
    return style.SPARE[name].colour if isinstance(name, int) else style.COLOURS[name]


@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: str(names[0]))
@pytest.mark.parametrize(("vision", "least"), [(v, 8) for v in VISIONS])
def test_those_who_share_a_figure_are_told_apart(names, vision, least):
    least = 15 if vision == "normal" else least
    for pair in itertools.combinations(names, 2):
        places = [oklab(colour_of(name), vision) for name in pair]
        assert math.dist(*places) >= least, pair


def test_all_providers_differ_in_colour_and_from_the_copy():
    assert style.COLOURS["gradient"] == style.COLOURS["fastest"]  # one product
    for one, other in itertools.combinations([*{*style.STYLES} - {"gradient"}], 2):
        apart = math.dist(oklab(style.COLOURS[one]), oklab(style.COLOURS[other]))
        assert apart >= (12 if "copy" in (one, other) else 5.5), (one, other)
    labels = [(each.marker, each.label) for each in style.STYLES.values()]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("names", TOGETHER[:-1], ids=lambda names: names[0])
def test_those_who_share_a_figure_differ_in_their_markers(names):
    markers = [style.STYLES[name].marker for name in names]
    assert len(set(markers)) >= len(markers) - 1


@pytest.mark.parametrize("each", [*style.STYLES.values(), *style.SPARE])
def test_lines_and_their_labels_stand_out_from_the_card(each):
    assert style.contrast(each.colour, style.CARD) >= 3
    assert style.contrast(style.darker(each.colour), style.CARD) >= 4.5


def test_contrast_is_that_of_wcag():
    assert style.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert style.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_unknown_providers_get_styles_of_their_own_and_keep_them():
    first = style.styles_of(["copy", "mine", "persistent", "yours"])
    assert len({each.colour for each in first.values()}) == 4
    assert first["mine"].label == "mine"
    assert style.styles_of(["yours"])["yours"] == first["yours"]
    assert style.styles_of(["persistent"])["persistent"] == first["persistent"]
    with pytest.raises(ValueError, match="without a style"):
        style.styles_of(map(str, range(len(style.SPARE) + 1)))


# ---- where the style holds -----------------------------------------------------------


def test_importing_changes_nobodys_settings():
    code = (
        "import matplotlib, pandas;"
        "rc = dict(matplotlib.rcParams); width = pandas.get_option('display.width');"
        "from kernels.lab import draw, models, plot, show, style;"
        "plot.figure().subplots().plot([1]);"
        "assert rc == dict(matplotlib.rcParams);"
        "assert width == pandas.get_option('display.width')"
    )
    run = forks.python(code, env=dict(os.environ), cwd=backend.ROOT)
    assert run.returncode == 0, run.stderr


def test_a_cell_that_draws_on_axes_gets_the_courses_style():
    """Whatever the settings are when it draws, and when the figure is shown."""
    theirs = {"lines.linewidth": 9, "font.size": 30, "text.color": "red"}
    theirs |= {"axes.titlelocation": "center", "axes.grid": False}
    theirs |= {"xtick.labelcolor": "red", "ytick.labelsize": 30}
    with mpl.rc_context(theirs):
        card = style.figure(title="A title", source=SOURCE)
        left, right = card.subplots(1, 2, sharey=True)
        (line,) = left.plot([1, 2], [1, 2], label="a line")
        note = right.annotate("a note", (1, 1))
        right.set(title="a panel")
        right.set_xticks([0, 1], ["no", "yes"])
        legend = left.legend().get_texts()[0]
        card.draw_without_rendering()
        assert line.get_linewidth() == style.STYLE["lines.linewidth"]
        assert right.get_title(loc="left") == "a panel"
        for text in (note, legend, *right.get_xticklabels(), *left.get_yticklabels()):
            assert text.get_size() == style.FONT
            assert to_hex(text.get_color()) == style.INK
        assert not left.spines["top"].get_visible()
        assert all(each.get_visible() for each in left.get_ygridlines())
        inset = card.add_axes((0.5, 0.5, 0.1, 0.1))
        assert inset.plot([1])[0].get_linewidth() == line.get_linewidth()
        assert mpl.rcParams["font.size"] == 30


# ---- the card ------------------------------------------------------------------------


def test_a_notebook_shows_a_figure_once_and_its_text_depends_on_its_size():
    card = style.figure(2.0)
    shell = InteractiveShell.instance()
    data, metadata = shell.display_formatter.format(card)
    assert set(data) == {"text/plain", "image/png"}
    assert data["text/plain"] == repr(style.figure(2.0, title="another"))
    width = int.from_bytes(data["image/png"][16:20], "big")  # of the PNG's header
    assert metadata["image/png"]["width"] == style.WIDTH * style.DPI
    sharper = 4 / 3 * style.WIDTH * style.DPI  # than it is shown
    assert width == pytest.approx(sharper, abs=1)


def test_an_image_of_pyplots_does_not_replace_ours():
    """As IPython registers it once a cell has imported `matplotlib.pyplot`."""
    formatter, card = DisplayFormatter(), style.figure(1.0)
    formatter.formatters["image/png"].for_type(mpl.figure.Figure, lambda _: b"its")
    assert formatter.format(card)[0]["image/png"] == b"its"
    style.keep_images(formatter.formatters)
    data, sizes = formatter.format(card)
    assert (data["image/png"], sizes["image/png"]) == card._repr_png_()


def test_the_card_has_its_title_at_the_left_and_its_source_at_the_right():
    card = style.figure(title="A title " * 20, source=SOURCE)
    card.draw_without_rendering()
    title, source = card.texts
    assert "\n" in title.get_text()
    for text in (title, source):
        box = text.get_window_extent()
        assert box.x0 > 0
        assert box.x1 < card.bbox.x1
        assert text.get_fontsize() >= 9
    assert source.get_text() == SOURCE
