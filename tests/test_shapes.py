"""Sizes: valid ones pass, invalid ones name the nearest valid ones."""

from __future__ import annotations

import pytest

from extension.errors import SettingError
from extension.shapes import Shape, parse_pixels, tokens_for_chunks


def test_from_pixels():
    shape = Shape.from_pixels(width=768, height=520, batch=2)
    assert (shape.width, shape.height, shape.pixels) == (96, 65, (768, 520))
    assert Shape.from_json(shape.to_json()) == shape
    assert tokens_for_chunks(3) == 231


@pytest.mark.parametrize(
    ("width", "nearest"), [(765, "760 and 768"), (767, "760 and 768"), (9, "8 and 16")]
)
def test_the_nearest_valid_sizes_are_named(width, nearest):
    with pytest.raises(SettingError) as caught:
        Shape.from_pixels(width=width, height=512, batch=1)
    assert nearest in caught.value.hint


@pytest.mark.parametrize("value", [0, -8, 7, 10**9, 8.0, "512", None, True])
def test_impossible_sides(value):
    with pytest.raises(SettingError):
        Shape.from_pixels(width=value, height=512, batch=1)


@pytest.mark.parametrize(
    "change", [{"batch": 0}, {"batch": 10**6}, {"tokens": 0}, {"control": 1}, {"height": True}]
)
def test_impossible_shapes(change):
    with pytest.raises(SettingError):
        Shape(**{"batch": 1, "height": 8, "width": 8, **change})


@pytest.mark.parametrize("obj", [None, [], {}, {"batch": 1}, {"x": 1}])
def test_json_of_another_kind(obj):
    with pytest.raises(SettingError):
        Shape.from_json(obj)


def test_parse_pixels():
    assert parse_pixels("512") == (512, 512)
    assert parse_pixels("768x512") == (768, 512)
    for text in ("", "x", "12x", "1x2x3", "-512", "512.0", "513", "axb"):
        with pytest.raises(SettingError):
            parse_pixels(text)
