"""pw: one ordinary Python process programs accelerators on many hosts as if they were its own."""

from __future__ import annotations

from importlib import metadata

__version__ = metadata.version("pw")
