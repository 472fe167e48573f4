"""Pictures of layouts draw what they are given."""

import numpy as np
import pytest

from kernels.lab import draw
from kernels.lab.allocation import Buffer
from tests.lab.pictures import boxes, gids, texts
from tests.lab.test_draw import faults


def held(shape, size=4, warps=4):
    """Threads that take `size` neighbours each, row after row."""
    thread = np.arange(np.prod(shape)).reshape(shape) // size
    return thread // 32 % warps, thread % 32


TILE = 4 * np.arange(1024).reshape(32, 32)
BUFFERS = [
    Buffer("local_alloc", "2x64x32xf16", 8192, 0, 31, 106),
    Buffer("local_alloc", "2x32x64xf16", 8192, 8192, 32, 105),
    Buffer("reduce", "", 512, 0, 108, 109),
    Buffer("reduce", "", 512, 0, 115, 116),
    Buffer("convert_layout", "", 8192, 0, 131, 132),
]
PICTURES = {
    "tile": lambda: draw.tile_layout({"16 × 64 elements": held((16, 64))}),
    "wide tile": lambda: draw.tile_layout({"a tile": held((4, 64), 1)}, lane=3),
    "two": lambda: draw.tile_layout(dict.fromkeys("ab", held((16, 16), 4, 2))),
    "banks": lambda: draw.banks({"stride 2": [8 * lane for lane in range(32)]}),
    "bank tiles": lambda: draw.bank_tiles(
        dict.fromkeys(("plain", "padded", "Triton's own"), (TILE, TILE % 128 == 0))
    ),
    "buffers": lambda: draw.allocation(BUFFERS),
    "one buffer": lambda: draw.allocation(BUFFERS[2:3]),
}


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_can_be_read(name):
    figure, again = PICTURES[name](), PICTURES[name]()
    assert faults(figure) == []
    assert texts(figure) == texts(again)


def test_tile_layout_covers_every_element_once():
    warps, lanes = held((16, 64))
    figure = draw.tile_layout({"tile": (warps, lanes)}, warp=1, lane=3)
    assert "lane 3 of warp 1: 8 elements" in texts(figure)
    cell = boxes(figure, "tile")[0].get_height()
    area = sum(box.get_width() * box.get_height() for box in boxes(figure, "tile"))
    assert area == pytest.approx(91 * 16 * cell)
    assert len(boxes(figure, "tile")) == 256
    assert gids(figure)["tile: warp 1 lane 3 at 2,12"] == 1


def test_tile_layout_draws_tall_holders_too():
    warps, lanes = held((16, 16), warps=1)
    both = {"before": (warps.T, lanes.T), "after": (warps, lanes)}
    figure = draw.tile_layout(both, lane=5, title="a title")
    assert "a title" in texts(figure)
    tall, wide = boxes(figure, "before")[0], boxes(figure, "after")[0]
    assert tall.get_height() == pytest.approx(4 * wide.get_height())
    assert wide.get_width() == pytest.approx(4 * tall.get_width())


def test_tile_layout_of_something_else():
    with pytest.raises(ValueError, match="tiles must have two axes"):
        draw.tile_layout({"row": held((64,))})
    with pytest.raises(ValueError, match=r"columns must be from 1 to 64.*got 128"):
        draw.tile_layout({"wide": held((2, 128))})
    with pytest.raises(ValueError, match="number of tiles must be from 1 to 2"):
        draw.tile_layout({})


@pytest.mark.parametrize(
    ("stride", "passes"), [(1, 1), (2, 2), (8, 8), (32, 32), (33, 1)]
)
def test_banks_count_the_words_of_a_bank(stride, passes):
    figure = draw.banks({"a load": [4 * stride * lane for lane in range(32)]})
    said = "1 pass" if passes == 1 else f"{passes} passes"
    assert said in texts(figure)
    busy = [name for name in gids(figure) if name.endswith(f"{passes} words")]
    assert len(busy) == 32 // passes


def test_banks_of_something_else():
    with pytest.raises(ValueError, match="a load must be 32 addresses"):
        draw.banks({"a load": range(31)})


def test_bank_tiles_mark_what_one_load_reads():
    tile = 4 * np.arange(1024).reshape(32, 32)
    column = np.zeros((32, 32), bool)
    column[:, 1] = True
    padded = tile + 4 * np.arange(32)[:, None]
    figure = draw.bank_tiles({"plain": (tile, column), "padded": (padded, column)})
    assert {"32 passes", "1 pass"} <= set(texts(figure))
    assert gids(figure)["plain: loaded 1"] == 8
    assert [gids(figure)[f"padded: loaded {bank}"] for bank in range(1, 9)] == [1] * 8
    with pytest.raises(
        ValueError, match=r"at least 8 × 8 elements, got shape \(4, 4\)"
    ):
        draw.bank_tiles({"small": (tile[:4, :4], column[:4, :4])})


def test_allocation_places_buffers_by_bytes_and_order():
    figure = draw.allocation(
        [
            Buffer("local_alloc", "2x64xf16", 256, 0, 4, 90),
            Buffer("reduce", "", 64, 256, 60, 61),
            Buffer("convert_layout", "", 128, 0, 95, 96),
        ],
        "a title",
    )
    assert {"a title", "320 B", "0 B"} <= set(texts(figure))
    assert "local_alloc\n2x64xf16\n256 B" in texts(figure)
    names = "local_alloc", "reduce", "convert_layout"
    kept, brief, last = (box for name in names for box in boxes(figure, name))
    assert kept.get_height() == pytest.approx(4 * brief.get_height())
    assert kept.get_x() < brief.get_x() < kept.get_x() + kept.get_width() < last.get_x()
    assert brief.get_y() + brief.get_height() == pytest.approx(kept.get_y())
    with pytest.raises(ValueError, match="number of buffers must be from 1 to 12"):
        draw.allocation([])
