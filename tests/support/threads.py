"""The same with other numbers of threads."""

from __future__ import annotations

from collections.abc import Callable

import torch


def assert_same_on_threads(call: Callable[[], torch.Tensor]) -> None:
    """A result must not depend on the threads that make it, to the last bit."""
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(call())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
