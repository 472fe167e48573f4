"""A training step's softmax and its gradient, or that alone, beside the peers'.

Every provider takes one tensor of two matrices: the gradient for the result, and the
input of the softmax. So it has the same values in every process. The peers are those of
`benchmarks.peers` that have a gradient, each called through autograd as a training step
calls it.

| function | what is timed |
|---|---|
| `ways_back()` | the gradient alone; the result was computed before |
| `steps()` | the softmax and its gradient |

Both have the provider `stream`: `torch.add` of the two matrices, which reads two values
and writes one for each, as the ideal gradient does.

The longest rows reach less of the stream than most others (`gradient.csv`).
Tried for them on an H200, and no faster: parts of 8 and 32 KiB, 1 to 8 warps, loading
edges after the body or in a branch, other hints for L2, and each share of an SM's
memory for L1. What helped is in `benchmarks.details`.

Weighed: calling each library's kernel for the gradient directly. Their signatures
differ from version to version, and autograd's own time is the host's, which the clock
`device` does not count.
"""

from collections.abc import Callable, Iterable, Mapping

import pandas as pd
import torch

from benchmarks import peers
from benchmarks.peers import Peer, Softmax
from kernels import eager
from kernels.lab import backend, record

ALIGNED = 64  # elements: the second matrix starts at a multiple of 128 bytes or more
STREAM = "stream"


def pair(dtype: torch.dtype, n_rows: int, n_cols: int) -> torch.Tensor:
    """The gradient for the result, and the input: (2, n_rows, n_cols), both normal.

    Each of the two is contiguous and starts at a multiple of 128 bytes.
    """
    step = -(-n_rows * n_cols // ALIGNED) * ALIGNED
    generator = torch.Generator(backend.DEVICE).manual_seed(0)
    flat = torch.randn(
        2 * step, dtype=dtype, device=backend.DEVICE, generator=generator
    )
    return flat.as_strided((2, n_rows, n_cols), (step, n_cols, 1))


INPUTS: dict[str, record.MakeInput] = {"pair": pair}


def cases(
    columns: Iterable[int], dtypes: Iterable[torch.dtype], n_bytes: int = 2**28
) -> list[record.Case]:
    """Pairs of matrices of n_bytes each, for `record.sweep` with INPUTS."""
    found = record.of_size(n_bytes, columns, dtypes)
    return [case._replace(input="pair") for case in found]


def stream(both: torch.Tensor) -> torch.Tensor:
    """The sum of the two matrices: 2MN values read, MN written."""
    return torch.add(*both.unbind())


class Step:
    """A softmax and its gradient, as a function of the pair."""

    def __init__(self, softmax: Softmax) -> None:
        self.softmax = softmax

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        """Returns the gradient for the input."""
        gradient, x = both.unbind()
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.softmax(x), x, gradient)[0]


class WayBack:
    """A softmax's gradient alone: the result is kept from the first call on a pair.

    Clocks take copies of small inputs in turn. So time it on pairs of more than twice
    the L2 cache: others would be new in every call.
    """

    def __init__(self, softmax: Softmax) -> None:
        self.softmax = softmax
        self.kept: tuple = (None, None, None)

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        """Returns the gradient for the input."""
        gradient, x = both.unbind()
        place, leaf, y = self.kept
        if place != (x.data_ptr(), x.shape, x.dtype):
            self.kept = (None, None, None)  # gives the memory back first
            leaf = x.detach().requires_grad_()
            y = self.softmax(leaf)
            self.kept = (x.data_ptr(), x.shape, x.dtype), leaf, y
        return torch.autograd.grad(y, leaf, gradient, retain_graph=True)[0]


def twice(softmax: Softmax, both: torch.Tensor) -> torch.Tensor:
    """A gradient of a gradient, for x.

    Args:
        softmax: of rows.
        both: (2, M, N): the gradient for the result, which also weighs the gradient
            for x that is differentiated again, and the input.
    """
    gradient, x = both.detach().clone().unbind()
    x.requires_grad_()
    (once,) = torch.autograd.grad(softmax(x), x, gradient, create_graph=True)
    return torch.autograd.grad(once, x, gradient)[0]


def ours(x: torch.Tensor) -> torch.Tensor:
    """The course's softmax."""
    from kernels import softmax

    return softmax(x)


def _load_liger_step() -> Softmax:
    return Step(peers._load_liger())


