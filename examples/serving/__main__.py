"""Two models on one cluster answer requests at once, each with a share of the devices.

`python -m examples.serving` starts a cluster and two models, and prints the latencies of their answers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import NamedTuple

import pw
from examples.serving import model


class Served(NamedTuple):
    """A model, its share of the devices, and its users."""

    name: str
    share: float
    width: int
    layers: int
    users: int


MODELS = (Served("small", 1.0, 128, 4, 8), Served("large", 3.0, 512, 8, 24))


def run(seconds: float) -> None:
    """Serve both models for so many seconds, and print a line for each."""
    with pw.LocalCluster(policy="share", connect=False) as cluster:
        command = [sys.executable, "-m", "examples.serving"]
        processes = [
            subprocess.Popen(
                [*command, "--model", one.name, "--seconds", str(seconds)],
                env=os.environ | {"PW_ADDRESS": cluster.address},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for one in MODELS
        ]
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise SystemExit("a model did not start")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate()[0] for process in processes]
    print(f"{'model':8}{'share':>6}{'answers/s':>11}{'a batch':>9}{'p50':>9}{'p90':>9}{'p99':>9}")
    for one, output in zip(MODELS, outputs, strict=True):
        found = json.loads(output)
        took_s = sorted(found["took_s"])
        p50, p90, p99 = (f"{took_s[int(len(took_s) * q)] * 1e3:.1f} ms" for q in (0.5, 0.9, 0.99))
        rate, size = len(took_s) / seconds, len(took_s) / found["batches"]
        print(f"{one.name:8}{one.share:6g}{rate:11.0f}{size:9.1f}{p50:>9}{p90:>9}{p99:>9}")


def main() -> None:
    """Be the whole example, or one model of it."""
    parser = argparse.ArgumentParser(prog="python -m examples.serving", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model is None:
        run(options.seconds)
        return
    one = next(one for one in MODELS if one.name == options.model)
    model.main(one.share, one.width, one.layers, one.users, options.seconds)


if __name__ == "__main__":
    main()
