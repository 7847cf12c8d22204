"""The stages in order. To be filled."""
