"""Learns to balance a ball: actors play on one island, a learner on another one learns from what they did.

Run it: `python -m examples.rollouts`. Each iteration sends the policy to the actors, and their episodes to the
learner. The learner's hosts end the loop as soon as the policy is good enough; the client calls
`pw.while_loop` once. The method is REINFORCE (Williams, 1992).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pw

EPISODES, LENGTH, TARGET, MOST, RATE = 128, 24, 0.9, 200, 5.0


def probability(policy: Any, state: Any) -> Any:
    """How likely it is that the policy pushes to the right."""
    return jax.nn.sigmoid(state @ policy["weights"] + policy["bias"])


def play(policy: Any, seed: Any, iteration: Any) -> Any:
    """Play episodes. Returns the states, the pushes and the rewards, (EPISODES, LENGTH) each."""

    def episode(key: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            push = jax.random.uniform(key) < probability(policy, state)
            place, speed = state
            speed = speed + jnp.where(push, 0.1, -0.1)
            place = place + speed
            return jnp.stack([place, speed]), (state, push, jnp.exp(-(place**2)))

        start, *keys = jax.random.split(key, LENGTH + 1)
        state = jax.random.uniform(start, (2,), minval=-0.2, maxval=0.2)
        return jax.lax.scan(step, state, jnp.stack(keys))[1]

    key = jax.random.fold_in(jax.random.key(seed), iteration)
    return jax.vmap(episode)(jax.random.split(key, EPISODES))


def learn(policy: Any, states: Any, pushes: Any, rewards: Any) -> Any:
    """Improve the policy. Returns it, and the mean reward of the episodes."""
    to_come = jnp.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]
    advantage = (to_come - to_come.mean(0)) / (to_come.std(0) + 1e-3)

    def loss(policy: Any) -> Any:
        right = probability(policy, states)
        return -jnp.mean(advantage * jnp.log(jnp.where(pushes, right, 1 - right) + 1e-6))

    gradient = jax.grad(loss)(policy)
    return jax.tree.map(lambda p, g: p - RATE * g, policy, gradient), rewards.mean()


def is_poor(reward: Any, iteration: Any) -> Any:
    """Whether the policy has more to learn."""
    return (reward < TARGET) & (iteration < MOST)


def train(parts: Any, while_loop: Any) -> Any:
    """Return the policy, its reward and the number of iterations; the same code for both systems."""

    def body(carry: Any) -> Any:
        policy, _, iteration = carry
        episodes = parts.play(policy, np.uint32(7), iteration)
        return *parts.learn(policy, *episodes), parts.next(iteration)

    policy = {"weights": np.zeros(2, np.float32), "bias": np.float32(0)}
    start = policy, np.float32(0), np.int32(0)
    return while_loop(lambda carry: parts.is_poor(*carry[1:]), body, start)


def main() -> None:
    """Learn, and compare with plain JAX."""
    plain = SimpleNamespace(play=play, learn=learn, is_poor=is_poor, next=lambda n: n + 1)
    with pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=1):
        slices = pw.make_virtual_device_set()
        actors, learner = (
            pw.Mesh(slices.add_slice(devices=2, island=island).devices, ("episodes",))
            for island in ("island-0", "island-1")
        )
        ours = SimpleNamespace(
            play=pw.jit(play, mesh=actors, out_shardings=P("episodes")),
            learn=pw.jit(learn, mesh=learner, out_shardings=P()),
            is_poor=pw.jit(is_poor, mesh=learner),
            next=pw.jit(lambda n: n + 1, mesh=learner),
        )
        policy, reward, iterations = pw.get(train(ours, pw.while_loop))
    wanted = train(plain, jax.lax.while_loop)
    print(f"mean reward {reward:.2f} after {iterations} iterations, with {policy['weights']}")
    print(f"plain JAX: {wanted[1]:.2f} after {wanted[2]}")
    assert iterations == wanted[2] < MOST
    np.testing.assert_allclose(policy["weights"], wanted[0]["weights"], rtol=1e-3)


if __name__ == "__main__":
    main()
