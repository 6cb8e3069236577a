"""Trains a small decoder of equinox whose weights are split over all devices (FSDP): plain JAX, in which no
line knows pw.

Run it: `JAX_PLATFORMS=pw python examples/jax/fsdp.py`. Each device has a part of every weight, of every
moment of the optimizer, and of the batch. A layer gathers its weights when it needs them, and each
device gets its part of the gradients. The devices may be on any number of islands.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH, ROWS = 64, 4, 4, 32, 32, 16
STEPS, SHOW_EVERY = 30, 10

mesh = Mesh(np.array(jax.devices()), ("fsdp",))
whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("fsdp"))
optimizer = optax.adamw(3e-3)


class Layer(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        attention, up, down = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention)
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=up)
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=down)

    def __call__(self, x):
        earlier = jnp.tril(jnp.ones((len(x), len(x)), bool))
        normed = jax.vmap(self.norms[0])(x)
        x = x + self.attention(normed, normed, normed, earlier)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x))))


class Decoder(eqx.Module):
    embedding: jax.Array
    layers: Layer
    """All layers in one: each weight has a first dimension for them."""

    def __init__(self, key):
        embedding, layers = jax.random.split(key)
        self.embedding = jax.random.normal(embedding, (VOCABULARY, WIDTH)) / 8
        self.layers = eqx.filter_vmap(Layer)(jax.random.split(layers, LAYERS))

    def __call__(self, tokens):
        weights, rest = eqx.partition(self.layers, eqx.is_array)

        def layer(x, own):
            own = jax.tree.map(lambda w: with_sharding_constraint(w, whole), own)  # gather them
            x = with_sharding_constraint(x, whole)  # with vmap's axis, each device keeps its rows
            return eqx.combine(own, rest)(x), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), self.embedding[tokens], weights)
        return x @ self.embedding.T


def split(x):
    """Return how a weight lies: its last dimension that all devices can share is split."""
    fits = [at for at in range(x.ndim) if x.shape[at] % mesh.size == 0]
    return NamedSharding(mesh, P(*[None] * fits[-1], "fsdp")) if fits else whole


def put(tree):
    return jax.tree.map(lambda x: jax.device_put(x, split(x)), tree)


def loss_of(params, rest, tokens):
    model = jax.vmap(eqx.combine(params, rest), spmd_axis_name="fsdp")
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    return losses.mean()


def main():
    params, rest = eqx.partition(Decoder(jax.random.key(0)), eqx.is_array)
    params = put(params)
    state = put(optimizer.init(params))
    like = jax.tree.map(split, params)

    @jax.jit(donate_argnums=(0, 1))
    def step(params, state, tokens):
        loss, gradients = jax.value_and_grad(loss_of)(params, rest, tokens)
        gradients = with_sharding_constraint(gradients, like)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(gradients)

    draw = np.random.default_rng(0)
    for number in range(1, STEPS + 1):
        starts, strides = draw.integers(0, VOCABULARY, (ROWS, 1)), draw.integers(1, 4, (ROWS, 1))
        tokens = (starts + strides * np.arange(LENGTH + 1)) % VOCABULARY
        tokens = jax.device_put(tokens.astype(np.int32), rows)
        params, state, loss, norm = step(params, state, tokens)
        if number % SHOW_EVERY == 0:
            print(f"step {number}: loss {loss:.4f}, norm of the gradients {norm:.3f}")


if __name__ == "__main__":
    main()
