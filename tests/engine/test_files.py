"""`infinity.directories`: a directory that others write to never leads us to their files, and a
lock has one holder."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infinity.directories import directory as directories
from infinity.directories import lock as locks
from infinity.directories.directory import Directory
from infinity.directories.drafts import drafting_directory, remove_leftovers
from infinity.directories.lock import LOCK_NAME, Holder, lock, lock_directory
from infinity.errors import ConfigError, PathInUseError, with_way_out
from support.planted import ADVICE, MINE, PLANTED, Planted

planted = pytest.mark.parametrize("what", PLANTED)


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[Path, str], Planted]:
    return lambda path, what: Planted(path, tmp_path / "precious", what)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "place"
    made.mkdir()
    return made


def names(path: Path) -> list[str]:
    return [one.name for one in path.iterdir()]


# What is not ours


@planted
@pytest.mark.parametrize("use", ["lock", "open", "reclaim", "check"])
def test_what_infinity_does_not_make_is_refused_and_untouched(
    place: Path, plant: Any, what: str, use: str
) -> None:
    there = plant(place / LOCK_NAME, what)
    with Directory(place) as directory, pytest.raises(ConfigError) as caught:
        lock(directory) if use == "lock" else getattr(directory, use)(LOCK_NAME)
    assert str(caught.value) == there.refusal
    there.check()
    assert names(place) == [LOCK_NAME]


@planted
def test_a_new_file_never_opens_what_is_there(place: Path, plant: Any, what: str) -> None:
    there = plant(place / "new", what)
    with Directory(place) as directory, pytest.raises(FileExistsError):
        directory.create("new")
    there.check()


@planted
def test_what_is_put_there_after_the_check_is_refused_too(
    place: Path, plant: Any, what: str, monkeypatch: Any
) -> None:
    (place / "states").write_bytes(b"old")
    real, made = Directory.check, []

    def check(self: Directory, name: str) -> Any:
        status = real(self, name)
        (place / name).unlink()
        made.append(plant(place / name, what))
        monkeypatch.undo()
        return status

    monkeypatch.setattr(Directory, "check", check)
    with Directory(place) as directory, pytest.raises((ConfigError, OSError)):
        directory.open("states", os.O_WRONLY)
    made[0].check()


def test_a_directory_that_is_replaced_by_a_link_leads_nobody_elsewhere(
    place: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("states", LOCK_NAME):
        (elsewhere / name).write_bytes(MINE)
    (place / "states").write_bytes(b"old")
    with Directory(place) as directory:
        place.rename(tmp_path / "moved")
        place.symlink_to(elsewhere)
        with lock(directory):
            assert directory.reclaim("states") is not None
            os.close(directory.create("states"))
            directory.rename("states", "renamed")
            directory.remove("renamed")
            with directory.below("inner") as inner:
                os.close(inner.create("new"))
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == {
        "states": MINE,
        LOCK_NAME: MINE,
    }
    assert names(tmp_path / "moved") == ["inner"]


def test_a_directory_below_is_not_reached_through_a_link(place: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (place / "rank0").symlink_to(tmp_path / "elsewhere")
    with Directory(place) as directory, pytest.raises(ConfigError) as caught:
        directory.below("rank0")
    assert str(caught.value) == f"{place / 'rank0'} is a link{ADVICE}"


def test_a_link_to_the_directory_itself_is_the_users_choice(place: Path, tmp_path: Path) -> None:
    (tmp_path / "short").symlink_to(place)
    with lock_directory(tmp_path / "short", "nvme directory"):
        assert names(place) == [LOCK_NAME]


@pytest.mark.parametrize(
    ("path", "why"), [("no", "does not exist"), ("file", "is not a directory")]
)
def test_a_directory_that_is_none_is_named(tmp_path: Path, path: str, why: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        lock_directory(tmp_path / path, "--checkpoint")
    assert str(caught.value) == f"--checkpoint {tmp_path / path} {why}; choose another one"


def test_a_file_system_that_takes_no_files_is_said_to_take_none() -> None:
    with pytest.raises(ConfigError, match=r"nvme directory /proc cannot be written: .*; "):
        lock_directory(Path("/proc"), "nvme directory")


def test_a_path_that_leaves_no_room_for_files_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory itself is made, and what lies in it could not be named by its whole path."""
    monkeypatch.chdir(tmp_path)
    name = "d" * 200
    for _ in range(20):
        Path(name).mkdir()
        os.chdir(name)
    long = Path(tmp_path, *[name] * 19, "e" * 100)
    with pytest.raises(ConfigError, match=r"is too long: .*; choose a shorter path"):
        lock_directory(long, "--output")


