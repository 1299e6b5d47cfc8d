"""bench/occupancy.py: what bounds a kernel, and names of kernels in two spellings."""

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))
from occupancy import Kernel, plain


@pytest.mark.parametrize(
    ("threads", "registers", "static", "dynamic", "blocks", "bound"),
    [
        (1024, 64, 0, 0, 1, "registers"),  # 65,536 exactly; and 48 warps are no two blocks
        (1024, 65, 0, 0, 0, "registers"),  # 72 by steps of 256 a warp: no block at all
        (128, 32, 0, 0, 12, "warps"),
        (32, 16, 0, 0, 24, "blocks"),
        (128, 72, 1024, 98304, 1, "shared memory"),
        (128, 72, 0, 50 * 1024 - 1024, 2, "shared memory"),
        (128, 72, 1, 50 * 1024 - 1024, 1, "shared memory"),
    ],
)
def test_blocks_at_once(threads, registers, static, dynamic, blocks, bound):
    assert Kernel("k", threads, registers, static, dynamic).blocks() == (blocks, bound)


@pytest.mark.parametrize(
    ("launch", "compiler"),
    [
        (
            "kd::ops::_GLOBAL__N__5f15d799_9_accept_cu_f2d8e831::commit_kernel<uint4>",
            "kd::ops::(anonymous namespace)::commit_kernel<uint4>",
        ),
        (
            "product_kernel<Tile<4, 1, 2, 64, 16, 2>, true, float, true>",
            "kd::cuda::product_kernel<kd::cuda::Tile<4, 1, 2, 64, 16, 2, (kd::cuda::Way)0>, true, float, true>",
        ),
        (
            "product_kernel<Tile<2, 4, 2, 16, 3>, true, float, false>",
            "kd::cuda::product_kernel<kd::cuda::Tile<2, 4, 2, 16, 3, 1, (kd::cuda::Way)0>, true, float, false>",
        ),
        (
            "product_kernel<Tile<1, 4, 1, 8>, true, float, false>",
            "kd::cuda::product_kernel<kd::cuda::Tile<1, 4, 1, 8, 16, 1, (kd::cuda::Way)0>, true, float, false>",
        ),
        (
            "product_kernel<Tile<4, 2, 4, 16, 8, 1, kd::cuda::Way::groups>, true, float, false>",
            "kd::cuda::product_kernel<kd::cuda::Tile<4, 2, 4, 16, 8, 1, (kd::cuda::Way)1>, true, float, false>",
        ),
    ],
)
def test_both_spellings_are_one_name(launch, compiler):
    assert plain(launch) == plain(compiler)


def test_other_tiles_keep_other_names():
    names = [
        f"product_kernel<Tile<{t}>>" for t in ("1,4,1,8", "1,4,1,16", "1,4,1,8,16,2", "1,4,1,8,3", "1,4,1,8,16,1,1")
    ]
    assert len({plain(name) for name in names}) == len(names)
