"""How many of the possible faults `make test` tries; the nightly run tries all of them."""

from __future__ import annotations

import pytest


def every_nth_unless_nightly(count: int) -> pytest.MarkDecorator:
    """Run the test with ``every`` set to ``count`` in `make test`, and to 1 in the nightly run."""
    nightly = [pytest.mark.nightly, pytest.mark.timeout(1800)]
    return pytest.mark.parametrize(
        "every",
        [pytest.param(count, id="some"), pytest.param(1, id="all", marks=nightly)],
    )
