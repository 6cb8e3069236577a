"""diffrax solves equations in batches over all devices: loops, with checks that call the script."""

import json

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

split = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))


def adaptive(y0):
    """Solve an ordinary equation, with as many steps as it takes."""
    term = diffrax.ODETerm(lambda t, y, args: -jnp.sin(y) * (1 + t))
    control = diffrax.PIDController(rtol=1e-4, atol=1e-6)
    solved = diffrax.diffeqsolve(
        term, diffrax.Tsit5(), 0.0, 2.0, None, y0, stepsize_controller=control
    )
    return solved.ys[-1], solved.stats["num_steps"]


def stochastic(y0, key):
    """Solve a stochastic equation."""
    path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(), key=key)
    drift = diffrax.ODETerm(lambda t, y, args: -y)
    noise = diffrax.ControlTerm(lambda t, y, args: 0.1 * y, path)
    solved = diffrax.diffeqsolve(
        diffrax.MultiTerm(drift, noise), diffrax.EulerHeun(), 0.0, 1.0, 0.05, y0
    )
    return solved.ys[-1]


y0 = jax.device_put(np.linspace(0.1, 3.0, 16, dtype=np.float32), split)
keys = jax.device_put(jax.random.split(jax.random.key(0), 16), split)
for made in (*jax.jit(jax.vmap(adaptive))(y0), jax.jit(jax.vmap(stochastic))(y0, keys)):
    print(json.dumps(np.asarray(made, np.float64).tolist()))
