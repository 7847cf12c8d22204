"""JSON Schema of a plan file, made from the types, their docstrings and the rules.

For editors and for tools in other languages. The loader is stricter: it also knows the rules that span fields.
"""

import re
from typing import Any

import msgspec

from autoshard.errors import Diagnostic
from autoshard.plan import rules
from autoshard.plan.schema import (
    VERSION,
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

STRUCTS: tuple[type[msgspec.Struct], ...] = (
    Plan,
    Axis,
    Precision,
    Unit,
    Method,
    Optimal,
    Projection,
    PhasePeak,
    Part,
    Stretch,
    Alternative,
    Diagnostic,
    Provenance,
)
"""All types of which a plan file is made, the file itself first."""

_DTYPE = {"enum": list(rules.PRECISION_DTYPES)}
_FORMS: dict[tuple[str, str], dict[str, Any]] = {
    ("Plan", "version"): {"const": VERSION},
    ("Plan", "fingerprint"): {"pattern": f"^{rules.FINGERPRINT_FORM}$"},
    ("Plan", "mesh"): {"minItems": 1, "maxItems": 2},
    ("Plan", "units"): {"minItems": 1},
    ("Plan", "soundness"): {"enum": list(rules.SOUNDNESS)},
    ("Axis", "size"): {"minimum": 1},
    ("Axis", "role"): {"enum": list(rules.ROLES)},
    ("Precision", "param"): _DTYPE,
    ("Precision", "reduce"): _DTYPE,
    ("Precision", "output"): _DTYPE,
    ("Unit", "modules"): {"minItems": 1},
    ("Unit", "digest"): {"pattern": f"^{rules.DIGEST_FORM}$"},
    ("Optimal", "status"): {"enum": list(rules.OPTIMAL_STATUS)},
    ("PhasePeak", "phase"): {"enum": list(rules.PHASES)},
    ("Stretch", "phase"): {"enum": list(rules.PHASES)},
    ("Alternative", "verdict"): {"enum": list(rules.VERDICTS)},
    ("Diagnostic", "code"): {"pattern": f"^{rules.CODE_FORM}$"},
    ("Diagnostic", "where"): {"minLength": 1},
    ("Provenance", "frontend"): {"enum": list(rules.FRONTENDS)},
}


def plan_json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a plan file."""
    whole = msgspec.json.schema(Plan)
    for struct in STRUCTS:
        described = whole["$defs"][struct.__name__]
        descriptions = field_descriptions(struct)
        described["description"] = summary(struct)
        for name, schema in described["properties"].items():
            schema.update(_FORMS.get((struct.__name__, name), {}))
            if schema.get("type") == "integer" and "const" not in schema:
                schema.setdefault("minimum", 0)
            schema["description"] = descriptions[name]
        if not struct.__struct_config__.omit_defaults:
            # Defaults are for Python; a file says all that it means.
            described["required"] = list(described["properties"])
            for schema in described["properties"].values():
                schema.pop("default", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "autoshard plan", **whole}


def summary(struct: type[msgspec.Struct]) -> str:
    """First line of a type's docstring."""
    return (struct.__doc__ or "").strip().splitlines()[0]


def field_descriptions(struct: type[msgspec.Struct]) -> dict[str, str]:
    """What each field means, from the ``Attributes`` of the docstrings, in the order of the fields."""
    found: dict[str, str] = {}
    for part in struct.__mro__:
        _, _, attributes = (part.__doc__ or "").partition("Attributes:\n")
        for name, text in re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", attributes, re.MULTILINE):
            found.setdefault(name, " ".join(text.split()))
    return {name: found[name] for name in struct.__struct_fields__}
