"""``python -m tests.jax_suite [FILE ...] --jax CHECKOUT``: see `python -m tests.jax_suite --help`."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import signal
import sys
from pathlib import Path

import tests.jax_suite
from tests.jax_suite.child import Order, chosen
from tests.jax_suite.compare import Comparison, compare
from tests.jax_suite.processes import FileRun, run_file
from tests.jax_suite.records import Baseline, not_passed, write_results
from tests.jax_suite.report import table, write_markdown

GOAL = "pjit pmap shard_map api random random_lax lax lax_control_flow python_callback export linalg lax_numpy"
"""The files that the goal is about; the default."""
OTHERS = (
    "array aot multi_device memories layout device debug_nans debugging_primitives checkify jax_jit "
    "lax_autodiff lax_numpy_indexing lax_numpy_operators lax_numpy_reducers lax_scipy lax_vmap nn "
    "image fft dtypes ode sparse_bcoo_bcsr mutable_array state buffer_callback colocated_python "
    "linalg_sharding custom_partitioning transfer_guard stack"
)
"""Files that use the backend in other ways; `--others` adds them."""

RESULTS = Path(__file__).resolve().parent / "results" / "results.json"


def main(arguments: list[str] | None = None) -> int:
    """Run the files; returns 0 if no test failed that passes with plain JAX."""
    options = parse(arguments)
    out: Path = options.out
    logs = out.parent / f"{out.stem}-logs"
    logs.mkdir(parents=True, exist_ok=True)
    baseline = Baseline(options.baseline, settings_of(options))
    again = options.again and not_passed(options.again)
    comparisons: list[Comparison] = []
    runs: dict[str, FileRun] = {}
    for file in options.files:
        plain = baseline.get(file, options.match, options.sample)
        if plain is None:
            say(f"{file}: plain JAX")
            plain = run(file, "cpu", options, logs)
            baseline.put(file, options.match, options.sample, plain)
        wanted = [
            test
            for test, outcome in plain.outcomes.items()
            if outcome.outcome == "passed"
            and chosen(test, options.match, options.sample)
            and (again is None or test in again.get(file, ()))
        ]
        say(
            f"{file}: {len(wanted)} tests pass with plain JAX in {plain.seconds:g} s {plain.broken}"
        )
        if options.platform == "cpu" or (again is not None and not wanted):
            continue
        runs[file] = run(file, options.platform, options, logs, wanted)
        comparisons.append(compare(file, wanted, runs[file]))
        say(table(comparisons[-1:]) + "\n")
        write_results(out, options.platform, settings_of(options), comparisons, runs)
        if options.markdown is not None:
            write_markdown(options.markdown, comparisons)
    if len(comparisons) > 1:
        say(table(comparisons))
    return int(any(comparison.failed for comparison in comparisons))


def run(
    file: str, platform: str, options: argparse.Namespace, logs: Path, only: list[str] | None = None
) -> FileRun:
    order = Order(
        file=file,
        events="",
        jax=str(options.jax),
        match=options.match,
        sample=options.sample,
        only=only,
    )
    log = logs / f"{file.removesuffix('.py')}.{platform.replace(',', '-')}.log"
    return run_file(
        order, environment(platform, options), log, options.seconds, options.processes, say
    )


def environment(platform: str, options: argparse.Namespace) -> dict[str, str]:
    """The variables of a process that runs tests; both platforms have the same settings of JAX."""
    devices = "JAX_NUM_CPU_DEVICES" if platform == "cpu" else "PW_DEVICES"
    islands = {} if platform == "cpu" else {"PW_ISLANDS": str(options.islands)}
    return {
        **os.environ,
        "JAX_ENABLE_CHECKS": "1",
        "JAX_NUM_GENERATED_CASES": str(options.cases),
        "JAX_SKIP_SLOW_TESTS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_PLATFORMS": platform,
        devices: str(options.devices),
        **islands,
        **options.env,
    }


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """What a baseline depends on."""
    jax_settings = {name: value for name, value in options.env.items() if name.startswith("JAX_")}
    return {
        "jax": installed(),
        "devices": str(options.devices),
        "cases": str(options.cases),
        **jax_settings,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.jax_suite",
        description=tests.jax_suite.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE", help="pjit or pjit_test.py; default: the goal's files")
    add("--others", action="store_true", help="also the files that the goal does not name")
    add("--jax", metavar="DIR", help="a checkout of JAX (default: $JAX_SOURCE)")
    add("--platform", default="pw", help="JAX_PLATFORMS of the second run; cpu: the first run only")
    add(
        "--islands", type=int, default=1, help="over how many islands the devices lie (%(default)s)"
    )
    add("--devices", type=int, default=8, help="how many devices (%(default)s)")
    add("--seconds", type=float, default=120, help="limit of one test (%(default)s)")
    add(
        "--processes",
        type=int,
        default=30,
        help="give a file up after so many processes that ended early",
    )
    add("--cases", type=int, default=1, help="JAX_NUM_GENERATED_CASES (%(default)s)")
    add("-k", dest="match", default="", metavar="REGEX", help="tests whose Class.name has this")
    add("--sample", type=int, default=1, metavar="N", help="every N-th test, always the same ones")
    add("--again", type=Path, metavar="FILE", help="only tests that did not pass in these results")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of both runs")
    add("--baseline", type=Path, metavar="FILE", help="keep the outcomes of plain JAX in this file")
    add(
        "--out",
        type=Path,
        default=Path("jax-suite.json"),
        help="results (%(default)s); logs beside them",
    )
    add("--markdown", type=Path, metavar="FILE", help="also write the tables here")
    options = parser.parse_args(arguments)
    options.env = dict(pair.split("=", 1) for pair in options.env)
    try:
        options.jax = checkout(options.jax or os.environ.get("JAX_SOURCE"))
        names = [*(options.files or GOAL.split()), *(OTHERS.split() if options.others else ())]
        options.files = [test_file(options.jax, name) for name in names]
    except ValueError as error:
        parser.error(str(error))
    return options


def checkout(folder: str | None) -> Path:
    """The folder of JAX's sources; raises `ValueError` if it is missing or is another version's."""
    how = (
        f"get JAX's sources with `git clone --depth 1 --branch jax-v{installed()} "
        "https://github.com/jax-ml/jax` and name the folder with --jax or JAX_SOURCE"
    )
    if folder is None:
        raise ValueError(how)
    path = Path(folder).resolve()
    version = path / "jax" / "version.py"
    if not version.exists() or not (path / "tests").is_dir():
        raise ValueError(f"{path} is no checkout of JAX; {how}")
    found = re.search(r'^_version = "(.*)"', version.read_text(), re.M)
    if found is None or found[1] != installed():
        raise ValueError(
            f"{path} has JAX {found[1] if found else 'of an unknown version'}, "
            f"and JAX {installed()} is installed; {how}"
        )
    return path


def test_file(jax: Path, name: str) -> str:
    """The file that a name on the command line means."""
    file = name if name.endswith(".py") else f"{name.removesuffix('_test')}_test.py"
    if not (jax / "tests" / file).exists():
        raise ValueError(f"JAX {installed()} has no tests/{file}")
    return file


def installed() -> str:
    return importlib.metadata.version("jax")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    # SIGTERM unwinds the stack like Ctrl-C, so that the process of a test file ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
