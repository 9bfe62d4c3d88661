"""Groups parameters into units, and finds the modules that use each unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.sharding.codec import stored_as
from infinity.sharding.tiles import Tile, direct_parameters
from infinity.tiers.originals import StoredBytes

# They contain modules or parameters, but have no forward.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

Units = Sequence[type[nn.Module] | nn.Module] | None
"""The type of `units` in `infinity.wrap`."""


class Group(NamedTuple):
    """A future unit: parameters of one dtype, all trainable or all frozen, below one owner module
    (the first one, if groups were joined).

    If files of the user are their home, `stored` has the place of each, and the parameters are in
    the order of these places.
    """

    name: str
    dtype: torch.dtype
    owner: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]
    trainable: bool
    stored: tuple[StoredBytes, ...] = ()

    @property
    def kind(self) -> tuple[torch.dtype, bool, bool]:
        """The dtype, whether they are trainable, and whether they are stored in files."""
        return self.dtype, self.trainable, bool(self.stored)


def find_owners(model: nn.Module, given: Units = None) -> dict[str, nn.Module]:
    """The modules with parameters that form units, by name: the repeated blocks, or the `given`
    classes and instances; also every tile. Raises `ConfigError` if `given` matches no module.

    A repeated block is an element of a `ModuleList` or `Sequential` in which its class occurs more
    than once. The outermost such element is the block. An element with more than half of the
    model's parameters (an encoder of many blocks) is no block: its modules are searched.
    """
    owners: dict[str, nn.Module] = {}
    tiles: dict[int, tuple[str, nn.Module]] = {}
    total = sum(p.numel() for p in model.parameters())

    # A loop, because an inner function that calls itself would keep the model in a reference cycle.
    pending = [("", model, given is not None and any(each is model for each in given))]
    while pending:
        name, module, chosen = pending.pop()
        if chosen:
            owners[name] = module
        if chosen or isinstance(module, Tile):
            for path, inner in module.named_modules(prefix=name):
                if isinstance(inner, Tile):
                    tiles.setdefault(id(inner), (path, inner))
            continue
        below = []
        kinds = Counter(type(child) for child in module.children())
        for child_name, child in module.named_children():
            numel = sum(p.numel() for p in child.parameters())
            if given is not None:
                chosen = _is_one_of(child, given)
            else:
                repeated = (
                    isinstance(module, (nn.ModuleList, nn.Sequential)) and kinds[type(child)] > 1
                )
                chosen = repeated and not isinstance(child, _CONTAINERS) and 2 * numel <= total
            chosen = chosen and not isinstance(child, Tile)
            below.append(
                (f"{name}.{child_name}" if name else child_name, child, chosen and numel > 0)
            )
        pending += reversed(below)
    if given is not None and not owners and _is_one_of(model, given):
        return find_owners(model, [model])  # by its class; no module inside has it
    if given is not None and not owners:
        raise ConfigError(
            "units=... matches no module of the model; give classes or modules that occur in it"
        )
    return owners | dict(tiles.values())


def _is_one_of(module: nn.Module, given: Iterable[type[nn.Module] | nn.Module]) -> bool:
    """Whether `module` is one of these modules, or of one of these classes."""
    return any(module is g if isinstance(g, nn.Module) else isinstance(module, g) for g in given)


def group_parameters(
    model: nn.Module,
    owners: dict[str, nn.Module],
    dtype: torch.dtype | None = None,
    stored: Mapping[int, StoredBytes] | None = None,
) -> list[Group]:
    """Every parameter of `model` in exactly one group, in the order of the modules. A tied
    parameter belongs to the first module that has it.

    Floating-point parameters count as `dtype`, if it is given: they will be stored in it. Frozen
    parameters of one byte (float8) keep their own dtype. They are codes of a quantized base, and
    its kernels and scales expect them. Parameters with an id in `stored` stay in files of the user,
    in units of their own.
    """
    stored = stored or {}
    inside = {id(m): (name, owner) for name, owner in owners.items() for m in owner.modules()}
    buckets: dict[tuple[str, torch.dtype, bool, bool], list[tuple[str, nn.Parameter]]] = {}
    owner_of: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for path, module, parent in _with_parents(model):
        for name, parameter in direct_parameters(module):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            holder_path, holder = parent if isinstance(module, _CONTAINERS) else (path, module)
            unit_name, owner = inside.get(id(module), (holder_path, holder))
            owner_of[unit_name] = owner
            is_stored = id(parameter) in stored
            key = (unit_name, stored_as(parameter, dtype), parameter.requires_grad, is_stored)
            buckets.setdefault(key, []).append((f"{path}.{name}" if path else name, parameter))
    kinds = Counter(unit_name for unit_name, *_ in buckets)
    groups = []
    for (unit_name, kept, trainable, is_stored), parameters in buckets.items():
        parts = [str(kept).removeprefix("torch.")]
        parts += ["frozen"] * (not trainable) + ["in its files"] * is_stored
        suffix = "" if kinds[unit_name] == 1 else f" ({', '.join(parts)})"
        places = [stored[id(p)] for _, p in parameters] if is_stored else []
        name = (unit_name or "model") + suffix
        groups.append(_in_order(name, kept, owner_of[unit_name], parameters, trainable, places))
    return groups


def _in_order(
    name: str,
    dtype: torch.dtype,
    owner: nn.Module,
    parameters: Sequence[tuple[str, nn.Parameter]],
    trainable: bool,
    stored: Sequence[StoredBytes],
) -> Group:
    """A group of `parameters`, in the order of their files if they are `stored`."""
    order = sorted(range(len(stored)), key=lambda at: stored[at][:2])
    if order:
        parameters = [parameters[at] for at in order]
    places = tuple(stored[at] for at in order)
    return Group(name, dtype, owner, tuple(parameters), trainable, places)


def join_small(groups: Sequence[Group], owners: Mapping[str, nn.Module]) -> list[Group]:
    """`groups` with small neighbors of one kind joined, so that they share their collectives and
    their I/O.

    [Note: small units]
    A unit of any size needs an all-gather, a reduction and I/O of its own. So adapters, or the
    layers of a long `Sequential`, are better together. Yet budgets hold whole units. So a joined
    unit has at most an eighth of the bytes of the largest unit, for which the smallest budget has
    room anyway. A sixteenth of the model, or 1 MiB if that is less, is always allowed. An element
    of a `Sequential` or `ModuleList` also joins the element before it if it has at most a 64th of
    its bytes. A norm between blocks is an example. A unit joins none if its module contains
    parameters of other units, because it is in use for longer. Tiles join none, because they are
    small on purpose. Joining changes no numbers.
    """
    sizes = [group.dtype.itemsize * sum(p.numel() for _, p in group.parameters) for group in groups]
    most = max(max(sizes) // 8, min(sum(sizes) // 16, 1 << 20))
    owner_of = {id(p): group.owner for group in groups for _, p in group.parameters}
    containers = {owner: name.rpartition(".")[0] for name, owner in owners.items()}
    joined: list[list[int]] = []
    # The groups that the next one of the same kind may join.
    last: dict[tuple[torch.dtype, bool, bool], list[int]] = {}

    def go_together(before: list[int], number: int) -> bool:
        together = sum(sizes[each] for each in before) + sizes[number]
        first, other = (containers.get(groups[each].owner) for each in (before[0], number))
        return together <= most or (
            first is not None and first == other and 64 * together <= 65 * sizes[before[0]]
        )

    for number, group in enumerate(groups):
        kind = group.kind
        if isinstance(group.owner, Tile):
            joined.append([number])
        elif any(owner_of[id(p)] is not group.owner for p in group.owner.parameters()):
            last.pop(kind, None)
            joined.append([number])
        elif kind in last and go_together(last[kind], number):
            last[kind].append(number)
        else:
            last[kind] = [number]
            joined.append(last[kind])
    return [_joined([groups[number] for number in numbers]) for numbers in joined]


def _joined(groups: Sequence[Group]) -> Group:
    first, *_, last = [groups[0], *groups]
    name = first.name if first is last else f"{first.name} to {last.name}"
    parameters = [named for group in groups for named in group.parameters]
    stored = [place for group in groups for place in group.stored]
    return _in_order(name, first.dtype, first.owner, parameters, first.trainable, stored)


def find_users(
    model: nn.Module, owners: dict[str, nn.Module], unit_of: dict[int, int]
) -> dict[nn.Module, list[int]]:
    """For each module to be hooked, the numbers of the units that its forward uses. `unit_of` has
    the unit of each parameter, by its id.

    Three kinds of modules are hooked: the model itself; the owners, with all parameters below them
    except those of tiles; and every module with parameters of its own that can be reached without
    passing through an owner. (Such a module may be a part of an owner that another module shares.)
    """
    users: dict[nn.Module, list[int]] = {model: []}
    tiles = {id(owner) for owner in owners.values() if isinstance(owner, Tile)}
    for owner in owners.values():
        below = _with_parents(owner, tiles - {id(owner)})
        own = [p for _, module, _ in below for _, p in direct_parameters(module)]
        users[owner] = list(dict.fromkeys(unit_of[id(p)] for p in own))
    for _, module, parent in _with_parents(model, {id(owner) for owner in owners.values()}):
        holder = parent[1] if isinstance(module, _CONTAINERS) else module
        units = [unit_of[id(p)] for _, p in direct_parameters(module)]
        if units:
            users[holder] = list(dict.fromkeys(users.get(holder, []) + units))
    return users


def find_nestings(
    model: nn.Module, users: Mapping[nn.Module, Sequence[int]]
) -> set[frozenset[int]]:
    """For every module, the numbers of the units in use during its forward: its own and those of
    the modules around it. Each set occurs once."""
    found: set[frozenset[int]] = set()
    pending: list[tuple[nn.Module, frozenset[int]]] = [(model, frozenset())]
    while pending:
        module, around = pending.pop()
        inside = around.union(users.get(module, ()))
        found.add(inside)
        pending += [(child, inside) for child in module.children()]
    return found


def _with_parents(
    model: nn.Module, without: Iterable[int] = ()
) -> Iterator[tuple[str, nn.Module, tuple[str, nn.Module]]]:
    """Every module once, with its path, and its nearest ancestor that has a forward. Leaves out
    modules with an id in `without`, and modules that are below these only."""
    seen = set(without)
    pending = [("", model, ("", model))]
    while pending:
        path, module, above = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module, above
        below = above if isinstance(module, _CONTAINERS) else (path, module)
        children = [
            (f"{path}.{name}" if path else name, child, below)
            for name, child in module.named_children()
        ]
        pending += reversed(children)
