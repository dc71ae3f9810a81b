"""Times of calls on a GPU, or of interpreted ones where there is none.

Comes in: calls that do the same on different memory. Goes out: seconds a call.
Always holds: on a device calls are captured in a CUDA graph and replayed, so that nothing of Python
is timed, and they go round memory larger than the last cache; without a device each call runs once,
and its time says nothing about one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Runner = Callable[[], object]
_REPLAYS = 5
_LONGEST = 0.2  # seconds that all replays of one measurement take, about


@dataclass(frozen=True)
class Times:
    """Seconds a call."""

    fastest: float
    median: float


def measure(runners: Sequence[Runner], device: torch.device) -> Times:
    """Seconds of one call.

    Args:
        runners: the same call on memory of its own each.
        device: where they run.
    """
    if device.type != "cuda":
        return _once(runners[0])
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for runner in runners[:2]:
            runner()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [runner() for runner in runners]
    first = _replayed(graph)
    found = [first, *(_replayed(graph) for _ in range(min(_REPLAYS, int(_LONGEST / first) + 1)))]
    del kept
    return Times(min(found) / len(runners), statistics.median(found) / len(runners))


def _once(runner: Runner) -> Times:
    start = time.perf_counter()
    runner()
    seconds = time.perf_counter() - start
    return Times(seconds, seconds)


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def properties(device: torch.device) -> dict[str, object]:
    """Name, multiprocessors and bytes of memory of a present device."""
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "multiprocessors": found.multi_processor_count,
        "memory": found.total_memory,
    }


def clock_rate(device: torch.device) -> float:
    """Cycles a second that the multiprocessors run at now."""
    return torch.cuda.clock_rate(device) * 1e6
