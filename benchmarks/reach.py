"""How many of transformers' architectures get a sound plan: ``make bench-reach`` runs it.

Every architecture that transformers knows and that builds on the meta device from its default configuration: the class
is the first match of causal LM, sequence to sequence, image and text, image classification, masked LM and base model,
the depth is cut to 4 layers for each stack by configuration, and the inputs are the ones that autoshard makes itself.
Each is planned for 8 devices of 80 GB in bf16 and the plan is verified.

A plan counts as sound if it was made from a traced step, no rule is broken, and of the parameters that may stand below
the root the root unit has at most a quarter of all; where the rest is more (an embedding that is tied to the head, at
four layers) its parameters are named. Models for which 8 devices are too few are planned for more. Refused rightly
means that autoshard said before any work that FSDP2 cannot shard the model, with a diagnostic.

One process for each model, so that one model's memory, time or crash is its own affair. Results are lines of JSON in
``build/reach.jsonl``; what stands there is not run again.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "reach.jsonl"
LAYERS = 4
SEQ = 128
DEVICE, DEVICES = "h100-80gb", (8, 64, 512)
LIMIT_S = 240
LIMIT_GIB = 7
ROOT_SHARE = 0.25
TAIL = 6
"""Frames of a traceback that are kept."""

DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth",
    "num_encoder_layers", "num_decoder_layers", "num_attention_layers", "encoder_num_layers", "decoder_num_layers",
    "num_blocks", "n_encoder_layers", "n_decoder_layers", "num_block_layers",
)  # fmt: skip
"""Names under which configurations keep the number of layers of a stack."""


def main() -> int:
    """Run what is missing, then print the counts and every failure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--only", nargs="*", help="model types to run, instead of all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run each N-th architecture only")
    parser.add_argument("--retry", choices=("failed", "all"), help="run these again although they have a result")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--dry-run", action="store_true", help="verify each plan by a dry run of the sharded model too")
    parser.add_argument("--one", nargs=2, metavar=("TYPE", "CLASS"), help="run one architecture here, print its line")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run_one(*args.one, dry_run=args.dry_run)))
        return 0
    wanted = architectures()
    if args.only:
        wanted = {kind: wanted[kind] for kind in args.only}
    wanted = dict(list(sorted(wanted.items()))[:: args.every])
    done = read(args.out)
    if args.retry:
        done = {kind: row for kind, row in done.items() if args.retry == "failed" and row["outcome"] in GOOD}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    missing = [kind for kind in wanted if kind not in done]
    options = ["--dry-run"] if args.dry_run else []
    with ThreadPoolExecutor(args.jobs) as pool, args.out.open("a") as out:
        for row in pool.map(lambda kind: in_a_process(kind, wanted[kind], options), missing):
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(f"{row['outcome']:<12} {row['type']:<32} {row['seconds']:6.1f} s  {row.get('reason', '')[:120]}")
    done = read(args.out)
    print(summary([done[kind] for kind in wanted]))
    return 0


GOOD = ("sound", "refused")
"""Outcomes that need no repair."""


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The last result of each architecture."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["type"]: row for row in map(json.loads, lines)}


def architectures() -> dict[str, str]:
    """Class of each model type."""
    from transformers.models.auto import modeling_auto as auto

    found: dict[str, str] = {}
    for name in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "IMAGE_CLASSIFICATION", "MASKED_LM"):
        for kind, cls in getattr(auto, f"MODEL_FOR_{name}_MAPPING_NAMES").items():
            found.setdefault(kind, cls if isinstance(cls, str) else cls[0])
    for kind, cls in auto.MODEL_MAPPING_NAMES.items():
        found.setdefault(kind, cls if isinstance(cls, str) else cls[0])
    return found


def in_a_process(kind: str, cls: str, options: list[str]) -> dict[str, Any]:
    """The result of one architecture, run in a process of its own."""
    start = time.monotonic()
    command = [sys.executable, __file__, "--one", kind, cls, *options]
    row: dict[str, Any] = {"type": kind, "class": cls}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, preexec_fn=limit_memory, env=quiet_environment()
        )
    except subprocess.TimeoutExpired:
        row |= {"outcome": "failed", "stage": "time", "reason": f"longer than {LIMIT_S} s"}
    else:
        try:
            row = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, json.JSONDecodeError):
            tail = " | ".join(done.stderr.strip().splitlines()[-3:])
            row |= {"outcome": "failed", "stage": "process", "reason": f"exit {done.returncode}: {tail[-300:]}"}
    row["seconds"] = round(time.monotonic() - start, 1)
    return row


