"""What the first cell of a chapter prints: which of the two worlds this is, and why.

Notebooks call it as `backend.describe()`. It stands apart from `backend` because
`from kernels import softmax` loads `backend`, and has no use for sentences. With
COURSE_MEASURE=recorded in the environment, a GPU runs kernels and times are recorded
ones; the sentence says so.

Errors about tensors that lie elsewhere take their sentence from here, too.
"""

import functools
import os
import re
import subprocess

import numpy
import torch
import triton

from kernels.lab import backend

_NEEDS = {  # what a GPU below compute capability 8.0 lacks, and what that means there
    "cp.async": (
        "asynchronous copies (cp.async)",
        "no load starts ahead of its use",
    ),
    "bfloat16": (
        "bfloat16 arithmetic",
        "conversions from and to bfloat16 take extra instructions",
    ),
    "tl.dot": (
        "products on tensor cores, as Triton makes them (tl.dot)",
        "tl.dot becomes ordinary multiplications and additions",
    ),
}


def describe(*needs: str) -> str:
    """Says which of the two worlds this is, why, and with which versions.

    Args:
        needs: what the chapter is about, of "cp.async", "bfloat16" and "tl.dot".

    Returns:
        One sentence. For each need that this GPU lacks, a second one says so, and says
        what works all the same and where to see the difference.

    Raises:
        ValueError: a need of another name.
    """
    if unknown := sorted(set(needs) - set(_NEEDS)):
        raise ValueError(f"needs must be among {sorted(_NEEDS)}, got {unknown}")
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    obstacle = backend.obstacle()
    if backend.INTERPRETED:
        name = nvidia_smi("name")
        why = "There is no GPU here"
        if name or backend.has_gpu():
            why = f"The {name or 'GPU'} of this machine is not used, because "
            why += obstacle or "TRITON_INTERPRET is set"
        return (
            f"{why}: kernels run in Triton's interpreter, and measured figures are "
            f"the ones {_recorded()} ({versions})."
        )
    if obstacle:
        return (
            "TRITON_INTERPRET turns the interpreter off, and PyTorch finds no GPU: "
            f"kernels can be compiled here, and not run ({versions})."
        )
    versions = f"driver {driver_version()}, {versions}"
    if limit := os.environ.get("COURSE_GPU_GB"):
        versions = f"at most {limit} GB of its memory, {versions}"
    name = torch.cuda.get_device_name()
    if os.environ.get("COURSE_MEASURE") == "recorded":
        sentence = (
            f"Kernels are compiled and run on the {name} here, and times are the ones "
            f"{_recorded()}, because COURSE_MEASURE=recorded is set ({versions})."
        )
    else:
        is_brief = os.environ.get("COURSE_MEASURE") == "briefly"
        timed = "timed briefly" if is_brief else "timed"
        sentence = f"Kernels are compiled, run and {timed} on the {name} ({versions})."
    major, minor = torch.cuda.get_device_capability()
    lacking = [_NEEDS[need] for need in needs if (major, minor) < (8, 0)]
    return " ".join(
        [
            sentence,
            *(
                f"This chapter is about {what}, which this GPU lacks (its compute "
                f"capability is {major}.{minor}, below 8.0): every kernel runs and is "
                f"right, but {cost}, and the rows {_recorded()} show the difference."
                for what, cost in lacking
            ),
        ]
    )


@functools.cache
def require_interpreter() -> None:
    """Checks that Triton's interpreter works with the NumPy that is installed.

    Raises:
        RuntimeError: Triton 3.6 cannot take a loop's bound from NumPy 2.4 or newer.
    """
    versions = [package.__version__.split(".") for package in (triton, numpy)]
    of_triton, of_numpy = ([int(part) for part in parts[:2]] for parts in versions)
    if of_triton < [3, 7] and of_numpy >= [2, 4]:
        raise RuntimeError(
            f"the interpreter of triton {triton.__version__} does not work with NumPy "
            f"2.4 or newer, got NumPy {numpy.__version__}; install 'numpy<2.4', or "
            "triton 3.7 or newer"
        )


def driver_version() -> str:
    """The NVIDIA driver's version, such as "580.159.04", or "unknown"."""
    return nvidia_smi("driver_version") or "unknown"


def limit_memory(gigabytes: str) -> None:
    """Limits this process to so many GB (1e9 bytes) of the GPU's memory."""
    if not gigabytes.replace(".", "", 1).isdecimal() or float(gigabytes) == 0:
        raise ValueError(
            f"COURSE_GPU_GB must be a number of GB such as 14, got {gigabytes!r}"
        )
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    share = float(gigabytes) * 1e9 / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def nvidia_smi(field: str) -> str:
    """What nvidia-smi says of this machine's first GPU; empty where it says nothing.

    Args:
        field: one that `nvidia-smi --help-query-gpu` lists, such as "name".
    """
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return output.stdout.partition("\n")[0].strip()


def _recorded() -> str:
    name = os.environ.get("COURSE_RECORDED_GPU") or "nvidia-h200"  # as in `record`
    there = (backend.ROOT / "notebooks" / "recorded" / name).is_dir()
    return f"recorded on {name}" if there else f"from {name}, which has none yet"


HUGGING_FACE = r"\w+(Repository|Properties)|Variant\w+|Benchmark|Device|Metadata|Mode"
HUGGING_FACE += r"|RepoInfo|kernelize|\w*Kernel\w*"
HUGGING_FACE += r"|(get|has|install|load|register|replace|use)_\w*kernel\w*"


def no_such_name(name: str, folder: str) -> Exception:
    """The error of asking the package `kernels`, in this folder, for what it lacks.

    Hugging Face has a package named `kernels`, too: the error says which one was found.
    """
    if re.fullmatch(HUGGING_FACE, name):
        said = (
            f"{name} is a part of Hugging Face's package 'kernels', but the package of "
            f"that name found here is the course's, in {folder}; run this outside of "
            "the course's folder, or import transformers in another process"
        )
        return ImportError(said, name="kernels", path=folder)
    return AttributeError(f"module 'kernels' has no attribute {name!r}")


def elsewhere(tensor: torch.Tensor, name: str) -> str:
    """Says that a tensor is not where kernels run, and what would do."""
    where = repr(backend.DEVICE)
    would_do = f"move it with {name}.to({where})"
    if tensor.device.type == "meta":  # there are no values to move
        would_do = f"torch.randn_like({name}, device={where}) would do"
    return (
        f"{name} must be on {where}, where kernels run here, got a tensor on "
        f"{str(tensor.device)!r}; {would_do}"
    )
