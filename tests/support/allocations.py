"""What torch allocates on the CPU, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile


def allocations(work: Callable[[], object]) -> Iterator[int]:
    """The bytes of each allocation of torch while `work` runs, in order; what is freed is
    negative."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        work()
    results = found.profiler.kineto_results
    events = [each for each in results.events() if each.name() == "[memory]"]
    for event in sorted(events, key=lambda each: each.start_ns()):
        if event.device_type() == torch.autograd.DeviceType.CPU:
            yield event.nbytes()


def peak(work: Callable[[], object], counts: Callable[[int], bool] = lambda _: True) -> int:
    """The most bytes that are allocated at once while `work` runs, of allocations of a size that
    `counts`."""
    most = now = 0
    for nbytes in allocations(work):
        if counts(abs(nbytes)):
            now += nbytes
            most = max(most, now)
    return most
