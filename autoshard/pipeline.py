"""The stages in order: capture → analysis → planner → verify → plan.

The first file to read. Every arrow is one frozen value; no stage calls the next one, only this file does. A plan that
is there already, whoever made it, is verified by the same stages: capture → analysis → verify. The file is long because
both ways and their entries, with all that they take, are to be read in one place.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec

from autoshard import __version__
from autoshard.analysis import Analysis, analyze
from autoshard.errors import Diagnostic, GraphError, RequestError, VerificationError
from autoshard.hardware import known_profiles, load_profile
from autoshard.ir import ModelGraph
from autoshard.ir.check import check
from autoshard.plan import Alternative, Decisions, Plan, Projection, Provenance, fingerprint
from autoshard.plan.fingerprint import FingerprintItems
from autoshard.plan.schema import VERSION
from autoshard.planner import Baseline, Found, baselines, compiled_blocks, search, with_small_root
from autoshard.request import LEVELS, Question, Request, resolve
from autoshard.simulate import (
    Timeline,
    not_modelled,
    peak_parts,
    phase_peaks,
    profile_step,
    stretches,
    uncertainty,
)
from autoshard.verify import verify_plan

if TYPE_CHECKING:
    from torch import nn

    from autoshard.capture.model_file import ModelFile

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
GivenInputs = Inputs | Sequence[Inputs] | Callable[..., Inputs | Sequence[Inputs]]
"""One pair, a list of pairs where the model takes different paths, or what makes either."""
Progress = Callable[[str], None]
DefaultInputs = Callable[["nn.Module"], tuple[GivenInputs, tuple[str, ...]] | None]
"""Inputs for a model that came without, and what had to be assumed for them; ``None`` if none can be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A plan and the values from which it was made.

    Attributes:
        plan: the answer.
        graph: the captured step.
        analysis: the facts about it.
        question: the request with nothing open.
        timeline: the step under the plan.
    """

    plan: Plan
    graph: ModelGraph
    analysis: Analysis
    question: Question
    timeline: Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the stages after capture make of a question.

    Attributes:
        question: the request with nothing open.
        analysis: the facts about the graph.
        found: the plan and what it costs.
        alternatives: the baselines, priced by the same fold.
        told: what is worth knowing of the plan.
    """

    question: Question
    analysis: Analysis
    found: Found
    alternatives: tuple[Alternative, ...]
    told: tuple[Diagnostic, ...] = ()


def make_plan(
    model: "nn.Module",
    inputs: GivenInputs | None = None,
    loss: Callable[[Any], Any] | None = None,
    entry: str | None = None,
    request: Request | None = None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    frontend: str = "trace",
    verify: str = "rules",
) -> Plan:
    """The plan for a model.

    Args:
        model: on a real device or on meta; it is left as it was.
        inputs: ``(args, kwargs)`` of one training step, a list of such pairs where the model takes different paths,
            or a callable of batch and seq that returns either.
        loss: from the outputs to a scalar; without it a scalar is found in the outputs.
        entry: the method that runs the step, ``forward`` if not given.
        request: what is asked; all defaults if not given.
        batch: batch size to ask the callable for.
        seq: sequence length to ask the callable for. A step of very many tokens is extrapolated from small captures
            where they agree, and a note in the plan says so.
        frontend: ``trace``, or ``tree`` to plan from the module tree alone (the plan is then ``assumed``).
        verify: ``rules``, or ``dry-run`` to run one step of the sharded model on fake tensors as well.

    Raises:
        RequestError: the request is not a question, or there are no inputs and ``tree`` was not asked for.
        CaptureError: the step does not run on these inputs.
        NoLegalUnitError: FSDP2 cannot shard the model.
        InfeasibleBudgetError: no plan fits.
        VerificationError: the plan is not right for the model.

    Examples:
        >>> import torch, autoshard
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> request = autoshard.Request(device="cpu", devices=2)
        >>> plan = autoshard.make_plan(model, inputs=((torch.randn(4, 8),), {}), request=request)
        >>> plan.units[-1].modules
        ('',)
    """
    if batch is not None or seq is not None:
        from autoshard.capture.inputs import read_pairs

        inputs = sized_inputs(functools.partial(read_pairs, inputs), batch, seq)
    return run_pipeline(
        model,
        inputs,
        loss=loss,
        entry="forward" if entry is None else entry,
        request=Request() if request is None else request,
        frontend=frontend,
        verify=verify,
    ).plan


