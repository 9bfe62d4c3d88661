"""The rules of ARCHITECTURE.md that can be read from the source: layers, the pure planner, one
place per concern."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A module imports from its own line and from lines with a lower number. A line is a package, or
# modules of `infinity` itself.
LAYERS = """\
0 infinity: config errors quantities version
1 infinity: free_memory
1 directories
2 infinity: backward compilation device native observe pinning
2 placement
3 measure
3 nvme
4 tiers
5 sharding
6 schedule
7 optim
8 checkpoint
8 weights
9 durable
9 tiles
10 losses
11 activations
12 modules
13 infinity: __init__ access accumulation assembly build closing engine
13 infinity: own_engines report unit_search unwrapping
13 models
14 bench
14 deepspeed
14 integrations
15 plan
16 cli
17 infinity: __main__
"""

PUBLIC = [
    "AdEMAMix",
    "Adagrad",
    "Adam",
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "CorruptStateError",
    "Engine",
    "EngineClosedError",
    "InfinityError",
    "Lion",
    "LossScaler",
    "NonFiniteError",
    "NvmeError",
    "PathInUseError",
    "SGD",
    "ShardedParameterError",
    "Tuning",
    "WeightsError",
    "accumulate",
    "adapt",
    "chunked_loss",
    "close_engines",
    "engine",
    "gathered",
    "get",
    "init",
    "no_sync",
    "nvme",
    "set",
    "snapshot",
    "tile",
    "wrap",
]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_name(path): path for path in sorted((ROOT / "infinity").rglob("*.py"))}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package, parsed."""
    return {name: ast.parse(path.read_text(), str(path)) for name, path in PATHS.items()}


@functools.cache
def nodes() -> list[tuple[str, str, ast.AST]]:
    """(module, "path:line", node) for every node of the library."""
    found = []
    for name, tree in trees().items():
        path = str(PATHS[name].relative_to(ROOT))
        found += [(name, f"{path}:{getattr(node, 'lineno', 1)}", node) for node in ast.walk(tree)]
    return found


