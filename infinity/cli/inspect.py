"""`infinity inspect`: shows the content of a checkpoint, and whether it is damaged."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from infinity.cli.failure import plain_failures
from infinity.cli.options import AsJson, Debug
from infinity.errors import CheckpointError
from infinity.quantities import format_bytes

if TYPE_CHECKING:
    from infinity.checkpoint.contents import Contents


def describe(contents: Contents, tensors: bool) -> dict[str, Any]:
    """All facts of `infinity inspect` without damage, ready for JSON. Sizes are in bytes."""
    manifest, header = contents.manifest, contents.header
    states: dict[str, Counter[str]] = {}
    sizes: Counter[str] = Counter()
    for key, tensor in manifest.tensors.items():
        kind = key.split(".", 2)[1] if key.startswith("optimizer.") else ""
        if kind:
            count = tensor.size.numel()
            states.setdefault(kind, Counter())[_name(tensor.properties.dtype)] += 1
            sizes[kind] += count * tensor.properties.dtype.itemsize
    weights = contents.weights()
    facts: dict[str, Any] = {
        "checkpoint": str(contents.directory),
        "version": manifest.version,
        "format": "torch.distributed.checkpoint",
        "run": manifest.stamp.run or None,
        "save": manifest.stamp.save or None,
        "step": header.get("posted_steps"),
        "skipped_steps": header.get("skipped_steps"),
        "ranks": header.get("ranks"),
        "files": dict(manifest.files),
        "bytes": sum(manifest.files.values()),
        "model": {
            "tensors": len(weights),
            "elements": sum(each.numel for each in weights),
            "bytes": sum(each.nbytes for each in weights),
            "dtypes": _dtypes(_name(each.dtype) for each in weights),
        },
        "left_out": len(contents.left_out),
        "optimizers": [_optimizer(each) for each in header.get("optimizers", [])],
        "states": {
            kind: {
                "tensors": sum(dtypes.values()),
                "bytes": sizes[kind],
                "dtypes": dict(dtypes),
            }
            for kind, dtypes in states.items()
        },
        "zero_states": len(manifest.absent or ()),
        "extra": {str(rank): keys for rank, keys in contents.extra_keys().items()},
    }
    if tensors:
        facts["tensors"] = [
            {
                "name": each.name,
                "dtype": _name(each.dtype),
                "shape": list(each.shape),
                "bytes": each.nbytes,
            }
            for each in weights
        ]
    return facts


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes(names: Iterable[str]) -> dict[str, int]:
    """The number of tensors of each dtype."""
    return dict(Counter(names))


def _optimizer(header: dict[str, Any]) -> dict[str, Any]:
    groups = header.get("names", [])
    return {
        "states": header.get("states"),
        "groups": len(groups),
        "parameters": sum(map(len, groups)),
    }


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    model, step = facts["model"], facts["step"]
    rows = [
        ("checkpoint", facts["checkpoint"]),
        ("format", f"version {facts['version']}, {facts['format']}"),
        ("step", "unknown" if step is None else f"{step}, {facts['skipped_steps'] or 0} skipped"),
        ("ranks", str(facts["ranks"])),
        ("files", f"{len(facts['files'])}, {format_bytes(facts['bytes'])}"),
        (
            "model",
            f"{model['tensors']} tensors, {model['elements']:,} elements, "
            f"{format_bytes(model['bytes'])}: {_listed(model['dtypes'])}",
        ),
    ]
    if facts["left_out"]:
        rows.append(("left out", f"{facts['left_out']} frozen parameters"))
    for number, each in enumerate(facts["optimizers"]):
        text = f"{each['parameters']} parameters in {each['groups']} groups: {each['states']}"
        rows.append((f"optimizer {number}", text))
    for kind, each in facts["states"].items():
        text = f"{each['tensors']} tensors, {format_bytes(each['bytes'])}: "
        rows.append((kind, text + _listed(each["dtypes"])))
    if facts["zero_states"]:
        rows.append(("zeros", f"{facts['zero_states']} states are zero, and take no space"))
    for rank, keys in facts["extra"].items():
        text = "too large to be shown" if keys is None else ", ".join(keys) or "nothing"
        rows.append((f"extra of rank {rank}", text))
    for each in facts.get("tensors", ()):
        shape = " x ".join(map(str, each["shape"])) or "one value"
        rows.append((each["name"], f"{each['dtype']}, {shape}, {format_bytes(each['bytes'])}"))
    return rows


def _listed(dtypes: dict[str, int]) -> str:
    return ", ".join(f"{count} in {name}" for name, count in dtypes.items())


def inspect(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint, or the directory of a run, of which the last one is shown.",
        ),
    ],
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor of the model.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all of it, and compare every digest.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the content of a checkpoint: step, ranks, tensors, optimizer states, and the additions
    of the caller. Checks the length and the start of every file, and with --verify all bytes."""
    with plain_failures(debug):
        from infinity.checkpoint.contents import Contents, latest

        contents = Contents(latest(checkpoint))
        facts = describe(contents, tensors)
        damage = contents.verify() if verify else None
        if damage is not None:
            facts["verified"] = {"items": damage.items, "damaged": damage.errors}
        if as_json:
            typer.echo(json.dumps(facts))
        else:
            table = Table(show_header=False, box=None)
            table.add_column(style="bold")
            table.add_column(overflow="fold")
            for name, value in _rows(facts):
                table.add_row(name, value)
            if damage is not None and not damage.errors:
                table.add_row("verified", f"{damage.items} items, {format_bytes(damage.nbytes)}")
            Console(file=sys.stdout, markup=False).print(table)
        if damage is not None and damage.errors:
            first = damage.errors[0]
            raise CheckpointError(f"{len(damage.errors)} of {damage.items} items: {first}")