def plan_model_file(
    spec: str,
    request: Request,
    *,
    batch: int | None = None,
    seq: int | None = None,
    image_size: int | None = None,
    entry: str | None = None,
    frontend: str = "trace",
    outline: bool = True,
    verify: str = "rules",
    attention: str | None = None,
    default_inputs: DefaultInputs = lambda model: None,
    progress: Progress = lambda stage: None,
) -> PlanResult:
    """The plan for a model file (``model.py``, ``model.py:factory`` or ``package.module:factory``).

    Args:
        spec: names the file.
        request: what is asked.
        batch: batch size for the file's ``example_inputs``.
        seq: sequence length for the file's ``example_inputs``.
        image_size: edge of an image for the file's ``example_inputs``.
        entry: the method that runs the step.
        frontend: ``trace`` or ``tree``.
        outline: trace blocks that are alike once; the plan is the same.
        verify: ``rules`` or ``dry-run``.
        attention: ``sdpa`` to exchange calls of flash_attn by calls that keep the same tensors.
        default_inputs: asked for inputs where the file gives none; may answer ``None``.
        progress: told the name of each stage as it begins.

    Raises:
        ModelLoadError: the file does not give a model or inputs.
        AutoshardError: whatever ``make_plan`` raises.
    """
    resolve(request)  # a bad option is told before any work
    progress(f"loading {spec}")
    from autoshard.capture import build_model, load_model_file
    from autoshard.capture.substitute import ASSUMED, substituted

    with substituted(attention):
        model_file: ModelFile = load_model_file(spec)
        model = build_model(model_file, attention)
        inputs: GivenInputs | None = None
        assumed: tuple[str, ...] = ()
        if frontend != "tree":
            made = default_inputs(model) if model_file.example_inputs is None else None
            if made is None:
                made = sized_inputs(lambda batch, seq: model_file.inputs(batch, seq, image_size), batch, seq), ()
            inputs, assumed = made
        return run_pipeline(
            model,
            inputs,
            loss=model_file.loss,
            entry="forward" if entry is None else entry,
            request=request,
            frontend=frontend,
            outline=outline,
            verify=verify,
            progress=progress,
            assumed=assumed if attention is None else (ASSUMED, *assumed),
        )


def run_pipeline(
    model: "nn.Module",
    inputs: GivenInputs | None,
    *,
    loss: Callable[[Any], Any] | None,
    entry: str,
    request: Request,
    frontend: str = "trace",
    outline: bool = True,
    verify: str = "rules",
    progress: Progress = lambda stage: None,
    assumed: tuple[str, ...] = (),
) -> PlanResult:
    """All stages in order; ``assumed`` is what was assumed of the model and its inputs before."""
    if not isinstance(request, Request):
        raise RequestError("request", request, "an autoshard.Request", "write request=autoshard.Request(devices=8, …)")
    if loss is not None and not callable(loss):
        raise RequestError("loss", loss, "a function from the outputs to one scalar", "write loss=lambda outputs: …")
    if not isinstance(entry, str) or not entry.isidentifier():
        raise RequestError("entry", entry, "the name of a method of the model")
    _require_level(verify, frontend)
    from autoshard.capture import find_accelerator

    question = resolve(request, find_accelerator())

    progress("capturing one training step")
    methods = named_methods(model, request.methods)
    graph = capture_step(model, inputs, loss, entry, question, frontend, outline, methods)
    answer = plan_graph(graph, question, methods, progress)
    if graph.frontend == "trace" and graph.compute_dtype != question.compute_dtype:
        # The step does not run in the precision that was asked for. Units cast what comes in, which may be enough: the
        # best plan is tried, then the one with the smallest root, then the stored dtypes are.
        progress("running one step of the sharded model")
        failure = _failure(model, answer.found.decisions, inputs, loss, question, graph)
        if failure:
            cut = plan_graph(graph, replace(question, root_percent=0), methods, progress)
            if _failure(model, cut.found.decisions, inputs, loss, question, graph):
                asked, question = question, resolve(replace(request, precision="fp32"), find_accelerator())
                answer = plan_graph(graph, question, methods, progress)
                answer = replace(answer, told=(*answer.told, _in_stored_dtypes(asked, failure)))
            else:
                answer = replace(cut, question=question, told=tuple(d for d in cut.told if d.code != "AS303"))
    found = answer.found
    told = answer.told
    if verify == "dry-run":
        progress("running one step of the sharded model")
        told = (*told, *_dry_run(model, found.decisions, inputs, loss, question.profile.kind, graph))
        if any(d.severity == "error" for d in told):
            raise VerificationError(tuple(d for d in told if d.severity == "error"))

    plan = _assemble(graph, answer, assumed, verify, told)
    return PlanResult(plan=plan, graph=graph, analysis=answer.analysis, question=question, timeline=found.timeline)


