"""What the page "Explore" shows: GPUs, kernels and the record, written for its scripts.

When the book is built, this writes `_static/explore/data.js`, with the GPUs that
`kernels.lab.gpu` documents and recorded files as they are. It also fills two tables of
the page, for readers without the scripts: kernels and how many fit, and the record's
files, which Sphinx then copies beside the pages. The data is a script because a browser
that reads the book from a disk lets a page load scripts, but no other files.

The scripts are in book/static/explore, and only this page loads them. Weighed, for the
benchmark's figure (sizes compressed): Observable Plot with d3, 160 KB: SVG, which can
be printed, marks for each provider, d3's reader of CSV. Taken. Vega-Lite, 280 KB: the
figure would be a description in JSON, but its points can't be reached by keyboard
either. Plotly's basic bundle, 395 KB: larger, and asks for more. uPlot, 22 KB: a
canvas, so no element for a mark or a test, and no markers of several shapes. anywidget:
needs a running kernel. The occupancy explorer's bars are plain HTML.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # before any other package `kernels`

from benchmarks import regions  # noqa: E402
from kernels.lab import gpu, occupancy, record, style  # noqa: E402

PAGE = "book/explore"
ASSETS = ("d3.min.js", "plot.umd.min.js", "arithmetic.js", "data.js")
ASSETS += ("occupancy.js", "benchmark.js")
SWEEPS = {  # stem of a recorded file: its title, and what its times are compared with
    "fastest": ("Softmax: the benchmark of chapter fastest", "copy"),
    "gradient": ("The gradient of softmax: chapter gradient", "stream"),
    "program": ("The first kernels: chapter program", "copy"),
    "cuda": ("Softmax in CUDA C++: chapter cuda", "copy"),
    "unaligned": ("Rows that start anywhere: chapter unaligned", "copy"),
    "staged": ("The shortest rows: chapter staged", "copy"),
    "windows": ("Rows of a slice: chapter windows", "copy"),
}
KERNELS = {"block_cols": 2048, "num_warps": 4}  # of the record, for the table
SYMBOLS = {  # Matplotlib's markers in the words of d3
    **{"": "Circle", "o": "Circle", "s": "Square", "D": "Diamond", "^": "Triangle"},
    **{"v": "Wye", "P": "Cross", "X": "Times", "<": "Star", ">": "Asterisk"},
    **{"p": "Star", "h": "Plus", "d": "Diamond2"},
}


def folders() -> list[str]:
    """The GPUs' folders of the record, the H200's first."""
    names = sorted(path.name for path in record.RECORDED.iterdir() if path.is_dir())
    return sorted(names, key=lambda name: name != "nvidia-h200")


# ---- what the scripts read -----------------------------------------------------------


def data() -> dict:
    """Everything that the scripts read; its values can be written as JSON.

    Returns:
        gpus: short name → the fields of `Gpu`, and sm_partitions;
        kernels: as `kernels()` returns them;
        files: for each recorded file title, gpu, yardstick (a provider), csv (the
        file's text), styles (provider → colour, symbol, label), shown (the providers
        that are drawn at first) and versions (of peers).
    """
    partitions = {"sm_partitions": occupancy.SM_PARTITIONS}
    return {
        "gpus": {
            name: dataclasses.asdict(facts) | partitions
            for name, facts in gpu.documented().items()
        },
        "kernels": kernels(),
        "files": [
            _file(folder, stem)
            for folder in folders()
            for stem in SWEEPS
            if (record.RECORDED / folder / f"{stem}.csv").exists()
        ],
    }


def _file(folder: str, stem: str) -> dict:
    path = record.RECORDED / folder / f"{stem}.csv"
    title, yardstick = SWEEPS[stem]
    rows = pd.read_csv(path)
    names = rows[(rows["clock"] != "host") & rows["p50_us"].notna()]["provider"]
    styles = style.styles_of(dict.fromkeys(names))
    benchmark = "copy", "fastest", *regions.PEERS
    peers = record.RECORDED / folder / f"{stem}_peers.csv"
    versions = pd.read_csv(peers).set_index("peer")["version"] if peers.exists() else {}
    return {
        "title": title,
        "gpu": rows["gpu"].iloc[0],
        "yardstick": yardstick,
        "csv": path.read_text(),
        "styles": {
            name: {
                "colour": look.colour,
                "symbol": SYMBOLS[look.marker],
                "label": look.label,
            }
            for name, look in styles.items()
        },
        "shown": [n for n in styles if stem != "fastest" or n in benchmark],
        "versions": dict(versions),
    }


def kernels() -> list[dict]:
    """The course's kernels whose residency the record has, each resource need once.

    Returns:
        kernel (module and function), num_stages, num_warps, registers (per thread) and
        shared (bytes per block).
    """
    rows = record.recorded("residency_occupancy", "nvidia-h200")
    rows = record.select(rows, **KERNELS)
    rows = rows.rename(columns={"shared_bytes": "shared"})
    rows = rows.drop_duplicates(["kernel", "registers", "shared"])
    columns = ["kernel", "num_stages", "num_warps", "registers", "shared"]
    return rows.sort_values(["kernel", "num_stages"])[columns].to_dict("records")


# ---- what stands on the page ---------------------------------------------------------


def kernels_table(on: str = "H200") -> str:
    """The residency of `kernels()` on a documented GPU, as a Markdown table."""
    head = "kernel | stages | registers | shared | blocks | occupancy"
    lines = [f"| {head} | limit |", "|---" + "|--:" * 5 + "|---|"]
    for row in kernels():
        needs = {name: row[name] for name in ("num_warps", "registers", "shared")}
        found = occupancy.resident(gpu.named(on), **needs)
        name = row["kernel"].removesuffix("_kernel")
        cells = f"`{name}`", row["num_stages"], row["registers"]
        cells += f"{row['shared']:,}", found.blocks_per_sm, f"{found.share:.1%}"
        lines.append(f"| {' | '.join(map(str, cells))} | {found.limit} |")
    return "\n".join(lines)


def files_table() -> str:
    """Every file of the record with what it holds, as a Markdown table with links."""
    lines = ["| file | rows | holds |", "|---|--:|---|"]
    for folder in folders():
        for path in sorted((record.RECORDED / folder).glob("*.csv")):
            rows = pd.read_csv(path)
            link = f"[{path.name}](../{path.relative_to(ROOT).as_posix()})"
            lines.append(f"| {link} | {len(rows):,} | {holds(rows)} |")
    return "\n".join(lines)


def holds(rows: pd.DataFrame) -> str:
    """What a recorded file holds, in words: whose times, or which columns."""
    if not {*record.TIMES} <= {*rows}:
        names = [name for name in rows if name not in record.PROVENANCE]
        return ", ".join(f"`{name}`" for name in names)
    kinds: dict[str, int] = {}
    for provider in rows["provider"].unique():
        kind = provider.split(".")[0]
        if provider in style.STYLES or not re.fullmatch(r"[\w.]+", provider):
            kind = provider if provider in style.STYLES else f"`{provider}`"
        kinds[kind] = kinds.get(kind, 0) + 1
    words = [f"{name} ({n} variants)" if n > 1 else name for name, n in kinds.items()]
    return f"times of {', '.join(words)}"


def fill(app, name: str, source: list[str]) -> None:
    """Puts the tables in the place of the page's two comments."""
    if name == PAGE:
        for words, make in (("kernels", kernels_table), ("files", files_table)):
            before, after = source[0].split(f"<!-- {words} -->")
            source[0] = before + make() + after


def write(app) -> None:
    """Writes the data where Sphinx copies the scripts to."""
    path = Path(app.outdir, "_static", "explore", "data.js")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"const EXPLORE = {json.dumps(data())};\n")


def load(app, page: str, template: str, context: dict, doctree) -> None:
    """Names the scripts and the style in this page, and in no other."""
    if page == PAGE:
        app.add_css_file("explore/explore.css")
        for asset in ASSETS:
            app.add_js_file(f"explore/{asset}", loading_method="defer")


def setup(app) -> dict[str, bool]:
    app.connect("builder-inited", write)
    app.connect("source-read", fill)
    app.connect("html-page-context", load)
    return {"parallel_read_safe": True}
