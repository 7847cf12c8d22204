"""Hand-made plans for tests of everything that reads a plan; no torch and no pipeline.

The figures are primes where they can be, so that no two fields can be mixed up unseen.
"""

import hashlib
from typing import Any

from autoshard.errors import Diagnostic
from autoshard.plan import (
    Alternative,
    Axis,
    Method,
    Optimal,
    Part,
    PhasePeak,
    Plan,
    Precision,
    Projection,
    Provenance,
    Stretch,
    Unit,
)

GIB = 2**30


def unit(*modules: str, num_params: int = 3, num_bytes: int = 1009, **fields: Any) -> Unit:
    """A unit with a plausible digest."""
    digest = hashlib.sha256("\n".join(sorted(modules)).encode()).hexdigest()[:16]
    fields = {"reshard": modules != ("",), **fields}
    return Unit(modules=modules, num_params=num_params, num_bytes=num_bytes, digest=digest, **fields)


def small_plan(**fields: Any) -> Plan:
    """Two blocks between an embedding and a head, on two devices."""
    values: dict[str, Any] = {
        "version": 1,
        "fingerprint": "sha256:" + "0123456789abcdef" * 4,
        "mesh": (Axis(name="shard", size=2, role="shard"),),
        "precision": Precision(),
        "units": (
            unit("embed", num_params=1, num_bytes=7001),
            unit("layers.0", num_params=9, num_bytes=5003),
            unit("layers.1", num_params=9, num_bytes=5003),
            unit("norm", "head", num_params=2, num_bytes=7013, reshard=False),
            unit("", num_params=0, num_bytes=0, reshard=False),
        ),
        "soundness": "rules",
        "optimal": Optimal(status="heuristic", bound_ns=0, gap=-1.0, space="legal cuts"),
        "projection": Projection(
            allowed_bytes=268435456,
            peak_bytes=104729,
            steady_bytes=36015,
            by_kind={"activations": 50021, "gradients": 12007, "optimizer": 24013, "parameters": 18688},
            peak_at="backward, layers.1, its gradients are reduced",
            phases=(
                PhasePeak(
                    phase="forward",
                    peak_bytes=88001,
                    peak_at="forward, head: aten.mm",
                    end_bytes=61001,
                    by_kind={"activations": 63988, "optimizer": 24013},
                ),
                PhasePeak(
                    phase="backward",
                    peak_bytes=104729,
                    peak_at="backward, layers.1, its gradients are reduced",
                    end_bytes=48023,
                    by_kind={"activations": 50021, "gradients": 12007, "optimizer": 24013, "parameters": 18688},
                ),
            ),
            parts=(
                Part(kind="activations", where="layers.*.mlp", num_bytes=50021),
                Part(kind="optimizer", where="", num_bytes=24013),
                Part(kind="parameters", where="layers.1", num_bytes=18688),
                Part(kind="gradients", where="(the rest)", num_bytes=12007),
            ),
            course=(
                Stretch(phase="forward", peak_bytes=88001, peak_at="forward, head: aten.mm", end_ns=433231),
                Stretch(phase="backward", peak_bytes=104729, peak_at="backward, layers.1", end_ns=1299709),
            ),
            step_ns=1299709,
            exposed_ns=15485,
            num_all_gathers=7,
            num_reduce_scatters=5,
            num_all_reduces=0,
            all_gather_bytes=48611,
            reduce_scatter_bytes=24019,
            all_reduce_bytes=0,
            not_modelled=("fragmentation of the allocator",),
        ),
        "alternatives": (
            Alternative(name="root only", verdict="does not fit", num_units=1, peak_bytes=GIB, step_ns=1200007),
            Alternative(name="by class names", verdict="fits", num_units=4, peak_bytes=120011, step_ns=1300021),
            Alternative(name="by size", verdict="not legal", num_units=3, reasons=("AS205 embed",)),
        ),
        "diagnostics": (
            Diagnostic(code="AS203", severity="warning", where="head", message="is tied", remedy="nothing to do"),
            Diagnostic(code="AS204", severity="note", where="layers", message="has no forward"),
        ),
        "provenance": Provenance(
            autoshard="0.1.0",
            torch="2.13.0",
            frontend="trace",
            device="cpu",
            optimizer="adamw",
            loss="the field loss of the outputs",
            inputs=("args[0]: int64[2, 16]",),
            assumed=("precision=fp32 (default on cpu)",),
        ),
        **fields,
    }
    return Plan(**values)


def full_plan() -> Plan:
    """A plan in which every field of the schema stands with a value that is not its default."""
    base = small_plan()
    return small_plan(
        entry="training_step",
        mesh=(Axis(name="replicate", size=3, role="replicate"), Axis(name="shard", size=5, role="shard")),
        precision=Precision(param="bfloat16", reduce="float32", output="float16", cast_inputs=False),
        units=(
            unit("模块.0", shard_dims={"模块.0.weight": 1, "模块.0.bias": 2}),
            *base.units,
        ),
        recompute=("layers.0", "layers.1"),
        compile=("layers.1",),
        methods=(Method(module="embed", method="encode"), Method(module="", method="generate")),
        replicated=("scale",),
        reduce_unused=True,
        rebuilt_buffers=("rope.inv_freq",),
        offload="cpu",
        micro_batches=3,
        gradient_sync="last",
        soundness="dry-run",
        optimal=Optimal(status="bounded", bound_ns=1299000, gap=0.000546, space="legal cuts, reshard"),
    )


def deep_plan(num_blocks: int = 126) -> Plan:
    """A decoder whose blocks are all equal."""
    blocks = tuple(unit(f"model.layers.{i}", num_params=9, num_bytes=3 * GIB) for i in range(num_blocks))
    return small_plan(
        units=(
            unit("model.embed_tokens", num_params=1, num_bytes=2 * GIB),
            *blocks,
            unit("model.norm", "lm_head", num_params=2, num_bytes=2 * GIB, reshard=False),
            unit("", num_params=0, num_bytes=0, reshard=False),
        )
    )
