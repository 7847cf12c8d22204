"""Is what is projected what is measured? ``make bench-memory`` runs it.

Each of the models is sharded in each of the configurations and trained for real on this machine: real tensors on the
CPU, FSDP2's own code through ``apply_plan``, and a fake process group of the plan's size in one process. Measured is
what was alive at once in each phase of a step, by a dispatch mode that sees every storage; projected is what the
simulation says of the same graph and plan. A cell's error is the difference of a phase's peaks as a part of the largest
measured peak of the step.

Beside it, in one configuration, stand torch's ``FSDPMemTracker`` on the same work, around the first step of a process
(cold: the temporaries of DTensor's sharding propagation are counted as if they had memory) and around the second one
(warmed), and a calculator. Not covered: whatever only a device has (its kernels, fused optimizers, allocator).

Every model has a process of its own. Results are lines of JSON in ``build/memory.jsonl``; each run begins anew, and
``--keep`` writes them to ``benchmarks/memory/results.jsonl``.
"""

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.memory.cell import cells
from benchmarks.memory.configurations import CONFIGURATIONS
from benchmarks.memory.models import MODELS
from benchmarks.memory.peers import peers
from benchmarks.memory.table import format_results

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "build" / "memory.jsonl"
KEPT = Path(__file__).parent / "results.jsonl"
LIMIT_S = 900


def main() -> int:
    """Measure all cells, print the tables; 1 if some model failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=[model.name for model in MODELS], help="only these")
    parser.add_argument("--configurations", nargs="*", default=[one.name for one in CONFIGURATIONS], help="only these")
    parser.add_argument("--no-peers", action="store_true", help="leave FSDPMemTracker and the calculator out")
    parser.add_argument("--keep", action="store_true", help="write the results to the repository")
    parser.add_argument("--print", action="store_true", help="print the tables of the results in the repository")
    parser.add_argument("--one", metavar="MODEL", help="measure one model here and print its lines")
    parser.add_argument("--peers", metavar="MODEL", help="ask the others about one model here and print the line")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    by_name = {model.name: model for model in MODELS}
    if args.one:
        for line in cells(by_name[args.one], args.configurations):
            print(json.dumps(line), flush=True)
        return 0
    if args.peers:
        print(json.dumps(peers(by_name[args.peers])), flush=True)
        return 0
    if args.print:
        print(format_results([json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()]))
        return 0
    lines: list[dict[str, Any]] = []
    for name in args.models:
        lines += _in_a_process("--one", name, args.configurations)
        if not args.no_peers and by_name[name].takes_bf16:
            lines += _in_a_process("--peers", name, ())
        print(f"{name}: {sum(1 for line in lines if line['model'] == name)} lines", file=sys.stderr, flush=True)
    out = KEPT if args.keep else RESULTS
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(format_results(lines))
    return int(any(line["state"] == "failed" for line in lines))


def _in_a_process(option: str, name: str, configurations: Iterable[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.memory", option, name]
    if configurations:
        command += ["--configurations", *configurations]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        lines.append({"model": name, "state": "failed", "configuration": option, "message": last})
    return lines


if __name__ == "__main__":
    sys.exit(main())
