"""The coordinates that an operator writes."""

from __future__ import annotations

from typing import Any

import pytest

from pw.core.coordinates import check_coordinates, parse_coordinates, parse_wraps
from pw.core.errors import ArgumentError


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("", ()),
        ("3:4", ((3,), (4,), (5,), (6,))),
        ("0,2:2x2", ((0, 2), (0, 3), (1, 2), (1, 3))),
        (" 0,0; 0,1 ;1,1;1,0 ", ((0, 0), (0, 1), (1, 1), (1, 0))),
        ("0,0:1x2;4,4:1x2", ((0, 0), (0, 1), (4, 4), (4, 5))),
        ("1,2,3:1x2x2", ((1, 2, 3), (1, 2, 4), (1, 3, 3), (1, 3, 4))),
    ],
)
def test_coordinates_are_blocks_in_the_order_of_devices(text: str, cells: tuple[Any, ...]) -> None:
    assert parse_coordinates(text, 4) == cells
    check_coordinates(cells, (), 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "looks like 0,2:2x2"),
        ("0,0:2", "a start of 2 axes and a shape of 1"),
        ("0,0:2x3", "more devices than the host's 4"),
        ("0:99999999999999", "more devices than the host's 4"),
        ("0,0:1x3", "coordinates of 3 devices, and the host has 4"),
    ],
)
def test_an_error_says_what_coordinates_look_like(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        parse_coordinates(text, 4)


def test_wraps_are_lengths_of_axes() -> None:
    assert parse_wraps("4, 0") == (4, 0)
    assert parse_wraps("") == ()
    with pytest.raises(ArgumentError, match="the first one after 4 devices"):
        parse_wraps("yes")


@pytest.mark.parametrize(
    ("cells", "wraps", "words"),
    [
        ((), (2,), "no coordinates"),
        (((0,),), (), "coordinates of 1 devices"),
        (((0,), (0, 1)), (), "coordinates of 1 and 2 axes"),
        (((), ()), (), "coordinates of 0 axes"),
        (((0, 1), (0, 1)), (), r"two devices of the host have the coordinates \(0, 1\)"),
        (((-1,), (0,)), (), "numbers from 0"),
        (((0, 0), (0, 1)), (2,), "--wrap is for 1 axes"),
        (((0, 0), (0, 2)), (0, 2), r"\(0, 2\) are beyond axis 1, which wraps around after 2"),
        (((0, 0), (0, 1)), (0, -2), "wraps around after"),
    ],
)
def test_coordinates_that_cannot_be_are_refused(
    cells: tuple[Any, ...], wraps: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ArgumentError, match=words):
        check_coordinates(cells, wraps, 2)
