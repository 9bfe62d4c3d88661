"""The NVMe tier: one preallocated file per directory, each behind an async-IO engine of its own,
striped in user space."""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from infinity import native
from infinity.directories.directory import Directory, file_limit, limit_text
from infinity.directories.lock import lock
from infinity.errors import BudgetError, CheckpointError, ConfigError, NvmeError, with_way_out
from infinity.native import make_engine
from infinity.nvme.ticket import Ticket
from infinity.observe import Meter, Recorder
from infinity.placement.calibrate import levelled
from infinity.quantities import format_bytes
from infinity.tiers import speed
from infinity.tiers.manifest import MANIFEST_NAME, STATES_NAME, StatesManifest, refuse_kept
from infinity.tiers.originals import FileExtent, Originals
from infinity.tiers.states_files import Extent, StatesFiles, extend, fill
from infinity.tiers.stripes import Stripes

log = logging.getLogger("infinity")

ALIGNMENT = 4096
STRIPE_BYTES = 4 << 20
# Larger ones cost less CPU, but what is needed first then waits longer behind them.
REQUEST_BYTES = 1 << 20
DIRECT_THREADS = 8
"""For each drive that writes to a GPU: so many requests are under way at once, for one takes a
thread until it has ended."""
TRIAL_NAME = "infinity-trial.bin"
"""A file that is there while GPUDirect Storage is tried."""
UNNAMED = "(unnamed)"
"""What errors say instead of the name of a file without one."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""How a file system says that it has no room."""


def check_directories(directories: Sequence[Path]) -> None:
    """Raise `ConfigError` unless all of them are there and differ."""
    for directory in directories:
        try:
            kind = "is not a directory" if directory.exists() else "does not exist"
            is_there = directory.is_dir()
        except OSError as error:  # such as a name that is too long
            raise ConfigError(
                f"nvme directory {directory} cannot be used: {with_way_out(error.errno or 0)}"
            ) from None
        if not is_there:
            raise ConfigError(
                f"nvme directory {directory} {kind}; create it on the drive to be "
                f"used: mkdir -p {directory}"
            )
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise ConfigError(f"the nvme directories must differ: {', '.join(map(str, directories))}")


class KeptStates(Protocol):
    """What the directories hold beyond the life of an engine, for the drives; `infinity.durable`
    has one."""

    found: StatesManifest | None
    """Of what was found there, once `find` has come."""

    @property
    def taken_over(self) -> StatesManifest | None:
        """Of what the engine goes on from; None where its states are new."""

    @property
    def outlive(self) -> bool:
        """Whether what the directories hold is worth keeping."""

    def refuse_other_ranks(self, place: Directory, own: str) -> None:
        """Raise `ConfigError` where `place` holds committed states of another number of ranks."""

    def find(self, places: Sequence[Directory], around: Sequence[Directory]) -> None:
        """Look what an earlier run left in the directories, which are locked; changes nothing.
        `around`: those that they lie in, where every rank has some of its own."""

    def check(self) -> None:
        """Raise `ConfigError` where the states that are there are not those of the engine."""

    def remove(self, places: Sequence[Directory]) -> None:
        """Remove what lies beside the states, which are worth nothing."""


