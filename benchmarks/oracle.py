"""The search against brute force on hundreds of small worlds: python benchmarks/oracle.py [worlds of each kind]."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from autoshard.planner import every
from tests.planner.test_oracle import compare

KINDS = (("all legal plans, at most 2 modules", 2, False), ("along the chain, at most 4 modules", 4, True))


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 150
    limit = every.MAX_PLANS
    for name, most, along_chain in KINDS:
        every.MAX_PLANS = 0 if along_chain else limit
        started, worlds, plans = time.monotonic(), 0, 0
        for seed in range(count):
            found = compare(seed, most, along_chain)
            worlds, plans = worlds + bool(found), plans + found
        print(f"{name}: {worlds} worlds, {plans} plans, all equal, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
