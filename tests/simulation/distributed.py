"""The calls of `torch.distributed` that the package makes, for ranks that are threads.

A thread that belongs to no rank has the real ones. A collective ends when all of its group have
come, and fails when one of them is gone. What a rank has sent arrives whatever becomes of it.
"""

from __future__ import annotations

import functools
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from simulation.machine import PowerOff
from simulation.processes import Gone, Rank, here


class Notes:
    """A store as torch.distributed has it, as `rank` sees it; its keys begin with `prefix`."""

    def __init__(self, prefix: str, rank: Rank) -> None:
        self._prefix, self._rank = prefix, rank

    def below(self, prefix: str) -> Notes:
        return Notes(f"{self._prefix}/{prefix}", self._rank)

    def set(self, key: str, value: Any) -> None:
        data = value if isinstance(value, bytes) else str(value).encode()
        self._tell(key, lambda notes, name: notes.__setitem__(name, data))

    def add(self, key: str, amount: int) -> int:
        def adding(notes: dict[str, bytes], name: str) -> int:
            total = int(notes.get(name, b"0")) + amount
            notes[name] = str(total).encode()
            return total

        if amount:
            return int(self._tell(key, adding))
        return int(self._ask(lambda notes: notes.get(f"{self._prefix}/{key}", b"0")))

    def get(self, key: str) -> bytes:
        found: bytes = self._ask(lambda notes: notes[f"{self._prefix}/{key}"])
        return found

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(lambda notes: all(f"{self._prefix}/{key}" in notes for key in keys)))

    def delete_key(self, key: str) -> None:
        self._ask(lambda notes: notes.pop(f"{self._prefix}/{key}", None))

    def _ask(self, question: Callable[[dict[str, bytes]], Any]) -> Any:
        """What changes nothing, or nothing that counts, is no operation: how often it is asked is a
        matter of time."""
        together = self._rank.together
        self._rank.machine.check()
        if together.keeps_store and together.ranks[0].is_gone:
            raise dist.DistNetworkError("Connection reset by peer")
        with together.changed:
            return question(together.notes)

    def _tell(self, key: str, change: Callable[[dict[str, bytes], str], Any]) -> Any:
        name, together = f"{self._prefix}/{key}", self._rank.together

        def told() -> Any:
            found = self._ask(lambda notes: change(notes, name))
            together.look()
            return found

        try:
            return self._rank.act("tell", name, told)
        except PowerOff:
            raise
        except OSError as error:
            raise dist.DistNetworkError(f"the store cannot be reached: {error}") from error


class Group:
    """A process group, as `rank` sees it; `members` are numbers among all."""

    def __init__(self, name: str, members: Sequence[int], rank: Rank) -> None:
        self.group_name, self.members, self.rank = name, list(members), rank
        self.at = self.members.index(rank.number)
        """Its number in the group."""
        self._joined = 0
        self._letters: Counter[tuple[int, int]] = Counter()

    def meet(self, what: str, brings: Any, works: Callable[[list[Any]], None]) -> None:
        """A collective: who comes last `works` with what all bring, in the order of the group.
        Raises `Gone` where somebody is."""
        rank, together = self.rank, self.rank.together
        key = self.group_name, self._joined
        self._joined += 1
        self._act(f"{self.group_name}: {what}")
        with together.changed:
            met = together.met.setdefault(key, {})

            def complete() -> bool:
                return len(met) == len(self.members)

            if any(together.ranks[member].is_gone for member in self.members):
                raise Gone
            met[self.at] = brings
            if complete():
                works([met[at] for at in range(len(self.members))])
                del together.met[key]
                together.changed.notify_all()
            together.await_others(rank, self.members, complete)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        together = self.rank.together
        self._act(f"{self.group_name}: send")
        with together.changed:
            if together.ranks[self.members[to]].is_gone:
                raise Gone
            together.mail[self._letter(self.at, to)] = tensor.clone()
            together.changed.notify_all()

    def receive(self, tensor: torch.Tensor, source: int) -> Receipt:
        return Receipt(self, tensor, source, self._letter(source, self.at))

    def _letter(self, source: int, to: int) -> tuple[str, int, int, int]:
        """The next one of those."""
        self._letters[source, to] += 1
        return self.group_name, source, to, self._letters[source, to]

    def _act(self, name: str) -> None:
        try:
            self.rank.act("join", name, lambda: None)
        except PowerOff:
            raise
        except OSError as error:
            raise Gone(f"Connection reset: {error}") from error


