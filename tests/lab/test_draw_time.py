"""Pictures of residency and time draw what the parameters say."""

import pytest

from kernels.lab import draw, gpu, occupancy
from tests.lab.pictures import boxes, gids, read, texts

H200 = gpu.named("H200")


@pytest.mark.parametrize(
    "use",
    [
        {"num_warps": 4, "registers": 48, "shared": 2048},
        {"num_warps": 1, "registers": 20, "shared": 0},
        {"num_warps": 8, "registers": 32, "shared": 60000},
        {"num_warps": 16, "registers": 40, "shared": 0},
        {"num_warps": 32, "registers": 255, "shared": 0},
    ],
)
def test_occupancy_fills_the_budgets_and_none_overflows(use):
    result = occupancy.resident(H200, **use)
    figure = draw.occupancy(H200, **use)
    for name, limit in result.limits.items():
        used = boxes(figure, f"used: {name}")
        assert len(used) == result.blocks_per_sm
        (budget,) = boxes(figure, f"budget: {name}")
        assert sum(box.get_width() for box in used) <= budget.get_width() + 1e-9
        assert f"room for {limit}" in texts(figure)
    assert read(figure, "NVIDIA H200").endswith(f"what binds: {result.limit}")
    bold = [t.get_text() for t in figure.axes[0].texts if t.get_weight() == "bold"]
    assert bold[1:] == [result.limit, f"room for {result.limits[result.limit]}"]


def test_pictures_of_a_gpu_need_one():
    with pytest.raises(TypeError, match=r"gpu must be a Gpu, .* got str"):
        draw.memory_hierarchy("H200")
    with pytest.raises(TypeError, match=r"gpu must be a Gpu, .* got str"):
        draw.occupancy("H200", num_warps=4, registers=32, shared=0)
    with pytest.raises(ValueError, match="num_warps must be at least 1, got 0"):
        draw.occupancy(H200, num_warps=0, registers=32, shared=0)


# ---- lines over time -----------------------------------------------------------------


def test_schedule_draws_its_plans_to_scale():
    figure = draw.schedule(22, 8, start=0.2)
    for name, starts, end, each in (
        ("one program per row: 22 programs", 22, 3.6, 1.2),
        ("persistent: 8 programs", 8, 3.2, 1.0),
    ):
        rows, idle = boxes(figure, f"{name}: row"), boxes(figure, f"{name}: idle")
        assert len(rows) == 22 and len(idle) == 8
        assert gids(figure)[f"{name}: start"] == starts
        scale = idle[0].get_width() / end
        assert rows[0].get_width() == pytest.approx(scale)
        step = rows[8].get_x() - rows[0].get_x()
        assert step == pytest.approx(scale * each)
        starting = boxes(figure, f"{name}: start")
        used = sum(box.get_width() for box in rows + starting) / scale
        share = f"{1 - used / (8 * end):.0%}"
        assert name in texts(figure)
        assert f"ends at {end:.3g}; {share} idle" in texts(figure)


def test_schedule_names_a_slot_of_another_speed():
    figure = draw.schedule(10, 3, start=0, speeds=[1.0, 0.5, 1.0])
    assert "1, at ×0.5" in texts(figure)
    assert f"ends at 6; {1 - (4 + 6 + 3) / 18:.0%} idle" in texts(figure)
    assert not any(text.startswith("a program starts") for text in texts(figure))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"speeds": [1, 1]}, ValueError, "speeds must be 4, one per slot, got 2"),
        ({"speeds": [1, 1, 0, 1]}, ValueError, "speeds must be positive"),
        ({"n_rows": 0}, ValueError, "n_rows must be from 1 to 120.*got 0"),
        ({"slots": 17}, ValueError, "slots must be from 1 to 16.*got 17"),
        (
            {"duration": [1.0]},
            ValueError,
            "duration must be one time, or 9, one for each row, got 1",
        ),
        ({"duration": 0}, ValueError, "duration or start must be positive"),
        ({"start": -1}, ValueError, "duration or start must be positive.*-1"),
        ({"start": "1"}, TypeError, "duration or start must be a number, got str"),
    ],
)
def test_schedule_of_something_else(arguments, error, message):
    with pytest.raises(error, match=message):
        draw.schedule(**({"n_rows": 9, "slots": 4} | arguments))


def test_pipeline_draws_its_plan_to_scale():
    figure = draw.pipeline((1, 3), iterations=4, load=3, compute=1, store=0.5)
    assert texts(figure).count("4 iterations: 18") == 1
    assert texts(figure).count("4 iterations: 10.5") == 1
    loads = boxes(figure, "num_stages = 3: load")
    scale = loads[0].get_width() / 3
    starts = [(box.get_x() - loads[0].get_x()) / scale for box in loads]
    assert starts == pytest.approx([0, 0, 4.5, 6])
    with pytest.raises(ValueError, match="load must be positive and finite, got 0"):
        draw.pipeline(load=0)
    with pytest.raises(ValueError, match="panels must be from 1 to 4"):
        draw.pipeline(())


def test_pipeline_shows_loads_that_wait():
    figure = draw.pipeline((3,), iterations=3, load=1, compute=2, store=1)
    waits = boxes(figure, "num_stages = 3: waits")
    (load, *_) = boxes(figure, "num_stages = 3: load")
    assert [box.get_gid()[-1] for box in waits] == ["1", "2"]
    assert waits[0].get_width() == pytest.approx(3 * load.get_width())


def test_sharing_draws_its_schedules():
    figure = draw.sharing(5, 3, 5)
    wanted = {"ends at 7.5", "never ends: 5 of 15 programs began"}
    assert wanted <= set(texts(figure))
    drawn, stuck = gids(figure), "all first parts first"
    assert drawn["in order: waits 1.0"] == drawn["in order: stores 4.2"] == 1
    assert drawn[f"{stuck}: waits 4.0"] == 1
    assert not any(gid.startswith(f"{stuck}: loads 0.1") for gid in drawn)
    with pytest.raises(ValueError, match="number of programs must be from 1 to 48"):
        draw.sharing(7, 7, 8)


def test_sharing_shows_who_helps_and_how_long_it_takes():
    figure = draw.sharing(5, 3, 5)
    (load,) = boxes(figure, "all first parts first, with help: loads 0.0")
    (helps,) = boxes(figure, "all first parts first, with help: helps 0.0")
    assert helps.get_width() == pytest.approx(3 * load.get_width())
    helpers = {gid[-3:] for gid in gids(figure) if ": helps" in gid}
    assert helpers == {f"{row}.0" for row in range(5)}  # then all pairs are there
