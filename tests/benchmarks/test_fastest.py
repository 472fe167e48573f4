"""The benchmark measures each case once, and goes on where it stopped."""

import functools
import os
import sys

import pandas as pd
import pytest
import torch

from benchmarks import fastest, peers, regions
from kernels.lab import backend, clock, record
from kernels.lab.record import Case

GPU = {"gpu": "NVIDIA Test 100", "driver": "1.2"}
F32 = torch.float32
CASES = Case(F32, 8, 16), Case(F32, 4, 32), Case(F32, 2, 64)
TWIN = Case(F32, 2, 781), Case(F32, 2, 781, "sliced")


class Machine:
    """Measures in no time; its clock advances by a minute for each measurement."""

    def __init__(self, path):
        self.minutes, self.timed, self.compiled, self.path = 0, [], [], path
        self.files = []

    def timer(self, function, x):
        self.minutes += 1
        self.timed.append((tuple(x.shape), x.stride()))
        return 1.0, 2.0, 3.0

    def precompile(self, providers, cases, inputs, until):
        self.compiled.append(list(cases))
        self.until_s = until

    def rows(self):
        return pd.read_csv(self.path)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    machine = Machine(tmp_path / "nvidia-test-100" / "fastest.csv")
    places = (
        regions.Region("here", "", CASES[:2], short=CASES[:1]),
        regions.Region("there", "", (*CASES[1:], TWIN[0]), short=CASES[2:]),
        regions.Region("strided", "", TWIN[1:], short=TWIN[1:]),
    )
    providers = {"fastest": peers.native, "torch": peers.native}
    monkeypatch.setattr(regions, "REGIONS", places)
    short = tuple(regions.Region(each.name, "", each.short) for each in places)
    monkeypatch.setattr(regions, "SHORT", short)
    monkeypatch.setattr(regions, "HOST", CASES[:1])
    monkeypatch.setattr(fastest, "providers", lambda: dict(providers))
    monkeypatch.setattr(fastest, "bare", peers.native)
    monkeypatch.setattr(fastest.time, "monotonic", lambda: 60.0 * machine.minutes)
    monkeypatch.setattr(peers, "precompile", machine.precompile)
    for name in ("device", "host"):
        monkeypatch.setitem(clock.CLOCKS, name, machine.timer)
    monkeypatch.setattr(record, "RECORDED", tmp_path)
    monkeypatch.setattr(record, "_gpu", lambda: GPU)
    monkeypatch.setattr(clock, "can_measure", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU["gpu"])
    monkeypatch.setattr(backend, "DEVICE", "cpu")
    monkeypatch.setattr(backend, "INTERPRETED", False)  # a record of its own is read
    monkeypatch.delenv("COURSE_RECORDED_GPU", raising=False)
    monkeypatch.setenv("COURSE_RECORD", "0")
    monkeypatch.setenv("COURSE_COMMIT", "abc1234")
    record._provenance.cache_clear()
    yield machine
    record._provenance.cache_clear()


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fastest", *arguments])
    fastest.main()


def test_every_case_is_measured_once_with_all_providers(machine, monkeypatch, capsys):
    run(monkeypatch)
    folder = machine.path.parent
    assert sorted(path.stem for path in folder.iterdir()) == [
        *("fastest", "fastest_absent", "fastest_peers"),
    ]
    rows = machine.rows()
    assert not rows.duplicated(record.KEY).any()
    kinds = rows.groupby(["clock", "input"])["provider"].agg(["count", "nunique"])
    assert kinds.to_dict("index") == {
        ("device", "contiguous"): {"count": 4 * 3, "nunique": 3},  # with the copy
        ("device", "sliced"): {"count": 2, "nunique": 2},  # whose copy is contiguous
        ("host", "contiguous"): {"count": 4, "nunique": 4},  # with the bare launch
    }
    assert len(machine.timed) == len(rows) + 4 * (clock.TURNS["host"] - 1)
    assert machine.timed.count(((2, 781), (800, 1))) == 2
    assert [set(cases) for cases in machine.compiled] == [{*CASES, *TWIN}]
    assert "0 tasks are left" in capsys.readouterr().out


