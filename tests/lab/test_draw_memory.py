"""Pictures of memory draw what the parameters say."""

import math

import pytest
import torch

from kernels.lab import draw, gpu, models
from tests.lab.pictures import boxes, gids, texts

X = torch.arange(24.0).reshape(4, 6)
ROW = [-3.0, -1.5, -2.25, -4.0, -2.0]
H200 = gpu.named("H200")


def test_memory_states_the_facts_of_the_gpu():
    figure = draw.memory_hierarchy(H200)
    assert "Memory of the NVIDIA H200" in texts(figure)
    assert {"SM 0", f"SM {H200.sms - 1}", "256 KiB per SM"} <= set(texts(figure))
    assert f"{H200.shared_per_sm // 1024} KiB per SM" in texts(figure)
    assert f"{H200.l2_bytes // 2**20} MiB, on the chip" in texts(figure)
    assert f"{H200.peak_bandwidth_gbps:,.0f} GB/s peak" in texts(figure)


# ---- one row, or one view ------------------------------------------------------------


def test_mask_computes_what_the_padding_does():
    figure = draw.mask(ROW, 8)
    assert gids(figure)["−∞ loaded"] == 5
    assert gids(figure)["0 loaded masked"] == 3
    assert [text for text in texts(figure) if "in all" in text] == [
        "1.00 in all: right",
        f"{sum(math.exp(x) for x in ROW) / (3 + sum(map(math.exp, ROW))):.2f} "
        "in all: wrong",
    ]
    assert [text for text in texts(figure) if "max =" in text] == [
        "max = −1.50",
        "max = 0",
    ]


def test_no_padding_cannot_be_wrong():
    figure = draw.mask([1.0, 2.0], 2, others=[0.0])
    assert "1.00 in all: right" in texts(figure) and "masked" not in texts(figure)


@pytest.mark.parametrize(
    ("row", "block", "message"),
    [
        ([1.0, math.inf], 8, "row must be one row of finite numbers"),
        ([[1.0]], 8, "row must be one row of finite numbers"),
        ([], 8, "row's length must be from 1 to 8.*got 0"),
        ([1.0] * 5, 4, "row's length must be from 1 to 4.*got 5"),
        ([1.0], 6, "block_cols must be a power of two, got 6"),
        ([1.0], 16, "block_cols must be from 1 to 8.*got 16"),
    ],
)
def test_mask_of_something_else(row, block, message):
    with pytest.raises(ValueError, match=message):
        draw.mask(row, block)


@pytest.mark.parametrize(
    "tensor",
    [
        X,
        X.t(),
        X[:, 1:5],
        X[1:, ::2],
        X[2:],
        torch.arange(6.0).expand(4, 6),
        torch.arange(6.0)[:, None].expand(6, 3),
        torch.arange(8).as_strided((3, 4), (2, 1)),
    ],
    ids=[
        "contiguous",
        "transposed",
        "sliced",
        "step",
        "offset",
        "rows",
        "columns",
        "overlap",
    ],
)
def test_strides_put_each_element_where_torch_has_it(tensor):
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    memory.copy_(torch.arange(len(memory)))  # so that an element's value is its cell
    figure = draw.strides(tensor)
    cells = {}
    for box in boxes(figure, "cell"):
        cell, places = box.get_gid().removeprefix("cell ").split(":")
        cells |= dict.fromkeys(places.split(), int(cell))
    n_rows, n_cols = tensor.shape
    wanted = {
        f"{row},{col}": int(tensor[row, col])
        for row in range(n_rows)
        for col in range(n_cols)
    }
    assert cells == wanted
    assert len(boxes(figure, "cell")) == len(memory)
    assert f"strides ({tensor.stride(0)}, {tensor.stride(1)})" in texts(figure)


def test_cells_with_several_elements_are_named():
    figure = draw.strides(torch.arange(6.0).expand(4, 6))
    assert {"∗,0", "∗,5"} <= set(texts(figure))
    assert "2,∗" in texts(draw.strides(torch.arange(6.0)[:, None].expand(6, 3)))
    assert "2×" in texts(draw.strides(torch.arange(8).as_strided((3, 4), (2, 1))))


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        ([[1.0]], TypeError, "tensor must be a torch.Tensor, got list"),
        (torch.ones(3), ValueError, r"tensor must be 2-D, got shape \(3,\)"),
        (torch.ones(9, 2), ValueError, "tensor's rows must be from 1 to 8.*got 9"),
        (torch.ones(2, 0), ValueError, "tensor's columns must be from 1 to 10.*got 0"),
        (torch.ones(97)[:4].view(2, 2), ValueError, "storage's elements.*got 97"),
    ],
)
def test_strides_of_something_else(tensor, error, message):
    with pytest.raises(error, match=message):
        draw.strides(tensor)