def limit_memory() -> None:
    size = LIMIT_GIB << 30
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def quiet_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def run_one(kind: str, cls: str, *, dry_run: bool) -> dict[str, Any]:
    """Build, make inputs, plan and judge one architecture; whatever goes wrong is its result."""
    warnings.filterwarnings("ignore")
    row: dict[str, Any] = {"type": kind, "class": cls, "outcome": "failed", "stage": "build"}

    def stage(name: str) -> None:
        row["stage"] = name

    try:
        row |= planned(kind, cls, stage, dry_run=dry_run)
    except Exception as error:  # any failure of any model is a result
        from autoshard.errors import AutoshardError, NoLegalUnitError

        row["reason"] = f"{type(error).__name__}: {error}"[:2000]
        row["tail"] = [
            f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)
        ][-TAIL:]
        cause = error.__cause__
        if cause is not None:
            frames = traceback.extract_tb(cause.__traceback__)
            users = [frame for frame in frames if "/transformers/models/" in frame.filename]
            row["cause"] = [f"{Path(frame.filename).name}:{frame.lineno} {frame.line}" for frame in users[-3:]]
        if isinstance(error, NoLegalUnitError):
            row["outcome"] = "refused"
        elif row["stage"] == "build":
            row["outcome"] = "not built"
        row["handled"] = isinstance(error, AutoshardError)
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return row


def planned(kind: str, cls: str, stage: Callable[[str], None], *, dry_run: bool) -> dict[str, Any]:
    """The plan of one architecture, judged."""
    import transformers

    from autoshard.errors import InfeasibleBudgetError, ModelLoadError
    from autoshard.integrations.transformers import make_inputs
    from autoshard.integrations.transformers.configuration import build
    from autoshard.integrations.transformers.facts import longest_text
    from autoshard.pipeline import run_pipeline
    from autoshard.request import Request

    def make(is_cut: bool) -> Any:
        config = transformers.CONFIG_MAPPING[kind]()
        if is_cut:
            cut(config)
        fit(config)
        return build(kind, config, getattr(transformers, cls)).model

    try:
        model = make(is_cut=True)
    except ModelLoadError:  # lists by layer that do not survive the cut, or a class that does not build at all
        model = make(is_cut=False)
    stage("inputs")
    made = make_inputs(model, kind, seq=min(SEQ, longest_text(model.config) or SEQ))

    def plan(devices: int) -> Any:
        request = Request(device=DEVICE, devices=devices, precision="bf16")
        return run_pipeline(
            model, made.pair, loss=None, entry="forward", request=request, progress=stage, assumed=made.assumed
        )

    for devices in DEVICES:
        try:
            result = plan(devices)
            break
        except InfeasibleBudgetError:
            if devices == DEVICES[-1]:
                raise
    if dry_run:
        stage("dry run")
        verify_by_dry_run(model, made.pair, result)
    stage("judging")
    return judge(result)


def verify_by_dry_run(model: Any, pair: Any, result: Any) -> None:
    """One step of the sharded model on fake tensors; what is wrong is raised."""
    from autoshard.errors import VerificationError
    from autoshard.runtime.dryrun import dry_run

    found = tuple(d for d in dry_run(model, result.plan, pair, device_kind="cuda") if d.severity == "error")
    if found:
        raise VerificationError(found)


def judge(result: Any) -> dict[str, Any]:
    """Whether a verified plan is sound as the page counts it, and its facts."""
    sizes = {param.key: param.nbytes for param in result.graph.params}
    owned = root_params(result)
    total = sum(sizes.values())
    share = sum(owned.values()) / total if total else 0.0
    row: dict[str, Any] = {
        "outcome": "sound",
        "stage": "",
        "params": len(sizes),
        "gib": round(total / 2**30, 3),
        "units": len(result.plan.units),
        "root_share": round(share, 4),
        "soundness": result.plan.soundness,
        "optimal": result.plan.optimal.status,
        "loss": result.plan.provenance.loss,
        "codes": sorted({d.code for d in result.plan.diagnostics}),
        "inputs": list(result.plan.provenance.inputs),
    }
    if result.plan.soundness == "assumed":
        return row | {"outcome": "failed", "stage": "judging", "reason": "planned from the module tree"}
    if share <= ROOT_SHARE:
        return row
    largest = sorted(owned, key=lambda key: -owned[key])[:3]
    named = ", ".join(f"{key} {owned[key] / total:.0%}" for key in largest)
    row["reason"] = f"{share:.0%} of the parameters in the root: {named}"
    return row | {"outcome": "root" if divisible_bytes(result) > ROOT_SHARE * total else "sound", "stage": "judging"}