def test_a_file_of_somebody_else_with_the_name_of_the_lock_is_kept(place: Path) -> None:
    (place / LOCK_NAME).write_bytes(MINE)
    with pytest.raises(
        ConfigError, match="was not made by infinity; move it, or choose another directory"
    ):
        lock_directory(place, "nvme directory")
    assert (place / LOCK_NAME).read_bytes() == MINE


def test_the_space_of_a_file_returns_although_somebody_has_it_open(place: Path) -> None:
    (place / "states").write_bytes(bytes(1 << 20))
    with (place / "states").open("rb") as kept, Directory(place) as directory:
        assert (directory.reclaim("states") or 0) >= 1 << 20
        assert os.fstat(kept.fileno()).st_blocks == 0
    assert names(place) == []


# Locks


def in_use(place: Path, pid: int) -> str:
    return f"nvme directory {place} is in use by process {pid}; give each job its own directory"


def refused(place: Path) -> str:
    with pytest.raises(PathInUseError) as caught:
        lock_directory(place, "nvme directory")
    return str(caught.value)


class Holding(NamedTuple):
    """A process that has the lock, and its child, or itself without one."""

    pid: int
    child: int

    def kill(self) -> None:
        """And wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@contextmanager
def holder(place: Path, kind: str) -> Iterator[Holding]:
    """A forked process that locks `place`, and then forks a "worker" as a DataLoader does, or a
    child in "c"."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            lock_directory(place, "nvme directory")
            if kind == "worker":
                multiprocessing.get_context("fork").Process(
                    target=_tell_and_stay, args=(theirs,)
                ).start()
            elif kind == "alone" or ctypes.CDLL(None).fork() == 0:
                _tell_and_stay(theirs)
            signal.pause()
        finally:
            os._exit(1)
    os.close(theirs)
    try:
        with os.fdopen(ours) as pipe:
            yield Holding(pid, int(pipe.readline()))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _tell_and_stay(pipe: int) -> None:
    os.write(pipe, f"{os.getpid()}\n".encode())
    signal.pause()


@pytest.mark.parametrize("kind", ["alone", "worker", "c"])
def test_another_process_is_refused(place: Path, kind: str) -> None:
    with holder(place, kind) as process:
        assert refused(place) == in_use(place, process.pid)
        assert int((place / LOCK_NAME).read_text().split()[0]) == process.pid


@pytest.mark.parametrize("kind", ["alone", "worker"])
def test_a_child_that_outlives_its_killed_parent_does_not_hold_the_lock(
    place: Path, kind: str
) -> None:
    with holder(place, kind) as process:
        process.kill()
        with lock_directory(place, "nvme directory"):
            assert (process.child != process.pid) == (kind == "worker")
            if kind == "worker":
                os.kill(process.child, 0)  # it lives
        assert names(place) == []


def test_a_child_that_python_knows_nothing_of_is_named_as_what_holds_the_lock(place: Path) -> None:
    with holder(place, "c") as process:
        process.kill()
        assert refused(place) == (
            f"nvme directory {place} was used by process {process.pid}, which has ended, but a "
            f"process that it forked still holds the lock; end that one (fuser {place / LOCK_NAME} "
            "tells which), or choose another directory"
        )


def test_a_forked_child_neither_holds_nor_removes_the_lock(place: Path) -> None:
    lock = lock_directory(place, "nvme directory")
    child = multiprocessing.get_context("fork").Process(target=lock.release)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert names(place) == [LOCK_NAME]
    assert refused(place) == in_use(place, os.getpid())
    lock.release()
    lock.release()
    assert names(place) == []


