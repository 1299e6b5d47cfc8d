"""INT4 packing against compressed-tensors' own code."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from ref import bf16, dequantise, f64, pack4, unpack4
from ref.model import read_tensors

torch.set_num_threads(1)


@pytest.mark.parametrize("shape", [(1, 8), (3, 32), (17, 96), (5, 256), (64, 1024)])
def test_random_matrices(shape):
    q = np.random.default_rng(shape).integers(-8, 8, shape)
    theirs = pack_to_int32(torch.from_numpy(q.astype(np.int8)), 4).numpy()
    assert np.array_equal(pack4(q).view(np.int32), theirs)
    assert np.array_equal(unpack4(theirs.view(np.uint32)), q)
    assert np.array_equal(unpack_from_int32(torch.from_numpy(theirs), 4, torch.Size(shape)).numpy(), q)


def test_every_matrix_of_nano(nano):
    tensors = read_tensors(nano)
    names = [name.removesuffix("_packed") for name in tensors if name.endswith("weight_packed")]
    assert len(names) == 5 * 16 * 3
    for name in names:
        shape = torch.Size(tensors[name + "_shape"].tolist())
        packed = torch.from_numpy(tensors[name + "_packed"].copy())
        assert np.array_equal(
            unpack4(tensors[name + "_packed"].view(np.uint32)), unpack_from_int32(packed, 4, shape).numpy()
        )


def test_dequantise_is_value_times_scale_of_its_group():
    q = np.full((2, 64), 7)
    q[1, 32:] = -8
    s = bf16(np.array([[0.5, 2.0], [1.0, 0.25]]))
    w = dequantise(pack4(q), s)
    assert w[0, :32].tolist() == [3.5] * 32 and w[0, 32:].tolist() == [14.0] * 32
    assert w[1, :32].tolist() == [7.0] * 32 and w[1, 32:].tolist() == [-2.0] * 32


def test_bf16_rounds_as_torch_does():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 20000, dtype=np.uint32)
    bits[:4] = [0x3F808000, 0x3F818000, 0x80000000, 0x3F80FFFF]  # two ties, minus zero, almost up
    x = bits.view(np.float32)
    x = x[np.isfinite(x) & (np.abs(x) < 1e38)]
    theirs = torch.from_numpy(x).to(torch.bfloat16)
    assert np.array_equal(bf16(x), theirs.view(torch.uint16).numpy())
    assert np.array_equal(f64(bf16(x)), theirs.double().numpy())
