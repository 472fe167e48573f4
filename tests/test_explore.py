"""The page Explore: its scripts compute what the course computes, and it shows all."""

import gzip
import json
import math
import random
import re
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.text import Text

from kernels.lab import draw, gpu, occupancy, record
from tests.helpers import loaded

py_mini_racer = pytest.importorskip(
    "py_mini_racer", reason="JavaScript for the page Explore: pip install mini-racer"
)

ROOT = Path(__file__).resolve().parents[1]
STATIC = ROOT / "book" / "static" / "explore"
ARITHMETIC = (STATIC / "arithmetic.js").read_text()
LONGEST_SCRIPT = 340  # lines
SMALLEST_LIBRARY = 180_000  # bytes, compressed: what the page loads beside the data

GPUS = gpu.documented()
INFINITE = "(key, value) => value === Infinity ? 'any' : value"


explore = loaded(ROOT / "book" / "extensions" / "explore.py")


@pytest.fixture(scope="module")
def data() -> dict:
    """What the build writes, as a browser reads it."""
    return json.loads(json.dumps(explore.data()))


def engine(script: str = ARITHMETIC):
    context = py_mini_racer.MiniRacer()
    context.eval((STATIC / "d3.min.js").read_text())
    context.eval(script)
    return context


def computed(context, call: str, **values):
    """The value of a JavaScript expression, in which `given` holds the values."""
    given = json.dumps(values)
    return json.loads(
        context.eval(f"((given) => JSON.stringify({call}, {INFINITE}))({given})")
    )


# ---- occupancy -----------------------------------------------------------------------


def cases(n: int = 1000) -> list[tuple[str, int, int, int]]:
    """Seeded cases over all GPUs: (GPU, warps, registers, bytes of shared memory)."""
    rng = random.Random(0)

    def warps():
        return rng.choice([1, 1, 2, 4, 8, 16, 32, rng.randint(1, 34)])

    def registers():
        return rng.choice(
            [0, 16, 24, 127, 128, 256, 257, *rng.choices(range(256), k=9)]
        )

    def shared(facts):
        near = facts.shared_per_block + rng.randint(-1024, 1)
        return rng.choice([0, near, *map(rng.randrange, (2048, 4096, 65536, 240_000))])

    names = [list(GPUS)[i % len(GPUS)] for i in range(n)]
    return [(name, warps(), registers(), shared(GPUS[name])) for name in names]


def by_python(case) -> dict:
    name, warps, registers, shared = case
    found = occupancy.resident(
        GPUS[name], num_warps=warps, registers=registers, shared=shared
    )
    limits = {k: "any" if n == math.inf else n for k, n in found.limits.items()}
    return {
        "blocks": found.blocks_per_sm,
        "warps": found.warps_per_sm,
        "share": found.share,
        "limits": limits,
        "limit": found.limit,
    }


def differences(script: str, gpus: dict) -> int:
    """In how many of the 1,000 cases a script differs from kernels.lab.occupancy."""
    call = (
        "given.cases.map(([name, ...kernel]) => residency(given.gpus[name], ...kernel))"
    )
    found = computed(engine(script), call, cases=cases(), gpus=gpus)
    wanted = map(by_python, cases())
    return sum({k: f[k] for k in w} != w for f, w in zip(found, wanted, strict=True))


def test_the_scripts_occupancy_is_the_courses_in_1000_cases(data):
    assert differences(ARITHMETIC, data["gpus"]) == 0


def test_the_cases_reach_every_limit_and_every_gpu():
    limits = [by_python(case)["limit"] for case in cases()]
    assert {limit: limits.count(limit) >= 40 for limit in set(limits)} == dict.fromkeys(
        ["threads", "blocks", "registers", "shared memory"], True
    )
    assert 50 < sum(by_python(case)["blocks"] == 0 for case in cases()) < 500
    assert {name for name, *_ in cases()} == set(GPUS)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("gpu.register_granularity)", "gpu.warp_size)"),
        ("roundUp(shared + reserved, gpu.shared_granularity)", "shared + reserved"),
        ("shared + reserved,", "shared,"),
        ("> gpu.shared_per_block + reserved", "> gpu.shared_per_block"),
        ("* gpu.sm_partitions) / warps", ") / warps"),
        ("gpu.threads_per_block ?", "gpu.threads_per_sm ?"),
        ("blocks: gpu.blocks_per_sm,", "blocks: 32,"),
        ("registers > gpu.max_registers_per_thread", "registers > 256"),
        ("if (registers === 0) return Infinity;", "if (registers === 0) return 99;"),
    ],
)
def test_a_wrong_formula_is_caught(data, right, wrong):
    assert right in ARITHMETIC
    assert differences(ARITHMETIC.replace(right, wrong), data["gpus"]) > 0