@pytest.mark.parametrize("locks", ["flock", "none"])
def test_the_same_process_and_its_threads_are_refused_too(
    place: Path, locks: str, without: Any
) -> None:
    if locks == "none":
        without("flock", errno.EOPNOTSUPP)
    with lock_directory(place, "nvme directory"):
        assert refused(place) == in_use(place, os.getpid())
        (place / LOCK_NAME).read_bytes()  # to open and close the file gives no lock back
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.append(refused(place)))
        thread.start()
        thread.join()
        assert seen == [in_use(place, os.getpid())]
    lock_directory(place, "nvme directory").release()
    assert names(place) == []


def test_a_lock_file_that_is_removed_meanwhile_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, times = fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        real(descriptor, how)
        times.append(how)
        if len(times) == 1:
            (place / LOCK_NAME).unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_directory(place, "nvme directory"):
        assert (place / LOCK_NAME).read_text().startswith(f"{os.getpid()}\n")
    assert len(times) == 2 and names(place) == []


def test_a_lock_that_never_stays_is_given_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Directory, "is_same", lambda *_: False)
    assert refused(place).endswith(
        "is locked and left again and again; give each job its own directory"
    )


@pytest.mark.parametrize(
    "content", ["", "12345\n", "12345", "\0\0\0", "12345\n77 boot pid:[1] host\n"]
)
def test_what_a_dead_holder_left_is_taken_over(place: Path, content: str) -> None:
    (place / LOCK_NAME).write_text(content)
    with lock_directory(place, "nvme directory"):
        assert (place / LOCK_NAME).read_text() == Holder.us().text()
        assert Holder.parse((place / LOCK_NAME).read_bytes()) == Holder.us()


# File systems without locks


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """`without("flock", errno)`: the call fails so."""

    def refuse(name: str, code: int) -> None:
        def fail(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(fcntl, name, fail)

    return refuse


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_flock_the_file_itself_is_the_lock(place: Path, without: Any, code: int) -> None:
    without("flock", code)
    with lock_directory(place, "nvme directory"):
        assert refused(place) == in_use(place, os.getpid())
    assert names(place) == []


def test_without_flock_the_lock_of_a_dead_process_is_taken_over(place: Path, without: Any) -> None:
    with holder(place, "worker") as process:
        without("flock", errno.ENOLCK)
        assert refused(place) == in_use(place, process.pid)
        process.kill()
        with lock_directory(place, "nvme directory"):
            os.kill(process.child, 0)
            assert (place / LOCK_NAME).read_text() == Holder.us().text()
    assert names(place) == []


def test_without_flock_a_pid_that_was_given_to_another_process_does_not_count(
    place: Path, without: Any
) -> None:
    without("flock", errno.ENOLCK)
    (place / LOCK_NAME).write_text(Holder.us()._replace(start="1").text())
    lock_directory(place, "nvme directory").release()
    assert names(place) == []


def test_without_flock_a_lock_from_before_the_machine_started_again_is_taken_over(
    place: Path, without: Any
) -> None:
    without("flock", errno.ENOLCK)
    (place / LOCK_NAME).write_text(Holder.us()._replace(boot="earlier").text())
    lock_directory(place, "nvme directory").release()
    assert names(place) == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "12345\n",
        Holder.us()._replace(host="elsewhere", boot="other").text(),
        Holder.us()._replace(namespace="pid:[1]").text(),
    ],
    ids=["empty", "a pid alone", "another machine", "another namespace"],
)
def test_without_flock_a_lock_that_cannot_be_judged_is_left_to_the_user(
    place: Path, without: Any, content: str
) -> None:
    without("flock", errno.ENOLCK)
    (place / LOCK_NAME).write_text(content)
    assert refused(place).endswith(
        f"and its file system has no locks; if no job uses it, remove {place / LOCK_NAME}"
    )
    assert (place / LOCK_NAME).read_text() == content


