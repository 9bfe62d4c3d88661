"""Packs samples into windows, by their lengths alone, and tries if a model keeps them apart."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


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


def are_alone(model: Any, device: torch.device) -> bool:
    """Whether the samples of one window do not see each other in `model`: another first sample
    changes no output for the second one by more than rounding.

    Runs the model twice on 16 tokens, without gradients.
    """
    size, vocabulary = 8, model.config.get_text_config(decoder=True).vocab_size
    positions = torch.arange(size, device=device).repeat(2)[None]
    second = torch.arange(2 * size, 3 * size)
    model.eval()
    outputs = []
    with torch.no_grad():
        for first in (torch.arange(size), torch.arange(size, 2 * size)):
            ids = (torch.cat([first, second]) % vocabulary)[None].to(device)
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            outputs.append(logits[0, size:])
    one, other = (output.float() for output in outputs)
    rounding = 4 * torch.finfo(outputs[0].dtype).eps * float(one.abs().max())
    return float((one - other).abs().max()) <= rounding
