"""What is given to the CUDA driver, seen by a driver that only records: no GPU is needed."""

from __future__ import annotations

import ctypes
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
import triton

from triton_dist.runtime import marking
from triton_dist.runtime.device import cuda_driver
from triton_dist.runtime.device.cuda_copies import CudaTransfer
from triton_dist.runtime.device.cuda_launch import (
    RepeatedLaunch,
    can_repeat,
    must_launch_through_triton,
    scratch_bytes,
)
from triton_dist.runtime.device.transfer import AwaitFlag, Copy, InputRows, SetFlag

STREAMS = [
    SimpleNamespace(handle=11, begun_event=12, done_event=13, staging=None),
    SimpleNamespace(handle=21, begun_event=22, done_event=23, staging=None),
]
CURRENT = 7


@pytest.fixture
def driver(monkeypatch):
    """Calls by name, with the values of their arguments; the next status to return."""
    seen = SimpleNamespace(calls=[], status=0)

    def function(name):
        def call(*arguments):
            seen.calls.append((name, *(each.value for each in arguments)))
            return seen.status

        return call

    monkeypatch.setattr(cuda_driver, "function", function)
    return seen


def test_a_transfer_queues_its_steps_in_order_between_two_events(driver):
    target, staged = torch.zeros(6, 4), torch.zeros(2, 4)
    flags = torch.zeros(8, dtype=torch.int32)
    steps = [
        Copy(0, target[:2], InputRows(1, 3)),
        Copy(0, flags[3:4], flags[:1]),
        AwaitFlag(1, flags, 5, 1),
        SetFlag(1, flags, 5, 0),
        Copy(1, target[2:4], staged),
    ]
    transfer = CudaTransfer(steps, STREAMS)
    word = flags.data_ptr()
    for own in (torch.zeros(3, 4), torch.zeros(3, 4)):
        driver.calls.clear()
        transfer.start(own, CURRENT)
        assert driver.calls == [
            ("cuEventRecord", 12, CURRENT),
            ("cuStreamWaitEvent", 11, 12, 0),
            ("cuStreamWaitEvent", 21, 12, 0),
            ("cuMemcpyDtoDAsync_v2", target.data_ptr(), own.data_ptr() + 16, 32, 11),
            ("cuMemcpyDtoDAsync_v2", word + 12, word, 4, 11),
            ("cuStreamWaitValue32_v2", 21, word + 20, 1, 1),
            ("cuStreamWriteValue32_v2", 21, word + 20, 0, 0),
            ("cuMemcpyDtoDAsync_v2", target.data_ptr() + 32, staged.data_ptr(), 32, 21),
        ]
    driver.calls.clear()
    transfer.join(CURRENT)
    assert driver.calls == [
        ("cuEventRecord", 13, 11),
        ("cuStreamWaitEvent", CURRENT, 13, 0),
        ("cuEventRecord", 23, 21),
        ("cuStreamWaitEvent", CURRENT, 23, 0),
    ]


def test_staged_copies_go_through_the_host_in_pieces_and_none_within_the_gpu(driver):
    staging, own = torch.zeros(40, dtype=torch.uint8), torch.zeros(5, 4)
    target, flags = torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)
    stream = SimpleNamespace(handle=11, begun_event=12, done_event=13, staging=staging)
    steps = [Copy(0, target[:4], InputRows(1, 5)), Copy(0, flags[1:], flags[:1])]
    transfer = CudaTransfer(steps, [stream])
    transfer.start(own, CURRENT)
    first, to, host = own.data_ptr() + 16, target.data_ptr(), staging.data_ptr()
    assert driver.calls[2:] == [
        ("cuMemcpyDtoHAsync_v2", host, first, 40, 11),
        ("cuMemcpyHtoDAsync_v2", to, host, 40, 11),
        ("cuMemcpyDtoHAsync_v2", host, first + 40, 24, 11),
        ("cuMemcpyHtoDAsync_v2", to + 40, host, 24, 11),
        ("cuMemcpyDtoHAsync_v2", host, flags.data_ptr(), 8, 11),
        ("cuMemcpyHtoDAsync_v2", flags.data_ptr() + 8, host, 8, 11),
    ]


def test_what_the_driver_refuses_is_an_error_that_says_what(driver, monkeypatch):
    refused = []
    monkeypatch.setattr(cuda_driver, "check", lambda *what: refused.append(what))
    transfer = CudaTransfer([], STREAMS[:1])
    driver.status = 700
    transfer.join(CURRENT)
    assert refused == [(700, "wait for a transfer")] * 2


Metadata = namedtuple(
    "Metadata", "name num_warps num_ctas shared global_scratch_size profile_scratch_size target"
)
SIGNATURE = {"a_ptr": "*bf16", "n": "i32", "one": "constexpr", "out_ptr": "*fp32", "big": "i64"}


