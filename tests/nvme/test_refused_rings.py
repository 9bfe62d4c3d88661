"""io_uring where a seccomp profile refuses a part of it: set up, and refused at the first use."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from infinity import native
from support.children import CHILD

AVAILABLE, REASON = native.aio().io_uring_available()
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"io_uring: {REASON}")

CASES = [
    ("io_uring_setup", errno.EPERM),
    ("io_uring_enter", errno.EPERM),
    ("io_uring_enter", errno.ENOSYS),
    ("io_uring_enter", errno.EACCES),
    ("mmap", errno.EPERM),
    ("io_uring_register", errno.EPERM),
]
REFUSED = [case for case in CASES if case[0] != "io_uring_register"]

# Each case in a child of its own, for a filter stays.
# Each case in a child of its own, since a filter stays.
PROGRAM = """
import json, logging, os, sys
import torch
from infinity import nvme
from infinity.bench.machine import io_engine_problem
from support.seccomp import refuse

def trial(call, code, path):
    try:
        refuse(call, code)
    except OSError as error:
        return {"no_seccomp": str(error)}
    warnings = []
    logging.getLogger("infinity").addFilter(lambda record: warnings.append(record.getMessage()))
    before = os.listdir("/proc/self/fd")
    facts = {"problem": io_engine_problem(), "explicit": ""}
    try:
        nvme.Io("io_uring").close()
    except RuntimeError as error:
        facts["explicit"] = str(error)
    facts["left_open"] = len(os.listdir("/proc/self/fd")) - len(before)
    data = torch.arange(1 << 18)
    for _ in range(2):
        back = torch.empty_like(data)
        with nvme.Io() as io:
            facts |= {"kind": io.engine.kind, "pinned": io.pin(data)}
            io.write(data, path)
            io.read(back, path)
        assert torch.equal(back, data)
    return facts | {"warnings": warnings}

directory, cases = sys.argv[1], json.loads(sys.argv[2])
for number, case in enumerate(cases):
    child = os.fork()
    if child == 0:
        print(json.dumps(trial(*case, f"{directory}/{number}")), flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    """What each case met."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("io")), json.dumps(CASES)],
        stdout=subprocess.PIPE,
        check=True,
        **CHILD,
    )
    facts = [json.loads(line) for line in result.stdout.splitlines()]
    if "no_seccomp" in facts[0]:
        pytest.skip(facts[0]["no_seccomp"])
    return dict(zip(CASES, facts, strict=True))


@pytest.mark.parametrize("case", REFUSED)
def test_io_goes_on_with_threads_and_one_warning(case: tuple[str, int], found: Any) -> None:
    call, code = case
    shown = "io_uring_setup" if call == "mmap" else call  # mapping the ring is a part of it
    reason = f"{shown}: {os.strerror(code)}"
    assert found[case]["kind"] == "posix"
    assert found[case]["warnings"] == [
        f"io_uring is not available ({reason}); using POSIX threads for I/O"
    ]
    assert found[case]["explicit"] == reason
    assert found[case]["left_open"] == 0


def test_the_doctor_says_what_is_refused(found: Any) -> None:
    seccomp = "is refused (EPERM): a container's seccomp profile blocks it"
    assert {case: found[case]["problem"] for case in CASES} == {
        ("io_uring_setup", errno.EPERM): f"io_uring_setup {seccomp}",
        ("io_uring_enter", errno.EPERM): f"io_uring_enter {seccomp}",
        ("io_uring_enter", errno.ENOSYS): (
            "io_uring_enter is not there (ENOSYS): the kernel lacks it, or a seccomp profile hides "
            "it"
        ),
        ("io_uring_enter", errno.EACCES): "io_uring_enter: Permission denied",
        ("mmap", errno.EPERM): "io_uring_setup: Operation not permitted",
        ("io_uring_register", errno.EPERM): None,
    }


def test_without_registration_the_ring_works(found: Any) -> None:
    """Memory is then not pinned, which costs CPU time alone."""
    facts = found["io_uring_register", errno.EPERM]
    assert (facts["kind"], facts["explicit"], facts["warnings"]) == ("io_uring", "", [])
    assert not facts["pinned"]