class NvmeTier:
    """Extents on one or more directories, each holding one states file and one lock file, and
    served by a native engine.

    Declare extents with `reserve`, then `open` locks the directories, reclaims what a dead run left
    there and preallocates. The address space is striped over the directories in pieces of 4 MiB, so
    a block of some size uses every drive. `shares` says what part of the pieces each one gets:
    "equal", numbers, or "measured" for its speed beside the others. `read` and `write` may be
    called by any thread; the caller's memory outlives the transfer.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        engine: str,
        budget: int | None,
        recorder: Recorder,
        shares: Literal["measured", "equal"] | Sequence[float] = "measured",
        own: str = "",
        kept: KeptStates | None = None,
    ) -> None:
        """With `own` the files lie in directories of that name below `directories`, which are made
        and removed. With `kept` they outlive the process, and may be taken over."""
        self._own = own
        self._kept = kept
        self._directories = list(directories)
        self._kind = engine
        self._budget = budget
        self._recorder = recorder
        self._shares = shares
        self._parts = ExitStack()  # what `close` undoes, the last first
        self._places: list[Directory] = []
        self._around: list[Directory] = []  # where they lie, if each rank has some of its own
        self._ours: list[Directory] = []  # those of which the states file is ours to remove
        self._states = StatesFiles(Stripes(STRIPE_BYTES, [1.0] * len(directories)))
        # Shares, and stripes of the directories that are full.
        self._layout: tuple[Sequence[float], list[int | None]] = (), []
        self.shares: Sequence[float] = ()
        """What part of the stripes each directory gets; known from `open` on, as `rooms`."""
        self.rooms: Sequence[int] = ()
        """How many stripes each directory has room for."""
        self._speeds: list[float] = []  # of the directories, once they were measured
        # How many bytes each directory had room for, at most those that were wanted.
        self._probed: list[int] = []
        self.engines = self._states.engines
        """The native I/O engines, one per directory; none when nothing is reserved."""
        self.direct: list[Any] = []
        """Those that read straight into what was given to `attach`, one per directory; else
        none."""
        self.originals = Originals(engine, REQUEST_BYTES)
        """Files of the user that are homes, beside the directories."""
        self._parts.callback(self.originals.close)
        self._unflushed: str | None = None  # the file whose flush has failed
        self._spare_bytes = 0
        self._taken: list[int] | None = None  # bytes of each file, where it was taken over
        self._growing = threading.Lock()

    @property
    def reserved(self) -> int:
        """Bytes of all extents."""
        return self._states.claims.given

    def reserve(self, nbytes: int, spare: bool = False) -> Extent:
        """Declare an extent of `nbytes` (a multiple of 4096), before `open`; a `spare` one is
        needed only because not every step is committed."""
        self._spare_bytes += nbytes * spare
        return self._states.claims.give(nbytes)

    def keep(self, extents: Iterable[Extent]) -> None:
        """Commits speak of `extents`: a write there raises `RuntimeError` from now on. Those that
        were kept before may be written again."""
        self._states.claims.keep(extents)

    def measure(self) -> float:
        """Before `open`: bytes per second that all directories together give, in their shares, half
        written and half read.

        Locks and reclaims as `open` does, and takes at most 64 MiB of each directory meanwhile, in
        a file of its own. Infinite where there is no room to measure. Raises what `open` raises,
        but for what depends on the states.
        """
        self._enter()
        speeds = self._probe()
        if self._found is not None:  # they stay as they are
            shares = list(self._found.shares)
        elif self._shares == "measured":
            shares = speeds
        elif self._shares == "equal":
            shares = [1.0] * len(speeds)
        else:
            shares = list(map(float, self._shares))
        rates = [rate / share for rate, share in zip(speeds, shares, strict=True) if share]
        together = min(rates, default=0.0) * sum(shares)
        if not together:
            log.warning(
                "%s: no room to measure the drives, which are taken to be fast; free %s",
                ", ".join(map(str, self._directories)),
                format_bytes(speed.PROBE_BYTES),
            )
        return together or math.inf

    def open(self) -> None:
        """Lock, reclaim, measure and preallocate; on an error nothing of ours stays behind.

        Raises `ConfigError` (no such directory, not writable), `PathInUseError` (another process),
        `BudgetError` (space), `NvmeError` (a drive that fails when it is measured).
        """
        # A mistake in a path is told even if all states fit elsewhere.
        check_directories(self._directories)
        if self.reserved == 0:
            return
        stripes = -(-self.reserved // STRIPE_BYTES)
        total = stripes * STRIPE_BYTES
        if self._budget is not None and total > self._budget:
            raise BudgetError(
                f"nvme_memory={format_bytes(self._budget)} cannot hold the states on nvme, which "
                f"need {format_bytes(total)}; the smallest nvme_memory that works is {total}"
            )
        self._enter()
        try:
            self._allocate(stripes)
        except BaseException:
            self.close()
            raise

    def find(self) -> None:
        """Before `open`: lock the directories, and look what an earlier run left there; changes
        nothing else."""
        if self._places:
            return
        check_directories(self._directories)
        try:
            for directory in self._directories:
                self._places.append(self._open_place(directory))
            self._directories = [place.path for place in self._places]
            for place in self._places:
                self._parts.callback(lock(place).release)
            if self._kept is not None:
                self._kept.find(self._places, self._around)
        except BaseException:
            self.close()
            raise

    def _enter(self) -> None:
        """Lock the directories, reclaim what is there, and have a file, which is empty, and an
        engine for each."""
        if self.engines:
            return
        self.find()
        try:
            self._parts.callback(self._remove)
            if self._found is not None:
                found = self._found
                if found.stripe_bytes != STRIPE_BYTES:
                    raise ConfigError(
                        f"{self._places[0].path / MANIFEST_NAME} has stripes of "
                        f"{found.stripe_bytes} bytes, and here they have {STRIPE_BYTES}; go on "
                        "from a checkpoint, in another directory"
                    )
                layout = Stripes(STRIPE_BYTES, found.shares, found.rooms)
                self._states.take_over(layout, found.nbytes)
            for place in self._places:
                file = self._open_file(place)
                engine = make_engine(self._kind, request_bytes=REQUEST_BYTES)
                self._parts.callback(engine.close)
                self._states.add(file, engine)
        except BaseException:
            self.close()
            raise

    def _open_place(self, directory: Path) -> Directory:
        """The directory that the files go to, open until `close`."""
        place = Directory(directory, "nvme directory")
        self._parts.callback(place.close)
        if self._kept is not None:
            self._kept.refuse_other_ranks(place, self._own)
        if not self._own:
            return place
        self._around.append(place)
        # It stays where somebody keeps something in it.
        self._parts.callback(place.remove_directory, self._own)
        inner = place.below(self._own)
        self._parts.callback(inner.close)
        if self._kept is not None:
            place.sync()  # what is committed in it must be found
        return inner

    @property
    def _found(self) -> StatesManifest | None:
        """What the files hold of an earlier run, which is taken over; None where they are new."""
        return None if self._kept is None else self._kept.taken_over

    def _open_file(self, place: Directory) -> Any:
        """The states file that is taken over, or a new one in place of one that a dead run left."""
        path = str(place.path / STATES_NAME)
        if self._found is not None:
            self._ours.append(place)
            file = native.file_at(place.open(STATES_NAME), path)
        else:
            if self._kept is None:
                refuse_kept(place)
            elif self._kept.found is not None:
                raise RuntimeError(f"{place.path} has committed states, which nothing took over")
            self._reclaim(place)
            self._ours.append(place)
            file = native.file_at(place.create_in_place(STATES_NAME), path)
        self._parts.callback(file.close)
        if not file.direct:
            log.warning(
                "%s does not support O_DIRECT; I/O goes through the page cache and is slower",
                place.path,
            )
        return file

    def _remove(self) -> None:
        """What is closed leaves nothing, unless it was committed. Where what lies beside the states
        cannot be removed they stay, too: a record may name them."""
        if self._kept is not None:
            if self._kept.outlive:
                return
            self._kept.remove(self._ours)
        with ExitStack() as stack:  # each of them, whatever the others meet
            for place in self._ours:
                stack.callback(place.remove, STATES_NAME)

    def _reclaim(self, place: Directory) -> None:
        status = place.check(STATES_NAME)
        if status is not None:
            place.reclaim(STATES_NAME)
            log.warning(
                "reclaimed %s that an earlier run left in %s",
                format_bytes(status.st_size),
                place.path,
            )

    # Shares and room

    def _allocate(self, stripes: int) -> None:
        """Lay `stripes` out as the shares say, as far as each directory has room, and take the
        space.

        Raises `BudgetError` when all together do not have it.
        """
        if self._kept is not None and self._found is not None:
            self._kept.check()
            self._take_over(stripes, self._found)
            return
        rooms = [stripes] * len(self._states)
        shares = self._decide(stripes, rooms)
        short = True
        while short:  # once more for every directory that turns out to have too little room
            if sum(rooms) < stripes:
                raise self._refusal(stripes, sum(rooms) * STRIPE_BYTES)
            layout, short = Stripes(STRIPE_BYTES, shares, rooms), False
            self._states.lay(layout)
            lengths = layout.lengths(stripes)
            # First of all, as another may be on the same drive.
            self._states.shorten(lengths)
            for number, length in enumerate(lengths):
                if not self._states.extend(number, length):
                    self._check_room(stripes)
                    short = True
                    rooms[number] = self._states.fill(number, length, STRIPE_BYTES)
                    log.warning(
                        (
                            "%s has room for %s of its share of %s of the states; the other "
                            "directories take the rest"
                        ),
                        self._directories[number],
                        format_bytes(rooms[number] * STRIPE_BYTES),
                        format_bytes(length),
                    )
        self.shares, self.rooms = shares, rooms
        self._layout = shares, [room if room < stripes else None for room in rooms]
        if len(lengths) > 1:
            parts = (
                f"{format_bytes(length)} in {at}"
                for at, length in zip(self._directories, lengths, strict=True)
            )
            log.info("the states on nvme take %s", ", ".join(parts))

    def _take_over(self, stripes: int, found: StatesManifest) -> None:
        """Lay `stripes` out so that what was `found` stays where it is. The run that wrote it may
        have taken more or less beyond: for activations, gradients, or spare extents.

        Raises `CheckpointError` where a file is cut off, and `BudgetError` where there is no room;
        the files are as before then.
        """
        kept = -(-found.nbytes // STRIPE_BYTES)
        lengths = Stripes(STRIPE_BYTES, found.shares, found.rooms).lengths(kept)
        for number, (size, length) in enumerate(zip(self._states.sizes(), lengths, strict=True)):
            if size < length:
                raise CheckpointError(
                    f"{self._states.path(number)} is cut off: it has {size} of {length} bytes; go "
                    "on from a checkpoint, in another directory"
                )
        self.shares, self.rooms = found.shares, found.rooms
        self._layout = found.shares, [room if room < kept else None for room in found.rooms]
        self._taken = self._extend_to(stripes)
        if self._taken is None:
            raise self._no_room(stripes, self._room())

    def shorten(self) -> None:
        """What was taken over is where it was said to be: give back what the earlier run had
        beyond."""
        if self._taken is not None:
            self._states.shorten(self._taken)

    def _decide(self, stripes: int, rooms: list[int]) -> Sequence[float]:
        """The shares of the directories; lowers the rooms of those that cannot even hold what is
        written to measure them.

        Nothing is measured when there is nothing to choose, or when the states are less than what
        would be written.
        """
        if not isinstance(self._shares, str):
            return self._shares
        most, files = speed.PROBE_BYTES // STRIPE_BYTES, len(self._states)
        if self._shares == "equal" or files == 1 or stripes < most * files:
            return [1.0] * files
        speeds = self._probe()
        for number, nbytes in enumerate(self._probed):
            if nbytes < speed.PROBE_BYTES:
                rooms[number] = nbytes // STRIPE_BYTES
        return levelled(speeds)

    def _probe(self) -> list[float]:
        """Bytes per second of each directory beside the others; measured once. 0 for one without
        room."""
        if not self._speeds:
            with self._scratch() as files:
                for file in files:
                    if not extend(file, speed.PROBE_BYTES):
                        fill(file, speed.PROBE_BYTES, STRIPE_BYTES)
                self._probed = [file.size() for file in files]
                probes = map(speed.Probe, self.engines, files, self._probed)
                self._speeds = speed.measure(list(probes))
            found = (
                f"{at} {rate / 1e9:.2f} GB/s"
                for at, rate in zip(self._directories, self._speeds, strict=True)
            )
            log.info("measured, half reading and half writing: %s", ", ".join(found))
        return self._speeds

    @contextmanager
    def _scratch(self, named: bool = False) -> Iterator[list[Any]]:
        """An empty native file in each directory, to try its drive with. When this ends they are
        gone, and their space is free. They have no name, so this holds after a kill, too; a
        `named` one is then removed by the next call that wants it.

        Raises `BudgetError` or `ConfigError` where a directory takes no file.
        """
        with ExitStack() as stack:
            files = []
            for place in self._places:
                name = TRIAL_NAME if named else UNNAMED
                try:
                    if named:
                        place.reclaim(name)
                    descriptor = place.create_in_place(name) if named else place.unnamed()
                except OSError as error:
                    kind = BudgetError if error.errno in FULL else ConfigError
                    raise kind(
                        f"{place.path} takes no file to try its drive with ({error.strerror}); "
                        "free some of its space, or choose another directory"
                    ) from error
                if named:
                    stack.callback(place.remove, name)
                files.append(native.file_at(descriptor, str(place.path / name)))
                stack.callback(files[-1].close)
                # Some file systems free the space of a file some time after it was closed.
                stack.callback(files[-1].truncate, 0)
            yield files

    def _check_room(self, stripes: int) -> None:
        """Raise `BudgetError` where it is plain that the directories cannot hold `stripes`, before
        each is filled to its end."""
        room = self._room()
        if len(self._states) == 1 or room < stripes * STRIPE_BYTES:
            raise self._refusal(stripes, room)

    def _room(self) -> int:
        """The bytes that the files have, and could have besides."""
        free = {place.device(): place.free_bytes() for place in self._places}
        return sum(free.values()) + sum(self._states.sizes())

    def _refusal(self, stripes: int, room: int) -> BudgetError:
        """`_no_room`, and the files are empty."""
        self._states.shorten([0] * len(self._states))
        return self._no_room(stripes, room)

    def _no_room(self, stripes: int, room: int) -> BudgetError:
        """`room`: the bytes that could be had."""
        need, names = stripes * STRIPE_BYTES, " and ".join(map(str, self._directories))
        most = file_limit()
        if most is not None and most * len(self._directories) < min(need, room):
            return BudgetError(
                f"the states on nvme need {format_bytes(need)} in {names}, but {limit_text(most)}"
            )
        alone = len(self._directories) == 1
        way_out = (
            "Tuning(copy_on_write=False) (halves what is updated, but a failed step then loses the "
            "state)"
            if self._kept is None
            else "durability='off' (no step outlives the process; what is cached takes no space)"
        )
        if self._spare_bytes:
            spare = format_bytes(self._spare_bytes)
            way_out = f"durability='step' (takes {spare} less), or {way_out}"
        return BudgetError(
            f"{names} {'has' if alone else 'together have'} {format_bytes(room)} free, but the "
            f"states on nvme need {format_bytes(need)} there; free "
            f"{format_bytes(max(need - room, 0))}, add {'a second' if alone else 'another'} "
            f"directory, or set {way_out}"
        )

    def grow(self, nbytes: int) -> Extent | None:
        """An extent of `nbytes` (a multiple of 4096) more, after `open`; None where the budget or
        the drives have no room for it.

        What is in flight goes on.
        """
        with self._growing:
            return self._grow(nbytes)

    def _grow(self, nbytes: int) -> Extent | None:
        stripes = -(-(self.reserved + nbytes) // STRIPE_BYTES)
        if not self._states or (self._budget is not None and stripes * STRIPE_BYTES > self._budget):
            return None
        if self._extend_to(stripes) is None:
            return None
        return self._states.claims.give(nbytes)

    def _extend_to(self, stripes: int) -> list[int] | None:
        """Take the space for so many stripes, those before stay where they are. Returns the bytes
        that each file needs; None where there is no room, and then nothing has changed."""
        shares, full = self._layout
        before = self._states.sizes()
        while sum(rooms := [stripes if room is None else room for room in full]) >= stripes:
            layout = Stripes(STRIPE_BYTES, shares, rooms)
            lengths = layout.lengths(stripes)
            short = [
                number
                for number, length in enumerate(lengths)
                if not self._states.extend(number, length)
            ]
            if not short:
                self._states.lay(layout)
                self._layout = shares, full
                return lengths
            full = [
                before[at] // STRIPE_BYTES if at in short else room for at, room in enumerate(full)
            ]
        self._states.shorten(before)
        return None

    def register(self, memory: torch.Tensor) -> None:
        """Let every engine pin `memory` until `close`, so that requests in it cost less CPU;
        needless, so it may be refused."""
        if memory.numel() > 0:
            for engine in filter(None, (*self.engines, self.originals.engine)):
                try:
                    engine.register_memory(memory.data_ptr(), memory.numel())
                except OSError as error:
                    log.debug(
                        "%d bytes are not registered with the I/O engine: %s", memory.numel(), error
                    )

    def attach(self, memory: torch.Tensor) -> None:
        """After `open`: let the drives write to `memory` (uint8, on a GPU) until `close`, for
        `read` with `direct`.

        A block of a file beside each is written and read so to see that it arrives. Raises
        `RuntimeError` that says why it cannot be, and then nothing has changed.
        """
        with ExitStack() as undo:
            cufile = native.cufile()
            undo.callback(cufile.close)
            cufile.register_memory(memory.data_ptr(), memory.numel())
            options = {"threads": DIRECT_THREADS, "request_bytes": REQUEST_BYTES}
            direct = []
            for number in range(len(self._states)):
                direct.append(self._states.direct_engine(number, cufile, **options))
                undo.callback(direct[-1].close)
            try:
                with self._scratch(named=True) as files:  # cuFile may look for names
                    for number, file in enumerate(files):
                        with closing(cufile.engine(file, **options)) as engine:
                            self._try_direct(number, file, engine, memory[:ALIGNMENT])
            except (BudgetError, ConfigError) as error:
                raise RuntimeError(str(error)) from None
            self.direct = direct
            self._parts.callback(self.direct.clear)
            self._parts.enter_context(undo.pop_all())

    def _try_direct(self, number: int, file: Any, engine: Any, place: torch.Tensor) -> None:
        """Raise `RuntimeError` unless a block of `file`, on drive `number`, arrives in `place`,
        which is as before then."""
        before = place.cpu().clone()
        block = (torch.arange(ALIGNMENT) * (number + 3) // 7).to(torch.uint8)
        try:
            for word, io, address in (
                ("write", self.engines[number], block.data_ptr()),
                ("read", engine, place.data_ptr()),
            ):
                getattr(io, word)(file, 0, address, ALIGNMENT).wait()
            if not torch.equal(place.cpu(), block):
                raise RuntimeError(f"a block of {file.path} did not arrive on the GPU")
        except NvmeError as error:
            raise RuntimeError(str(error)) from None
        finally:
            place.copy_(before)

    def read(
        self,
        extent: Extent | FileExtent,
        begin: int,
        nbytes: int,
        address: int,
        name: str,
        meter: Meter | None = None,
        direct: bool = False,
        background: bool = False,
    ) -> Ticket:
        """Start reading bytes [begin, begin + nbytes) of `extent` into `address`, with `direct` in
        the memory that was attached; in the `background` when nobody waits for it. `name` labels
        the span, `meter` counts."""
        if meter is not None:
            meter.add(read=nbytes)
        self._recorder.count("nvme bytes read", nbytes)
        if isinstance(extent, FileExtent):
            requests = self.originals.requests(extent, begin, nbytes, address, name)
            return Ticket(requests, self._spanning("nvme read", name))
        _check_within(extent, begin, nbytes)
        engines = self.direct if direct else self.engines
        requests = self._states.read(extent, begin, nbytes, address, name, engines, background)
        return Ticket(requests, self._spanning("nvme read", name))

    def write(
        self,
        extent: Extent | FileExtent,
        begin: int,
        nbytes: int,
        address: int,
        name: str,
        meter: Meter | None = None,
        background: bool = False,
    ) -> Ticket:
        """Start writing `nbytes` from `address` to bytes [begin, begin + nbytes) of `extent`; in
        the `background` when nobody waits for it: reads then go first.

        Raises `RuntimeError`, and writes nothing, where the bytes were not given out or a commit
        speaks of them.
        """
        if isinstance(extent, FileExtent):
            raise RuntimeError(f"{name} is at home in files of the user, which are only read")
        _check_within(extent, begin, nbytes)
        requests = self._states.write(extent, begin, nbytes, address, name, background)
        if meter is not None:
            meter.add(written=nbytes)
        self._recorder.count("nvme bytes written", nbytes)
        return Ticket(requests, self._spanning("nvme write", name))

    def where(self, extent: Extent, begin: int) -> tuple[str, int]:
        """The path, and the offset in that file, of byte `begin` of `extent`."""
        return self._states.where(extent.start + begin)

    def flush(self) -> None:
        """Return when all that was written, and has ended, would survive a power cut.

        Where that failed once it fails from then on: the system may have dropped what it could not
        write, and the next flush of that file would succeed all the same.
        """
        if self._unflushed is not None:
            reason = "an earlier flush failed, and what was written there may be lost"
            raise OSError(errno.EIO, reason, self._unflushed)
        for number in range(len(self._states)):
            try:
                self._states.sync(number)
            except BaseException:
                self._unflushed = self._states.path(number)
                raise

    def _spanning(self, lane: str, name: str) -> Callable[[Ticket], None]:
        """Begin a span that ends with a ticket; what fails is not recorded."""
        start = time.perf_counter()
        shown = self._recorder.show(lane, name)

        def ended(ticket: Ticket) -> None:
            self._recorder.hide(shown)
            if not ticket.failed:
                self._recorder.add(lane, name, start, time.perf_counter())

        return ended

    def close(self) -> None:
        """Wait for what is in flight, then remove the files and the locks, all of it whatever
        fails. May be called twice."""
        self._parts.close()


def _check_within(extent: Extent, begin: int, nbytes: int) -> None:
    if begin < 0 or begin + nbytes > extent.nbytes:
        raise ValueError(f"bytes {begin}..{begin + nbytes} are not in an extent of {extent.nbytes}")
