"""The space of the NVMe tier: how its address space is striped over the directories, and how it
grows."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Literal

from infinity.directories.directory import file_limit, limit_text
from infinity.errors import BudgetError, CheckpointError, ConfigError
from infinity.measure import speed
from infinity.placement.calibrate import levelled
from infinity.quantities import format_bytes
from infinity.tiers.manifest import MANIFEST_NAME, StatesManifest
from infinity.tiers.places import Places
from infinity.tiers.states_files import Extent, StatesFiles, extend, fill
from infinity.tiers.stripes import Stripes

log = logging.getLogger("infinity")

STRIPE_BYTES = 4 << 20

Shares = Literal["measured", "equal"] | Sequence[float]
"""The part of the stripes of each directory: equal, by number, or by measured speed."""


class Extents:
    """The extents of one engine, in the states files of its directories.

    Declare extents with `reserve`. `allocate` takes their space, once `states` has all files. Later
    `grow` adds extents. `budget` limits the bytes of all files; None is no limit.
    """

    def __init__(self, places: Places, budget: int | None, wanted: Shares) -> None:
        self.states = StatesFiles(Stripes(STRIPE_BYTES, [1.0] * len(places.paths)))
        """The files, one per directory."""
        self._places = places
        self._budget = budget
        self._wanted = wanted
        # Shares, and stripes of the directories that are full.
        self._layout: tuple[Sequence[float], list[int | None]] = (), []
        self.shares: Sequence[float] = ()
        """The part of the stripes of each directory; known from `allocate` on, like `rooms`."""
        self.rooms: Sequence[int] = ()
        """How many stripes each directory has room for."""
        self._speeds: list[float] = []  # bytes per second of each directory, once measured
        self._probed: list[int] = []  # the bytes that each directory gave to the measurement
        self._spare_bytes = 0
        self._taken: list[int] | None = None  # bytes that each adopted file needs
        self._growing = threading.Lock()

    @property
    def reserved(self) -> int:
        """Bytes of all extents."""
        return self.states.claims.given

    def reserve(self, nbytes: int, spare: bool = False) -> Extent:
        """Declare an extent of `nbytes` (a multiple of 4096), before `allocate`. A `spare` extent
        is needed only because some steps are not committed."""
        self._spare_bytes += nbytes * spare
        return self.states.claims.give(nbytes)

    def keep(self, extents: Iterable[Extent]) -> None:
        """Commits include `extents`: a write there raises `RuntimeError` from now on. Extents that
        were kept before may be written again."""
        self.states.claims.keep(extents)

    def adopt(self) -> None:
        """Before the files are opened: keep all bytes of files that are taken over. Does nothing
        for new files. Raises `ConfigError` if their stripes have another size."""
        found = self._places.found
        if found is None:
            return
        if found.stripe_bytes != STRIPE_BYTES:
            raise ConfigError(
                f"{self._places.paths[0] / MANIFEST_NAME} has stripes of {found.stripe_bytes} "
                f"bytes, and here they have {STRIPE_BYTES}; go on from a checkpoint, in another "
                "directory"
            )
        self.states.take_over(Stripes(STRIPE_BYTES, found.shares, found.rooms), found.nbytes)

    def measure(self) -> float:
        """Before `allocate`: bytes per second of all directories together, in their shares, half
        written and half read. Infinite without room to measure.

        Takes at most 64 MiB of each directory meanwhile, in a file of its own.
        """
        speeds, found = self._probe(), self._places.found
        if found is not None:  # the shares of taken-over files stay
            shares = list(found.shares)
        elif self._wanted == "measured":
            shares = speeds
        elif self._wanted == "equal":
            shares = [1.0] * len(speeds)
        else:
            shares = list(map(float, self._wanted))
        rates = [rate / share for rate, share in zip(speeds, shares, strict=True) if share]
        together = min(rates, default=0.0) * sum(shares)
        if not together:
            log.warning(
                "%s: no room to measure the drives, which are taken to be fast; free %s",
                ", ".join(map(str, self._places.paths)),
                format_bytes(speed.PROBE_BYTES),
            )
        return together or math.inf

    def stripes(self) -> int:
        """How many stripes hold all extents. Raises `BudgetError` if the budget does not."""
        count = -(-self.reserved // STRIPE_BYTES)
        total = count * STRIPE_BYTES
        if self._budget is not None and total > self._budget:
            raise BudgetError(
                f"nvme_memory={format_bytes(self._budget)} cannot hold the states on nvme, which "
                f"need {format_bytes(total)}; the smallest nvme_memory that works is {total}"
            )
        return count

    def allocate(self, stripes: int) -> None:
        """Lay out `stripes` stripes by the shares, within the room of each directory, and take the
        space. Raises `BudgetError` if all directories together lack the room."""
        if self._places.kept is not None and self._places.found is not None:
            self._places.kept.check()
            self._take_over(stripes, self._places.found)
            return
        rooms = [stripes] * len(self.states)
        shares = self._decide(stripes, rooms)
        short = True
        while short:  # again for every directory that has too little room
            if sum(rooms) < stripes:
                raise self._refusal(stripes, sum(rooms) * STRIPE_BYTES)
            layout, short = Stripes(STRIPE_BYTES, shares, rooms), False
            self.states.lay(layout)
            lengths = layout.lengths(stripes)
            # Shorten first, because two directories may be on one drive.
            self.states.shorten(lengths)
            for number, length in enumerate(lengths):
                if not self.states.extend(number, length):
                    self._check_room(stripes)
                    short = True
                    rooms[number] = self.states.fill(number, length, STRIPE_BYTES)
                    log.warning(
                        (
                            "%s has room for %s of its share of %s of the states; the other "
                            "directories take the rest"
                        ),
                        self._places.paths[number],
                        format_bytes(rooms[number] * STRIPE_BYTES),
                        format_bytes(length),
                    )
        self.shares, self.rooms = shares, rooms
        self._layout = shares, [room if room < stripes else None for room in rooms]
        if len(lengths) > 1:
            parts = (
                f"{format_bytes(length)} in {at}"
                for at, length in zip(self._places.paths, lengths, strict=True)
            )
            log.info("the states on nvme take %s", ", ".join(parts))

    def _take_over(self, stripes: int, found: StatesManifest) -> None:
        """Lay `stripes` out so that the bytes of `found` stay where they are. Beyond them, the
        earlier run may have taken more or less: for activations, gradients, or spare extents.

        Raises `CheckpointError` if a file is cut off, and `BudgetError` without room. The files are
        then as before.
        """
        kept = -(-found.nbytes // STRIPE_BYTES)
        lengths = Stripes(STRIPE_BYTES, found.shares, found.rooms).lengths(kept)
        for number, (size, length) in enumerate(zip(self.states.sizes(), lengths, strict=True)):
            if size < length:
                raise CheckpointError(
                    f"{self.states.path(number)} is cut off: it has {size} of {length} bytes; go "
                    "on from a checkpoint, in another directory"
                )
        self.shares, self.rooms = found.shares, found.rooms
        self._layout = found.shares, [room if room < kept else None for room in found.rooms]
        self._taken = self._extend_to(stripes)
        if self._taken is None:
            raise self._no_room(stripes, self._room())

    def shorten(self) -> None:
        """After the check of taken-over states: release the bytes that only the earlier run
        needed."""
        if self._taken is not None:
            self.states.shorten(self._taken)

    def _decide(self, stripes: int, rooms: list[int]) -> Sequence[float]:
        """The shares of the directories. Lowers the room of a directory that cannot hold the file
        of a measurement.

        Measures only if there is a choice, and the states take more than the measurement writes.
        """
        if not isinstance(self._wanted, str):
            return self._wanted
        most, files = speed.PROBE_BYTES // STRIPE_BYTES, len(self.states)
        if self._wanted == "equal" or files == 1 or stripes < most * files:
            return [1.0] * files
        speeds = self._probe()
        for number, nbytes in enumerate(self._probed):
            if nbytes < speed.PROBE_BYTES:
                rooms[number] = nbytes // STRIPE_BYTES
        return levelled(speeds)

    def _probe(self) -> list[float]:
        """Bytes per second of each directory while all are busy; measured once. 0 for a directory
        without room."""
        if not self._speeds:
            with self._places.scratch() as files:
                for file in files:
                    if not extend(file, speed.PROBE_BYTES):
                        fill(file, speed.PROBE_BYTES, STRIPE_BYTES)
                self._probed = [file.size() for file in files]
                probes = map(speed.Probe, self.states.engines, files, self._probed)
                self._speeds = speed.measure(list(probes))
            found = (
                f"{at} {rate / 1e9:.2f} GB/s"
                for at, rate in zip(self._places.paths, self._speeds, strict=True)
            )
            log.info("measured, half reading and half writing: %s", ", ".join(found))
        return self._speeds

    def _check_room(self, stripes: int) -> None:
        """Raise `BudgetError` if the free bytes cannot hold `stripes`, before a directory is
        filled."""
        room = self._room()
        if len(self.states) == 1 or room < stripes * STRIPE_BYTES:
            raise self._refusal(stripes, room)

    def _room(self) -> int:
        """Bytes of the files, and free bytes of their file systems."""
        return self._places.free_bytes() + sum(self.states.sizes())

    def _refusal(self, stripes: int, room: int) -> BudgetError:
        """The error of `_no_room`, after the files were cut to nothing."""
        self.states.shorten([0] * len(self.states))
        return self._no_room(stripes, room)

    def _no_room(self, stripes: int, room: int) -> BudgetError:
        """The error for `stripes` that do not fit into `room` bytes."""
        need, names = stripes * STRIPE_BYTES, " and ".join(map(str, self._places.paths))
        most = file_limit()
        if most is not None and most * len(self._places.paths) < min(need, room):
            return BudgetError(
                f"the states on nvme need {format_bytes(need)} in {names}, but {limit_text(most)}"
            )
        alone = len(self._places.paths) == 1
        way_out = (
            "Tuning(copy_on_write=False) (halves what is updated, but a failed step then loses the "
            "state)"
            if self._places.kept is None
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
        """After `allocate`: another extent of `nbytes` (a multiple of 4096). None if the budget or
        the drives have no room. Transfers in flight continue."""
        with self._growing:
            stripes = -(-(self.reserved + nbytes) // STRIPE_BYTES)
            beyond = self._budget is not None and stripes * STRIPE_BYTES > self._budget
            if not self.states or beyond or self._extend_to(stripes) is None:
                return None
            return self.states.claims.give(nbytes)

    def _extend_to(self, stripes: int) -> list[int] | None:
        """Take the space for `stripes` stripes. Earlier stripes stay where they are. Returns the
        bytes that each file needs. None without room; the files are then as before."""
        shares, full = self._layout
        before = self.states.sizes()
        while sum(rooms := [stripes if room is None else room for room in full]) >= stripes:
            layout = Stripes(STRIPE_BYTES, shares, rooms)
            lengths = layout.lengths(stripes)
            short = [
                number
                for number, length in enumerate(lengths)
                if not self.states.extend(number, length)
            ]
            if not short:
                self.states.lay(layout)
                self._layout = shares, full
                return lengths
            full = [
                before[at] // STRIPE_BYTES if at in short else room for at, room in enumerate(full)
            ]
        self.states.shorten(before)
        return None
