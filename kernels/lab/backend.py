"""The two worlds: a CUDA GPU, or Triton's interpreter where there is no usable GPU.

When it is imported, Triton decides whether kernels are compiled or interpreted. So
`import kernels` runs this module first. Kernels run on the GPU if the CUDA driver
reports one that PyTorch can use. Otherwise `describe()` says why not.
"""

import ctypes
import functools
import os
import sys
import warnings
from importlib import import_module  # of what the product never needs
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def has_gpu() -> bool:
    """True if the CUDA driver reports at least one device (PyTorch is not asked)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return not failed and count.value > 0


def obstacle() -> str:
    """Why kernels cannot run on a GPU of this machine; empty if they can."""
    if not has_gpu():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = "" if hidden is None else f" for CUDA_VISIBLE_DEVICES={hidden!r}"
        return f"the CUDA driver reports no device{where}"
    import torch  # not before: without a GPU, TRITON_INTERPRET is set first

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch would warn of what describe() says
        if torch.cuda.is_available():
            return ""
    built = f"torch {torch.__version__}, built for CUDA {torch.version.cuda},"
    return f"{built} does not start with the driver that is installed"


def _choose_world() -> bool:
    """Sets TRITON_INTERPRET for this process; returns True for the interpreter."""
    if wanted := os.environ.get("TRITON_INTERPRET"):
        return wanted.lower() in ("1", "true", "yes", "on", "y")  # as Triton reads it
    if not (reason := obstacle()):
        return False
    if "triton" in sys.modules:
        raise RuntimeError(
            "triton was imported before kernels, so its interpreter is off, and no GPU "
            f"can be used here ({reason}); restart Python and import kernels first, or "
            "set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    return True


INTERPRETED: bool = _choose_world()
DEVICE: str = "cpu" if INTERPRETED else "cuda"

import torch  # noqa: E402 - a PyTorch that imports Triton finds the world chosen

if INTERPRETED:
    from kernels.lab import interpreter  # noqa: F401 - makes it faster, and silent

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

if os.environ.get("COURSE_GPU_GB") and not INTERPRETED and not obstacle():
    import_module("kernels.lab.description").limit_memory(os.environ["COURSE_GPU_GB"])


def describe(*needs: str) -> str:
    """Says which of the two worlds this is; see `description.describe`."""
    return import_module("kernels.lab.description").describe(*needs)


def validate(x: torch.Tensor, **limits: int | bool | None) -> None:
    """Checks the input of a matrix's softmax; see `operator.validate_rows`."""
    import_module("kernels.lab.operator").validate_rows(x, **limits)