def root_params(result: Any) -> dict[str, int]:
    """Bytes of the parameters that the root unit owns, by key: those below no other unit."""
    units = {module for unit in result.plan.units for module in unit.modules if module}
    found = {}
    for param in result.graph.params:
        names = (param.key, *param.aliases)
        below = [any(name == unit or name.startswith(unit + ".") for unit in units) for name in names]
        if not any(below):
            found[param.key] = param.nbytes
    return found


def divisible_bytes(result: Any) -> int:
    """Bytes of the parameters that the root owns although the rules let a unit below it own them."""
    units = {module for unit in result.plan.units for module in unit.modules}
    below = {key for atom in result.analysis.space.atoms if atom.module not in units for key in atom.params}
    return sum(nbytes for key, nbytes in root_params(result).items() if key in below)


def cut(config: Any, depth: int = 0) -> None:
    """Leave each stack of layers at most four, also in the configurations within a configuration."""
    before = {name: getattr(config, name, None) for name in DEPTHS}
    for name, count in before.items():
        if isinstance(count, int) and not isinstance(count, bool) and count > LAYERS:
            try:
                setattr(config, name, LAYERS)
            except (AttributeError, NotImplementedError, ValueError):
                continue
    for name, value in list(vars(config).items()):
        is_list = isinstance(value, list) and len(value) > LAYERS
        if (
            is_list
            and len(value) in before.values()
            and any(word in name for word in ("layer", "mlp", "block", "type"))
        ):
            setattr(config, name, value[:LAYERS])
        if hasattr(value, "to_dict") and hasattr(value, "model_type") and depth < 4:
            cut(value, depth + 1)


def fit(config: Any) -> None:
    """Mend default configurations that do not run: widths and rotary sections that do not fit each other."""
    text, vision = getattr(config, "text_config", None), getattr(config, "vision_config", None)
    width = getattr(text, "hidden_size", None)
    if isinstance(width, int) and isinstance(getattr(vision, "out_hidden_size", None), int):
        vision.out_hidden_size = width
    elif isinstance(width, int) and vision is not None and config.model_type == "qwen2_vl":
        vision.hidden_size = width
    if getattr(config, "image_token_index", 0) is None:
        config.image_token_index = text.vocab_size - 1
    for part in (config, text):
        rope = getattr(part, "rope_parameters", None)
        if isinstance(rope, dict) and "mrope_section" in {*rope, *part.ignore_keys_at_rope_validation}:
            head = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
            pairs = -(-int(head * rope.get("partial_rotary_factor", 1.0)) // 2)
            if sum(rope.get("mrope_section", ())) != pairs:
                rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


def summary(rows: list[dict[str, Any]]) -> str:
    """Counts and every failure with its reason."""
    built = [row for row in rows if row["outcome"] != "not built"]
    counts = Counter(row["outcome"] for row in built)
    stages = Counter(row["stage"] for row in built if row["outcome"] == "failed")
    good = counts["sound"] + counts["refused"]
    lines = [
        "",
        f"{len(rows)} architectures, {len(built)} build from a default configuration",
        f"sound              {counts['sound']:4}  {counts['sound'] / max(len(built), 1):6.1%}",
        f"rightly refused    {counts['refused']:4}  together {good / max(len(built), 1):6.1%}",
        f"too much in root   {counts['root']:4}",
        f"failed             {counts['failed']:4}  {', '.join(f'{name} {n}' for name, n in stages.most_common())}",
        f"unhandled          {sum(not row.get('handled', True) for row in built):4}",
    ]
    for row in sorted(built, key=lambda row: (row["outcome"], row["stage"], row["type"])):
        if row["outcome"] != "sound" or row.get("reason"):
            place = f" [{'; '.join(row['cause'])}]" if row.get("cause") else ""
            lines.append(
                f"{row['outcome']:<8} {row['stage']:<12} {row['type']} {row['class']}: {row['reason'][:400]}{place}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
