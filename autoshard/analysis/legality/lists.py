"""List units: several modules in one ``fully_shard`` call.

Two uses. Neighbours in execution order may share a unit to save collectives. And modules that share a parameter, which
no unit of a single module could own, may own it together. FSDP2 unshards a list unit when its first member starts and
reshards it after the last, so every member must run, once, and backward must enter through the last one.
"""

from bisect import bisect_left

from autoshard.analysis.access import uncovered_reads
from autoshard.analysis.facts import Facts
from autoshard.analysis.legality.atoms import Draft, cover, escaping, owned_at_most, trainable_dtypes
from autoshard.analysis.legality.modules import bar
from autoshard.analysis.order import Run, read_positions


def groupable_pairs(draft: Draft) -> tuple[tuple[str, str], ...]:
    """Atoms that may share a list unit: one runs right after the other, each once, with one trainable dtype."""
    facts = draft.facts
    depth = {fqn: len(facts.tree.above(fqn)) for fqn in draft.atoms}
    starts = sorted(
        (run for fqn in draft.atoms for run in facts.runs.get(fqn, ())),
        key=lambda run: (run.start, -run.end, depth[run.module]),
    )
    positions = [run.start for run in starts]
    reads = read_positions(facts.graph)
    dtypes = {fqn: _member_dtypes(draft, fqn) for fqn in draft.atoms}
    pairs = []
    for run in starts:
        if dtypes[run.module] is None:
            continue
        for follower in _followers(facts, starts, bisect_left(positions, run.end), run):
            is_read_between = bisect_left(reads, run.end) < bisect_left(reads, follower.start)
            has_one_dtype = dtypes[run.module] == dtypes[follower.module]
            if has_one_dtype and not is_read_between and _is_hooked(facts, follower.module):
                pairs.append((run.module, follower.module))
    # Inner pairs first: the last pair of a module in either place is the outermost one.
    pairs.sort(key=lambda pair: -(depth[pair[0]] + depth[pair[1]]))
    return tuple(dict.fromkeys(pairs))


def _followers(facts: Facts, starts: list[Run], index: int, run: Run) -> list[Run]:
    """The first atom that starts after a run, and those that start first inside it."""
    found: list[Run] = []
    for place in range(index, len(starts)):
        candidate = starts[place]
        if found and not (facts.tree.is_inside(candidate.module, found[-1].module) and candidate.end <= found[-1].end):
            break
        if facts.tree.is_inside(candidate.module, run.module) or facts.tree.is_inside(run.module, candidate.module):
            break
        found.append(candidate)
    return found


def _member_dtypes(draft: Draft, fqn: str) -> frozenset[str] | None:
    """Trainable dtypes of an atom that may be a member of a list: it owns parameters and runs once."""
    runs = draft.facts.runs.get(fqn, ())
    keys = owned_at_most(draft, fqn)
    if fqn == "" or len(runs) != 1 or runs[0].end == runs[0].start or not keys:
        return None
    return frozenset(trainable_dtypes(draft.facts, keys))


def _is_hooked(facts: Facts, fqn: str) -> bool:
    """Backward enters the module through a result in which FSDP2 finds a tensor with a gradient."""
    span = facts.runs[fqn][-1].span
    return span.backward is not None and span.output_needs_grad


def joint_sets(draft: Draft) -> tuple[tuple[str, ...], ...]:
    """Sets of modules that may own the parameters that they share as one list unit, in execution order."""
    found: list[tuple[str, ...]] = []
    for param in draft.facts.graph.params:
        if len(param.holders) < 2 or param.key in draft.replicated:
            continue
        members = _members(draft, param.key)
        if members and not any(_conflict(draft.facts, members, other) for other in found):
            found.append(members)
    return tuple(found)


def _conflict(facts: Facts, members: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """The two lists name one module, or each contains a member of the other, so that neither can be applied first."""
    if set(members) & set(others):
        return True
    inner = any(facts.tree.is_inside(one, other) for one in members for other in others)
    outer = any(facts.tree.is_inside(other, one) for one in members for other in others)
    return inner and outer


def _members(draft: Draft, key: str) -> tuple[str, ...]:
    """The smallest modules, one for each holder of a parameter, that may be a list unit; empty if there are none."""
    facts = draft.facts
    holders = facts.tree.params[key].holders
    choices = [_hosts(facts, holder, holders) for holder in holders]
    if not all(choices):
        return ()
    chosen = [hosts[0] for hosts in choices]
    while _widen(draft, chosen, choices):
        pass
    members = tuple(sorted(set(chosen), key=lambda fqn: facts.runs[fqn][0].start))
    return members if len(members) > 1 and is_legal_list(draft, members) else ()


def _widen(draft: Draft, chosen: list[str], choices: list[list[str]]) -> bool:
    """Replace one chosen module by one around it that takes in a holder or a read outside; false if none does."""
    tree = draft.facts.tree
    inside = frozenset().union(*(tree.below(fqn) for fqn in chosen))
    for key in dict.fromkeys(key for fqn in chosen for key in owned_at_most(draft, fqn)):
        param = tree.params[key]
        outside = [frozenset((holder,)) for holder in param.holders if holder not in inside]
        wanted = [*outside, *map(frozenset, uncovered_reads(param, tuple(chosen)))]
        for names in wanted:
            for index, hosts in enumerate(choices):
                for host in hosts[hosts.index(chosen[index]) + 1 :]:
                    # A read needs the host on its stack, a holder needs to stand inside the host.
                    if host in names or (names in outside and names <= tree.below(host)):
                        chosen[index] = host
                        return True
    return False


def _hosts(facts: Facts, holder: str, holders: tuple[str, ...]) -> list[str]:
    """A holder and the modules around it, inner first, that run once and contain no other holder."""
    hosts = []
    fqn = holder
    while fqn and not any(other != holder and facts.tree.is_inside(other, fqn) for other in holders):
        if facts.tree.nodes[fqn].has_forward and len(facts.runs.get(fqn, ())) == 1:
            hosts.append(fqn)
        fqn = facts.tree.nodes[fqn].parent
    return hosts


def is_legal_list(draft: Draft, members: tuple[str, ...]) -> bool:
    """Modules, none an atom, that FSDP2 can shard as one list unit whatever other atoms are units."""
    facts, tree = draft.facts, draft.facts.tree
    inside = frozenset().union(*(tree.below(member) for member in members))
    if any(tree.is_inside(one, other) for one in members for other in members if one != other):
        return False
    shared = [cover(draft, fqn) for fqn in escaping(facts, inside, members)]
    if any(atoms is None or not set(atoms) <= draft.required.keys() for atoms in shared):
        return False
    keys = tuple(dict.fromkeys(key for member in members for key in owned_at_most(draft, member)))
    params = [tree.params[key] for key in keys]
    return (
        not any(holder not in inside for param in params for holder in param.holders)
        and not any(uncovered_reads(param, members) for param in params)
        and len(trainable_dtypes(facts, keys)) <= 1
        and _is_hooked(facts, members[-1])
        and not any(bar(facts, member, ()) for member in members)
    )
