"""The version, on its own: pyproject.toml and every module may read it."""

__version__ = "0.1.0"