def _failure(
    model: "nn.Module",
    decisions: Decisions,
    inputs: GivenInputs | None,
    loss: Callable[[Any], Any] | None,
    question: Question,
    graph: ModelGraph,
) -> str:
    """Why the sharded model does not run one step, empty if it does."""
    import torch.distributed as dist

    if dist.is_initialized():
        return "not tried, since there is a process group already"
    found = _dry_run(model, decisions, inputs, loss, question.profile.kind, graph)
    return next((f"{each.where}: {each.message}" for each in found if each.severity == "error"), "")


def _in_stored_dtypes(asked: Question, failure: str) -> Diagnostic:
    return Diagnostic(
        code="AS302",
        severity="warning",
        where="precision",
        message=f"the step does not run with parameters in {asked.compute_dtype}, the sharded model neither "
        f"({failure}); this plan computes in the stored dtypes",
        remedy="cast what meets the parameters there, such as a buffer, and plan again",
    )


def plan_captured(
    graph: ModelGraph, question: Question, assumed: tuple[str, ...], progress: Progress = lambda stage: None
) -> PlanResult:
    """The plan for a step that was captured before; verified by the rules, without torch.

    Args:
        graph: captured in the question's compute dtype for its kind of device.
        question: what is asked; it registers no methods.
        assumed: what was assumed of the model and its inputs.
        progress: told the name of each stage as it begins.

    Raises:
        AutoshardError: whatever ``plan_graph`` raises.
    """
    answer = plan_graph(graph, question, (), progress)
    plan = _assemble(graph, answer, assumed, "rules", answer.told)
    return PlanResult(
        plan=plan, graph=graph, analysis=answer.analysis, question=question, timeline=answer.found.timeline
    )


def plan_graph(
    graph: ModelGraph,
    question: Question,
    methods: tuple[tuple[str, str], ...] = (),
    progress: Progress = lambda stage: None,
) -> Answer:
    """The stages after capture: one captured step serves any number of questions about the same kind of device.

    Args:
        graph: captured in the question's compute dtype for its kind of device.
        question: what is asked.
        methods: ``(module, method)`` pairs to register.
        progress: told the name of each stage as it begins.

    Raises:
        NoLegalUnitError: FSDP2 cannot shard the model.
        InfeasibleBudgetError: no plan fits.
        VerificationError: the plan is not right for the graph.
    """
    progress("analysing")
    analysis = analyze(graph, num_shards=question.num_shards, methods=methods)

    progress("planning")
    profile = profile_step(graph, question)
    known = baselines(graph, analysis, question)
    findings = [verify_plan(base.decisions, graph, analysis) for base in known]
    reasons = [tuple({f"{d.code} {d.where}": None for d in found if d.severity == "error"}) for found in findings]
    legal = [base for base, reason in zip(known, reasons, strict=True) if not reason]
    found = search(graph, analysis, question, profile, legal)
    found, held = with_small_root(
        found, graph, analysis, question, profile, lambda decisions: not _broken(decisions, graph, analysis), legal
    )
    if question.compile == "blocks":
        compiled = msgspec.structs.replace(found.decisions, compile=compiled_blocks(graph, analysis))
        found = replace(found, decisions=compiled)

    progress("verifying")
    broken = _broken(found.decisions, graph, analysis)
    if broken:
        raise VerificationError(broken)
    alternatives = tuple(
        _alternative(base, reason, found.priced[base.candidate] if not reason else None, question)
        for base, reason in zip(known, reasons, strict=True)
    )
    return Answer(question=question, analysis=analysis, found=found, alternatives=alternatives, told=held)