def imported(module: str, node: ast.AST) -> list[str]:
    """Dotted names of the modules that `node` imports; a name inside a module stands for the
    module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = (
            module.split(".") if PATHS[module].name == "__init__.py" else module.split(".")[:-1]
        )
        base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
    return [
        f"{base}.{alias.name}" if f"{base}.{alias.name}" in PATHS else base for alias in node.names
    ]


def imports() -> Iterator[tuple[str, str, str]]:
    """(module, "path:line", imported module) for every import of the library."""
    for module, at, node in nodes():
        for target in imported(module, node):
            yield module, at, target


def is_ours(name: str) -> bool:
    return name.split(".")[0] == "infinity"


def parse_lines(table: str) -> list[tuple[int, str, list[str]]]:
    """(layer, package, modules named after the colon) for each line."""
    lines = [
        re.fullmatch(r"(\d+) (\w+)(?:: ([\w ]+))?", line) for line in table.strip().splitlines()
    ]
    return [(int(line[1]), line[2], (line[3] or "").split()) for line in lines if line]


def line_of(module: str) -> tuple[int, str]:
    """Layer and identity of the line in LAYERS that `module` is on."""
    parts = module.split(".")[1:]
    for layer, package, names in parse_lines(LAYERS):
        if package == "infinity":
            if PATHS[module].parent == ROOT / "infinity" and PATHS[module].stem in names:
                return layer, f"infinity {layer}"
        elif parts[:1] == [package]:
            return layer, package
    raise AssertionError(
        f"{module} is on no line of the table; give it a layer there and in ARCHITECTURE.md"
    )


def table_of_the_document() -> str:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    (table,) = re.findall(r"^```layers\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return table


def test_imports_point_to_lower_layers() -> None:
    wrong = []
    lines = {module: line_of(module) for module in PATHS}
    for module, at, target in imports():
        if not is_ours(target):
            continue
        if target not in PATHS:
            wrong.append(f"{at} imports {target}, which is not a module of the library")
        elif lines[target] != lines[module] and lines[target][0] >= lines[module][0]:
            wrong.append(
                f"{at} (layer {lines[module][0]}) imports {target} (layer {lines[target][0]})"
            )
    assert not wrong, "\n".join(wrong)


def reachable(start: str, targets: dict[str, set[str]]) -> set[str]:
    """What `start` imports, by way of others, too; with itself where it is in a circle."""
    found, waiting = set(), [start]
    while waiting:
        for target in targets[waiting.pop()] - found:
            found.add(target)
            waiting.append(target)
    return found


def test_modules_import_each_other_in_no_circle() -> None:
    """Imports of types count: a module that knows the type of its owner is no part that can be
    read, or tested, alone."""
    targets: dict[str, set[str]] = {module: set() for module in PATHS}
    for module, _, target in imports():
        if target in PATHS and target != module:
            targets[module].add(target)
    reached = {module: reachable(module, targets) for module in PATHS}
    circles = {
        tuple(
            other
            for other in sorted(PATHS)
            if other in reached[module] and module in reached[other]
        )
        for module in PATHS
        if module in reached[module]
    }
    assert not circles, sorted(circles)


def test_the_document_has_the_same_table() -> None:
    document = [
        (layer, package, names if package == "infinity" else [])
        for layer, package, names in parse_lines(table_of_the_document())
    ]
    assert document == parse_lines(LAYERS)


def test_modules_named_in_the_document_are_the_modules_there_are() -> None:
    for _, package, names in parse_lines(table_of_the_document()):
        if names and package != "infinity":
            there = {path.stem for path in (ROOT / "infinity" / package).glob("*.py")} - {
                "__init__"
            }
            assert set(names) == there, package


def needed_by(*modules: str) -> dict[str, list[str]]:
    """All modules of ours that importing `modules` runs, but the package `infinity` itself, and
    what each of them imports."""
    pending, found = list(modules), {}
    while pending:
        module = pending.pop()
        if module not in found:
            found[module] = [
                target for node in ast.walk(trees()[module]) for target in imported(module, node)
            ]
            ours = list(filter(is_ours, found[module]))
            # Importing a module runs its package first.
            packages = [target.rpartition(".")[0] for target in ours]
            pending += [name for name in ours + packages if "." in name]
    return found


def test_the_planner_and_the_trace_know_no_torch() -> None:
    for module, targets in needed_by(
        "infinity.schedule.planner", "infinity.schedule.trace"
    ).items():
        assert not [target for target in targets if target.split(".")[0] == "torch"], (
            f"{module} imports torch"
        )


def test_placement_knows_neither_torch_nor_tiers() -> None:
    """It decides from values: what it imports cannot hold a tensor, a file or a live block."""
    modules = [name for name in PATHS if name.startswith("infinity.placement")]
    assert "infinity.placement.decide" in modules
    for module, targets in needed_by(*modules).items():
        live = [
            target
            for target in targets
            if target.split(".")[0] == "torch" or target.startswith("infinity.tiers")
        ]
        assert not live, f"{module} imports {', '.join(live)}"


def test_no_message_cites_an_invariant_by_number() -> None:
    """A user does not have the list at hand. Comments and docstrings may cite it."""
    wrong = []
    for module, tree in trees().items():
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        wrong += [
            f"{module}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and id(node) not in said
            and isinstance(node.value, str)
            and re.search(r"invariant I?\d", node.value)
        ]
    assert not wrong, wrong


def test_torch_cuda_is_said_in_one_file() -> None:
    wrong = [
        at
        for module, at, node in nodes()
        if module != "infinity.device"
        and (
            (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda")
            or any(name.startswith("torch.cuda") for name in imported(module, node))
            or (
                isinstance(node, ast.ImportFrom)
                and node.module == "torch"
                and "cuda" in [a.name for a in node.names]
            )
        )
    ]
    assert not wrong, wrong


HOOKS = {
    # Step hooks belong to optimizers.
    # A dense parameter hands hooks of users on. Nodes of custom functions are no modules.
    re.compile(r"register_(?!step_)\w*hook"): {
        "infinity.modules.hooks",
        "infinity.modules.node_attributes",
        "infinity.sharding.views",
    },
    # A handle is made under a hook on the one tensor that is saved for it.
    re.compile(r"saved_tensors_hooks"): {"infinity.modules.packing", "infinity.sharding.twins"},
}


def test_hooks_of_one_kind_are_registered_in_one_file() -> None:
    wrong = [
        at
        for hook, places in HOOKS.items()
        for module, at, node in nodes()
        if module not in places
        for name in [getattr(node, "attr", ""), getattr(node, "id", ""), getattr(node, "name", "")]
        if hook.fullmatch(name or "")
    ]
    assert not wrong, wrong


def test_no_two_classes_share_a_name() -> None:
    """So a search for a class finds one thing. A leading underscore makes no other name."""
    places: dict[str, list[str]] = {}
    for _, at, node in nodes():
        if isinstance(node, ast.ClassDef):
            places.setdefault(node.name.lstrip("_"), []).append(at)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_no_star_imports_and_no_print() -> None:
    wrong = []
    for module, at, node in nodes():
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            wrong.append(f"{at} star import")
        if (
            isinstance(node, ast.Name)
            and node.id == "print"
            and not module.startswith("infinity.cli")
        ):
            wrong.append(f"{at} print; a library logs")
    assert not wrong, "\n".join(wrong)


SHELL = {"typer", "click", "rich", "matplotlib", "infinity.cli"}


def test_measuring_knows_no_shell() -> None:
    """`infinity.bench`, `infinity.models` and all they import work without the command line and
    what draws its output."""
    pending = [
        module for module in PATHS if module.startswith(("infinity.bench", "infinity.models"))
    ]
    seen = set()
    assert pending
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        targets = [
            target for node in ast.walk(trees()[module]) for target in imported(module, node)
        ]
        wrong = [
            target
            for target in targets
            if any(f"{target}.".startswith(f"{shell}.") for shell in SHELL)
        ]
        assert not wrong, f"{module} imports {wrong}"
        pending += [target for target in targets if target in PATHS]


WORK = {
    *(
        "submit",
        "wait",
        "read",
        "write",
        "flush",
        "step",
        "pop",
        "append",
        "close",
        "fetch",
        "release",
        "evict",
        "acquire",
    ),
    *(
        "unshard",
        "reshard",
        "reduce",
        "send",
        "put",
        "get_nowait",
        "join",
        "add",
        "remove",
        "update",
        "popleft",
    ),
}


def test_asserts_do_no_work() -> None:
    wrong = [
        at
        for _, at, node in nodes()
        if isinstance(node, ast.Assert)
        for part in ast.walk(node)
        if isinstance(part, ast.NamedExpr)
        or (
            isinstance(part, ast.Call)
            and isinstance(part.func, ast.Attribute)
            and part.func.attr in WORK
        )
    ]
    assert not wrong, wrong


REAL_ATTRIBUTES = {"data", "grad", "requires_grad", "__class__"}


def is_parameter(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("p", "param", "parameter")


def test_nothing_is_pasted_onto_parameters() -> None:
    wrong = []
    for _, at, node in nodes():
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if is_parameter(node.value) and node.attr not in REAL_ATTRIBUTES:
                wrong.append(f"{at} {ast.unparse(node)}")
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "setattr"
            and is_parameter(node.args[0])
        ):
            wrong.append(f"{at} {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_public_names_change_on_purpose_only() -> None:
    (names,) = [
        ast.literal_eval(node.value)
        for node in trees()["infinity"].body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert sorted(names) == PUBLIC
