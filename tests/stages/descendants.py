"""Processes that come from another one, found in /proc."""

from __future__ import annotations

from pathlib import Path


def descendants(root: int) -> list[int]:
    """Return the process ids of the living descendants of a process, by one walk over /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _living_parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    frontier = [root]
    while frontier:
        offspring = children.get(frontier.pop(), [])
        found.extend(offspring)
        frontier.extend(offspring)
    return found


def state(pid: int) -> str:
    """Return the state of a process, one letter as `ps` shows it: `T` if it is stopped; empty if it is gone."""
    return _stat(Path(f"/proc/{pid}"))[0]


def _living_parent(process: Path) -> int | None:
    state, parent = _stat(process)
    return None if state in ("", "Z", "X") else int(parent)


def _stat(process: Path) -> tuple[str, str]:
    """Return the state and the parent of a process, or nothing if it has ended."""
    try:
        stat = (process / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    state, parent = stat.rpartition(")")[2].split()[:2]  # the name before may hold anything
    return state, parent