def test_a_run_stops_in_time_and_the_next_one_goes_on(machine, monkeypatch, capsys):
    run(monkeypatch, "--minutes", "4", "here", "there")
    assert len(machine.timed) == 2 * 3
    assert machine.until_s == 60 * 2  # half of the time is for measuring
    assert "2 tasks are left" in capsys.readouterr().out
    run(monkeypatch, "here", "there")
    assert len(machine.timed) == 4 * 3 + 2  # with the twin's slice
    assert machine.compiled[-1] == [CASES[2], *TWIN]
    run(monkeypatch, "here", "there")
    assert len(machine.timed) == 4 * 3 + 2
    assert machine.compiled[-1] == []


def test_done_is_what_this_commit_has_measured_on_this_gpu(machine, monkeypatch):
    run(monkeypatch, "here")
    assert len(machine.timed) == 2 * 3
    run(monkeypatch, "--again", "here")
    assert len(machine.timed) == 2 * 2 * 3
    for name, value in [("COURSE_COMMIT", "def5678"), ("COURSE_COMMIT", "abc1234")]:
        monkeypatch.setenv(name, value)
        record._provenance.cache_clear()
        run(monkeypatch, "here")
    assert len(machine.timed) == 4 * 2 * 3  # the first commit's rows were replaced
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another GPU")
    run(monkeypatch, "here")
    assert len(machine.timed) == 5 * 2 * 3


def test_a_shape_of_which_an_input_lacks_is_measured_again_whole(machine, monkeypatch):
    run(monkeypatch, "strided")
    before = len(machine.timed)
    rows = machine.rows()
    rows[rows["input"] == "contiguous"].to_csv(machine.path, index=False)
    run(monkeypatch, "strided")
    assert before == 3 + 2 and len(machine.timed) == 2 * before
    run(monkeypatch, "strided")
    assert len(machine.timed) == 2 * before


def test_rows_are_written_after_each_case(machine, monkeypatch):
    """What is finished is kept when the command is killed."""
    written = []

    def timer(function, x):
        written.append(len(machine.rows()) if machine.path.exists() else 0)
        return 1.0, 2.0, 3.0

    monkeypatch.setitem(clock.CLOCKS, "device", timer)
    run(monkeypatch, "here")
    assert written == [0, 0, 0, 3, 3, 3]


def test_a_wrong_provider_has_no_times(machine, monkeypatch, capsys):
    wrong = {"fastest": peers.native, "wrong": torch.relu}
    monkeypatch.setattr(fastest, "providers", lambda: wrong)
    run(monkeypatch, "here")
    rows = machine.rows().set_index("provider")
    assert rows.loc["wrong", "p50_us"].isna().all()
    assert rows.loc["fastest", "p50_us"].notna().all()
    assert "wrong is absent at float32 8 × 16" in capsys.readouterr().out
    absent = record.recorded("fastest_absent")
    assert [*absent["provider"]] == ["wrong"] * 2
    assert [*absent["case"]] == ["float32 8 × 16", "float32 4 × 32"]
    assert absent["why"].str.startswith("ValueError: wrong value at row 0").all()


def test_reasons_of_this_commit_are_kept_and_replaced(machine, monkeypatch):
    monkeypatch.setenv("COURSE_RECORD", "1")
    at = "float32", 8, 16, "contiguous"
    told = [
        ({("a", *at, "device"): "y: z", ("b", *at, "device"): "y"}, "device"),
        ({("b", *at, "host"): "Oh: no"}, "host"),
        ({("a", *at, "device"): "w"}, "device"),  # again: b has a time now
    ]
    for absent, name in told:
        why = functools.partial(fastest.reasons, absent, name, CASES[:1])
        df = record.observe("fastest_absent", why)
    rows = df[["provider", "case", "why"]].to_numpy().tolist()
    host, again = "float32 8 × 16 (host)", "float32 8 × 16"
    assert rows == [["b", host, "Oh: no"], ["a", again, "w"]]
    monkeypatch.setenv("COURSE_COMMIT", "def5678")
    record._provenance.cache_clear()
    assert fastest.reasons({}, "host", CASES[:1]) == []


