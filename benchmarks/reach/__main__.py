"""How many models get a sound plan: ``make bench-reach`` runs it.

Every architecture that transformers knows and that builds on the meta device from its default configuration, with four
layers a stack (sixty of them as deep as they are), and models of other libraries. Inputs are the ones that autoshard
makes itself. Each is planned for 8 devices of 80 GB in bf16, for more where those are too few, and the plan is verified
by the rules and by a dry run of the sharded model.

A plan counts as sound if it was made from a traced step, neither level of verification finds a fault, and the root unit
has at most a quarter of the parameters. Where it has more although no unit, of one module or of several, may hold the
rest, the model counts as sound too and its parameters are named. Refused rightly means that autoshard said before any
work that FSDP2 cannot shard the model, with a diagnostic, or that the model has no training step.

One process for each model, so that one model's memory, time or crash is its own affair. Results are lines of JSON in
``build/reach.jsonl``; what stands there is not run again. ``--keep`` writes them to ``benchmarks/reach/results.jsonl``.
"""

import argparse
import json
import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "build" / "reach.jsonl"
KEPT = Path(__file__).parent / "results.jsonl"
TRAINED = Path(__file__).parent / "trained.jsonl"
LIMIT_S = {"cut": 900, "full": 1800, "none": 900}
LIMIT_GIB = 6
STRIDE = 11

Job = tuple[str, str, str]
"""Model type or name, class, and depth: cut, full, or none for a model of another library."""


def main() -> int:
    """Run what is missing, then print the counts and every failure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--only", nargs="*", help="models to run, instead of all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run each N-th model only")
    parser.add_argument("--retry", choices=("failed", "all"), help="run these again although they have a result")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--rules-only", action="store_true", help="verify by the rules, without dry runs")
    parser.add_argument(
        "--keep", action="store_true", help=f"write the results to {KEPT.relative_to(ROOT)} and the figures to the docs"
    )
    args = parser.parse_args()
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"})
    wanted = wanted_jobs()
    if args.only:
        wanted = [job for job in wanted if job[0] in args.only]
    wanted = wanted[:: args.every]
    done = read(args.out)
    skipped = {job[0] for job in wanted if job[0] in done and not is_again(done[job[0]], args.retry)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    run([job for job in wanted if job[0] not in skipped], args)
    done = read(args.out)
    report([done[job[0]] for job in wanted if job[0] in done])
    if args.keep:
        KEPT.write_text("".join(json.dumps(compact(done[kind])) + "\n" for kind in sorted(done)))
        write_pages()
    return 0


def write_pages() -> None:
    """Bring README and docs up to the kept results."""
    from benchmarks.reach.page import write

    write(ROOT, list(read(KEPT).values()), list(read(TRAINED).values()))


def wanted_jobs() -> list[Job]:
    """Every model: the architectures that build by default, the deep ones last, then those that need more.

    Like ones stand apart, so that the results of a run that was stopped tell of all kinds.
    """
    from benchmarks.reach.architectures import architectures, keep_depth, peers
    from benchmarks.reach.others import OTHERS

    classes = architectures()
    known = peers()
    full = keep_depth([kind for kind in classes if kind in known])
    jobs = [(kind, cls, "full" if kind in full else "cut") for kind, cls in classes.items()]
    others = [(name, "", "none") for name in OTHERS]
    apart = {job[0]: place % STRIDE for place, job in enumerate(jobs)}
    return [*sorted(jobs, key=lambda job: (job[0] not in known, job[2] == "full", apart[job[0]])), *others]


def run(jobs: list[Job], args: argparse.Namespace) -> None:
    """Do the jobs and write the row of each as it ends."""
    from benchmarks.reach import pool

    preload()
    verify = "rules" if args.rules_only else "dry-run"
    rows = pool.run_all(
        jobs,
        partial(work, verify=verify),
        lambda job, reason: {
            "type": job[0], "class": job[1], "outcome": "failed", "stage": reason.partition(":")[0], "reason": reason,
            "depth": job[2], "handled": False,
        },
        at_a_time=args.jobs,
        limit_s=lambda job: LIMIT_S[job[2]],
        limit_bytes=LIMIT_GIB << 30,
    )  # fmt: skip
    with args.out.open("a") as out:
        for number, row in enumerate(rows, start=1):
            out.write(json.dumps(row) + "\n")
            out.flush()
            place = f"{number}/{len(jobs)}"
            reason = " ".join(row.get("reason", "").split())[:120]
            print(f"{place:>9} {row['outcome']:<10} {row['type']:<32} {row['seconds']:6.1f} s  {reason}", flush=True)


def preload() -> None:
    """Import what every job needs, before any is forked."""
    from benchmarks.reach.torchvision_ops import declare

    declare()
    for name in (
        "transformers.modeling_utils",
        "autoshard.integrations.transformers.configuration",
        "autoshard.pipeline",
        "autoshard.runtime.dryrun",
    ):
        import_module(name)


def work(job: Job, *, verify: str) -> dict[str, Any]:
    """The row of one job."""
    from benchmarks.reach.one import architecture, run_one
    from benchmarks.reach.others import OTHERS, attempt_other

    kind, cls, depth = job
    if depth == "none":
        missing = OTHERS[kind].missing
        if missing:
            reason = f"not installed: {', '.join(missing)}"
            return {"type": kind, "class": cls, "outcome": "not built", "stage": "build", "reason": reason}
        return run_one(kind, cls, attempt_other(kind, verify=verify))
    return run_one(kind, cls, architecture(kind, cls, is_full=depth == "full", verify=verify))


def is_again(row: dict[str, Any], retry: str | None) -> bool:
    """Whether a model that has a result is to be run again."""
    from benchmarks.reach.summary import GOOD

    return retry == "all" or (retry == "failed" and row["outcome"] not in GOOD)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The last result of each model."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["type"]: row for row in map(json.loads, lines)}


def report(rows: list[dict[str, Any]]) -> None:
    """Print the counts of the architectures that build by default, of those that need more, and of other libraries."""
    from benchmarks.reach.architectures import peers
    from benchmarks.reach.others import OTHERS
    from benchmarks.reach.summary import peers_summary, summary

    known = peers()
    print(
        summary([row for row in rows if row["type"] in known], "architectures that build from a default configuration")
    )
    print(peers_summary())
    more = [row for row in rows if row["type"] not in known and row["type"] not in OTHERS]
    print(summary(more, "architectures that need more than that to build"))
    print(summary([row for row in rows if row["type"] in OTHERS], "models of other kinds and libraries"))


def compact(row: dict[str, Any]) -> dict[str, Any]:
    """What of a row is worth keeping in the repository."""
    dropped = (
        ("tail", "inputs", "codes", "handled", "loss", "stage") if row["outcome"] == "sound" else ("tail", "inputs")
    )
    return {name: value for name, value in row.items() if name not in dropped}


if __name__ == "__main__":
    sys.exit(main())