def test_a_wrong_fact_is_caught(data):
    gpus = data["gpus"] | {"T4": data["gpus"]["T4"] | {"shared_granularity": 128}}
    assert differences(ARITHMETIC, gpus) > 0


def test_the_facts_are_those_of_the_course(data):
    assert list(data["gpus"]) == list(GPUS)
    for name, facts in GPUS.items():
        partitions = {"sm_partitions": occupancy.SM_PARTITIONS}
        assert data["gpus"][name] == asdict(facts) | partitions


@pytest.mark.parametrize("bad", ["4.5, 32, 0", "0, 32, 0", "4, -1, 0", "4, 32, NaN"])
def test_what_is_no_kernel_is_refused(data, bad):
    with pytest.raises(
        py_mini_racer.JSEvalException, match="RangeError: expected a whole"
    ):
        computed(engine(), f"residency(given.h200, {bad})", h200=data["gpus"]["H200"])


@pytest.mark.parametrize("case", cases(12), ids=str)
def test_the_bars_are_those_of_the_courses_picture(data, case):
    name, warps, registers, shared = case
    call = "residency(given.on, ...given.kernel)"
    found = computed(engine(), call, on=data["gpus"][name], kernel=case[1:])
    picture = draw.occupancy(
        GPUS[name], num_warps=warps, registers=registers, shared=shared
    )
    words = {text.get_text() for text in picture.findobj(Text)}
    for budget, amount in found["each"].items():
        unit = " bytes" if budget == "shared memory" else ""
        assert f"{amount:,}{unit} per block" in words
        assert f"{found['budgets'][budget]:,}{unit}" in words


# ---- the benchmark -------------------------------------------------------------------


def measured(data, stem: str) -> pd.DataFrame:
    """The rows of a recorded file as the scripts read them."""
    file = data["files"][list(explore.SWEEPS).index(stem)]
    call = "measurements(d3.csvParse(given.csv), given.yardstick)"
    rows = computed(engine(), call, csv=file["csv"], yardstick=file["yardstick"])
    return pd.DataFrame(rows)


def test_the_files_are_the_records_own_text(data):
    texts = [
        (record.RECORDED / folder / f"{stem}.csv").read_text()
        for folder in explore.folders()
        for stem in explore.SWEEPS
        if (record.RECORDED / folder / f"{stem}.csv").exists()
    ]
    assert [file["csv"] for file in data["files"]] == texts


@pytest.mark.parametrize("stem", ["fastest", "program", "cuda", "unaligned"])
def test_shares_of_the_copy_are_those_of_the_record(data, stem):
    found = measured(data, stem)
    wanted = record.recorded(stem, "nvidia-h200")
    wanted = wanted[wanted["clock"] != "host"]
    assert len(found) == len(wanted)
    both = found.merge(wanted, on=record.KEY, suffixes=("", "_wanted"))
    assert len(both) == len(wanted)
    assert both["p50_us"].equals(both["p50_us_wanted"])
    difference = (both["share"] - both["share_of_copy"]).abs()
    assert difference.max() < 1e-12


def test_the_gradients_shares_are_of_the_stream(data):
    from benchmarks import training

    found = measured(data, "gradient")
    assert "copy" not in set(found["provider"])
    wanted = training.shares(record.recorded("gradient", "nvidia-h200"), "float32")
    rows = found[(found["dtype"] == "float32") & (found["provider"] == "gradient")]
    shares = rows.set_index("n_cols")["share"]
    assert (shares - wanted["gradient"]).abs().max() < 1e-12


