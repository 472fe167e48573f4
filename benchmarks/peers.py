"""The peers: softmax by others, each measured where it can run.

| peer | what is called |
|---|---|
| `torch` | `torch.softmax` |
| `torch.compile` | `torch.softmax`, compiled for each shape (`dynamic=False`) |
| `tutorial` | the kernel of Triton's own tutorial, with that tutorial's launch |
| `liger` | `LigerSoftmaxFunction` of liger-kernel (measured with 0.8.5) |
| `quack` | `quack.softmax.softmax` of quack-kernels: CuTe DSL, clusters (0.6.5) |
| `tileops` | `tileops.reduction.SoftmaxFwdOp` of tileops: TileLang, clusters (0.1.0) |

The course does not require the last three. Each is used if it can be imported, or if
the folder that the environment variable COURSE_PEERS names holds it unpacked, under its
name; otherwise its recorded rows are used. QuACK and TileOPs need different versions of
a library. So each of them has a process of its own, which lives as long as the
benchmark. That process makes the same input from the same seed, on the same GPU, while
this process waits.

Weighed: an environment that holds all peers (their requirements exclude each other),
and a new process for each measurement (importing any of them takes seconds).
"""

import contextlib
import functools
import importlib.metadata
import io
import os
import queue
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.lab import backend, gpu, process, record
from kernels.lab.clock import Times
from kernels.lab.record import Case

Softmax = Callable[[torch.Tensor], torch.Tensor]

