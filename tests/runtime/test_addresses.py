"""Names of addresses."""

from __future__ import annotations

import pytest

from triton_dist.runtime.addresses import describe_address, forget, register


@pytest.fixture
def flags():
    register(0x1000, 64, 4, "context.flags")
    register(0x2000, 32, 2, "context.rows")
    register(0x3000, 192, 8, "context.words", (2, 3, 4))
    yield
    forget(0x1000)
    forget(0x2000)
    forget(0x3000)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (0x1000, "context.flags[0]"),
        (0x1003, "context.flags[0]"),
        (0x1004, "context.flags[1]"),
        (0x103F, "context.flags[15]"),
        (0x1040, "0x1040"),
        (0x0FFF, "0xfff"),
        (0x2002, "context.rows[1]"),
        (0x2020, "0x2020"),
        (0x3000, "context.words[0, 0, 0]"),
        (0x3000 + 8 * (12 + 2 * 4 + 3), "context.words[1, 2, 3]"),
    ],
)
def test_an_address_is_named_by_region_and_index(flags, address, name):
    assert describe_address(address) == name


def test_a_forgotten_address_is_a_number(flags):
    forget(0x1000)
    assert describe_address(0x1004) == "0x1004"
    assert describe_address(0x2000) == "context.rows[0]"
    forget(0x1000)


def test_memory_that_was_dropped_leaves_no_name_to_what_takes_its_place(flags):
    register(0x1010, 16, 4, "context.later")
    assert describe_address(0x1010) == "context.later[0]"
    assert describe_address(0x1004) == "0x1004"
    forget(0x1010)
