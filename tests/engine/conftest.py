"""Property tests draw the same examples in every run: a red test is red for everybody."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile(
    "seriatim", derandomize=True, deadline=None, database=None, max_examples=80
)
settings.load_profile("seriatim")