def verify_model(
    model: "nn.Module",
    plan: Decisions,
    inputs: GivenInputs,
    loss: Callable[[Any], Any] | None = None,
    *,
    level: str = "dry-run",
    progress: Progress = lambda stage: None,
) -> tuple[Diagnostic, ...]:
    """Everything that is wrong with a plan for a model, and what is worth knowing; errors first within each level.

    Args:
        model: on a real device or on meta; it is left as it was.
        plan: whoever made it.
        inputs: as for ``make_plan``.
        loss: as for ``make_plan``.
        level: ``rules``, or ``dry-run`` for the rules and a dry run.
        progress: told the name of each stage as it begins.

    Raises:
        RequestError: ``level`` is unknown, or there is a process group where a dry run makes its own.
        CaptureError: the step of the unsharded model does not run on these inputs.

    Examples:
        >>> import torch, autoshard
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> inputs = ((torch.randn(4, 8),), {})
        >>> plan = autoshard.make_plan(model, inputs, request=autoshard.Request(device="cpu", devices=2))
        >>> verify_model(model, plan, inputs)
        ()
    """
    _require_level(level, "trace")
    if not callable(getattr(model, plan.entry, None)):
        what = f"it is to run the step, but {type(model).__name__} has no such method"
        return (Diagnostic(code="AS230", severity="error", where=plan.entry, message=what),)
    from autoshard.capture import capture

    kind = _device_kind(plan)
    progress("capturing one training step")
    dtype = "float32" if plan.precision.param == "same" else plan.precision.param
    named = dict(model.named_modules(remove_duplicate=False))
    planned = tuple((method.module, method.method) for method in plan.methods)
    methods = tuple(each for each in planned if callable(getattr(named.get(each[0]), each[1], None)))
    options: dict[str, Any] = {"compute_dtype": dtype, "device_kind": kind, "methods": methods}
    graph = _checked(capture(model, inputs, loss=loss, entry=plan.entry, **options))
    progress("verifying")
    found = verify_plan(plan, graph, analyze(graph, num_shards=plan.num_shards, methods=methods))
    if level == "dry-run":
        progress("running one step of the sharded model")
        found = (*found, *_dry_run(model, plan, inputs, loss, kind, graph))
    return found


def verify_model_file(
    plan: Decisions,
    spec: str,
    *,
    level: str = "dry-run",
    batch: int | None = None,
    seq: int | None = None,
    image_size: int | None = None,
    attention: str | None = None,
    default_inputs: DefaultInputs = lambda model: None,
    progress: Progress = lambda stage: None,
) -> tuple[Diagnostic, ...]:
    """Everything that is wrong with a plan for the model of a model file.

    Args:
        plan: whoever made it.
        spec: names the file, as for ``plan_model_file``.
        level: ``rules`` or ``dry-run``.
        batch: batch size for the file's ``example_inputs``.
        seq: sequence length for the file's ``example_inputs``.
        image_size: edge of an image for the file's ``example_inputs``.
        attention: as for ``plan_model_file``.
        default_inputs: asked for inputs where the file gives none; may answer ``None``.
        progress: told the name of each stage as it begins.

    Raises:
        ModelLoadError: the file does not give a model or inputs.
        AutoshardError: whatever ``verify_model`` raises.
    """
    _require_level(level, "trace")
    progress(f"loading {spec}")
    from autoshard.capture import build_model, load_model_file
    from autoshard.capture.substitute import substituted

    with substituted(attention):
        model_file = load_model_file(spec)
        model = build_model(model_file, attention)
        made = default_inputs(model) if model_file.example_inputs is None else None
        inputs = model_file.inputs(batch, seq, image_size) if made is None else made[0]
        return verify_model(model, plan, inputs, model_file.loss, level=level, progress=progress)