def _load_liger_back() -> Softmax:
    return WayBack(peers._load_liger())


def _load_quack_step() -> Softmax:
    return Step(peers._load_quack())


def _load_quack_back() -> Softmax:
    return WayBack(peers._load_quack())


_LOADS = {
    "liger": {Step: _load_liger_step, WayBack: _load_liger_back},
    "quack": {Step: _load_quack_step, WayBack: _load_quack_back},
}


def _providers(wrap: type) -> dict[str, Callable | Peer]:
    here = {
        STREAM: stream,
        "gradient": wrap(ours),
        "torch": wrap(peers.native),
        "torch.compile": wrap(peers.compiled),
    }
    optional = {
        peer.name: Peer(
            peer.name, peer.package, _LOADS[peer.name][wrap], peer.apart, peer.inside
        )
        for peer in peers.OPTIONAL
        if peer.name in _LOADS
    }
    return here | optional


def steps() -> dict[str, Callable | Peer]:
    """Providers of a softmax and its gradient, for `record.sweep` with INPUTS.

    The five lines of chapter `eager` are among them, with autograd's gradient.
    """
    return _providers(Step) | {"eager": Step(eager.softmax)}


def ways_back() -> dict[str, Callable | Peer]:
    """Providers of the gradient alone, for `record.sweep` with INPUTS."""
    return _providers(WayBack)


def verify(both: torch.Tensor, result: torch.Tensor) -> None:
    """Compares rows of a gradient with the formula in float64.

    As many rows are compared as `benchmarks.peers.verify` compares. A result of
    `stream` is recognised by its first row, and is not a gradient.

    Raises:
        ValueError: the result has another shape or dtype, or a value is wrong.
    """
    if not isinstance(result, torch.Tensor) or result.shape != both.shape[1:]:
        got = getattr(result, "shape", type(result))
        raise ValueError(f"wrong result: expected {tuple(both.shape[1:])}, got {got}")
    if result.dtype != both.dtype:
        raise ValueError(f"wrong result: expected {both.dtype}, got {result.dtype}")
    n_rows, n_cols = result.shape
    if torch.equal(result[0], both[0, 0] + both[1, 0]):
        return
    count = min(n_rows, max(2, peers.VERIFIED_VALUES // n_cols))
    rows = torch.linspace(0, n_rows - 1, count, dtype=torch.float64)
    rows = rows.long().to(both.device)
    gradient, x = both[:, rows].double()
    y = torch.softmax(x, -1)
    products = gradient * y
    expected = products - y * products.sum(-1, keepdim=True)
    # The forward pass's result was rounded, too, and terms of both signs are added.
    scale = y * (gradient.abs() + products.abs().sum(-1, keepdim=True))
    info = torch.finfo(both.dtype)
    allowed = 4 * peers.RELATIVE[both.dtype] * scale + info.smallest_normal
    wrong = ~((result[rows].double() - expected).abs() <= allowed)
    if wrong.any():
        row, col = (int(where) for where in wrong.nonzero()[0])
        got, right = result[rows[row], col].item(), expected[row, col].item()
        raise ValueError(
            f"wrong gradient at row {int(rows[row])}, column {col}: expected "
            f"{right:.6g}, got {got:.6g}"
        )


def shares(df: pd.DataFrame, dtype: torch.dtype) -> pd.DataFrame:
    """The stream's time as a share of each provider's, over the columns.

    Args:
        df: of a sweep that has the provider STREAM.
        dtype: of the rows to take.
    """
    times = record.pivot(record.select(df, dtype=dtype), "p50_us")
    times = times.drop(columns="copy", errors="ignore")
    return times.rdiv(times.pop(STREAM), axis=0)


def ranges(shares: Mapping[torch.dtype, pd.DataFrame]) -> list[list]:
    """Each provider's least and greatest share, for `show.table`.

    Args:
        shares: of several dtypes, from `shares`.

    Returns:
        Rows of the provider, a range for each dtype, and at how many lengths it has a
        time (in the dtype where it has more).
    """
    frames = list(shares.values())
    found = []
    for name in frames[0]:
        of = [frame[name].dropna() for frame in frames]
        texts = [f"{one.min():.2f} to {one.max():.2f}" for one in of]
        found.append([name, *texts, f"{max(map(len, of))} of {len(frames[0])}"])
    return found
