"""Pages of the reference that are made from the code, so that they cannot lag behind it.

``docs/reference/diagnostics.md`` and ``docs/reference/plan-file.md`` are golden files of these functions.
"""

import re

import msgspec

from autoshard.plan.json_schema import STRUCTS, field_descriptions, summary
from autoshard.plan.save import FIELD_ORDER
from autoshard.plan.schema import Plan
from autoshard.plan.supported import unsupported
from autoshard.report.explain import explain, list_codes, title

_STAGES = {
    "1": "Capture (AS1xx)",
    "2": "Legality (AS2xx)",
    "3": "Planning (AS3xx)",
    "4": "Run time (AS4xx)",
}

_DIAGNOSTICS_HEAD = """\
# Diagnostics

What the stages have to say about a model. A diagnostic has a code, a severity (`error` refuses, `warning` asks for
attention, `note` tells), a place, a message and a remedy. It stands in the plan, and `autoshard explain CODE` prints
its section of this page.
"""

_PLAN_FILE_HEAD = """\
# The plan file

One JSON object in UTF-8. The fields down to `gradient_sync` are what `apply_plan` and `accumulate` do; those after it
are for people and never change what is applied. The same plan always has the same bytes: fields in this order,
mappings sorted, no time, host or path. Every field is required but those marked as optional, which are left out at
their default.

The loader is strict: an unknown, missing, repeated or wrongly typed field is a `PlanFormatError` with its JSON path; a
`version` that this release cannot read is a `PlanVersionError`; and what `apply_plan` of this release cannot do yet
is refused by name: {not_yet}.

Beyond the types it holds that

- the mesh has one axis (`shard`) or two (`replicate`, then `shard`) with distinct names and sizes from 1;
- each module stands in one unit, before its ancestors; the last unit is the root, `[""]`, alone;
- names are paths in a model, digests and the fingerprint have their form, counts and bytes are not negative, and tensor
  dims in `shard_dims` are 1 or more.

[`plan.schema.json`](plan.schema.json) is the JSON Schema, for editors and other languages.
"""


def diagnostics_page() -> str:
    """The page of all diagnostics: a list, then the explanations by stage."""
    codes = list_codes()
    lines = [_DIAGNOSTICS_HEAD, *(f"- [{code}](#{_anchor(code)}): {title(code)}" for code in codes), ""]
    for digit, stage in _STAGES.items():
        of_stage = [code for code in codes if code[2] == digit]
        if of_stage:
            lines += [f"## {stage}\n", *(_one_level_down(explain(code)).rstrip() + "\n" for code in of_stage)]
    return "\n".join(lines).rstrip() + "\n"


def plan_file_page() -> str:
    """The page of the fields of a plan, from the docstrings of the schema."""
    parts = [_PLAN_FILE_HEAD.replace("{not_yet}", ", ".join(unsupported()))]
    for struct in STRUCTS:
        name = "The file" if struct is Plan else struct.__name__
        parts.append(f"## {name}\n\n{_markdown(summary(struct))}\n\n{_fields(struct)}")
    return "\n".join(parts)


def _fields(struct: type[msgspec.Struct]) -> str:
    descriptions = field_descriptions(struct)
    may_be_left_out = struct.__struct_config__.omit_defaults
    optional = {field.name for field in msgspec.structs.fields(struct) if may_be_left_out and not field.required}
    rows = ["| field | meaning |", "| --- | --- |"]
    for name in FIELD_ORDER if struct is Plan else struct.__struct_fields__:
        mark = " (optional)" if name in optional else ""
        rows.append(f"| `{name}`{mark} | {_markdown(descriptions[name])} |")
    return "\n".join(rows) + "\n"


def _markdown(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def _anchor(code: str) -> str:
    # As hosts of Markdown make it from the heading `ASnnn: title`.
    heading = f"{code}: {title(code)}".lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def _one_level_down(text: str) -> str:
    in_code = False
    lines = []
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        lines.append("##" + line if line.startswith("#") and not in_code else line)
    return "\n".join(lines)