START_S, CASE_S = 180.0, 90.0  # the most that a process's start, or a case, may take
VERIFIED_VALUES = 2**20  # of a result: as many rows as hold so many are compared
RELATIVE = {torch.float32: 2.0**-16, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
"""How far a peer's values may be off. A peer must not win by being wrong, and must not
be refused for a fast exponential."""
PROCESS_BYTES = 2**30  # of the GPU's memory: a CUDA context, and a compiler's own needs


# ---- in this process -----------------------------------------------------------------


def native(x: torch.Tensor) -> torch.Tensor:
    """`torch.softmax` of the rows."""
    return torch.softmax(x, dim=-1)


def compiled(x: torch.Tensor) -> torch.Tensor:
    """`torch.softmax` by torch.compile, for every shape anew."""
    return _compiled()(x)


@functools.cache
def _compiled() -> Softmax:
    from torch._dynamo import config
    from torch._inductor import config as inductor

    config.recompile_limit = 4096  # beyond it, it would raise (fullgraph)
    config.accumulated_recompile_limit = 4096
    inductor.compile_threads = 1  # one kernel each: no pool of processes
    for said in (r"\s*Online softmax is disabled", "IProgress not found"):
        warnings.filterwarnings("ignore", said)  # the compiler, in a first call
    return torch.compile(native, dynamic=False, fullgraph=True)


@triton.jit
def tutorial_kernel(
    output_ptr,
    input_ptr,
    input_row_stride,
    output_row_stride,
    n_rows,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
    num_stages: tl.constexpr,
):
    """One program computes the softmax of every num_programs-th row.

    This is the kernel of Triton's tutorial 2 in our words: the same operations in the
    same order, so that it has the tutorial's limits too. Columns must be neighbours, no
    row may start 2^31 elements or more after the first, and only float32 has an
    exponential.

    Args:
        output_ptr, input_ptr: the tensors' first elements.
        input_row_stride, output_row_stride: elements from one row to the next.
        n_rows, n_cols: the tensors' shape.
        BLOCK_SIZE: n_cols rounded up to a power of two.
        num_stages: of the pipeline.
    """
    cols = tl.arange(0, BLOCK_SIZE)
    inside = cols < n_cols
    first, step = tl.program_id(0), tl.num_programs(0)
    for row in tl.range(first, n_rows, step, num_stages=num_stages):
        input_ptrs = input_ptr + row * input_row_stride + cols
        x = tl.load(input_ptrs, mask=inside, other=-float("inf"))
        numerator = tl.exp(x - tl.max(x, axis=0))
        y = numerator / tl.sum(numerator, axis=0)
        tl.store(output_ptr + row * output_row_stride + cols, y, mask=inside)


def tutorial(x: torch.Tensor) -> torch.Tensor:
    """The tutorial's launch: as many programs as its formula says that the GPU holds.

    The tutorial computes this number at every call. Here it is computed once for each
    shape, which is kinder to the host and changes nothing for the GPU.

    Source: https://triton-lang.org/main/getting-started/tutorials/02-fused-softmax.html
    (triton-lang/triton, python/tutorials/02-fused-softmax.py, MIT licence).
    Chapter `persistent` shows what is wrong with it.
    """
    y = torch.empty_like(x)
    sizes = x.stride(0), y.stride(0), *x.shape
    kernel, constants, n_programs = _tutorial_launch(x.dtype, sizes)
    kernel[(n_programs, 1, 1)](y, x, *sizes, *constants)
    return y


@functools.cache
def _tutorial_launch(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple:
    """The compiled kernel, its constants, and how many programs to launch."""
    has = triton.runtime.driver.active.utils.get_device_properties(
        torch.cuda.current_device()
    )
    num_warps, num_stages = 8, 4 if has["max_shared_mem"] > 200_000 else 2
    constants = triton.next_power_of_2(sizes[-1]), num_stages
    ahead = (num_stages - 1) * constants[0] * dtype.itemsize
    if ahead > has["max_shared_mem"]:  # else minutes of compiling end in this error
        raise triton.OutOfResources(ahead, has["max_shared_mem"], "shared memory")
    kernel = tutorial_kernel.warmup(
        dtype, dtype, *sizes, *constants, num_warps=num_warps, grid=(1,)
    )
    kernel._init_handles()  # loads the kernel: then its registers are known
    by_registers = has["max_num_regs"] // (kernel.n_regs * has["warpSize"] * num_warps)
    per_sm = min(by_registers, has["max_shared_mem"] // kernel.metadata.shared)
    return kernel, constants, min(has["multiprocessor_count"] * per_sm, sizes[2])


# ---- optional providers --------------------------------------------------------------


@dataclass(frozen=True)
class Peer(record.OptionalProvider):
    """A peer that a machine may lack.

    Attributes:
        name: of the provider, and of its subfolder of COURSE_PEERS.
        package: the distribution, for its version.
        load: imports the peer and returns its softmax.
        apart: whether the peer needs a process of its own.
        inside: which subfolders of its folder go onto `sys.path`, in this order.
        case_s: the most that a case may take, s; then the peer's process is ended.
    """

    name: str
    package: str
    load: Callable[[], Softmax]
    apart: bool = False
    inside: tuple[str, ...] = (".",)
    case_s: float = CASE_S

    def folders(self) -> tuple[str, ...]:
        """Where the peer is unpacked; () if it is to be imported like any package."""
        root = os.environ.get("COURSE_PEERS")
        folder = Path(root, self.name).resolve() if root else None
        if not folder or not folder.is_dir():
            return ()
        return tuple(str(folder / part) for part in self.inside)

    def version(self) -> str:
        """The peer's version, or "" if it is neither installed nor unpacked."""
        where = {"path": list(self.folders())} if self.folders() else {}
        found = importlib.metadata.distributions(name=self.package, **where)
        return next((distribution.version for distribution in found), "")

    def available(self) -> bool:
        """Whether the peer is here and can be imported; the first call tries it."""
        return bool(self.version()) and _answers(self, self.folders())

    def times(
        self,
        x: torch.Tensor,
        make_input: Callable[[], torch.Tensor],
        timer: Callable[..., Times],
        verify: record.Verify | None,
    ) -> Times:
        """As `record.timed`, in the process where the peer lives.

        Raises:
            TimeoutError: it took longer than case_s.
        """
        if not self.apart:
            function = _loaded(self.load, self.folders())
            return record.timed(function, x, timer, verify)
        helper, where = _process(self, self.folders()), (self.load, self.folders())
        if helper.process is None:  # it was ended, and has to import everything again
            helper.call(_ready, where, limit_s=START_S)
        try:
            args = *where, make_input, timer, verify
            times, printed = helper.call(_timed, args, limit_s=self.case_s)
        except Exception:
            _end_if_broken(helper)
            raise
        print(printed, end="")
        return times


def _new_process() -> process.Helper:
    world = "interpreter" if backend.INTERPRETED else "compiler"
    return process.Helper(world, hide_gpu=False)


@functools.cache
def _process(peer: Peer, folders: tuple[str, ...]) -> process.Helper:
    """The process of a peer, which lives as long as this process."""
    return _new_process()


def _end_if_broken(helper: process.Helper) -> None:
    """Ends a process that has lost its CUDA context: every later call would fail."""
    if helper.process is not None:
        try:
            helper.call(_synchronize, limit_s=START_S)
        except Exception:
            helper.stop()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@functools.cache
def _answers(peer: Peer, folders: tuple[str, ...]) -> bool:
    try:
        if peer.apart:
            _process(peer, folders).call(_ready, (peer.load, folders), limit_s=START_S)
        else:
            _loaded(peer.load, folders)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        print(f"{peer.name} cannot be used: {type(error).__name__}: {reason}")
        return False
    return True


@functools.cache
def _loaded(load: Callable[[], Softmax], folders: tuple[str, ...]) -> Softmax:
    sys.path[:0] = folders
    with warnings.catch_warnings(action="ignore"):  # advice on its libraries
        return load()


def _ready(load: Callable[[], Softmax], folders: tuple[str, ...]) -> None:
    _loaded(load, folders)


def _timed(
    load: Callable[[], Softmax],
    folders: tuple[str, ...],
    make_input: Callable[[], torch.Tensor],
    timer: Callable[..., Times],
    verify: record.Verify | None,
) -> tuple[Times, str]:
    """The times, and what was printed; in the peer's process."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        times = record.timed(_loaded(load, folders), make_input(), timer, verify)
    return times, printed.getvalue()


def _load_liger() -> Softmax:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply


def _load_quack() -> Softmax:
    from quack.softmax import softmax

    return softmax


def _load_tileops() -> Softmax:
    from tileops.reduction import SoftmaxFwdOp

    return SoftmaxFwdOp(dim=-1)


OPTIONAL = (
    Peer("liger", "liger-kernel", _load_liger),
    Peer(
        "quack",
        "quack-kernels",
        _load_quack,
        apart=True,
        inside=("nvidia_cutlass_dsl/dsl_packages", "."),
    ),
    Peer("tileops", "tileops", _load_tileops, apart=True),
)


def providers() -> dict[str, Softmax | Peer]:
    """All peers by name, for `record.sweep`."""
    here = {"torch": native, "torch.compile": compiled, "tutorial": tutorial}
    return here | {peer.name: peer for peer in OPTIONAL}


def versions() -> list[dict[str, str]]:
    """The versions that were measured, for `record.observe("fastest_peers", versions)`.

    An optional peer that is not here keeps its recorded version, as its measurements
    keep their rows.

    Returns:
        Rows of peer and version.
    """
    found = {"torch": str(torch.__version__), "triton": triton.__version__}
    found |= {peer.name: peer.version() for peer in OPTIONAL if peer.version()}
    with contextlib.suppress(ValueError):  # nothing is recorded yet
        rows = record.recorded("fastest_peers")
        found = dict(zip(rows["peer"], rows["version"], strict=True)) | found
    return [{"peer": name, "version": version} for name, version in found.items()]


# ---- before the timing ---------------------------------------------------------------


def verify(x: torch.Tensor, y: Any) -> None:
    """Compares rows of a result with PyTorch's softmax of these rows in float64.

    As many rows as hold 2^20 values are compared, evenly spread, and at least two: few
    enough for every provider to be verified in every case.

    Args:
        x: (n_rows, n_cols), the input.
        y: a provider's result.

    Raises:
        ValueError: y has another shape or dtype, or a value in those rows is wrong.
    """
    if not isinstance(y, torch.Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
        got = (tuple(y.shape), y.dtype) if isinstance(y, torch.Tensor) else type(y)
        raise ValueError(f"wrong result: expected {tuple(x.shape), x.dtype}, got {got}")
    n_rows, n_cols = x.shape
    count = min(n_rows, max(2, VERIFIED_VALUES // n_cols))
    rows = torch.linspace(0, n_rows - 1, count, dtype=torch.float64)
    rows = rows.long().to(x.device)
    expected = torch.softmax(x[rows].double(), dim=-1)
    info = torch.finfo(x.dtype)
    allowed = RELATIVE[x.dtype] * expected + info.smallest_normal * info.eps
    wrong = ~((y[rows].double() - expected).abs() <= allowed)  # NaN is wrong, too
    if wrong.any():
        row, col = (int(where) for where in wrong.nonzero()[0])
        got, right = y[rows[row], col].item(), expected[row, col].item()
        raise ValueError(
            f"wrong value at row {int(rows[row])}, column {col}: expected {right:.6g}, "
            f"got {got:.6g}"
        )


def precompile(
    providers: Mapping[str, Softmax | Peer],
    cases: Iterable[Case],
    inputs: Mapping[str, record.MakeInput] | None = None,
    *,
    processes: int | None = None,
    until: float = float("inf"),
) -> None:
    """Lets every provider compile for every case, several processes at a time.

    The compilers (Triton's, Inductor's, CuTe's, TileLang's) leave their results on the
    disk, where the process that measures finds them. An error here is ignored: it comes
    again when the provider is measured, and is reported then.

    Args:
        providers, cases, inputs: as in `record.sweep`.
        processes: how many at a time; None means as many as fit the free memory of the
            GPU, and at most two fewer than there are cores.
        until: when to stop, by `time.monotonic()`; the first cases come first.
    """
    cases = list(cases)
    if not cases:
        return
    makers = {"contiguous": record.random, **(inputs or {})}
    groups: dict[tuple[str, ...] | None, list[tuple[Callable, tuple[str, ...]]]] = {}
    for provider in providers.values():
        if not isinstance(provider, Peer):
            loads = functools.partial(_itself, provider), ()
            groups.setdefault(None, []).append(loads)
        elif provider.available():
            group = provider.folders() or (provider.name,) if provider.apart else None
            groups.setdefault(group, []).append((provider.load, provider.folders()))
    jobs: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in groups]
    for case in cases:
        make_input = functools.partial(makers[case.input], *case[:3])
        for own, group in zip(jobs, groups.values(), strict=True):
            for load, folders in group:
                own.put((load, folders, make_input))
    if processes is None:
        processes = _how_many(cases)
    processes = min(processes, sum(own.qsize() for own in jobs))
    with ThreadPoolExecutor(max(1, processes)) as pool:
        firsts = [worker % len(jobs) for worker in range(processes)]
        turns = [jobs[first:] + jobs[:first] for first in firsts]
        for worker in [pool.submit(_work, turn, until) for turn in turns]:
            worker.result()


def _how_many(cases: Sequence[Case]) -> int:
    """So many processes fit the GPU's free memory, and leave two cores to others."""
    largest = max(case.n_rows * case.n_cols * case.dtype.itemsize for case in cases)
    fitting = gpu.free_bytes() // (record.MATRICES * largest + PROCESS_BYTES)
    return max(1, min((os.cpu_count() or 1) - 2, fitting))


def _itself(function: Softmax) -> Softmax:
    return function


def _work(groups: Sequence[queue.SimpleQueue], until: float) -> None:
    """Does the jobs of one group after the other, each group in a new process."""
    for jobs in groups:
        helper = _new_process()
        try:
            while time.monotonic() < until:
                job = jobs.get_nowait()
                with contextlib.suppress(Exception):
                    limit_s = min(START_S, until - time.monotonic())
                    helper.call(_run, job, limit_s=limit_s)
        except queue.Empty:
            continue
        finally:
            helper.stop()


def _run(
    load: Callable, folders: tuple[str, ...], make_input: Callable[[], torch.Tensor]
) -> None:
    _loaded(load, folders)(make_input())