def test_without_flock_a_lock_that_was_taken_meanwhile_is_not_lost(
    place: Path, without: Any, monkeypatch: Any
) -> None:
    without("flock", errno.ENOLCK)
    dead = Holder.us()._replace(start="1").text()
    (place / LOCK_NAME).write_text(dead)
    real = locks._LockFile._remove_dead

    def late(self: locks._LockFile, content: bytes) -> None:
        (place / LOCK_NAME).write_text(Holder.us().text())  # another was faster
        real(self, content)

    monkeypatch.setattr(locks._LockFile, "_remove_dead", late)
    assert refused(place) == in_use(place, os.getpid())
    assert names(place) == [LOCK_NAME]


def test_without_hard_links_too_a_lock_that_was_taken_meanwhile_is_not_lost(
    place: Path, without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    test_without_flock_a_lock_that_was_taken_meanwhile_is_not_lost(place, without, monkeypatch)


def test_another_failure_of_the_lock_is_one_sentence(place: Path, without: Any) -> None:
    without("flock", errno.EIO)
    with pytest.raises(ConfigError) as caught:
        lock_directory(place, "nvme directory")
    assert str(caught.value) == f"{place / LOCK_NAME} cannot be locked: {with_way_out(errno.EIO)}"


def test_no_descriptor_is_left_behind(place: Path, plant: Any) -> None:
    plant(place / LOCK_NAME, "link")
    before = names(Path("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ConfigError):
            lock_directory(place, "nvme directory")
    (place / LOCK_NAME).unlink()
    with lock_directory(place, "nvme directory"):
        refused(place)
    assert len(names(Path("/proc/self/fd"))) == len(before)
    assert not locks._held._descriptors


# A directory that replaces another


OLD, NEW = {"one": b"old", "two": b"old"}, {"one": b"new", "three": b"new"}


@pytest.fixture(params=["exchange", "renames"])
def target(place: Path, request: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files `OLD`, in a file system with or without an exchange of names."""
    if request.param == "renames":
        monkeypatch.setattr(directories, "_exchange", lambda *_: errno.EINVAL)
    made = place / "target"
    made.mkdir()
    for name, content in OLD.items():
        (made / name).write_bytes(content)
    return made


def contents(path: Path) -> dict[str, bytes]:
    """The files that a directory has, without the lock of a writer that was killed."""
    return {each.name: each.read_bytes() for each in path.iterdir() if each.name != LOCK_NAME}


def replace(path: Path) -> None:
    with drafting_directory(path, "directory") as drafts:
        for name, content in NEW.items():
            drafts.write(name, content)


def test_a_directory_is_replaced_whole(target: Path) -> None:
    replace(target)
    assert contents(target) == NEW
    assert names(target.parent) == ["target"]


@pytest.mark.parametrize("failing", ["_exchange", "rename", "fsync", "unlink"])
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("after", [False, True])
def test_a_failure_leaves_all_of_the_old_or_the_new_directory(
    target: Path, failing: str, at: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C just before a call or just after it."""
    owner: Any = directories if failing == "_exchange" else os
    real, calls = getattr(owner, failing), []

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(failing)
        if len(calls) == at + 1 and not after:
            raise KeyboardInterrupt
        result = real(*arguments, **keywords)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, failing, interrupted)
    with suppress(KeyboardInterrupt):
        replace(target)
    monkeypatch.undo()
    with Directory(target.parent) as directory:
        remove_leftovers(directory)
    assert contents(target) in (OLD, NEW)


def test_a_kill_between_two_calls_leaves_the_old_or_the_new_directory(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`infinity gc` may run after it, so a name that it removes does not count."""
    real, seen = os.rename, []

    def rename(*arguments: Any, **keywords: Any) -> None:
        real(*arguments, **keywords)
        kept = [path for path in target.parent.iterdir() if not path.name.startswith(".infinity-")]
        seen.append(any(contents(path) in (OLD, NEW) for path in kept))

    monkeypatch.setattr(os, "rename", rename)
    replace(target)
    assert all(seen)
