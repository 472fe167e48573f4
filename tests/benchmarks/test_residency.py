"""The launches about which the driver is asked compile, each with its own labels."""

from benchmarks import residency
from kernels import meta
from kernels.lab import compile, gpu, occupancy


def test_every_kernel_is_launched_in_every_way():
    labels = [
        (*labels.values(), launch.constants["num_warps"])
        for labels, launch in residency.launches()
    ]
    ways = len(residency.COLUMNS) * len(meta.WARPS) * len(residency.STAGES)
    assert len(set(labels)) == len(labels) == 4 * ways
    assert {kernel for kernel, *_ in labels} == {
        "program.add_kernel",
        "program.softmax_kernel",
        "strided.softmax_kernel",
        "persistent.softmax_kernel",
    }


def test_the_launches_compile_with_their_options():
    chosen = [
        launch
        for labels, launch in residency.launches()
        if labels["block_cols"] == 512 and labels["num_stages"] == 3
        if launch.constants["num_warps"] == 2
    ]
    made = compile.aot_all(chosen, gpu="H200")
    assert [kernel.num_warps for kernel in made] == [2] * 4
    assert [kernel.num_stages for kernel in made] == [3] * 4
    ahead = [kernel.count(r"cp\.async\.c[ag]") > 0 for kernel in made]
    assert ahead == [False, False, False, True]  # only the last kernel has a loop
    for kernel in made:
        assert occupancy.of(kernel, gpu.named("H200")).blocks_per_sm >= 1
