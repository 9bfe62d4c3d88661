"""Packs samples into windows, by their lengths alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable

import numpy as np


def best_fit(lengths: Iterable[int], most: int) -> list[list[int]]:
    """Groups of numbers whose `lengths` sum to at most `most`. Each number is in one group.

    Best fit decreasing: the longest first, each into the fullest group with room for it. At most
    11/9 of the least number of groups, and one more (Johnson et al., 1974, "Worst-case performance
    bounds for simple one-dimensional packing algorithms"). A length above `most` is a group alone.
    """
    sizes = np.asarray(list(lengths))
    groups: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)  # groups by their room
    rooms: list[int] = []  # the keys that have groups, sorted
    for number in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[number])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            group, room = len(groups), most
            groups.append([])
        else:
            room = rooms[place]
            group = with_room[room].pop()
            if not with_room[room]:
                del rooms[place]
        groups[group].append(number)
        left = room - size
        if left > 0:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(group)
    return groups
