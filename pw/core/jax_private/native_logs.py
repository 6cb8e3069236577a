"""What the native code of jaxlib writes to standard error."""

from __future__ import annotations

from jaxlib import utils

set_min_level = utils.absl_set_min_log_level
"""Let native code log nothing below a level: 1 is warnings, 2 errors. Public: none once jaxlib is loaded."""
