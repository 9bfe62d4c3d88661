"""One sentence on the limit of the device, from the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.bench.io.preflight import DirectoryFacts
from infinity.bench.io.search import Setting

NEAR_LINK = 0.8
"""From this share of the bytes of a link on, packet headers take nearly the rest."""
FULL_CPU = 0.85
"""From this number of CPU seconds per second on, one engine thread is the limit."""
SHARED = 0.85
"""Paths that together reach less than this share of their sum share something."""
FLAT = 1.1
"""A device is full if twice as many bytes in flight gain less than this."""

LASTS = 0.85
"""Writing lasts if it keeps this share of its first speed."""


@dataclass(frozen=True)
class Evidence:
    """The evidence for one direction. Speeds are in GB/s (10^9 bytes). `fio_ratio`: our speed over
    that of fio, None without a comparison.

    `wider`: the best speed of the search with at least twice as many bytes in flight, None without
    such a setting.
    """

    operation: str
    together: float
    alone: Sequence[float]
    cpu_share: float
    setting: Setting
    at_setting: float | None
    wider: float | None
    fio_ratio: float | None


def verdict(places: Sequence[DirectoryFacts], evidence: Evidence) -> str:
    """The limit of reads or writes: the strongest reason, in one sentence with its number."""
    subject = {"read": "Reads", "write": "Writes"}[evidence.operation]
    speed = evidence.together
    against = "" if evidence.fio_ratio is None else f" ({evidence.fio_ratio:.0%} of what fio gets)"
    reached = f"{subject} are limited by"
    links = [place.link.bytes_per_second / 1e9 for place in places if place.link is not None]
    cached = next((place for place in places if place.direct_problem or place.in_memory), None)
    if cached is not None:
        cause = f"memory and the page cache: {cached.path} has no drive that O_DIRECT reaches"
    elif len(links) == len(places) and speed >= NEAR_LINK * sum(links):
        cause = (
            f"the PCIe link: {speed:.2f} GB/s is {speed / sum(links):.0%} of its "
            f"{sum(links):.2f} GB/s"
        )
    elif len(places) > 1 and speed < SHARED * sum(evidence.alone):
        cause = (
            f"what the paths share: together they reach {speed:.2f} GB/s, alone "
            f"{sum(evidence.alone):.2f} GB/s in sum"
        )
    elif evidence.cpu_share / len(places) >= FULL_CPU:
        cause = (
            f"the CPU: each engine takes {evidence.cpu_share / len(places):.0%} of a "
            f"core for {speed / len(places):.2f} GB/s"
        )
    elif any(place.network for place in places):
        cause = f"the network or the server of the file system, at {speed:.2f} GB/s"
    elif (
        evidence.wider is not None
        and evidence.at_setting
        and evidence.wider < FLAT * evidence.at_setting
    ):
        name = " and ".join(place.device or str(place.path) for place in places)
        link = f", {speed / sum(links):.0%} of the PCIe link" if len(links) == len(places) else ""
        cause = (
            f"the device itself ({name}): twice as much in flight is not faster than "
            f"{speed:.2f} GB/s{link}"
        )
    elif evidence.wider is not None:
        cause = (
            f"the bytes in flight: {speed:.2f} GB/s, and the search saw "
            f"{evidence.wider:.2f} GB/s with more of it"
        )
    else:
        flight = f"{evidence.setting.depth} requests of {evidence.setting.request_bytes >> 10} KiB"
        cause = (
            f"the bytes in flight ({flight}) or by the device: {speed:.2f} GB/s, and "
            "no setting with more in flight was tried"
        )
    return f"{reached} {cause}{against}."


def lasting(first: float, last: float, written: int, write_set: int) -> str:
    """Whether long writing keeps the speed (GB/s) of its beginning, in one sentence. `write_set`:
    bytes, all paths."""
    if not first:
        return "Nothing is said of long writes: none ended in the first tenth of the time."
    if last < LASTS * first:
        return (
            f"Writes fall from {first:.2f} to {last:.2f} GB/s as {written / 1e9:.0f} GB are "
            "written: a cache of the drive is full by then, and training gets the lower figure."
        )
    again = (
        f", but on the same {write_set / 1e9:.0f} GB, which a cache may hold"
        if written > 1.1 * write_set
        else ""
    )
    return (
        f"Writes keep {last / first:.0%} of their first speed over {written / 1e9:.0f} GB{again}."
    )