def _require_level(level: str, frontend: str) -> None:
    if level not in LEVELS:
        raise RequestError("verify", level, " or ".join(LEVELS))
    if level == "dry-run" and frontend == "tree":
        raise RequestError(
            "verify",
            level,
            "rules, since a plan made from the module tree alone has no step to run",
            "give example inputs and leave out frontend=tree, or verify by the rules",
        )


def _device_kind(plan: Decisions) -> str:
    """Whose kernels run under a plan: those of its device if its profile is known here, else CUDA's."""
    if not isinstance(plan, Plan):
        return "cpu"
    name = plan.provenance.device
    return load_profile(name).kind if name in known_profiles() else "cuda"


def _dry_run(
    model: "nn.Module",
    decisions: Decisions,
    inputs: GivenInputs | None,
    loss: Callable[[Any], Any] | None,
    kind: str,
    graph: ModelGraph,
) -> tuple[Diagnostic, ...]:
    # Imported here: a plan without a dry run needs no torch.distributed.
    from autoshard.capture.inputs import read_pairs
    from autoshard.runtime import dry_run

    pairs = read_pairs(inputs)
    # What the graph says holds for all pairs together; each of several is asked for its own gradients.
    trained = {param.key for param in graph.params if param.gets_grad} if len(pairs) == 1 else None
    return dry_run(model, decisions, pairs, loss, graph.entry, device_kind=kind, trained=trained)


def capture_step(
    model: "nn.Module",
    inputs: GivenInputs | None,
    loss: Callable[[Any], Any] | None,
    entry: str,
    question: Question,
    frontend: str = "trace",
    outline: bool = True,
    methods: tuple[tuple[str, str], ...] = (),
) -> ModelGraph:
    """One training step of a model, captured for a question's device and precision, and checked.

    Raises:
        RequestError: there are no inputs, or no such front end.
        CaptureError: the step does not run on these inputs.
        GraphError: what was captured is not consistent.
    """
    # Imported here, as everywhere in this file: a question about a step that was captured before needs no torch.
    from autoshard.capture import capture, capture_tree
    from autoshard.capture.sizes import SizedInputs, capture_far

    if frontend == "tree":
        return _checked(capture_tree(model, entry=entry))
    if frontend != "trace":
        raise RequestError("frontend", frontend, "trace or tree")
    if inputs is None:
        raise RequestError(
            "inputs",
            None,
            "the inputs of one training step",
            "define example_inputs() in the model file, or pass inputs=(args, kwargs); frontend=tree plans from the "
            "module tree alone and marks the plan as assumed",
        )
    options: dict[str, Any] = {
        "loss": loss,
        "entry": entry,
        "compute_dtype": question.compute_dtype,
        "device_kind": question.profile.kind,
        "outline": outline,
        "methods": methods,
    }
    if isinstance(inputs, SizedInputs):
        return _checked(capture_far(inputs, lambda pairs: capture(model, pairs, **options)))
    return _checked(capture(model, inputs, **options))


def sized_inputs(
    make: Callable[[int | None, int | None], tuple[Inputs, ...]], batch: int | None, seq: int | None
) -> GivenInputs:
    """Pairs of inputs in a size; where it is far, what makes them in any size.

    Args:
        make: pairs of a batch size and a sequence length.
        batch: batch size that is asked.
        seq: sequence length that is asked.

    Raises:
        AutoshardError: whatever ``make`` raises.
    """
    from autoshard.capture.sizes import SizedInputs, is_far

    return SizedInputs(make=make, batch=batch, seq=seq) if is_far(batch, seq) else make(batch, seq)


