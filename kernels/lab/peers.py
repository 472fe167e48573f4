"""The peers: softmax by others, each measured where it can live.

| peer | what is called |
|---|---|
| `torch` | `torch.softmax` |
| `torch.compile` | the same, compiled for each shape by itself (`dynamic=False`) |
| `tutorial` | the kernel of Triton's own tutorial, with that tutorial's launch |
| `liger` | `LigerSoftmaxFunction` of liger-kernel (measured with 0.8.5) |
| `quack` | `quack.softmax.softmax` of quack-kernels: CuTe DSL, clusters (0.6.5) |
| `tileops` | `tileops.reduction.SoftmaxFwdOp` of tileops: TileLang, clusters (0.1.0) |

The last three are no requirements of the course. Each is used if it can be imported, or
if the folder that the environment variable COURSE_PEERS names holds it unpacked, under
its name; else its recorded rows are used. QuACK and TileOPs need different versions of
one library, so each has a process of its own, which stays for the whole benchmark. It
makes the same input from the same seed, on the same GPU, while this process waits.

TileOPs' call takes the host longer than a small softmax takes the GPU: `bench.time_us`
would time the host there. The benchmark uses `bench.device_us`, which does not.

Weighed: one environment for all peers (their requirements exclude each other), and one
process per measurement (it costs seconds to import any of them).
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import os
import queue
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.lab import backend, bench

Softmax = Callable[[torch.Tensor], torch.Tensor]

START_S, CELL_S = 180.0, 90.0  # what a process may take to start, and for one shape
PROVED_VALUES = 2**22  # of a result: as many rows as hold so many are compared
RELATIVE = {torch.float32: 2.0**-16, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
"""How far a peer's values may be off: it is to be kept from winning by being wrong, and
not to be refused for a fast exponential."""


# ---- in this process -----------------------------------------------------------------


def native(x: torch.Tensor) -> torch.Tensor:
    """`torch.softmax` of the rows."""
    return torch.softmax(x, dim=-1)


def compiled(x: torch.Tensor) -> torch.Tensor:
    """The same by torch.compile, for every shape anew."""
    return _compiled()(x)


@functools.cache
def _compiled() -> Softmax:
    from torch._dynamo import config
    from torch._inductor import config as inductor

    config.recompile_limit = 4096  # beyond it, it would raise (fullgraph)
    config.accumulated_recompile_limit = 4096
    inductor.compile_threads = 1  # one kernel each: no pool of processes
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

    Triton's tutorial 2 in our words: the same operations in the same order, so that it
    has its properties too. Columns must be neighbours, rows must not lie 2^31 elements
    or more from the first, and only float32 has an exponential.

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

    The tutorial works this out at every call. Here it is done once for each shape:
    kinder to the host, and the same for the GPU.

    Source: https://triton-lang.org/main/getting-started/tutorials/02-fused-softmax.html
    (triton-lang/triton, python/tutorials/02-fused-softmax.py, MIT licence). What is
    wrong with it is shown in chapter 6.
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
    if ahead > has["max_shared_mem"]:  # known before minutes of compiling end so, too
        raise triton.OutOfResources(ahead, has["max_shared_mem"], "shared memory")
    kernel = tutorial_kernel.warmup(
        dtype, dtype, *sizes, *constants, num_warps=num_warps, grid=(1,)
    )
    kernel._init_handles()  # loads it, which tells its registers
    by_registers = has["max_num_regs"] // (kernel.n_regs * has["warpSize"] * num_warps)
    per_sm = min(by_registers, has["max_shared_mem"] // kernel.metadata.shared)
    return kernel, constants, min(has["multiprocessor_count"] * per_sm, sizes[2])


# ---- guests --------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer(bench.Guest):
    """A peer that a machine may lack.

    Attributes:
        name: the provider's, and the subfolder's of COURSE_PEERS.
        package: the distribution, for its version.
        load: imports it and returns its softmax.
        apart: whether it needs a process of its own.
        inside: what of its folder goes onto `sys.path`, in this order.
        cell_s: how long one shape may take, s; then its process is ended.
    """

    name: str
    package: str
    load: Callable[[], Softmax]
    apart: bool = False
    inside: tuple[str, ...] = (".",)
    cell_s: float = CELL_S

    def folders(self) -> tuple[str, ...]:
        """Where it lies unpacked; none if it is to be imported as anything else."""
        root = os.environ.get("COURSE_PEERS")
        folder = Path(root, self.name).resolve() if root else None
        if not folder or not folder.is_dir():
            return ()
        return tuple(str(folder / part) for part in self.inside)

    def version(self) -> str:
        """Its version, or "" if it is not installed or not unpacked."""
        where = {"path": list(self.folders())} if self.folders() else {}
        found = importlib.metadata.distributions(name=self.package, **where)
        return next((one.version for one in found), "")

    def available(self) -> bool:
        """Whether it is there and can be imported; the first call tries it."""
        return bool(self.version()) and _answers(self, self.folders())

    def times(
        self,
        x: torch.Tensor,
        remake: Callable[[], torch.Tensor],
        timer: Callable,
        prove: bench.Prove | None,
    ) -> bench.Times:
        """As `bench.timed`, in the process where the peer lives.

        Raises:
            TimeoutError: it took longer than cell_s.
        """
        if not self.apart:
            return bench.timed(_loaded(self.load, self.folders()), x, timer, prove)
        process, where = _process(self, self.folders()), (self.load, self.folders())
        if process.process is None:  # it was ended, and has to import all again
            process.call(_ready, where, limit_s=START_S)
        try:
            args = *where, remake, timer, prove
            times, said = process.call(_timed, args, limit_s=self.cell_s)
        except Exception:
            _end_if_broken(process)
            raise
        print(said, end="")
        return times


@functools.cache
def _process(peer: Peer, folders: tuple[str, ...]) -> backend.Helper:
    world = "interpreter" if backend.INTERPRETED else "compiler"
    return backend.Helper(world, hide_gpu=False)


def _end_if_broken(process: backend.Helper) -> None:
    """A process that has lost its CUDA context fails at all that comes after."""
    if process.process is not None:
        try:
            process.call(_synchronize, limit_s=START_S)
        except Exception:
            process.stop()


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
    return load()


def _ready(load: Callable[[], Softmax], folders: tuple[str, ...]) -> None:
    _loaded(load, folders)


def _timed(
    load: Callable[[], Softmax],
    folders: tuple[str, ...],
    remake: Callable[[], torch.Tensor],
    timer: Callable,
    prove: bench.Prove | None,
) -> tuple[bench.Times, str]:
    """The times, and what was printed; in the peer's process."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        times = bench.timed(_loaded(load, folders), remake(), timer, prove)
    return times, said.getvalue()


