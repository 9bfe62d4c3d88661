"""One benchmark from its plan to its summary: examine, prepare, search, measure in interleaved
rounds, conclude, clean up."""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch

from infinity import native
from infinity.bench.io import fio, patterns
from infinity.bench.io.block import config_block
from infinity.bench.io.load import Load
from infinity.bench.io.patterns import Operation
from infinity.bench.io.plan import SIZE_MULTIPLE, Plan
from infinity.bench.io.preflight import DirectoryFacts, examine, machine_facts, notes
from infinity.bench.io.results import Case, fio_facts, latency_facts, sustained_facts
from infinity.bench.io.rig import PIECE_BYTES, Drive, Measured, Pieces, Rig
from infinity.bench.io.search import Found, Setting, Space, search
from infinity.bench.io.verdict import Evidence, lasting, verdict
from infinity.bench.io.wear import read_smart, wear_percent
from infinity.bench.io.workspace import check_owners, check_space, workspace
from infinity.bench.summary import spread
from infinity.device import HostMemory
from infinity.placement.budget import CHUNK_ELEMENTS
from infinity.quantities import format_bytes

TRIAL_SECONDS = 0.3
_DIRECTIONS: tuple[Operation, ...] = ("read", "write")
_TRIAL_OVERHEAD = 1.25  # engines, ramp-up and the last transfers


