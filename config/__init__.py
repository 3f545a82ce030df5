"""Presets. A package, so that one of the same name elsewhere does not hide it."""