def _load_liger() -> Softmax:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply


def _load_quack() -> Softmax:
    from quack.softmax import softmax

    return softmax


def _load_tileops() -> Softmax:
    from tileops.reduction import SoftmaxFwdOp

    return SoftmaxFwdOp(dim=-1)


GUESTS = (
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
    """All peers by name, for `bench.sweep`; those that are not here are guests."""
    here = {"torch": native, "torch.compile": compiled, "tutorial": tutorial}
    return here | {peer.name: peer for peer in GUESTS}


def versions() -> list[dict[str, str]]:
    """Whose versions were measured, for `bench.observe("fastest_peers", versions)`.

    A guest that is not here keeps what is recorded of it, as its measurements do.
    """

    def nothing() -> list:
        raise bench.Unavailable

    found = {"torch": str(torch.__version__), "triton": triton.__version__}
    found |= {peer.name: peer.version() for peer in GUESTS if peer.version()}
    with contextlib.suppress(ValueError):  # nothing is recorded yet
        recorded = bench.observe("fastest_peers", nothing)
        found = {row["peer"]: row["version"] for row in recorded} | found
    return [{"peer": name, "version": version} for name, version in found.items()]


# ---- before and while they are timed -------------------------------------------------


def prove(x: torch.Tensor, y: Any) -> None:
    """Compares some rows of a result with PyTorch's softmax of them in float64.

    Args:
        x: (n_rows, n_cols), the input.
        y: what a provider made of it.

    Raises:
        ValueError: y has another shape or dtype, or a value in those rows is wrong.
    """
    if not isinstance(y, torch.Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
        got = (tuple(y.shape), y.dtype) if isinstance(y, torch.Tensor) else type(y)
        raise ValueError(f"wrong result: expected {tuple(x.shape), x.dtype}, got {got}")
    n_rows, n_cols = x.shape
    some = min(n_rows, max(2, PROVED_VALUES // n_cols))
    rows = torch.linspace(0, n_rows - 1, some, dtype=torch.float64).long().to(x.device)
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


def warm(
    providers: Mapping[str, Softmax | Peer],
    remakes: Sequence[Callable[[], torch.Tensor]],
    *,
    processes: int | None = None,
) -> None:
    """Lets everyone compile for every input, several processes at a time.

    The compilers (Triton's, Inductor's, CuTe's, TileLang's) leave what they make on the
    disk, where the process that measures finds it. What fails is left for that to say.

    Args:
        providers: as in `bench.sweep`.
        remakes: each makes one of the inputs, in any process.
        processes: at a time; None means one for each core but two.
    """
    groups: dict[tuple[str, ...] | None, list[tuple[Callable, tuple[str, ...]]]] = {}
    for one in providers.values():
        if not isinstance(one, Peer):
            groups.setdefault(None, []).append((functools.partial(_itself, one), ()))
        elif one.available():
            group = one.folders() or (one.name,) if one.apart else None
            groups.setdefault(group, []).append((one.load, one.folders()))
    for group in groups.values():
        jobs: queue.SimpleQueue = queue.SimpleQueue()
        for remake in remakes:
            for load, folders in group:
                jobs.put((load, folders, remake))
        count = min(processes or max(1, (os.cpu_count() or 1) - 2), jobs.qsize())
        with ThreadPoolExecutor(max(1, count)) as pool:
            for worker in [pool.submit(_work, jobs) for _ in range(count)]:
                worker.result()


def _itself(function: Softmax) -> Softmax:
    return function


def _work(jobs: queue.SimpleQueue) -> None:
    """One process, for as long as there are jobs."""
    world = "interpreter" if backend.INTERPRETED else "compiler"
    helper = backend.Helper(world, hide_gpu=False)
    try:
        while True:
            job = jobs.get_nowait()
            with contextlib.suppress(Exception):
                helper.call(_run, job, limit_s=START_S)
    except queue.Empty:
        return
    finally:
        helper.stop()


def _run(load: Callable, folders: tuple[str, ...], remake: Callable) -> None:
    _loaded(load, folders)(remake())
