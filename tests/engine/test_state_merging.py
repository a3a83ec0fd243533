"""State files: few files, and each session rewritten a logarithmic number of times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seriatim.engine.files import STATE_FILES_MAX, merge_count
from seriatim.errors import BrokenPromiseError


def written(sizes: list[int]) -> tuple[int, list[int]]:
    """Rows written in all when slices touch so many distinct sessions each, and the files left."""
    files: list[int] = []
    total = 0
    for size in sizes:
        count = merge_count(files, size)
        new = size + sum(files[len(files) - count :])
        files = [*files[: len(files) - count], new]
        total += new
    return total, files


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=300))
def test_rewriting_is_amortised(sizes: list[int]) -> None:
    """All slices together write at most a logarithm times what they touched, and few files stay."""
    total, files = written(sizes)
    assert sum(files) == sum(sizes)
    assert len(files) <= STATE_FILES_MAX
    assert total <= sum(sizes) * (2 + math.log2(sum(sizes)))


def test_a_large_base_is_left_alone() -> None:
    """A slice that touches 100 sessions of 100,000 writes 100."""
    assert merge_count([100_000], 100) == 0


def test_no_more_files_than_can_be_opened() -> None:
    """Even falling sizes, which never merge by themselves, stay within the bound."""
    _, files = written([2**n for n in range(60, 0, -1)])
    assert len(files) <= STATE_FILES_MAX


def test_nothing_is_not_written() -> None:
    """A file without sessions would be noise."""
    with pytest.raises(BrokenPromiseError, match="nothing"):
        merge_count([], 0)
