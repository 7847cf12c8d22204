"""Do the plans train: ``make bench-reach-train`` runs it.

Sixty of transformers' architectures, evenly over all, and a dozen well-known ones are made small by their
configuration, planned for two CPU processes in fp32, and trained for three steps under their plan on two gloo ranks.
Beside it each rank trains unsharded copies, one for each rank's inputs, and averages their gradients. Losses must be
equal in each step, and parameters after the last. Ranks that wait for each other are ended after a minute without a
word, and the unit at work is named.

Planning and training of a model run in processes of their own. Results are lines of JSON in
``build/reach-train.jsonl``; what stands there is not run again.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.reach import pool
from benchmarks.reach.__main__ import LIMIT_GIB, ROOT, TRAINED, preload, read, write_pages

RESULTS = ROOT / "build" / "reach-train.jsonl"
STEPS = 3
DEVICES = 2
LIMIT_S = 900


def main() -> int:
    """Train what is missing, then print the counts and every failure; 1 if there is a failure."""
    from benchmarks.reach.small import DOZEN, sample

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", help="model types to train, instead of all")
    parser.add_argument("--dozen", action="store_true", help="train the dozen only")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time, two processes each")
    parser.add_argument("--retry", choices=("failed", "all"), help="train these again although they have a result")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--keep", action="store_true", help=f"write the results to {TRAINED.relative_to(ROOT)}")
    args = parser.parse_args()
    preload()
    classes = sample()
    wanted = list(DOZEN) if args.dozen else args.only or list(classes)
    done = read(args.out)
    again = {"all": set(wanted), "failed": {kind for kind, row in done.items() if row["outcome"] != "equal"}}
    missing = [kind for kind in wanted if kind not in done or kind in again.get(args.retry, ())]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = pool.run_all(
        [(kind, classes[kind]) for kind in missing],
        train_one,
        lambda job, reason: {"type": job[0], "class": job[1], "outcome": "failed", "reason": reason},
        at_a_time=args.jobs,
        limit_s=lambda job: LIMIT_S,
        limit_bytes=LIMIT_GIB << 30,
    )
    with args.out.open("a") as out:
        for row in rows:
            out.write(json.dumps(row) + "\n")
            out.flush()
            reason = " ".join(row.get("reason", "").split())[:200]
            print(f"{row['outcome']:<8} {row['type']:<32} {row['seconds']:6.1f} s  {reason}", flush=True)
    done = read(args.out)
    found = [done[kind] for kind in wanted]
    equal = sum(row["outcome"] == "equal" for row in found)
    print(f"\n{equal} of {len(found)} train {STEPS} steps on {DEVICES} ranks with the losses of one process")
    for row in found:
        if row["outcome"] != "equal":
            print(f"{row['outcome']:<8} {row['type']} {row['class']}: {row['reason'][:600]}")
    if args.keep:
        TRAINED.write_text("".join(json.dumps(done[kind]) + "\n" for kind in sorted(done)))
        write_pages()
    return int(equal < len(found))


def train_one(job: tuple[str, str]) -> dict[str, Any]:
    """Plan one architecture and train it under the plan; whatever goes wrong is its result.

    The plan is made in a process of its own (what a model caches while it is captured must not reach the training), and
    so the ranks take over nothing but imports.
    """
    from autoshard.plan import decode_plan
    from autoshard.runtime.trial import train_beside_reference

    kind, cls = job
    row: dict[str, Any] = {"type": kind, "class": cls, "outcome": "failed"}
    start = time.monotonic()
    (made,) = pool.run_all(
        [job],
        plan_one,
        lambda job, reason: {"reason": f"planning: {reason}"},
        at_a_time=1,
        limit_s=lambda job: LIMIT_S,
        limit_bytes=LIMIT_GIB << 30,
    )
    if "plan" not in made:
        return row | {"reason": made["reason"]}
    plan = decode_plan(made["plan"])
    row |= {"mib": made["mib"], "units": len(plan.units), "plan_s": round(time.monotonic() - start, 1)}
    try:
        found = train_beside_reference(made["load"], plan, STEPS, start="fork")
    except Exception as error:  # any failure of any model is a result
        return row | {"reason": f"training: {type(error).__name__}: {error}"[:2000]}
    wrong = [str(each) for each in found]
    return row | ({"reason": "; ".join(wrong)[:2000]} if wrong else {"outcome": "equal"})


def plan_one(job: tuple[str, str]) -> dict[str, Any]:
    """The plan of the small model, and how to load it."""
    from autoshard import Request, make_plan
    from autoshard.plan import encode_plan
    from benchmarks.reach.small import loader

    try:
        load, num_bytes = loader(*job)
        case = load()
        request = Request(device="cpu", devices=DEVICES, precision="fp32", root_percent=25)
        plan = make_plan(case.model, list(case.pairs[:1]), request=request, verify="dry-run")
    except Exception as error:  # any failure of any model is a result
        return {"reason": f"planning: {type(error).__name__}: {error}"[:2000]}
    return {"plan": encode_plan(plan), "load": load, "mib": round(num_bytes / 2**20, 1)}


if __name__ == "__main__":
    sys.exit(main())
