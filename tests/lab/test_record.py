"""Measurements are recorded whole, and read back as they were."""

import math
import shutil

import pandas as pd
import pytest
import torch
import triton

from kernels.lab import backend, clock, gpu, record
from tests.lab.conftest import GPU
from tests.lab.test_recorded import faults_of

CASES = record.cases([(64, 128), (8, 1000)])
PROVIDERS = {"torch": lambda x: torch.softmax(x, dim=-1)}
HEADER = (
    "provider,dtype,n_rows,n_cols,input,clock,p20_us,p50_us,p80_us,"
    "gpu,driver,torch,triton,recorded_at,commit"
)


class FakeClock:
    """Takes 1 µs per value for the copy, 2 µs for the others; notes what it timed."""

    def __init__(self):
        self.timed = []

    def __call__(self, function, x):
        self.timed.append((function, x.dtype, tuple(x.shape)))
        time = x.numel() * (1.0 if function is torch.clone else 2.0)
        return 0.5 * time, time, 1.5 * time


@pytest.fixture
def timer(monkeypatch):
    """The clock "device"; "events" takes half of its times."""
    fake = FakeClock()

    def events(function, x):
        return tuple(time / 2 for time in fake(function, x))

    monkeypatch.setitem(clock.CLOCKS, "device", fake)
    monkeypatch.setitem(clock.CLOCKS, "events", events)
    return fake


def lines(path):
    return path.read_text().splitlines()


def sliced(dtype, n_rows, n_cols):
    return torch.ones(n_rows, n_cols + 1, dtype=dtype)[:, :n_cols]


# ---- cases ---------------------------------------------------------------------------


def test_cases_are_every_shape_in_every_dtype():
    made = record.cases(iter([(2, 3), (4, 5)]), [torch.float32, torch.bfloat16])
    assert made == [
        (torch.float32, 2, 3, "contiguous"),
        (torch.float32, 4, 5, "contiguous"),
        (torch.bfloat16, 2, 3, "contiguous"),
        (torch.bfloat16, 4, 5, "contiguous"),
    ]


def test_cases_of_a_size_have_as_many_rows_as_make_it():
    made = record.of_size(2**20, iter([256, 1000]), [torch.float32, torch.float16])
    assert [(case.n_rows, case.n_cols) for case in made] == [
        *((1024, 256), (262, 1000)),
        *((2048, 256), (524, 1000)),
    ]
    assert record.of_size(100, [1000])[0].n_rows == 1


def test_the_same_input_every_time(world):
    world(has_gpu=True)
    first, again = (record.random(torch.float16, 4, 8) for _ in range(2))
    assert first.equal(again)
    assert first.dtype is torch.float16 and first.is_contiguous()


# ---- sweeps --------------------------------------------------------------------------


def test_a_sweep_measures_every_provider_beside_a_copy(world, folder, timer):
    world(has_gpu=True)
    shapes, dtypes = [(64, 128), (8, 1000)], [torch.float32, torch.float16]
    df = record.sweep("mine", PROVIDERS, record.cases(shapes, dtypes))
    assert df[["provider", "dtype", "n_rows"]].values.tolist() == [
        [provider, dtype, n_rows]
        for dtype in ("float32", "float16")
        for n_rows in (64, 8)
        for provider in ("copy", "torch")
    ]
    assert [*df] == [*HEADER.split(","), "effective_gbps", "share_of_copy"]
    row = record.only(df, provider="torch", n_rows=8, dtype="float16")
    assert (row.p20_us, row.p50_us, row.p80_us) == (8000, 16000, 24000)
    assert row.share_of_copy == 0.5
    assert row.effective_gbps == pytest.approx(2 * 2 * 8000 / 16000e-6 / 1e9)
    assert (row.gpu, row.driver, row.commit) == ("NVIDIA Test 100", "1.2", "abc1234")
    assert (row.torch, row.triton) == (str(torch.__version__), triton.__version__)
    assert (row.input, row.clock) == ("contiguous", "device")
    assert len(timer.timed) == 8
    assert df.attrs["source"].endswith("measured here")
    assert not folder.exists()  # it was not asked to record


