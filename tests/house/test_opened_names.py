"""What opens, makes, renames or removes a name in a directory of users goes through
`infinity.directories`, which follows no link that somebody else put there.

Other places are listed in `ELSEWHERE`, each with what keeps it safe. A new one belongs into
`infinity.directories`, or there with its reason.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "infinity"
OF_MODULES = {
    "os": {
        *("open", "rename", "replace", "unlink", "remove", "truncate", "link", "symlink"),
        *("mkdir", "makedirs", "rmdir", "removedirs", "mkfifo", "mknod", "chmod", "chown"),
    },
    "shutil": {"rmtree", "copy", "copy2", "copyfile", "copytree", "move"},
    "io": {"open", "FileIO"},
    "tempfile": {"mkstemp", "NamedTemporaryFile"},
}
OF_PATHS = {
    *("write_text", "write_bytes", "rename", "unlink", "touch", "mkdir", "rmdir"),
    *("symlink_to", "hardlink_to", "chmod"),
}
NOT_FOLLOWED = "O_NOFOLLOW, or O_EXCL"
READ_ONLY = "reads alone, and what it opened is checked to be a regular file"
OF_THE_KERNEL = "a name below /proc or /dev"
IN_A_DRAFT = "in a folder of `drafting` or `replacing`"
A_NEW_DIRECTORY = "makes a directory, where a link is an error, or one to write in, as users say"
A_WHOLE_DIRECTORY = "renames or removes a directory of ours; of a link, rmtree removes nothing"
ELSEWHERE = {
    ("bench/io/wear.py", "os.open"): OF_THE_KERNEL,
    ("bench/machine.py", "os.open"): OF_THE_KERNEL,
    ("bench/step/measure.py", "write_text"): OF_THE_KERNEL,
    ("bench/machine.py", "tempfile.NamedTemporaryFile"): NOT_FOLLOWED,
    ("bench/summary.py", "write_text"): "the file that users name for results, maybe a device",
    ("checkpoint/export.py", "rename"): "gives a tensor another name",
    ("checkpoint/data_file.py", "os.open"): NOT_FOLLOWED,
    ("checkpoint/files.py", "os.open"): NOT_FOLLOWED,
    ("checkpoint/saving.py", "mkdir"): A_NEW_DIRECTORY,
    ("checkpoint/saving.py", "rename"): A_WHOLE_DIRECTORY,
    ("checkpoint/saving.py", "shutil.rmtree"): A_WHOLE_DIRECTORY,
    ("cli/checkpoints.py", "mkdir"): A_NEW_DIRECTORY,
    ("cli/checkpoints.py", "shutil.rmtree"): A_WHOLE_DIRECTORY,
    ("cli/failure.py", "tempfile.NamedTemporaryFile"): NOT_FOLLOWED,
    ("cli/output.py", "mkdir"): A_NEW_DIRECTORY,
    ("cli/trainer.py", "mkdir"): A_NEW_DIRECTORY,
    ("integrations/trainer_notes.py", "mkdir"): A_NEW_DIRECTORY,
    ("integrations/transformers.py", "mkdir"): A_NEW_DIRECTORY,
    ("integrations/transformers.py", "rename"): A_WHOLE_DIRECTORY,
    ("integrations/transformers.py", "shutil.rmtree"): A_WHOLE_DIRECTORY,
    ("interrupt.py", "os.open"): OF_THE_KERNEL,
    ("deepspeed/checkpoints.py", "chmod"): IN_A_DRAFT,
    ("deepspeed/checkpoints.py", "mkdir"): A_NEW_DIRECTORY,
    ("deepspeed/checkpoints.py", "write_bytes"): IN_A_DRAFT,
    ("deepspeed/consolidation.py", "mkdir"): A_NEW_DIRECTORY,
    ("deepspeed/engine.py", "rmdir"): A_WHOLE_DIRECTORY,
    ("deepspeed/initialize.py", "mkdir"): A_NEW_DIRECTORY,
    ("deepspeed/initialize.py", "rmdir"): A_WHOLE_DIRECTORY,
    ("deepspeed/latest.py", "write_text"): IN_A_DRAFT,
    ("deepspeed/tools.py", "mkdir"): A_NEW_DIRECTORY,
    ("deepspeed/zero_to_fp32.py", "mkdir"): A_NEW_DIRECTORY,
    ("deepspeed/zero_to_fp32.py", "write_text"): "runs without the package, as a user's command",
    ("models/quantization.py", "mkdir"): A_NEW_DIRECTORY,
    ("models/reading.py", "os.open"): READ_ONLY,
    ("models/shards.py", "rename"): IN_A_DRAFT,
    ("models/tokenizer.py", "shutil.copyfile"): IN_A_DRAFT,
    ("tiers/originals.py", "os.open"): READ_ONLY,
}


def calls(source: str) -> list[str]:
    """Those calls in `source` that take the name of a file or directory and may change it."""
    tree = ast.parse(source)
    direct = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in OF_MODULES.get(node.module or "", ())
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        func = node.func
        if isinstance(func, ast.Name):
            found += [name] if (name := {"open": "open", **direct}.get(func.id)) else []
        elif isinstance(func, ast.Attribute):
            owner = func.value.id if isinstance(func.value, ast.Name) else ""
            if func.attr in OF_MODULES.get(owner, ()):
                found.append(f"{owner}.{func.attr}")
            elif func.attr in OF_PATHS and owner not in OF_MODULES:
                found.append(func.attr)
    return found


def test_names_of_users_are_opened_in_one_place() -> None:
    found = Counter(
        (path.relative_to(PACKAGE).as_posix(), call)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "directories"
        for call in calls(path.read_text())
    )
    assert found.keys() == ELSEWHERE.keys(), "open it by infinity.directories.Directory"


def test_what_opens_a_name_is_seen() -> None:
    for line in (
        "open('a')",
        "os.open(path, flags)",
        "Path('a').write_text('')",
        "(directory / name).unlink()",
        "from os import replace as put\nput(a, b)",
        "shutil.rmtree(path)",
    ):
        assert len(calls(line)) == 1, line
    assert calls("directory.open(name)\nself.store.open()\ntext.replace(a, b)") == []
