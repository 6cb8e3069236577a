"""Trains a small language model whose experts lie on two islands, beside a model without experts.

Run it: `python -m examples.moe`. The text is the sources of Python's standard library. Each byte goes to one of
four experts, so both models compute as much for a byte. The first losses are compared with plain JAX, where
every expert computes every byte.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pw
from examples.train_lm.corpus import Corpus

ROWS, CONTEXT, WIDTH, HIDDEN, EXPERTS = 32, 32, 64, 64, 4
FACTOR, BALANCE = 2.0, 0.01
STEPS, COMPARED = 300, 5
optimizer = optax.adam(5e-3)


def first_params(experts: int) -> tuple[Any, Any]:
    """Draw the parameters around the experts, and those of the experts."""
    draw = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        return (draw.standard_normal(shape) * shape[-2] ** -0.5).astype(np.float32)

    around = {
        "bytes": weight(256, WIDTH),
        "positions": weight(CONTEXT, WIDTH),
        "qkv": weight(WIDTH, 3 * WIDTH),
        "mixed": weight(WIDTH, WIDTH),
        "gate": weight(WIDTH, experts),
        "logits": weight(WIDTH, 256),
    }
    return around, {"up": weight(experts, WIDTH, HIDDEN), "down": weight(experts, HIDDEN, WIDTH)}


def normed(x: Any) -> Any:
    """Divide each row by its root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def before(params: Any, inputs: Any) -> tuple[Any, Any, Any]:
    """Embed bytes and attend to earlier ones. Returns rows, rows for the experts, and the router's logits."""
    x = params["bytes"][inputs] + params["positions"]
    query, key, value = jnp.split(normed(x) @ params["qkv"], 3, -1)
    scores = jnp.einsum("rqd,rkd->rqk", query, key) * WIDTH**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool)), scores, -1e30)
    x = x + jnp.einsum("rqk,rkd->rqd", jax.nn.softmax(scores), value) @ params["mixed"]
    x = x.reshape(-1, WIDTH)
    return x, normed(x), normed(x) @ params["gate"]


def expert(params: Any, rows: Any) -> Any:
    """The feed-forward layer of one expert."""
    return jax.nn.gelu(rows @ params["up"]) @ params["down"]


def after(params: Any, x: Any, y: Any, balance: Any, targets: Any) -> tuple[Any, Any]:
    """Return the loss with the balance of the experts, and the cross-entropy in nats a byte."""
    logits = normed(x + y) @ params["logits"]
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, targets.reshape(-1)).mean()
    return entropy + BALANCE * balance, entropy


def every_expert(params: Any, rows: Any, logits: Any) -> tuple[Any, Any]:
    """The layer in plain JAX: every expert computes every row, and a mask chooses."""
    gates = jax.nn.softmax(logits)
    chosen = jax.nn.one_hot(jnp.argmax(gates, 1), EXPERTS)
    room = int(np.ceil(len(rows) / EXPERTS * FACTOR))
    kept = chosen * (jnp.cumsum(chosen, 0) <= room)
    made = jax.vmap(expert, (0, None), 1)(params, rows)
    balance = EXPERTS * (chosen.mean(0) * gates.mean(0)).sum()
    return jnp.einsum("re,red->rd", kept * gates, made), balance


def one_expert(params: Any, rows: Any, logits: Any) -> tuple[Any, Any]:
    """The layer of the model without experts."""
    return expert(jax.tree.map(lambda leaf: leaf[0], params), rows), 0.0


def update(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
    """Take a step of the optimizer."""
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def plain_step(layer: Any) -> Any:
    """Return a training step in one JAX function."""

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        around, experts = params
        x, rows, logits = before(around, inputs)
        y, balance = layer(experts, rows, logits)
        return after(around, x, y, balance, targets)

    def step(params: Any, state: Any, inputs: Any, targets: Any) -> Any:
        (_, entropy), gradients = jax.value_and_grad(loss, has_aux=True)(params, inputs, targets)
        return *update(params, state, gradients), entropy

    return step


def step_with_experts(near: pw.Slice, far: list[pw.Slice]) -> tuple[Any, Any]:
    """Return a training step with experts on their own slices, and its first parameters and states."""
    layer = pw.moe(expert, devices=far, capacity_factor=FACTOR)
    first, last = (pw.jit(function, devices=near) for function in (before, after))
    updates = [pw.jit(update, devices=one, donate_argnums=(0, 1)) for one in (near, *far)]

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        around, *experts = params
        x, rows, logits = first(around, inputs)
        y, balance = layer(experts, rows, logits)
        return last(around, x, y, balance, targets)

    @pw.program
    def step(params: Any, states: Any, inputs: Any, targets: Any) -> Any:
        differentiate = pw.value_and_grad(loss, has_aux=True)
        (_, entropy), gradients = differentiate(params, inputs, targets)
        new = [one(*its) for one, *its in zip(updates, params, states, gradients, strict=True)]
        return [params for params, _ in new], [state for _, state in new], entropy

    around, experts = first_params(EXPERTS)
    params = [pw.put(around, near), *layer.put(experts)]
    states = [
        pw.jit(optimizer.init, devices=one)(tree)
        for one, tree in zip((near, *far), params, strict=True)
    ]
    return step, (params, states)


def train(step: Any, params: Any, state: Any, batches: Any) -> list[float]:
    """Return the losses of a model."""
    losses = []
    for batch in batches:
        params, state, entropy = step(params, state, batch.inputs[0], batch.targets[0])
        losses.append(entropy)
    return [float(one) for one in pw.get(losses)]


def main() -> None:
    """Train both models."""
    parser = argparse.ArgumentParser(prog="python -m examples.moe")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training (%(default)s)")
    steps = parser.parse_args().steps
    corpus = Corpus.standard_library()
    batches = [
        corpus.training_batch(seed=0, step=at, micro_batches=1, rows=ROWS, context=CONTEXT)
        for at in range(steps)
    ]
    params = first_params(EXPERTS)
    reference = jax.jit(plain_step(every_expert))
    wanted = train(reference, params, optimizer.init(params), batches[:COMPARED])
    with pw.LocalCluster(islands=3):
        slices = pw.make_virtual_device_set()
        near, *far = (slices.add_slice(devices=1, island=f"island-{at}") for at in range(3))
        step, (placed, states) = step_with_experts(near, far)
        with_experts = train(step, placed, states, batches)
        np.testing.assert_allclose(with_experts[:COMPARED], wanted, rtol=1e-4)
        print(f"the first {len(wanted)} losses: as in plain JAX with every expert on every byte")
        params = first_params(1)
        alone = pw.jit(plain_step(one_expert), devices=near)
        without = train(alone, params, optimizer.init(params), batches)
    for name, losses in (
        (f"{EXPERTS} experts, one for each byte", with_experts),
        ("one feed-forward layer", without),
    ):
        print(f"{name}: {losses[0]:.2f} to {np.mean(losses[-10:]):.2f} nats a byte")


if __name__ == "__main__":
    main()