def test_what_is_recorded_is_read_back_without_a_gpu(world, folder, timer, monkeypatch):
    world(has_gpu=True, recording=True)
    measured = record.sweep("mine", PROVIDERS, CASES)
    header, *rows = lines(folder / "mine.csv")
    assert header == HEADER
    assert rows[0].startswith(
        "copy,float32,8,1000,contiguous,device,4000.0,8000.0,12000.0,NVIDIA Test 100,"
    )
    assert list(folder.iterdir()) == [folder / "mine.csv"]  # no draft is left
    timed = len(timer.timed)
    for change in ({"has_gpu": False}, {"has_gpu": True}):
        world(**change)
        if change["has_gpu"]:
            monkeypatch.setenv("COURSE_MEASURE", "recorded")
        read = record.sweep("mine", PROVIDERS, CASES)
        pd.testing.assert_frame_equal(read, measured)
        assert read.attrs["source"] == measured.attrs["source"].replace(
            "measured here", f"recorded {read['recorded_at'][0]}"
        )
    assert len(timer.timed) == timed
    whole = record.recorded("mine", folder.name)
    pd.testing.assert_frame_equal(whole, record.recorded("mine"))
    with pytest.raises(ValueError, match=r"there is no nvidia-none/mine\.csv"):
        record.recorded("mine", "nvidia-none")
    label = f"NVIDIA Test 100 · driver 1.2 · torch {torch.__version__} · triton "
    assert read.attrs["source"].startswith(label)


def test_brief_times_are_not_recorded(world, folder, monkeypatch):
    world(has_gpu=True, recording=True)
    monkeypatch.setattr(clock, "BRIEFLY", True)
    with pytest.raises(ValueError, match=r"COURSE_MEASURE must be unset.*'briefly'"):
        record.observe("occupancy", lambda: iter([{"us": 1.0}]))
    assert not [*folder.glob("*.csv")]


def test_a_sweep_has_the_record_of_the_same_rows_beside_it(world, folder, timer):
    """For a figure to draw behind what is measured; a GPU that records draws none."""
    world(has_gpu=True, recording=True)
    measured = record.sweep("mine", PROVIDERS, record.cases([(8, 1000), (64, 128)]))
    assert "recorded" not in measured.attrs
    world(has_gpu=True)
    df = record.sweep("mine", PROVIDERS, record.cases([(8, 1000), (16, 500)]))
    kept = pd.DataFrame(df.attrs["recorded"])
    same = measured[measured["n_rows"] == 8].reset_index(drop=True)
    pd.testing.assert_frame_equal(kept, same, check_dtype=False)
    joined = record.concat([record.select(df, n_rows=8), record.select(df, n_rows=16)])
    assert len(joined.attrs["recorded"]["provider"]) == len(kept)
    world(has_gpu=False)
    read = record.sweep("mine", PROVIDERS, record.cases([(8, 1000)]))
    assert "recorded" not in read.attrs  # it is the record


def test_a_new_record_takes_the_place_of_the_same_rows_only(world, folder, timer):
    world(has_gpu=True, recording=True)
    record.sweep("mine", PROVIDERS, CASES)
    before = lines(folder / "mine.csv")
    more = {"torch": PROVIDERS["torch"], "another": torch.clone}
    clock.CLOCKS["device"] = lambda *_: (1.0, 2.0, 3.0)
    assert len(record.sweep("mine", more, CASES[:1])) == 3
    rows = [line.split(",")[:9] for line in lines(folder / "mine.csv")[1:]]
    usual = ["contiguous", "device"]
    assert rows == [
        ["another", "float32", "64", "128", *usual, "1.0", "2.0", "3.0"],
        ["copy", "float32", "8", "1000", *usual, "4000.0", "8000.0", "12000.0"],
        ["copy", "float32", "64", "128", *usual, "1.0", "2.0", "3.0"],
        ["torch", "float32", "8", "1000", *usual, "8000.0", "16000.0", "24000.0"],
        ["torch", "float32", "64", "128", *usual, "1.0", "2.0", "3.0"],
    ]
    assert before[1] in lines(folder / "mine.csv")