class Benchmark:
    """Carries out a `Plan`. `say` receives the progress. Used once, by the main thread."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan, self._say = plan, say
        self._drives: list[Drive] = []
        self._written = 0
        self._trials: list[tuple[Setting, dict[Operation, float]]] = []
        self._fio = ""
        self._registered = False

    def run(self) -> dict[str, Any]:
        """The summary, ready for JSON. Every number has its unit in its key. Always removes its
        files."""
        plan = self._plan
        plan.check()
        spaces = plan.spaces()
        self._fio = fio.require_fio() if plan.compare_fio else ""
        check_owners(plan.paths)
        check_space(plan.paths, max(plan.file_bytes, plan.write_set or 0), plan.reserve)
        self._say(plan.wear())
        places, machine = [examine(path) for path in plan.paths], machine_facts()
        with ExitStack() as stack:
            files = stack.enter_context(workspace(plan.paths, plan.file_bytes, plan.reserve))
            for note in notes(places, machine):
                self._say(note)
            self._prepare(files, spaces, stack)
            found = self._search(spaces)
            cases = self._cases(found)
            load = stack.enter_context(closing(Load())) if plan.load else None
            latencies = self._measure(cases, found.best, load)
            sustained = self._sustain(found) if plan.sustained is not None else None
            rows = self._rows(cases, latencies, load)
            return {
                "paths": [place.facts() for place in places],
                "machine": machine,
                "notes": notes(places, machine),
                "file_bytes": plan.file_bytes,
                "reserve_bytes": plan.reserve,
                "memory_bytes": plan.memory_bytes,
                "memory_registered": self._registered,
                "search": self._search_facts(found),
                "best": found.best.facts(),
                "rows": rows,
                "load": self._load_facts(load),
                "sustained": sustained,
                "limits": [*self._limits(places, found, cases), *_lasting(sustained)],
                "wear": self._wear(places),
                "config": config_block(plan.paths, found.best, _path_speeds(cases)),
            }

    def _prepare(self, files: Sequence[Any], spaces: Sequence[Space], stack: ExitStack) -> None:
        """Touch memory with bytes that do not compress, and write the files. Reads of unwritten
        files would cost nothing."""
        plan = self._plan
        self._say(f"writing {format_bytes(plan.file_bytes)} once on each path")
        generator = torch.Generator().manual_seed(0)
        for file in files:
            memory = HostMemory(plan.memory_bytes)
            stack.callback(memory.close)
            memory.tensor.view(torch.int64).random_(generator=generator)
            self._drives.append(Drive(file, plan.file_bytes, memory))
        middling = spaces[0].middle()
        piece = max(PIECE_BYTES, middling.request_bytes)
        with self._rig(middling) as rig:
            rig.stream(
                lambda size: islice(patterns.sequential("write", size, piece), -(-size // piece)),
                piece,
            )
        for file in files:
            file.sync()

    @contextmanager
    def _rig(self, setting: Setting) -> Iterator[Rig]:
        with Rig(self._drives, setting) as rig:
            self._registered = rig.registered
            try:
                yield rig
            finally:
                self._written += rig.moved["write"]

    # Search

    def _search(self, spaces: Sequence[Space]) -> Found:
        plan, ways = self._plan, self._plan.directions
        self._say(f"searching for the fastest setting, at most {plan.search_seconds:g} s")
        trials = max(int(plan.search_seconds / (len(ways) * TRIAL_SECONDS * _TRIAL_OVERHEAD)), 1)
        start = time.perf_counter()

        def measure(setting: Setting) -> float | None:
            if self._trials and time.perf_counter() - start > plan.search_seconds:
                return None
            piece = max(PIECE_BYTES, setting.request_bytes)
            speeds = {}
            with self._rig(setting) as rig:
                for way in ways:
                    pieces = _sequential(way, piece)
                    speeds[way] = rig.stream(pieces, piece, TRIAL_SECONDS).gb_per_second
            self._trials.append((setting, speeds))
            return _score(speeds)

        found = search(spaces, measure, trials)
        self._search_seconds = time.perf_counter() - start
        self._say(f"{_words(found.best)}: {found.score:.2f} GB/s")
        return found

    def _trial_median(self, setting: Setting, way: Operation) -> float | None:
        speeds = [
            measured[way]
            for tried, measured in self._trials
            if tried == setting and way in measured
        ]
        return statistics.median(speeds) if speeds else None

    def _search_facts(self, found: Found) -> dict[str, Any]:
        return {
            "seconds": self._search_seconds,
            "trials_count": len(self._trials),
            "settings_count": len(found.scores),
            "score_gb_per_second": found.score,
            "trials": [
                setting.facts() | {f"{way}_gb_per_second": speed for way, speed in speeds.items()}
                for setting, speeds in self._trials
            ],
        }

    # Rounds

    def _cases(self, found: Found) -> list[Case]:
        plan, request = self._plan, found.best.request_bytes
        alone = range(len(plan.paths)) if len(plan.paths) > 1 else ()
        cases: list[Case] = []
        for mode in plan.modes:
            if mode in ("read", "write"):
                cases += [self._sequential_case(mode, request, only) for only in (None, *alone)]
            elif mode == "mixed":
                cases.append(
                    self._stream_case(mode, lambda size: patterns.mixed(size, request), request)
                )
            elif mode == "many-tensor":
                ways: tuple[Operation, ...] = ("write", "read")
                cases += [self._tensors_case(way) for way in ways]
            else:
                cases.append(self._replay_case(found))
        return cases

    def _sequential_case(self, way: Operation, request: int, only: int | None) -> Case:
        piece, seconds = max(PIECE_BYTES, request), self._plan.round_seconds
        return Case(
            way,
            lambda rig: rig.stream(_sequential(way, piece), piece, seconds, only),
            _sequential(way, request),
            request,
            only,
        )

    def _stream_case(self, mode: str, pieces: Pieces, piece: int) -> Case:
        return Case(
            mode, lambda rig: rig.stream(pieces, piece, self._plan.round_seconds), pieces, piece
        )

    def _tensors_case(self, way: Operation) -> Case:
        size, seconds = self._plan.tensor_bytes, self._plan.round_seconds
        # As many bytes at once as in the other modes: less CPU time, equal speed.
        batch = max(1, min(PIECE_BYTES // size, 64))

        def run(rig: Rig) -> Measured:
            return rig.stream(_tensors(way, size), size, seconds, batch=batch)

        return Case(f"many-tensor {way}", run, _tensors(way, size), size)

    def _replay_case(self, found: Found) -> Case:
        elements, model = self._replayed(found), self._plan.model_parameters
        chunk = patterns.chunk_elements(self._plan.memory_bytes)
        return Case(
            "replay",
            lambda rig: rig.replay(patterns.training_step(elements, model, chunk)),
            None,
            0,
        )

    def _replayed(self, found: Found) -> int:
        """The number of parameters whose step is replayed: those of the model, or as many as the
        files hold or two rounds' time moves."""
        plan = self._plan
        by_time = (
            found.score
            * 1e9
            * 2
            * plan.round_seconds
            / (patterns.BYTES_READ + patterns.BYTES_WRITTEN)
        )
        most = min(
            plan.model_parameters,
            len(plan.paths) * plan.file_bytes // patterns.STATE_BYTES,
            int(by_time),
        )
        return max(most // CHUNK_ELEMENTS, 1) * CHUNK_ELEMENTS

    def _measure(
        self, cases: list[Case], best: Setting, load: Load | None
    ) -> dict[tuple[int, bool], list[float]]:
        """Fill the cases round by round, each beside the work that it is compared with. Returns
        latencies by case and load."""
        plan = self._plan
        for number in range(plan.rounds):
            self._say(f"round {number + 1} of {plan.rounds}")
            for case in cases:
                compared = self._fio and case.mode in ("read", "write", "mixed")
                if compared and number % 2:  # both go first equally often
                    case.fio.append(self._run_fio(case, best))
                with self._rig(best) as rig:
                    case.quiet.append(case.run(rig))
                if compared and not number % 2:
                    case.fio.append(self._run_fio(case, best))
                if load is not None and case.only is None:
                    with self._rig(best) as rig, load:
                        case.loaded.append(case.run(rig))
        self._say("measuring latencies")
        latencies: dict[tuple[int, bool], list[float]] = {}
        for number, case in enumerate(cases):
            for loaded in [False, *([True] if load is not None and case.only is None else [])]:
                if case.pieces is None:
                    continue
                only = range(len(plan.paths)) if case.only is None else [case.only]
                with self._rig(best) as rig, load if loaded and load is not None else nullcontext():
                    each = [
                        rig.latencies(
                            case.pieces, case.piece_bytes, plan.round_seconds / len(only), path
                        )
                        for path in only
                    ]
                latencies[number, loaded] = sorted(seconds for one in each for seconds in one)
        return latencies

    def _run_fio(self, case: Case, best: Setting) -> Measured:
        drives = self._drives if case.only is None else [self._drives[case.only]]
        files = [(drive.file.path, drive.size) for drive in drives]
        direct = all(drive.file.direct for drive in drives)
        ring, _ = native.aio().io_uring_available()
        options = fio.arguments(
            case.mode, best, files, self._plan.round_seconds, direct, ring, self._registered
        )
        measured = fio.run(self._fio, options)
        self._written += measured.bytes_written
        return measured

    def _rows(
        self, cases: list[Case], latencies: dict[tuple[int, bool], list[float]], load: Load | None
    ) -> list[dict[str, Any]]:
        rows = []
        for number, case in enumerate(cases):
            for loaded, runs in ((False, case.quiet), (True, case.loaded)):
                if runs:
                    row = self._row(case, runs, loaded, load) | latency_facts(
                        latencies.get((number, loaded))
                    )
                    rows.append(row | (fio_facts(case) if case.fio and not loaded else {}))
        return rows

    def _row(
        self, case: Case, runs: list[Measured], loaded: bool, load: Load | None
    ) -> dict[str, Any]:
        plan = self._plan
        speed = spread([run.gb_per_second for run in runs])
        row = {
            "mode": case.mode,
            "paths": [
                str(path) for path in (plan.paths if case.only is None else [plan.paths[case.only]])
            ],
            "load": load.name if loaded and load is not None else None,
            "of_quiet_ratio": speed["median"] / _median_speed(case) if loaded else None,
            **{f"{name}_gb_per_second": value for name, value in speed.items()},
            # Under load the CPU time is mostly the load's.
            "cpu_seconds_per_gb": None
            if loaded
            else statistics.median(run.cpu_seconds_per_gb for run in runs),
            "read_bytes": sum(run.bytes_read for run in runs),
            "written_bytes": sum(run.bytes_written for run in runs),
            "rounds_count": len(runs),
        }
        if case.mode == "replay":
            moved = (patterns.BYTES_READ + patterns.BYTES_WRITTEN) * plan.model_parameters
            row["model_parameters_count"] = plan.model_parameters
            row["replayed_parameters_count"] = runs[0].bytes_written // patterns.BYTES_WRITTEN
            row["io_per_training_step_seconds"] = moved / (speed["median"] * 1e9)
        return row

    # Conclusions

    def _sustain(self, found: Found) -> dict[str, Any]:
        plan, seconds = self._plan, self._plan.sustained or 0.0
        expected = self._trial_median(found.best, "write") or found.score
        write_set = plan.write_set or self._write_set(expected * 1e9 * seconds / len(plan.paths))
        write_set = max(write_set // SIZE_MULTIPLE, 1) * SIZE_MULTIPLE
        self._say(f"writing for {seconds:g} s over {format_bytes(write_set)} on each path")
        check_space(plan.paths, write_set, plan.reserve)
        for drive in self._drives:
            drive.file.allocate(write_set)
        piece = max(PIECE_BYTES, found.best.request_bytes)
        samples: list[tuple[float, int]] = [(0.0, 0)]
        ended = threading.Event()
        with self._rig(found.best) as rig:
            start = time.perf_counter()

            def sample() -> None:
                while not ended.wait(max(seconds / 100, 0.1)):
                    samples.append((time.perf_counter() - start, rig.moved["write"]))

            sampler = threading.Thread(target=sample, name="bench-sampler", daemon=True)
            sampler.start()
            try:
                measured = rig.stream(
                    lambda _: patterns.sequential("write", write_set, piece), piece, seconds
                )
            finally:
                ended.set()
                sampler.join()
            samples.append((measured.seconds, measured.bytes_written))
        return sustained_facts(samples, write_set * len(plan.paths))

    def _write_set(self, expected: float) -> int:
        """Bytes such that no block is written twice in the time, if the drive keeps its speed and
        has the space."""
        free = min(shutil.disk_usage(path).free for path in self._plan.paths) // len(
            self._plan.paths
        )
        return int(
            max(
                min(1.2 * expected, free - self._plan.reserve + self._plan.file_bytes),
                self._plan.file_bytes,
            )
        )

    def _limits(
        self, places: Sequence[DirectoryFacts], found: Found, cases: list[Case]
    ) -> list[str]:
        sentences = []
        for way in _DIRECTIONS:
            whole = next((case for case in cases if case.mode == way and case.only is None), None)
            if whole is None:
                continue
            alone = [
                _median_speed(case) for case in cases if case.mode == way and case.only is not None
            ]
            wider = [
                self._trial_median(setting, way)
                for setting in found.scores
                if setting.engine == found.best.engine
                and setting.in_flight_bytes >= 2 * found.best.in_flight_bytes
            ]
            evidence = Evidence(
                operation=way,
                together=_median_speed(whole),
                alone=alone,
                cpu_share=statistics.median(run.cpu_seconds / run.seconds for run in whole.quiet),
                setting=found.best,
                at_setting=self._trial_median(found.best, way),
                wider=max((speed for speed in wider if speed is not None), default=None),
                fio_ratio=fio_facts(whole)["fio_median_ratio"] if whole.fio else None,
            )
            sentences.append(verdict(places, evidence))
        return sentences

    def _load_facts(self, load: Load | None) -> dict[str, Any] | None:
        if load is None:
            return None
        return {
            "name": load.name,
            "seconds": load.seconds,
            "adam_gigaparameters_per_second": load.updated / load.seconds / 1e9,
            "host_to_device_gb_per_second": load.copied / load.seconds / 1e9
            if load.copied
            else None,
        }

    def _wear(self, places: Sequence[DirectoryFacts]) -> dict[str, Any]:
        plan = self._plan
        per_step = patterns.BYTES_WRITTEN * plan.model_parameters
        smart = [(place.device, read_smart(place.device)) for place in places]
        # Bytes are spread over the paths evenly, and the endurance is one drive's.
        per_drive = self._written / len(plan.paths)
        return {
            "written_bytes": self._written,
            "runs_count": plan.runs,
            "endurance_bytes": plan.endurance,
            "endurance_used_percent": wear_percent(per_drive, plan.endurance, plan.runs)
            if plan.endurance
            else None,
            "model_parameters_count": plan.model_parameters,
            "training_step_written_bytes": per_step,
            "training_steps_per_endurance_count": plan.endurance * len(plan.paths) // per_step
            if plan.endurance
            else None,
            "drives": [
                {
                    "device": device,
                    "life_used_percent": said.used_percent,
                    "life_written_bytes": said.written_bytes,
                }
                for device, said in smart
                if said is not None
            ],
        }


def _score(speeds: dict[Operation, float]) -> float:
    """GB/s of one direction. For both, of the mix of a training step: 14 bytes read to 12
    written."""
    if len(speeds) == 1:
        return next(iter(speeds.values()))
    read, written = patterns.BYTES_READ, patterns.BYTES_WRITTEN
    return (read + written) / (read / speeds["read"] + written / speeds["write"])


def _lasting(sustained: dict[str, Any] | None) -> list[str]:
    if sustained is None:
        return []
    first, last = sustained["first_tenth_gb_per_second"], sustained["last_half_gb_per_second"]
    return [lasting(first, last, sustained["written_bytes"], sustained["write_set_bytes"])]


def _path_speeds(cases: Sequence[Case]) -> list[float]:
    """GB/s of each path alone, half of it read and half written, if both were measured. Empty with
    one path."""
    numbers = sorted({case.only for case in cases if case.only is not None})
    return [
        statistics.harmonic_mean([_median_speed(case) for case in cases if case.only == number])
        for number in numbers
    ]


def _median_speed(case: Case) -> float:
    return statistics.median(run.gb_per_second for run in case.quiet)


def _words(setting: Setting) -> str:
    threads = f", {setting.threads} threads" if setting.engine == "posix" else ""
    return (
        f"{setting.engine}, {setting.depth} requests of "
        f"{format_bytes(setting.request_bytes)} in flight{threads}"
    )


def _sequential(way: Operation, piece: int) -> Pieces:
    return lambda size: patterns.sequential(way, size, piece)


def _tensors(way: Operation, tensor_bytes: int) -> Pieces:
    return lambda size: patterns.many_tensors(way, size, tensor_bytes)
