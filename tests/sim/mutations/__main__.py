"""`python -m tests.sim.mutations`: replay a mutation, or look for the seeds that show mutations soonest."""

from __future__ import annotations

from typing import Annotated

import typer

from pw.cli.sim import replay
from pw.testing.sim import PROFILES
from tests.sim.mutations.search import soonest
from tests.sim.mutations.table import MUTATIONS

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    name: Annotated[str, typer.Argument(help="The mutation; without it, all of them.")] = "",
    seed: Annotated[int | None, typer.Option(help="Replay this seed of its profile.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Print every event.")] = False,
    smallest: Annotated[
        bool, typer.Option("--shrink", help="Find the smallest case that still fails.")
    ] = False,
    seeds: Annotated[int, typer.Option(help="Look for the best of so many seeds.")] = 40,
) -> None:
    """Replay a seed with a mutation, or print the seed in which it is noticed after the fewest events."""
    if seed is not None:
        install, seen = MUTATIONS[name]
        options = {"trace": trace, "smallest": smallest}
        raise SystemExit(not replay(seed, PROFILES[seen.profile], alter=install, **options))
    for each in [name] if name else MUTATIONS:
        best, events = soonest(each, seeds)
        typer.echo(f"{each}: seed {best}, {events} events (seed {MUTATIONS[each].seen.seed} now)")


if __name__ == "__main__":
    app()