def test_clocks_are_rows_of_one_file(world, folder, timer):
    world(has_gpu=True, recording=True)
    frames = [
        record.sweep("mine", PROVIDERS, CASES, clock=name)
        for name in ("device", "events")
    ]
    df = record.recorded("mine")
    assert len(df) == 8
    for name, frame in zip(("device", "events"), frames, strict=True):
        rows = record.select(df, clock=name)
        assert sorted(rows["p50_us"]) == sorted(frame["p50_us"])
        assert set(rows[rows["provider"] == "torch"]["share_of_copy"]) == {0.5}
    world(has_gpu=False)
    read = record.sweep("mine", PROVIDERS, CASES, clock="events")
    pd.testing.assert_frame_equal(read, frames[1])


def test_at_the_hosts_clock_providers_take_turns(world, folder, timer, monkeypatch):
    world(has_gpu=True)
    slow, calls = {1, 2, 3, 4}, []  # a slow host: the first two turns

    def host(function, x):
        calls.append(function)
        return (1.0, 2.0, 3.0) if len(calls) not in slow else (10.0, 20.0, 30.0)

    monkeypatch.setitem(clock.CLOCKS, "host", host)
    df = record.sweep("mine", PROVIDERS, CASES[:1], clock="host")
    assert len(calls) == clock.TURNS["host"] * (1 + len(PROVIDERS))
    assert calls[: len(calls) // 5] * 5 == calls
    assert set(df["p50_us"]) == {2.0} and set(df["p80_us"]) == {3.0}


def test_who_fails_in_one_turn_is_absent(world, folder, monkeypatch):
    world(has_gpu=True)
    left = [1] * 3  # calls that do not fail: a turn has two

    def timed_once(function, x):
        function(x)
        return 1.0, 2.0, 3.0

    def tired(x):
        left.pop()
        return x

    providers = {"tired": tired, "steady": lambda x: x}
    monkeypatch.setitem(clock.CLOCKS, "host", timed_once)
    df = record.sweep("mine", providers, CASES[:1], clock="host")
    assert list(df["provider"]) == ["copy", "steady"]
    assert [key[0] for key in df.attrs["absent"]] == ["tired"]


def test_inputs_are_rows_of_one_file_beside_a_contiguous_copy(world, folder, timer):
    world(has_gpu=True, recording=True)
    seen = []
    providers = {"mine": lambda x: seen.append((x.shape[1], x.stride(0)))}
    cases = [case._replace(input="sliced") for case in CASES] + CASES[:1]
    df = record.sweep("mine", providers, cases, inputs={"sliced": sliced})
    assert df[["provider", "n_cols", "input"]].values.tolist() == [
        ["copy", 128, "contiguous"],
        ["mine", 128, "sliced"],
        ["copy", 1000, "contiguous"],
        ["mine", 1000, "sliced"],
        ["mine", 128, "contiguous"],
    ]
    assert seen == [(128, 129), (1000, 1001), (128, 128)]
    assert set(record.select(df, provider="mine")["share_of_copy"]) == {0.5}
    assert len(timer.timed) == 5  # the copy is not repeated
    world(has_gpu=False)
    read = record.sweep("mine", providers, cases, inputs={"sliced": sliced})
    pd.testing.assert_frame_equal(read, df)


def test_a_failed_sweep_records_nothing(world, folder, timer):
    def interrupted(x):
        raise KeyboardInterrupt

    world(has_gpu=True, recording=True)
    with pytest.raises(KeyboardInterrupt):
        record.sweep("mine", {"mine": interrupted}, CASES)
    assert not folder.exists()


def test_rows_that_are_not_recorded_are_named(world, folder, timer):
    world(has_gpu=False)
    with pytest.raises(ValueError, match=r"no nvidia-test-100/mine\.csv"):
        record.sweep("mine", PROVIDERS, CASES)
    world(has_gpu=True, recording=True)
    record.sweep("mine", PROVIDERS, CASES)
    world(has_gpu=False)
    wanted = {**PROVIDERS, "faster": torch.clone}
    with pytest.raises(
        ValueError, match=r"lacks 2 of the 6 rows.*faster float32 64 × 128, faster"
    ):
        record.sweep("mine", wanted, CASES)
    with pytest.raises(ValueError, match=r"lacks 20 .* and 12 more; `make record`"):
        record.sweep("mine", PROVIDERS, record.cases((1, n) for n in range(10)))
    with pytest.raises(ValueError, match=r"copy float32 64 × 128 \(host\), torch"):
        record.sweep("mine", PROVIDERS, CASES, clock="host")
    with pytest.raises(ValueError, match=r"torch float32 64 × 128 sliced;"):
        strided = [CASES[0]._replace(input="sliced")]
        record.sweep("mine", PROVIDERS, strided, inputs={"sliced": sliced})


def test_a_provider_that_refuses_a_shape_is_absent_and_said_to_be(
    world, folder, timer, capsys
):
    def picky(x):
        if x.shape[1] % 16:
            raise NotImplementedError("N must be a multiple of 16\nand more")
        return x

    world(has_gpu=True, recording=True)
    df = record.sweep("mine", {"picky": picky}, CASES)
    said = "picky is absent at float32 8 × 1000"
    reason = "NotImplementedError: N must be a multiple of 16"
    assert capsys.readouterr().out == f"{said}: {reason}\n"
    key = "picky", "float32", 8, 1000, "contiguous", "device"
    assert df.attrs["absent"] == {key: reason}
    assert record.select(df, provider="picky")["n_cols"].tolist() == [128]
    assert math.isnan(record.pivot(df).loc[1000, "picky"])
    world(has_gpu=False)
    read = record.sweep("mine", {"picky": picky}, CASES)
    assert capsys.readouterr().out == f"{said}\n"
    pd.testing.assert_frame_equal(read, df)


@pytest.mark.parametrize("known", ["before", "too late"])
def test_a_case_that_does_not_fit_is_left_out_and_said_to_be(
    world, folder, timer, capsys, monkeypatch, known
):
    make = record.random
    world(has_gpu=True, recording=True)

    def small_memory(dtype, n_rows, n_cols):
        if n_cols > 500:
            raise torch.OutOfMemoryError
        return make(dtype, n_rows, n_cols)

    cases = record.cases([(64, 128), (8, 8000)])
    if known == "before":  # three matrices of 64 × 128, but not of 8 × 8000
        monkeypatch.setattr(gpu, "free_bytes", lambda: 100_000)
    else:
        monkeypatch.setattr(record, "random", small_memory)
    df = record.sweep("mine", PROVIDERS, cases)
    said = "float32 8 × 8000 is left out: it does not fit the GPU's memory\n"
    assert capsys.readouterr().out == said
    assert set(df["n_cols"]) == {128}
    assert len(timer.timed) == 2
    world(has_gpu=False)
    read = record.sweep("mine", PROVIDERS, cases)
    pd.testing.assert_frame_equal(read, df)
    assert capsys.readouterr().out == said
    assert record.recorded("mine").equals(df)


def test_where_nothing_fits_the_frame_is_empty(world, folder, timer, monkeypatch):
    world(has_gpu=True)
    monkeypatch.setattr(gpu, "free_bytes", lambda: 0)
    df = record.sweep("mine", PROVIDERS, CASES)
    assert df.empty and "share_of_copy" in df
    assert record.pivot(df).empty
    assert record.select(df, provider="torch").empty
    assert record.concat([df, df]).empty
    assert record.sweep("mine", PROVIDERS, []).empty


def test_a_wrong_provider_is_not_timed(world, folder, timer, capsys):
    def verify(x, y):
        if not torch.equal(y, torch.softmax(x, dim=-1)):
            raise ValueError("wrong at row 0")

    world(has_gpu=True)
    providers = {"wrong": lambda x: 2 * x, **PROVIDERS}
    df = record.sweep("mine", providers, CASES[:1], verify=verify)
    assert df["provider"].tolist() == ["copy", "torch"]
    said = "wrong is absent at float32 64 × 128: ValueError: wrong at row 0\n"
    assert capsys.readouterr().out == said
    assert len(timer.timed) == 2


def test_a_sweep_refuses_bad_names(world, folder):
    world(has_gpu=False)
    with pytest.raises(ValueError, match="must not name 'copy'"):
        record.sweep("mine", {"copy": torch.clone}, CASES)
    with pytest.raises(ValueError, match="name must be of letters"):
        record.sweep("../mine", PROVIDERS, CASES)
    with pytest.raises(ValueError, match=r"clock must be one of \['device', 'host'"):
        record.sweep("mine", PROVIDERS, CASES, clock="sundial")
    strided = [CASES[0]._replace(input="sliced")]
    with pytest.raises(ValueError, match=r"one of \['contiguous'\], got 'sliced'"):
        record.sweep("mine", PROVIDERS, strided)


def test_a_file_with_other_columns_is_refused(world, folder):
    world(has_gpu=False)
    folder.mkdir()
    (folder / "mine.csv").write_text("provider,p50_us\ncopy,1.0\n")
    with pytest.raises(ValueError, match="must have the columns"):
        record.sweep("mine", PROVIDERS, CASES)


@pytest.mark.gpu
def test_a_copy_of_256_mb_is_timed_on_the_gpu():
    df = record.sweep("mine", {}, record.cases([(8192, 8192)]))
    (row,) = df.itertuples()
    assert 0 < row.p20_us <= row.p50_us <= row.p80_us
    assert row.gpu == torch.cuda.get_device_name()
    assert faults_of(df) == []


# ---- optional providers --------------------------------------------------------------


class FakePeer(record.OptionalProvider):
    """There or not; takes 3 µs per value, of the matrix that is made for it."""

    def __init__(self, there=True):
        self.there = there

    def available(self):
        return self.there

    def times(self, x, make_input, timer, verify):
        again = make_input()
        assert again.equal(x) and again is not x
        return timer(lambda x: x, again)[0], 3.0 * x.numel(), 9.0 * x.numel()


def test_an_optional_provider_is_measured_where_it_is(world, folder, timer):
    world(has_gpu=True, recording=True)
    providers = {"peer": FakePeer(), **PROVIDERS}
    df = record.sweep("mine", providers, CASES)
    assert df["provider"].tolist() == ["copy", "peer", "torch"] * 2
    assert record.only(df, provider="peer", n_rows=64).p50_us == 3 * 8192
    assert "recorded" not in df.attrs["source"]
    world(has_gpu=False)
    pd.testing.assert_frame_equal(record.sweep("mine", providers, CASES), df)


def test_an_optional_provider_that_is_not_there_keeps_its_recorded_rows(
    world, folder, timer, capsys
):
    world(has_gpu=True, recording=True)
    record.sweep("mine", {"peer": FakePeer()}, CASES[:1])
    before = [line for line in lines(folder / "mine.csv") if "peer" in line]
    providers = {"peer": FakePeer(there=False), **PROVIDERS}
    df = record.sweep("mine", providers, CASES)
    assert df["provider"].tolist() == ["copy", "peer", "torch", "copy", "torch"]
    said = "peer is left out at 1 of 2 shapes: not here, no record\n"
    assert capsys.readouterr().out == said
    day = record.only(df, provider="peer").recorded_at
    assert df.attrs["source"].endswith(f"measured here · peer recorded {day}")
    assert [line for line in lines(folder / "mine.csv") if "peer" in line] == before
    world(has_gpu=False)
    pd.testing.assert_frame_equal(record.sweep("mine", providers, CASES), df)
    assert capsys.readouterr().out == said


def test_an_optional_provider_is_left_out_where_nothing_is_recorded(
    world, folder, timer, capsys
):
    world(has_gpu=True)
    providers = {"peer": FakePeer(there=False), **PROVIDERS}
    df = record.sweep("mine", providers, CASES)
    assert df["provider"].tolist() == ["copy", "torch"] * 2
    assert "peer is left out at 2 of 2 shapes" in capsys.readouterr().out
    assert df.attrs["source"].endswith("measured here")


def test_rows_of_another_gpu_do_not_stand_beside_those_of_this_gpu(
    world, folder, timer, monkeypatch, capsys
):
    world(has_gpu=True, recording=True)
    record.sweep("mine", {"peer": FakePeer()}, CASES)
    monkeypatch.setattr(record, "_gpu", lambda: GPU | {"gpu": "NVIDIA Test 200"})
    record._provenance.cache_clear()
    df = record.sweep("mine", {"peer": FakePeer(there=False)}, CASES)
    assert set(df["gpu"]) == {"NVIDIA Test 200"}
    assert "peer is left out at 2 of 2 shapes" in capsys.readouterr().out


# ---- where a row is from -------------------------------------------------------------


def test_the_commit_is_given_or_asked_of_git_or_unknown(world, monkeypatch, tmp_path):
    world(has_gpu=True)
    assert record._provenance()["commit"] == "abc1234"
    assert record.commit() == "abc1234"
    monkeypatch.delenv("COURSE_COMMIT")
    monkeypatch.setattr(backend, "ROOT", tmp_path)
    assert record.commit() == "unknown"


def test_all_that_is_recorded_is_read_in_both_worlds(world, folder, timer, capsys):
    def picky(x):
        raise NotImplementedError

    world(has_gpu=True, recording=True)
    sweep = record.sweep("mine", {"picky": picky, **PROVIDERS}, CASES)
    capsys.readouterr()
    for has_gpu in (True, False):
        world(has_gpu=has_gpu)
        read = record.recorded("mine")
        both = [
            frame.sort_values(record.KEY).to_dict("list") for frame in (read, sweep)
        ]
        assert both[0] == both[1]
        assert "· recorded " in read.attrs["source"]
        with pytest.raises(ValueError, match=r"no nvidia-test-100/other\.csv"):
            record.recorded("other")
    assert capsys.readouterr().out == ""


def test_which_record_is_read(world, folder, timer, monkeypatch):
    world(has_gpu=True, recording=True)
    record.sweep("mine", PROVIDERS, CASES)
    monkeypatch.delenv("COURSE_RECORDED_GPU")
    assert "Test 100" in record.recorded("mine").attrs["source"]  # this GPU's own
    h200 = shutil.copytree(folder, folder.with_name("nvidia-h200"))
    (h200 / "mine.csv").rename(h200 / "other.csv")
    assert record.recorded("other").equals(record.recorded("mine"))  # the H200's
    shutil.rmtree(h200)
    world(has_gpu=False)
    with pytest.raises(
        ValueError, match=r"no nvidia-h200/mine\.csv.*'nvidia-test-100'"
    ):
        record.recorded("mine")
    monkeypatch.setenv("COURSE_RECORDED_GPU", "another-gpu")
    world(has_gpu=True)
    with pytest.raises(ValueError, match=r"no another-gpu/mine\.csv"):
        record.recorded("mine")
