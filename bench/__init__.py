"""Benchmarks of the runtime beside its baselines: ``python -m bench`` or ``make bench``.

Each benchmark is a module with ``run(quick) -> Result``. It measures through the public API.
"""

import os

os.environ.setdefault("PW_ADVICE", "0")  # benchmarks do on purpose what scripts should not