def test_rereading_draws_what_the_cache_holds():
    figure = draw.rereading(8, 5)
    assert "0 of 8 again from the cache" in texts(figure)
    assert "5 of 8 again from the cache" in texts(figure)
    drawn = gids(figure)
    assert sum(drawn[f"forwards: from memory again {block}"] for block in range(8)) == 8
    assert [drawn[f"backwards: from the cache {block}"] for block in range(8)] == [
        *(0, 0, 0, 1, 1, 1, 1, 1)
    ]
    with pytest.raises(ValueError, match="n_blocks must be from 1 to 16"):
        draw.rereading(17, 5)


# ---- inside a program ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "options", "sectors"),
    [
        (0, {}, 4),
        (4, {}, 5),
        (32, {}, 4),
        (781 * 4, {}, 5),
        (0, {"vector": 4}, 16),
        (16, {"vector": 4}, 17),
        (0, {"itemsize": 2}, 2),
        (0, {"stride": 8}, 32),
        (0, {"stride": 2}, 8),
    ],
)
def test_coalescing_counts_the_sectors(start, options, sectors):
    figure = draw.coalescing(start, **options)
    assert gids(figure)["sector touched"] == sectors
    each = options.get("itemsize", 4) * options.get("vector", 1)
    used = f"{100 * 32 * each / (32 * sectors):.3g}% of it used"
    assert f"{sectors} sectors of 32 bytes fetched, {used}" in texts(figure)
    first = boxes(figure, "used")[0].get_x() - boxes(figure, "sector")[0].get_x()
    sector = boxes(figure, "sector")[0].get_width()
    assert first / sector * 32 == pytest.approx(start % 128)


def test_coalescing_refuses_what_the_hardware_refuses():
    with pytest.raises(ValueError, match=r"multiple of the 16 bytes.*misaligned"):
        draw.coalescing(781 * 4, vector=4)
    with pytest.raises(ValueError, match=r"vector must be from 1 to 4.*got 8"):
        draw.coalescing(0, vector=8)
    with pytest.raises(ValueError, match=r"first lane to the last.*got 1244"):
        draw.coalescing(0, stride=10)
    with pytest.raises(
        ValueError, match=r"number of starts must be from 1 to 4.*got 0"
    ):
        draw.coalescing()


def test_block_layout_shows_one_lane():
    figure = draw.block_layout(1024, warp=1, lane=2)
    shown = [box.get_gid() for box in boxes(figure, "element")]
    assert shown == [f"element {e}" for e in models.elements_of_lane(1024, 1, 2)]
    assert gids(figure)["warp 3"] == 2
    with pytest.raises(ValueError, match=r"lane must be from 0 to 31.*got 32"):
        draw.block_layout(1024, lane=32)
    with pytest.raises(ValueError, match="block_cols must be a power of two, got 781"):
        draw.block_layout(781)


@pytest.mark.parametrize("warp_size", [4, 8, 16])
def test_reduction_ends_with_the_maximum(warp_size):
    values = [3, -1, 4, 1, -5, 9, 2, 6, 5, 3, -5, 8, 9, 7, 11, 3]
    figure = draw.reduction(values, warp_size=warp_size)
    assert "11" in texts(figure)[-1]
    assert gids(figure)["result"] == 1
    steps = models.butterfly(values[:warp_size])
    names = [f"shuffle, xor {warp_size >> n}" for n in range(1, len(steps))]
    for name, state in zip(["one value per lane", *names], steps, strict=True):
        assert gids(figure)[f"{name}: 15"] == 1
        assert str(state[0]).replace("-", "−") in texts(figure)
        assert gids(figure)[f"{name} again: 15"] == (name in names and warp_size < 16)
    shared = boxes(figure, "shared memory")
    assert len(shared) == (16 // warp_size if warp_size < 16 else 0)
    assert texts(figure).count("−∞") == {4: 0, 8: 2 * (6 + 4), 16: 0}[warp_size]


@pytest.mark.parametrize("warp_size", [1, 2])
def test_a_reduction_has_no_more_warps_than_a_warp_has_lanes(warp_size):
    with pytest.raises(ValueError, match=r"number of values must be 1 to \d, got 16"):
        draw.reduction(range(16), warp_size=warp_size)


def test_reduction_of_something_else():
    with pytest.raises(ValueError, match="number of values must be a power of two"):
        draw.reduction([1, 2, 3])
    with pytest.raises(ValueError, match=r"warp_size must be from 1 to 4.*got 8"):
        draw.reduction([1, 2, 3, 4])