class Receipt:
    """What is on its way to this rank."""

    def __init__(
        self, group: Group, tensor: torch.Tensor, source: int, letter: tuple[str, int, int, int]
    ) -> None:
        self._group, self._tensor, self._source, self._letter = group, tensor, source, letter

    def wait(self) -> None:
        group, together = self._group, self._group.rank.together
        with together.changed:
            there = functools.partial(together.mail.__contains__, self._letter)
            together.await_others(group.rank, [group.members[self._source]], there)
            self._tensor.copy_(together.mail.pop(self._letter))


class SimulatedDistributed:
    """Is `torch.distributed` for the modules of the package."""

    ProcessGroup = (Group, dist.ProcessGroup)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @property
    def group(self) -> Any:
        return self if here() is not None else dist.group

    @property
    def WORLD(self) -> Group:
        return _of(None)

    def is_initialized(self) -> bool:
        return here() is not None or dist.is_initialized()

    def get_rank(self, group: Any = None) -> int:
        return _of(group).at

    def get_world_size(self, group: Any = None) -> int:
        return len(_of(group).members)

    def get_process_group_ranks(self, group: Group) -> list[int]:
        return list(group.members)

    def get_backend(self, group: Group) -> str:
        return "gloo"

    def get_backend_config(self, group: Group) -> str:
        return "cpu:gloo"

    def new_group(self, members: Sequence[int], **options: Any) -> Group:
        rank = _of(None).rank
        made = Group(f"group {len(rank.groups)}", members, rank)
        rank.groups.append(made)
        made.meet("new", None, lambda brought: None)
        return made

    def destroy_process_group(self, group: Group) -> None:
        """Nothing is held by it."""

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> None:
        one = torch.maximum if op == dist.ReduceOp.MAX else torch.add

        @torch.no_grad()
        def reduce(tensors: list[torch.Tensor]) -> None:
            total = functools.reduce(one, [each.clone() for each in tensors])
            for each in tensors:
                each.copy_(total)

        _of(group).meet("reduce", tensor, reduce)

    # Objects, which travel as bytes

    def get_global_rank(self, group: Any, number: int) -> int:
        return _of(group).members[number]

    def gather_object(
        self, obj: Any, object_gather_list: list[Any] | None, dst: int, group: Any = None
    ) -> None:
        self._exchange("gather", group, obj, object_gather_list)

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        self._exchange("all gather", group, obj, object_list)

    def broadcast_object_list(self, object_list: list[Any], src: int, group: Any = None) -> None:
        found: list[Any] = [None] * len(_of(group).members)
        self._exchange("broadcast", group, object_list[0], found)
        object_list[0] = found[_of(group).members.index(src)]

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None,
        src: int,
        group: Any = None,
    ) -> None:
        found: list[Any] = [None] * len(_of(group).members)
        self._exchange("scatter", group, scatter_object_input_list, found)
        scatter_object_output_list[0] = found[_of(group).members.index(src)][_of(group).at]

    @staticmethod
    def _exchange(what: str, group: Any, brings: Any, found: list[Any] | None) -> None:
        """`found` gets what each rank brings, where it is a list."""

        def give(pairs: list[tuple[bytes, list[bytes]]]) -> None:
            for _, all_of_them in pairs:
                all_of_them += [data for data, _ in pairs]

        met: list[bytes] = []
        _of(group).meet(what, (pickle.dumps(brings), met), give)
        if found is not None:
            found[:] = map(pickle.loads, met)

    def isend(self, tensor: torch.Tensor, group: Group, group_dst: int) -> None:
        group.send(tensor, group_dst)

    def irecv(self, tensor: torch.Tensor, group: Group, group_src: int) -> Receipt:
        return group.receive(tensor, group_src)


def _of(group: Group | None) -> Group:
    if group is not None:
        return group
    rank = here()
    assert rank is not None, "this thread belongs to no rank"
    if not rank.groups:
        rank.groups.append(Group("world", range(len(rank.together.ranks)), rank))
    world: Group = rank.groups[0]
    return world


def gather(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    """`torch.distributed.all_gather_into_tensor`."""

    @torch.no_grad()
    def fill(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        parts = [part.clone() for _, part in pairs]
        for whole, _ in pairs:
            for place, part in zip(whole.chunk(len(parts)), parts, strict=True):
                place.copy_(part)

    group.meet("gather", (full, shard), fill)


class SimulatedStores:
    """Is `torch.distributed.distributed_c10d` for the modules of the package."""

    def __getattr__(self, name: str) -> Any:
        return getattr(distributed_c10d, name)

    def PrefixStore(self, prefix: str, store: Any) -> Any:
        if isinstance(store, Notes):
            return store.below(prefix)
        return distributed_c10d.PrefixStore(prefix, store)

    def _get_default_store(self) -> Any:
        return Notes("store", _of(None).rank)
