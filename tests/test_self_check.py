"""The check of the device before a model is served: it passes here, and each operation it looks at can fail it."""

import re
from pathlib import Path

import pytest
from probes import Device, ProbeError, Probes

SOURCE = Path(__file__).resolve().parent.parent / "native" / "self_check.cpp"
CHECKED = re.findall(r'expect\("(\w+)"', SOURCE.read_text())


@pytest.fixture(scope="module")
def probes(test_library):
    return Probes(test_library)


def check(probes, spoil=""):
    probes._run("self_check", Device(threads=2), probes.ffi.new("char[]", spoil.encode()))


def test_this_device_passes(probes):
    want = {"linear", "logits", "mla_query", "mla_attention", "mla_value", "route", "moe", "draft_attention"}
    assert want == set(CHECKED)
    check(probes)


@pytest.mark.parametrize("op", CHECKED)
def test_a_wrong_operation_is_named(probes, op):
    with pytest.raises(ProbeError, match=f"this device computes {op} wrongly"):
        check(probes, op)
