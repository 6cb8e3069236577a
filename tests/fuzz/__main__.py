"""`python -m tests.fuzz`: see `tests.fuzz`."""

from __future__ import annotations

import argparse
import logging
import sys

from tests.fuzz.running import fuzz
from tests.fuzz.table import INPUTS, TARGETS, share_of


def main() -> int:
    """Run targets, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], metavar="target")
    parser.add_argument("--inputs", type=int, default=INPUTS, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    names = given.targets or list(TARGETS)
    print(f"{'target':24}{'inputs':>10}{'valid':>9}{'s':>8}{'slowest ms':>12}{'most MiB':>10}")
    failed, total, seconds = 0, 0, 0.0
    for name in names:
        target = TARGETS[name]
        report = fuzz(
            target, share_of(target, given.inputs), given.seed, measure=True, most_failures=10
        )
        total, seconds = total + report.inputs, seconds + report.seconds
        print(
            f"{name:24}{report.inputs:>10}{report.accepted:>9}{report.seconds:>8.1f}"
            f"{1e3 * report.slowest_s:>12.2f}{report.largest_bytes / (1 << 20):>10.2f}",
            flush=True,
        )
        shown: set[str] = set()
        for failure in report.failures:
            if failure.place not in shown:
                shown.add(failure.place)
                print(f"  {failure.save(target)}: {failure.why}", flush=True)
        failed += len(shown)
    print(f"{'all':24}{total:>10}{'':9}{seconds:>8.1f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
