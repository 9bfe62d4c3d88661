"""Plants one fault after the other and prints what finds it; words choose some by name."""

from __future__ import annotations

import sys

from cuda_faults.faults import FAULTS
from cuda_faults.planting import ROOT, Copy


def main() -> int:
    words = sys.argv[1:]
    copy = Copy(ROOT / "build/cuda-faults")
    if found := copy.found_by():
        raise SystemExit(f"without a fault: {found} finds one")
    chosen = [fault for fault in FAULTS if all(word in fault.breaks for word in words)]
    missed = 0
    for fault in chosen:
        copy.plant(fault)
        found = copy.found_by()
        missed += not found
        print(f"{fault.breaks:<60} {found or 'NOT FOUND'}", flush=True)
    copy.heal()
    print(f"{len(chosen)} faults, {missed} not found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