def test_the_record_says_why_each_time_is_missing():
    times = pd.read_csv(record.RECORDED / "nvidia-h200" / "fastest.csv")
    missing = times[times["p50_us"].isna()]
    absent = {
        (key[0], record.words(key))
        for key in missing[record.KEY].itertuples(index=False, name=None)
    }
    why = record.recorded("fastest_absent", "nvidia-h200")
    assert not why.duplicated(["provider", "case"]).any()
    assert {*why[["provider", "case"]].itertuples(index=False, name=None)} == absent
    assert len(absent) > 700 and why["why"].str.contains(r"^\w+: \S").all()


def test_the_short_form(machine, monkeypatch):
    run(monkeypatch, "--short")
    df = record.recorded("fastest")
    assert regions.covered_by(df) == regions.SHORT
    assert len(machine.timed) == 3 * 3 + 4 * clock.TURNS["host"]
    run(monkeypatch)
    assert regions.covered_by(record.recorded("fastest")) == regions.REGIONS


def test_cases_of_one_shape_share_a_copy():
    """A strided matrix is compared with the copy that its contiguous twin is, too."""
    tasks = fastest.plan(region.name for region in regions.REGIONS)
    cases = [case for _, cases in tasks for case in cases]
    wanted = {case for region in regions.REGIONS for case in region.cases}
    assert set(cases) == wanted and len(cases) == len(wanted)
    for name, group in tasks:
        assert name == "device" and len({case[:3] for case in group}) == 1
    assert len({group[0][:3] for _, group in tasks}) == len(tasks)


def test_a_region_is_measured_with_the_twins_of_its_cases():
    """If not, they would be compared with a copy of another run."""
    tasks = fastest.plan(["strided"])
    matrices = {case[:3] for case in regions.BY_NAME["strided"].cases}
    twins = {c for r in regions.REGIONS for c in r.cases if c[:3] in matrices}
    assert {case for _, cases in tasks for case in cases} == twins
    assert {case.input for case in twins} == {"sliced", "contiguous"}


def test_an_unknown_region_is_refused(machine, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "here", "nowhere")
    assert "got ['nowhere']" in capsys.readouterr().err
    assert not machine.timed


def test_the_benchmark_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(clock, "can_measure", lambda: False)
    before = os.environ.get("COURSE_RECORD")
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch)
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("nothing can be timed here: ")
    assert os.environ.get("COURSE_RECORD") == before


def test_a_bare_launch_is_a_softmax():
    x = torch.randn(5, 100, device=backend.DEVICE)
    torch.testing.assert_close(fastest.bare(x), torch.softmax(x, dim=-1))


def test_whole_rows_are_short_enough():
    x = torch.randn(2, fastest.LONGEST_WHOLE_ROW + 1, device=backend.DEVICE)
    fits = fastest.whole_rows(torch.relu, x[:, 1:])
    assert fits.shape == (2, fastest.LONGEST_WHOLE_ROW)
    with pytest.raises(ValueError, match="x must have at most 32768 columns here"):
        fastest.whole_rows(torch.relu, x)


def test_the_chapters_and_the_peers_found_here_are_its_providers(monkeypatch, capsys):
    monkeypatch.delenv("COURSE_PEERS", raising=False)
    gone = peers.Peer("gone", "no-such-package", lambda: torch.relu)
    monkeypatch.setattr(peers, "OPTIONAL", (gone,))
    everyone = fastest.providers()
    always = ("torch", "torch.compile", "tutorial")
    assert [*everyone] == [*fastest.COURSE, *always]
    assert capsys.readouterr().out == "gone is not measured: it is not found here\n"
    x = torch.randn(3, 40, device=backend.DEVICE)
    for name in fastest.COURSE:
        peers.verify(x, everyone[name](x))


def test_the_report_names_what_is_below_its_bar(monkeypatch, capsys):
    monkeypatch.setenv("COURSE_RECORDED_GPU", "nvidia-h200")
    run(monkeypatch, "--report")
    reported = capsys.readouterr().out
    table = record.recorded("fastest")
    assert reported.strip() == fastest.report(table).strip()
    assert "longest" in reported
    table.loc[table["provider"] == "fastest", ["p20_us", "p50_us", "p80_us"]] *= 2
    assert len(fastest.report(table).splitlines()) > len(reported.splitlines()) + 50
