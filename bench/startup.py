"""The time from an empty process to its first result; the paper has no such table.

Every reading is a new Python process, which prints the time from its first line to its first value.
The time of `import jax` is part of all readings and is measured as well. Only the file system's
pages and Python's byte code are cached between processes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from bench import measure, report
from bench.baselines.peer import ROOT, environment
from bench.measure import GaveUp

LIMIT_S = 120.0
IMPORT, EMBEDDED = "import jax", "pw, embedded"
HOSTS = (1, 2, 4)
FOUR = "pw, cluster of 4"

FIRST_RESULT = """
import numpy as np, pw
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices={devices}).devices, ("d",))
total = pw.jit(lambda x: x.sum(), mesh=mesh, in_shardings=pw.PartitionSpec("d"))
assert np.asarray(total(np.ones({devices}, np.float32))) == {devices}
"""

SCRIPTS = {
    IMPORT: "import jax",
    "JAX": "import jax, numpy as np; assert np.asarray(jax.jit(lambda x: x.sum())(np.ones(1))) == 1",
    EMBEDDED: FIRST_RESULT.format(devices=1),
    **{
        f"pw, cluster of {hosts}": f"import pw\ncluster = pw.LocalCluster(hosts_per_island={hosts})"
        + FIRST_RESULT.format(devices=hosts)
        for hosts in HOSTS
    },
}


def run(quick: bool) -> report.Result:
    """Measure the first result, embedded and on clusters of 1, 2 and 4 hosts."""
    names = (IMPORT, EMBEDDED) if quick else tuple(SCRIPTS)
    result = report.Result("startup", "seconds from the first line of a script to its first value")
    samples = measure.alternate(
        {name: _reading(SCRIPTS[name]) for name in names},
        rounds=1 if quick else 4,
        warm_up=0 if quick else 1,
        notes=result.notes,
    )
    result.compare(samples, unit="s", baseline=IMPORT)
    imports, embedded, four = (samples.get(name) for name in (IMPORT, EMBEDDED, FOUR))
    if imports is not None and embedded is not None:
        beyond = embedded.minus(imports).median
        result.at_most(2.0, beyond, "embedded, seconds beyond `import jax`")
    if four is not None:
        text = "a cluster of four worker processes to the first result, seconds"
        result.at_most(6.0, four.median, text)
    result.notes.append("a host is two processes: a supervisor, and the runtime that it restarts")
    return result


def _reading(script: str) -> Callable[[], float]:
    """A case: the seconds that the lines of the script take in a new process, without its end."""
    settings = environment() | {"JAX_PLATFORMS": "cpu", "PW_EMBEDDED_DEVICES": "1"}
    clocked = (
        "import time\nstarted = time.perf_counter()\n"
        f"{script}\nprint('took', time.perf_counter() - started)"
    )

    def reading() -> float:
        command = [sys.executable, "-c", clocked]
        try:
            done = subprocess.run(
                command, env=settings, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired as error:
            raise GaveUp(f"it took more than {LIMIT_S:.0f} s") from error
        lines = [line for line in done.stdout.splitlines() if line.startswith("took ")]
        if done.returncode or not lines:
            raise GaveUp(f"the script ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return float(lines[-1].split()[1])

    return reading