def compiled(**changes):
    values = {
        "name": "kernel", "num_warps": 8, "num_ctas": 1, "shared": 4096, "global_scratch_size": 128,
        "profile_scratch_size": 0, "target": SimpleNamespace(warp_size=32),
    }  # fmt: skip
    metadata = Metadata(**(values | changes))
    return SimpleNamespace(
        metadata=metadata, function=99, src=SimpleNamespace(signature=dict(SIGNATURE))
    )


def read(address, kinds):
    """The parameters that an array of addresses at ``address`` points to."""
    pointers = (ctypes.c_void_p * len(kinds)).from_address(address)
    return [kind.from_address(at).value for kind, at in zip(kinds, pointers, strict=True)]


def test_a_repeated_launch_has_the_parameters_of_the_signature_then_the_scratch(driver):
    a, out, scratch = torch.zeros(4), torch.zeros(4), torch.zeros(512, dtype=torch.int8)
    arguments = {"a_ptr": a, "n": -5, "one": 1, "out_ptr": out, "big": 1 << 40}
    launch = RepeatedLaunch(compiled(), (3,), arguments, ["out_ptr"], scratch)
    launch(CURRENT, [1 << 33])
    ((name, function, *numbers, parameters, extra),) = driver.calls
    assert (name, function, extra) == ("cuLaunchKernel", 99, None)
    assert numbers == [3, 1, 1, 256, 1, 1, 4096, CURRENT]
    address = ctypes.c_uint64
    kinds = [address, ctypes.c_int32, address, ctypes.c_int64, address, address]
    expected = [a.data_ptr(), -5, 1 << 33, 1 << 40, scratch.data_ptr(), 0]
    assert read(parameters, kinds) == expected
    with pytest.raises(ValueError, match="zip"):
        launch(CURRENT, [])


def test_what_only_triton_can_launch():
    arguments = dict.fromkeys(SIGNATURE, 1)
    assert can_repeat(compiled(), arguments)
    assert scratch_bytes(compiled(), (3, 2)) == 768
    assert not can_repeat(None, arguments)  # interpreted
    assert not can_repeat(compiled(num_ctas=2), arguments)
    assert not can_repeat(compiled(profile_scratch_size=8), arguments)
    assert not can_repeat(compiled(), {"a_ptr": 1})
    for kind in ("fp32", "tensordesc<bf16[8, 8]>"):
        kernel = compiled()
        kernel.src.signature["n"] = kind
        assert not can_repeat(kernel, arguments)


Slot = namedtuple("Slot", "data elements bias")
WITH_TUPLES = {
    "slot": Slot("*bf16", "i64", "constexpr"), "n": "i32", "tile": "constexpr",
    "pair": ("constexpr", "*i32"), "out": ("*fp32",),
}  # fmt: skip


def with_tuples():
    kernel = compiled()
    kernel.src.signature = dict(WITH_TUPLES)
    return kernel


def test_members_of_tuples_are_parameters_in_their_order_but_for_constants(driver):
    data, words, out = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    arguments = {
        "slot": Slot(data, 1 << 40, None), "n": 7, "tile": Slot(1, 2, 3), "pair": (1, words),
        "out": (out,),
    }  # fmt: skip
    assert can_repeat(with_tuples(), arguments)
    launch = RepeatedLaunch(with_tuples(), (3,), arguments, ["out.0", "slot.data"], None)
    launch(CURRENT, [1 << 33, 1 << 34])
    address = ctypes.c_uint64
    kinds = [address, ctypes.c_int64, ctypes.c_int32, address, address, address, address]
    expected = [1 << 34, 1 << 40, 7, words.data_ptr(), 1 << 33, 0, 0]
    assert read(driver.calls[0][-2], kinds) == expected


def test_a_tuple_with_a_member_that_only_triton_can_launch():
    arguments = {"slot": Slot(1, 2, 3), "n": 7, "tile": 0, "pair": (1, 2), "out": (3,)}
    for kind in ("fp32", ("*bf16", "fp32"), "tensordesc<bf16[8, 8]>"):
        kernel = with_tuples()
        kernel.src.signature["slot"] = Slot("*bf16", kind, "constexpr")
        assert not can_repeat(kernel, arguments | {"slot": Slot(1, (2, 3), 4)})
    missing = {name: value for name, value in arguments.items() if name != "slot"}
    assert not can_repeat(with_tuples(), missing)


def test_a_profiler_sees_every_launch(monkeypatch):
    assert not must_launch_through_triton()
    with marking.Marks(None).on():
        assert must_launch_through_triton()
        with marking.off():
            assert not must_launch_through_triton()
    assert not must_launch_through_triton()
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", lambda metadata: None)
    assert must_launch_through_triton()
