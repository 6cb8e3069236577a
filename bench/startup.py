"""How long it takes from an empty process to a first result. The paper does not say; a user notices every day.

Every reading is a fresh Python process that tells how long it took from its first line to the first value, so
what `import jax` costs is in all of them and is measured as well. Nothing is cached between them but the file
system's pages and Python's byte code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from bench import measure, report
from bench.baselines.peer import CPU_SETTINGS, ROOT
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
    result.rows = report.rows(samples, unit="s", baseline=IMPORT)
    imports, embedded, four = (samples.get(name) for name in (IMPORT, EMBEDDED, FOUR))
    if imports is not None and embedded is not None:
        pairs = zip(embedded.values, imports.values, strict=True)
        beyond = measure.Sample(tuple(first - bare for first, bare in pairs))
        text = "embedded, seconds beyond `import jax`"
        result.bars.append(report.Bar(text, beyond.median, 2.0, at_least=False))
    if four is not None:
        text = "a cluster of four worker processes to the first result, seconds"
        result.bars.append(report.Bar(text, four.median, 6.0, at_least=False))
    result.notes.append(
        "a host is two processes: a supervisor, and the runtime that it watches over"
    )
    return result


def _reading(script: str) -> Callable[[], float]:
    """Seconds that the lines of the script take in a process of its own; its end is not part of them."""
    environment = {k: v for k, v in os.environ.items() if k not in CPU_SETTINGS}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PW_EMBEDDED_DEVICES": "1"}
    clocked = (
        "import time\nstarted = time.perf_counter()\n"
        f"{script}\nprint('took', time.perf_counter() - started)"
    )

    def reading() -> float:
        command = [sys.executable, "-c", clocked]
        try:
            done = subprocess.run(
                command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired as error:
            raise GaveUp(f"it took more than {LIMIT_S:.0f} s") from error
        told = [line for line in done.stdout.splitlines() if line.startswith("took ")]
        if done.returncode or not told:
            raise GaveUp(f"the script ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return float(told[-1].split()[1])

    return reading
