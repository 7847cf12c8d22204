"""Rules about the root, which is a unit in every plan, and about what no plan can help."""

from autoshard.analysis.facts import Facts
from autoshard.analysis.legality.atoms import Draft, outermost, trainable_dtypes
from autoshard.analysis.legality.modules import EXACT_TYPE, hidden_output
from autoshard.findings import Finding
from autoshard.ir import LOSS


def must_keep_root(draft: Draft) -> bool:
    """The root may not reshard after forward; requires an atom, and says why, where that is the reason.

    Two reasons. Code after the root's forward reads parameters. Or the root's result holds no tensor on which FSDP2
    could put its pre-backward hook: then nothing gathers the root's parameters again, and the end of backward is seen
    only if a unit inside the root has such a hook.
    """
    read = loss_reads(draft.facts)
    for key in read:
        message = "the loss reads it after the root's forward, so the root stays unsharded until backward"
        draft.findings.append(Finding(code="AS207", severity="note", where=key, message=message))
    reason = next(filter(None, map(hidden_output, draft.facts.runs.get("", ()))), None)
    if reason is None:
        return bool(read)
    hooked = _last_hooked_leaf(draft)
    if hooked:
        draft.required[hooked] = None
        reason += f"; so the root stays unsharded until backward, and {hooked} is a unit of its own"
    draft.findings.append(
        Finding(
            code="AS217",
            severity="warning" if hooked else "error",
            where="(root)",
            message=reason,
            remedy="return a tensor, tuple, list, dict or dataclass of tensors from the root's forward",
        )
    )
    return True


def _last_hooked_leaf(draft: Draft) -> str:
    """The last atom to run that trains, has no atom inside, and whose results take a hook; empty if there is none."""
    facts = draft.facts
    for fqn in reversed(facts.order):
        if fqn == "" or fqn not in draft.atoms or outermost(draft, fqn):
            continue
        spans = [run.span for run in facts.runs.get(fqn, ())]
        is_hooked = all(span.backward is not None and span.output_needs_grad for span in spans)
        if spans and is_hooked and trainable_dtypes(facts, facts.tree.keys(fqn)):
            return fqn
    return ""


def loss_reads(facts: Facts) -> tuple[str, ...]:
    """Keys of the parameters that code after the root's forward reads."""
    return tuple(param.key for param in facts.graph.params if any(stack[:1] == (LOSS,) for stack in param.readers))


def hookless_modules(facts: Facts) -> list[Finding]:
    """Modules that take no hooks although every plan puts them below a unit."""
    found = []
    for node in facts.graph.modules:
        if "script" in node.traits and facts.tree.keys(node.fqn):
            message = "it is a ScriptModule with parameters, which takes no hooks"
            found.append(_hookless(node.fqn, message, "plan the module before torch.jit"))
        if "lazy" in node.traits:
            message = "it is a lazy module whose parameters have no shapes yet"
            found.append(_hookless(node.fqn, message, "run one forward before planning, or give the sizes"))
    return found


def exact_root(facts: Facts) -> list[Finding]:
    """The root is a unit in every plan, so its class may not be asked for."""
    root = facts.tree.nodes[""]
    if EXACT_TYPE not in root.traits:
        return []
    name = root.class_name.rpartition(".")[2]
    message = f"the step asks for its exact class ({name}), and fully_shard gives the root a derived one"
    remedy = "ask with isinstance, or by an attribute of the class"
    return [Finding(code="AS227", severity="error", where="(root)", message=message, remedy=remedy)]


def _hookless(fqn: str, message: str, remedy: str) -> Finding:
    return Finding(code="AS202", severity="error", where=fqn or "(root)", message=message, remedy=remedy)