def _checked(graph: ModelGraph) -> ModelGraph:
    violations = check(graph)
    if violations:
        raise GraphError(violations)
    return graph


def named_methods(model: "nn.Module", named: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The methods that a request names, as ``(module, method)``.

    Raises:
        RequestError: there is no such module or method.
    """
    if not named:
        return ()  # a tree that holds itself has no end to look through, and capture tells of it
    pairs = []
    modules = dict(model.named_modules(remove_duplicate=False))
    for text in named:
        module, colon, method = text.rpartition(":")
        if not colon or not method:
            raise RequestError(
                "method",
                text,
                "MODULE:METHOD, such as codec:encode",
                "name the module by its path and the method by its name",
            )
        if module not in modules:
            raise RequestError(
                "method", text, f"a module of the model; there is no {module}", "name one of model.named_modules()"
            )
        if method.startswith("__") or not callable(getattr(modules[module], method, None)):
            raise RequestError("method", text, f"a method of {module or 'the root'} ({type(modules[module]).__name__})")
        pairs.append((module, method))
    return tuple(pairs)


def _alternative(
    base: Baseline, reasons: tuple[str, ...], timeline: Timeline | None, question: Question
) -> Alternative:
    num_units = len(base.decisions.units)
    if timeline is None:
        return Alternative(name=base.name, verdict="not legal", num_units=num_units, reasons=reasons)
    fits = timeline.peak_bytes <= question.allowed_bytes
    return Alternative(
        name=base.name,
        verdict="fits" if fits else "does not fit",
        num_units=num_units,
        peak_bytes=timeline.peak_bytes,
        step_ns=timeline.step_ns,
    )


def _broken(decisions: Decisions, graph: ModelGraph, analysis: Analysis) -> tuple[Diagnostic, ...]:
    return tuple(d for d in verify_plan(decisions, graph, analysis) if d.severity == "error")


def _projection(timeline: Timeline, question: Question, graph: ModelGraph) -> Projection:
    projection = msgspec.structs.replace(
        timeline.projection(question),
        phases=phase_peaks(timeline),
        parts=peak_parts(timeline, graph),
        course=stretches(timeline),
        not_modelled=not_modelled(timeline, graph, question),
    )
    unseen = []
    if graph.frontend == "tree":
        unseen.append(
            "activations, temporaries of ops and the time of all computation, which the module tree does not show"
        )
    if question.compile == "blocks":
        unseen.append(uncertainty())
    return msgspec.structs.replace(projection, not_modelled=(*unseen, *projection.not_modelled))


def _fingerprint_items(graph: ModelGraph) -> FingerprintItems:
    return FingerprintItems(
        params=tuple((each.key, each.aliases, each.shape, each.dtype, each.requires_grad) for each in graph.params),
        buffers=tuple(buffer.name for buffer in graph.buffers),
    )


def _assemble(
    graph: ModelGraph,
    answer: Answer,
    assumed: tuple[str, ...],
    level: str,
    told: tuple[Diagnostic, ...],
) -> Plan:
    found, question = answer.found, answer.question
    decisions = found.decisions
    return Plan(
        **{name: getattr(decisions, name) for name in decisions.__struct_fields__},
        version=VERSION,
        fingerprint=fingerprint(_fingerprint_items(graph), decisions.named_modules),
        soundness="assumed" if graph.frontend == "tree" else level,
        optimal=found.optimal,
        projection=_projection(found.timeline, question, graph),
        alternatives=answer.alternatives,
        diagnostics=(
            *graph.diagnostics,
            *answer.analysis.space.diagnostics,
            *told,
        ),
        provenance=Provenance(
            autoshard=__version__,
            torch=version("torch").partition("+")[0],
            frontend=graph.frontend,
            device=question.profile.name,
            optimizer=question.optimizer,
            zero_grad=question.zero_grad,
            clip=question.clip,
            loss=graph.loss,
            inputs=tuple(f"{info.name}: {info.dtype}{list(info.shape)}" for info in graph.inputs),
            assumed=(*question.assumed, *assumed),
        ),
    )
