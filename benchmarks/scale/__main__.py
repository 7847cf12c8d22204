"""``make bench-scale``: wall and CPU seconds, peak memory and outlined blocks of whole ``autoshard plan`` processes.

Each case runs in processes of its own: with an empty cache, again with the step that the first run kept, and without
outlining. CPU seconds are those of the process and its children, user and system. The last table is for scale: what
else reads a whole model before training, in processes of its own as well. A case for which no plan fits is said to be
so; its seconds are those up to that answer.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.scale.cases import CONFIGS, GROWTH, SIZES, USUAL

HERE = Path(__file__).parent
PEERS = {
    "import torch": "import torch",
    "import torch and transformers' Llama": "import torch; from transformers import LlamaForCausalLM",
    "fully_shard on meta, each block (8B)": "from benchmarks.scale.peers import shard; shard()",
    "FSDPMemTracker, one step (plain torch file)": "from benchmarks.scale.peers import track; track()",
    "accelerate": "import accelerate",
    "torchtitan": "import torchtitan",
}
"""Python code by what it does."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one process took: seconds of the clock and of the processor, MiB at the most, and its exit code."""

    wall: float
    cpu: float
    peak_mib: float
    code: int
    out: str


def measured(command: list[str], cache: Path) -> Cost:
    """Run a process and measure it."""
    environment = os.environ | {"AUTOSHARD_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as out:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - start
        out.seek(0)
        return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, process.returncode, out.read())


def plan(model: str, size: tuple[str, int], cache: Path, *options: str) -> Cost:
    """One ``autoshard plan``."""
    device, num_devices = size
    command = [sys.executable, "-m", "autoshard", "plan", model, "--device", device, "--devices", str(num_devices)]
    return measured([*command, *options], cache)


def row(name: str, model: str, size: tuple[str, int], *, is_full: bool) -> list[object]:
    """One line of the table: cold, warm, blocks, full."""
    with tempfile.TemporaryDirectory() as folder:
        cache, output = Path(folder) / "steps", str(Path(folder) / "plan.json")
        cold = plan(model, size, cache, "--quiet", "-o", output)
        warm = plan(model, size, cache, "--quiet", "-o", output)
        found = plan(model, size, cache, "--dump", "ir")
        full = plan(model, size, cache, "--quiet", "--no-outline", "-o", output) if is_full else None
    blocks = ", ".join(re.findall(r"^outlined: (\d+ of \d+) blocks", found.out, re.MULTILINE)) or "none"
    num_ops = re.findall(r"^region root .*: (\d+) forward ops, (\d+) backward ops", found.out, re.MULTILINE)
    note = {0: "", 3: "no plan fits"}.get(cold.code, cold.out.strip().splitlines()[-1][:60])
    return [
        name,
        *(f"{value:.1f}" for value in (cold.wall, cold.cpu)),
        f"{cold.peak_mib:.0f}",
        f"{warm.cpu:.1f}" if not warm.code else "",
        f"{full.cpu:.1f}" if full is not None else "",
        blocks,
        sum(map(int, num_ops[0])) if num_ops else "",
        note,
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("cases", nargs="*", help="names of cases (default: all)")
    parser.add_argument("--full", action="store_true", help="also without outlining")
    parser.add_argument("--modules", action="store_true", help="also DeepSeek-V3 with each expert a module")
    parser.add_argument("--peers", action="store_true", help="only what else reads a whole model")
    args = parser.parse_args()
    if args.peers:
        peers()
        return
    headers = ["case", "wall s", "CPU s", "peak MiB", "warm CPU s", "full CPU s", "outlined", "ops", "note"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, config in {**CONFIGS, **GROWTH}.items():
            if args.cases and name not in args.cases:
                continue
            path = Path(folder) / name.replace(" ", "-") / "config.json"
            path.parent.mkdir()
            path.write_text(json.dumps(config))
            rows.append(row(name, str(path), SIZES.get(name, USUAL), is_full=args.full))
            print(tabulate(rows[-1:], headers=headers, disable_numparse=True), flush=True)
        if not args.cases:
            rows.append(row("plain torch file", str(HERE / "plain.py"), ("h100-80gb", 8), is_full=args.full))
        if args.modules:
            rows.append(row("deepseek-v3, modules", str(HERE / "deepseek_modules.py"), ("h200", 2048), is_full=False))
    print("\n" + tabulate(rows, headers=headers, disable_numparse=True))


def peers() -> None:
    """What else reads a whole model before training."""
    rows = []
    for name, code in PEERS.items():
        cost = measured([sys.executable, "-c", code], Path("unused"))
        failed = "absent" if "ModuleNotFoundError" in cost.out else "failed"
        rows.append([name, f"{cost.cpu:.1f}", f"{cost.peak_mib:.0f}"] if not cost.code else [name, failed, ""])
    print(tabulate(rows, headers=["for scale", "CPU s", "peak MiB"], disable_numparse=True))


if __name__ == "__main__":
    main()
