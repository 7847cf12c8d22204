"""transformers: models by their configuration, and inputs without effort. The library is imported when asked for."""

from autoshard.integrations.transformers.configuration import build_from_config, is_config
from autoshard.integrations.transformers.inputs import MadeInputs, has_config, make_inputs

__all__ = ["MadeInputs", "build_from_config", "has_config", "is_config", "make_inputs"]