def test_matrices_are_compared_in_groups_of_one_size_or_few_rows(data):
    call = (
        "groupings(given.rows).map((group) => ({...group,"
        " rows: given.rows.filter(group.matches)}))"
    )
    rows = measured(data, "fastest")
    rows = rows[rows["dtype"] == "bfloat16"]
    groups = computed(engine(), call, rows=rows.to_dict("records"))
    sizes = [group["value"] for group in groups if group["by"] == "bytes"]
    assert sizes == sorted(sizes, reverse=True) and 2**28 in sizes
    assert {g["value"] for g in groups if g["by"] == "rows"} >= {1, 2, 4, 64, 128}
    for group in groups:
        table = pd.DataFrame(group["rows"])
        assert table["n_cols"].nunique() >= 3
        spread = table["bytes" if group["by"] == "bytes" else "n_rows"]
        assert spread.max() <= 1.02 * spread.min()


def test_every_provider_has_a_colour_a_symbol_and_a_name(data):
    for file in data["files"]:
        rows = pd.read_csv(
            ROOT / "notebooks" / "recorded" / "nvidia-h200" / "fastest.csv"
        )
        assert set(file["shown"]) <= set(file["styles"])
        for look in file["styles"].values():
            assert set(look) == {"colour", "symbol", "label"} and look["label"]
            assert engine().eval(f"typeof d3.symbol{look['symbol']}.draw") == "function"
    assert set(data["files"][0]["styles"]) <= set(rows["provider"])


# ---- the page ------------------------------------------------------------------------


def test_the_page_names_every_file_of_the_record():
    links = re.findall(r"\]\(\.\./(notebooks/recorded/\S+)\)", explore.files_table())
    files = sorted(record.RECORDED.glob("*/*.csv"))
    assert sorted(links) == sorted(str(file.relative_to(ROOT)) for file in files)


def test_a_file_is_described_by_its_rows():
    sweep = record.recorded("tiled", "nvidia-h200")
    assert explore.holds(sweep).startswith("times of copy, persistent, tiled (")
    odd = record.recorded("layouts", "nvidia-h200")
    assert "`x.t().contiguous()`" in explore.holds(odd)
    rows = pd.DataFrame({"kernel": ["a"], "warps": [4], "gpu": ["NVIDIA H200"]})
    assert explore.holds(rows) == "`kernel`, `warps`"


def test_the_static_table_has_the_drivers_answers():
    rows = re.findall(
        r"^\| `(\S+)` \| (\d) \| (\d+) \| .+? \| (\d+) \|",
        explore.kernels_table(),
        re.M,
    )
    asked = record.select(
        record.recorded("residency_occupancy", "nvidia-h200"), **explore.KERNELS
    )
    driver = {
        (row.kernel.removesuffix("_kernel"), row.num_stages): (
            row.registers,
            row.blocks_per_sm_driver,
        )
        for row in asked.itertuples()
    }
    assert len(rows) == len(explore.kernels()) >= 5
    for kernel, stages, registers, blocks in rows:
        assert driver[kernel, int(stages)] == (int(registers), int(blocks))


def test_the_page_is_filled_and_no_other():
    page = (ROOT / "book" / "explore.md").read_text()
    source = [page]
    explore.fill(None, explore.PAGE, source)
    assert "<!--" not in source[0] and "fastest.csv" in source[0]
    other = [page]
    explore.fill(None, "book/index", other)
    assert other == [page]


def test_only_the_page_loads_the_scripts():
    class App:
        def __init__(self):
            self.loaded = []

        def add_js_file(self, name, **how):
            self.loaded.append(name)

        add_css_file = add_js_file

    on_page, elsewhere = App(), App()
    explore.load(on_page, explore.PAGE, "page.html", {}, None)
    explore.load(elsewhere, "book/index", "page.html", {}, None)
    assert elsewhere.loaded == []
    there = {path.name for path in STATIC.iterdir()} - {"README.md", "LICENSE"}
    assert {Path(name).name for name in on_page.loaded} == there | {"data.js"}


def test_the_scripts_are_short_and_the_libraries_small():
    for name in ("arithmetic.js", "occupancy.js", "benchmark.js"):
        assert len((STATIC / name).read_text().splitlines()) <= LONGEST_SCRIPT, name
    libraries = [gzip.compress(path.read_bytes()) for path in STATIC.glob("*.min.js")]
    assert len(libraries) == 2
    assert sum(map(len, libraries)) < SMALLEST_LIBRARY
