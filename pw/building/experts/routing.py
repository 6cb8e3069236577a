"""Which rows go to which experts, and back: the mathematics of a mixture of experts, in JAX.

The rows of one *group* are the rows of one shard. A group has room for `capacity` rows at each expert.
First choices have a place before second ones, and earlier rows before later ones; a row without a
place is dropped at this expert (GShard: Lepikhin et al., 2020, algorithm 1). A choice has a *slot*, its
expert times the capacity plus its place; a dropped one has the slot behind all others.

Rows move by gathers in both directions, also for gradients: each slot knows its choice, and each choice its
slot. A scatter would add in an order of its own on some devices.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class ExpertAssignment(NamedTuple):
    """The places of the rows of one group."""

    slots: Any
    """int32 (rows, top_k): the slot of each choice, or `experts * capacity` if it is dropped."""
    choices: Any
    """int32 (experts, capacity): the choice in each slot, `row * top_k + number`, or `rows * top_k`."""
    counts: Any
    """int32 (experts,): the slots of each expert that are taken, the first ones."""
    weights: Any
    """float32 (rows, top_k): the weight of the result of each choice."""
    balance: Any
    """float32: the load-balancing loss of this group."""


def capacity_of(rows: int, experts: int, top_k: int, factor: float) -> int:
    """Return the room of a group of so many rows at each expert; an expert is chosen by a row at most once."""
    return min(rows, math.ceil(top_k * rows / experts * factor))


def assign(logits: Any, top_k: int, capacity: int) -> ExpertAssignment:
    """Choose the experts of each row of a group.

    A single choice has the probability of its expert as its weight (Switch Transformer: Fedus et al.,
    2021), several have their probabilities divided by the sum of them (GShard). The loss is equation 4 of
    Fedus et al. without its factor: 1 if the experts have equal shares, `experts` if one has all.

    Args:
        logits: (rows, experts): of the router.
        top_k: experts for each row.
        capacity: room at each expert.
    """
    rows, experts = logits.shape
    gates = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(gates, top_k)
    if top_k > 1:
        weights = weights / weights.sum(-1, keepdims=True)
    in_order = chosen.T.reshape(-1)  # all first choices, then all second ones
    is_of = (in_order[:, None] == jnp.arange(experts)).astype(jnp.int32)
    places = (jnp.cumsum(is_of, axis=0) * is_of).sum(-1) - 1
    slots = jnp.where(places < capacity, in_order * capacity + places, experts * capacity)
    slots = slots.reshape(top_k, rows).T.astype(jnp.int32)
    choices = jnp.full(experts * capacity, rows * top_k, jnp.int32)
    numbers = jnp.arange(rows * top_k, dtype=jnp.int32)
    choices = choices.at[slots.reshape(-1)].set(numbers, mode="drop")
    shares = is_of[:rows].astype(jnp.float32).mean(0)
    return ExpertAssignment(
        slots,
        choices.reshape(experts, capacity),
        jnp.minimum(is_of.sum(0), capacity).astype(jnp.int32),
        weights,
        experts * (shares * gates.mean(0)).sum(),
    )


def dispatch(x: Any, assignment: ExpertAssignment, first: int, count: int) -> Any:
    """Return the rows for `count` experts from number `first` on, (count, capacity, d), zeros where none is.

    Args:
        x: (rows, d).
        assignment: of these rows.
        first, count: the experts.
    """
    _, top_k = assignment.slots.shape
    _, capacity = assignment.choices.shape
    sources = assignment.choices[first : first + count].reshape(-1) // top_k
    slots = assignment.slots - first * capacity
    slots = jnp.where(slots < 0, count * capacity, slots)
    return _take_rows(x, sources, slots).reshape(count, capacity, x.shape[-1])


def combine(results: Any, slots: Any, choices: Any, weights: Any) -> Any:
    """Return the sum of the results for each row times their weights, (rows, d); zeros for a dropped row.

    Args:
        results: (experts, capacity, d): results of the experts for the rows in their slots.
        slots, choices, weights: of the `ExpertAssignment`.
    """
    rows, top_k = slots.shape
    flat = results.reshape(-1, results.shape[-1])
    values = _take_rows(flat, slots.reshape(-1), choices.reshape(-1, 1)).reshape(rows, top_k, -1)
    wide = weights.astype(jnp.promote_types(results.dtype, jnp.float32))
    weighted = [values[:, at] * wide[:, at, None] for at in range(top_k)]
    return sum(weighted[1:], start=weighted[0]).astype(results.dtype)


@jax.custom_vjp
def _take_rows(rows: Any, index: Any, back: Any) -> Any:
    """Return the rows with these numbers, (n, d), zeros for numbers behind the last row.

    Args:
        rows: (m, d).
        index: (n,), not negative.
        back: (m, k): the places in the result of each row; n for none.
    """
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)


def _take_rows_forward(rows: Any, index: Any, back: Any) -> Any:
    return _take_rows(rows, index, back), (index, back)


def _take_rows_backward(kept: Any, cotangent: Any) -> Any:
    index, back = kept
    parts = [
        jnp.take(cotangent, back[:, at], axis=0, mode="fill", fill_value=0)
        for at in range(back.shape[1])
    ]
    return sum(parts[1:], start=parts[0]), _no_cotangent(index), _no_cotangent(back)


def _no_cotangent(numbers: Any) -> Any:
    return np.zeros(numbers.shape, jax.dtypes.float0)


_take_rows.defvjp(_take_rows_forward, _take_rows_backward)
