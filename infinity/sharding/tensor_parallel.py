"""Parameters that are DTensors: tensor parallelism of `torch.distributed.tensor`. Units shard their
local tensors once more.

[Note: twice sharded]
`parallelize_module` turns a parameter into a DTensor. Each rank of a tensor parallel mesh has a
part or a copy of it, its local tensor. A unit lays out the local tensor, gathers it over the data
parallel ranks and updates it. The parameter stays the same DTensor, with the same local tensor. The
local tensor has its data in the unit or nowhere, as a plain parameter (`ParameterData.guard`).

[Note: the same on all tensor parallel ranks]
Shards of a dimension that does not divide evenly differ in size. Each shard has room for the
largest, so units, offsets and placements are the same on all ranks. So parameters that all ranks
hold are rounded with the same noise, and the ranks post the same collectives.

[Note: two threads]
Torch runs collectives of DTensors on the thread of the model, which waits for them. The exchange
joins the collectives of the engine, in groups of its own. All ranks go through both in the order of
one program, and the exchange never waits for the thread of the model. So among waiting ranks, the
rank that is least far can always continue: all other ranks have posted or reached its collective.
On GPUs the kernels of both must fit at once, as with any groups that are used side by side.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from infinity.errors import ConfigError
from infinity.sharding import collectives
from infinity.sharding.layout import LocalPart, part_within
from infinity.sharding.ranks import Ranks
from infinity.sharding.recognize import is_dtensor, is_fully_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


class Form(NamedTuple):
    """The parts of a DTensor besides its local tensor. `stride` is in elements."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def wrap(self, tensor: torch.Tensor) -> DTensor:
        """The DTensor of this form whose local tensor is a view of `tensor`."""
        from torch.distributed.tensor import DTensor  # see `recognize`

        return DTensor.from_local(
            tensor,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


def form_of(tensor: torch.Tensor) -> Form | None:
    """The form of a DTensor; None for every other tensor."""
    if not is_dtensor(tensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return Form(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; any other tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def cut_along(tensor: torch.Tensor) -> int | None:
    """The dimension along which tensor parallel ranks divide `tensor`; None if each rank has all of
    it."""
    if not is_dtensor(tensor):
        return None
    from torch.distributed.tensor import Shard  # see `recognize`

    (placement,) = tensor.placements
    return placement.dim % tensor.ndim if isinstance(placement, Shard) else None


def bounds_of(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The indices that take this rank's part out of a tensor of the whole shape."""
    dimension, form = cut_along(tensor), form_of(tensor)
    if dimension is None or form is None:
        return ()
    size, rank = form.shape[dimension], form.mesh.get_local_rank()
    each = -(-size // form.mesh.size())  # as torch.chunk
    return (*[slice(None)] * dimension, slice(min(rank * each, size), min((rank + 1) * each, size)))


def part_of(tensor: torch.Tensor) -> LocalPart:
    """The place of this rank's part in `tensor`."""
    shape, dimension, form = tuple(tensor.shape), cut_along(tensor), form_of(tensor)
    if dimension is None or form is None:
        numel = math.prod(shape)
        return LocalPart(1, numel, 0, numel, numel)
    begin, end, _ = bounds_of(tensor)[-1].indices(shape[dimension])
    return part_within(shape, dimension, begin, end, -(-shape[dimension] // form.mesh.size()))


def whole(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The whole tensor of which `values` is this rank's part, on the host; its form is that of
    `like`. All tensor parallel ranks must call it, on the thread that runs the model. On a GPU it
    passes the device."""
    form = form_of(like)
    if form is None:
        return values
    with torch.no_grad():
        return form.wrap(values).full_tensor().cpu()


def part_in(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of `value`, a whole tensor or a DTensor, as `like` is divided."""
    return local_gradient(value, like) if is_dtensor(value) else value[bounds_of(like)]


def local_gradient(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of `gradient`. A DTensor is first divided, or summed up, as its parameter
    is."""
    if not is_dtensor(gradient):
        return gradient
    from torch.distributed.tensor import Replicate  # see `recognize`

    wanted = (
        parameter.placements
        if is_dtensor(parameter)
        else (Replicate(),) * gradient.device_mesh.ndim
    )
    if gradient.placements != wanted:
        gradient = gradient.redistribute(placements=wanted)
    return gradient._local_tensor


def attach(dtensor: DTensor, tensor: torch.Tensor) -> None:
    """Make `tensor` the local tensor of `dtensor`. Both get its dtype."""
    form = form_of(dtensor)
    if form is not None and dtensor.dtype != tensor.dtype:
        with torch.no_grad():
            converted = form.wrap(tensor)
        dtensor.data = converted
        dtensor._spec = converted._spec
    dtensor._local_tensor = tensor


def with_tensor_parallel(ranks: Ranks, model: nn.Module, device: torch.device) -> Ranks:
    """`ranks`, with the group of tensor parallel ranks that divide DTensors of `model`.

    Raises `ConfigError` for DTensors that cannot be sharded further over `ranks`, on every rank,
    before anything is changed.
    """
    if any(map(is_fully_sharded, model.modules())):
        raise ConfigError(
            "the model was given to fully_shard; infinity shards over the data parallel "
            "ranks itself: leave that out"
        )
    parameters = {name: p for name, p in model.named_parameters() if is_dtensor(p)}
    for name, buffer in model.named_buffers():
        if is_dtensor(buffer) and not all(
            placement.is_replicate() for placement in buffer.placements
        ):
            raise ConfigError(
                f"the buffer {name} is a DTensor placed as {buffer.placements}; buffers "
                "must be Replicate()"
            )
    if not parameters:
        return ranks
    first, mesh = next((name, p.device_mesh) for name, p in parameters.items())
    for name, p in parameters.items():
        _check(name, p, first, mesh, device)
    ours = {rank for group in ranks.groups() for rank in dist.get_process_group_ranks(group)} - {
        dist.get_rank()
    }
    shared = sorted(ours & set(mesh.mesh.flatten().tolist()))
    if shared:
        raise ConfigError(
            f"{first} is a DTensor on ranks {mesh.mesh.flatten().tolist()}, of which `group` also "
            f"has {shared}: data parallel ranks must hold the same part of every DTensor; give the "
            "data dimension of the same mesh, as in infinity.wrap(..., group=mesh['dp']), or "
            "group=None where it has none. Where these are experts, and each of their ranks has "
            "tokens of its own, give the ranks that hold the same experts as `group`, and have "
            "hooks average the other gradients (docs/ranks.md, Experts)"
        )
    held = repr(
        [(name, bounds_of(p), tuple(p.shape), p.placements) for name, p in parameters.items()]
    )
    for group in ranks.groups():
        if not collectives.same(zlib.crc32(held.encode()), group):
            raise ConfigError(
                f"ranks {dist.get_process_group_ranks(group)} of `group` hold different parts of "
                "the DTensors of the model; give the data dimension of the mesh that these are on, "
                "as in infinity.wrap(..., group=mesh['dp'])"
            )
    return ranks._replace(tensor=mesh.get_group() if mesh.size() > 1 else None)


def _check(
    name: str, parameter: DTensor, first: str, mesh: DeviceMesh, device: torch.device
) -> None:
    from torch.distributed.tensor import Replicate, Shard  # see `recognize`

    if parameter.device_mesh != mesh:
        raise ConfigError(
            f"{first} is a DTensor on {mesh}, and {name} on {parameter.device_mesh}; all "
            "parameters must be on one mesh"
        )
    if mesh.ndim != 1:
        raise ConfigError(
            f"{name} is a DTensor on a mesh of shape {tuple(mesh.shape)}; one dimension is "
            "supported: parallelize_module(model, mesh['tp'], ...), and the others as "
            "infinity.wrap(..., group=mesh['dp'])"
        )
    if mesh.device_type != device.type:
        raise ConfigError(
            f"{name} is a DTensor on a mesh of {mesh.device_type}, and the model will run on "
            f"{device.type}; set Config(tuning=Tuning(device={mesh.device_type!r})), or make the "
            f"mesh for {device.type}"
        )
    if not all(type(placement) in (Shard, Replicate) for placement in parameter.placements):
        raise ConfigError(
            f"{name} is a DTensor placed as {parameter.placements}; parameters may be "
            "Shard(...) or Replicate()"
        )
    wanted = torch.empty(parameter.shape, device="meta")[bounds_of(parameter)].shape
    if local(parameter).shape != wanted:
        raise ConfigError(
            f"{name} is a DTensor of shape {tuple(parameter.shape)} placed as "
            f"{parameter.placements}, of which this rank has {tuple(local(parameter).shape)}; it "
            f"should have {tuple(wanted)}"
        )
