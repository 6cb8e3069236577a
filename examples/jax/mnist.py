"""The neural network from scratch of JAX's documentation, in plain JAX, on digits that are drawn here.

Run it: `JAX_PLATFORMS=pw python examples/jax/mnist.py`. By default it trains on one device, as in the
documentation. With `--two-islands` it trains on all devices of one island, each with a part of the
batch, while another island evaluates the parameters of the last epoch.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import grad, jit, random, vmap
from jax.scipy.special import logsumexp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# --- the model, as in JAX's documentation


def random_layer_params(m, n, key, scale=1e-2):
    w_key, b_key = random.split(key)
    return scale * random.normal(w_key, (n, m)), scale * random.normal(b_key, (n,))


def init_network_params(sizes, key):
    keys = random.split(key, len(sizes))
    return [
        random_layer_params(m, n, k) for m, n, k in zip(sizes[:-1], sizes[1:], keys, strict=False)
    ]


layer_sizes = [784, 512, 512, 10]
step_size = 0.01
num_epochs = 3
batch_size = 128
n_targets = 10


def relu(x):
    return jnp.maximum(0, x)


def predict(params, image):
    activations = image
    for w, b in params[:-1]:
        outputs = jnp.dot(w, activations) + b
        activations = relu(outputs)
    final_w, final_b = params[-1]
    logits = jnp.dot(final_w, activations) + final_b
    return logits - logsumexp(logits)


batched_predict = vmap(predict, in_axes=(None, 0))


def one_hot(x, k, dtype=jnp.float32):
    return jnp.array(x[:, None] == jnp.arange(k), dtype)


@jit
def accuracy(params, images, targets):
    target_class = jnp.argmax(targets, axis=1)
    predicted_class = jnp.argmax(batched_predict(params, images), axis=1)
    return jnp.mean(predicted_class == target_class)


@jit
def loss(params, images, targets):
    preds = batched_predict(params, images)
    return -jnp.mean(preds * targets)


@jit
def update(params, x, y):
    grads = grad(loss)(params, x, y)
    return [
        (w - step_size * dw, b - step_size * db)
        for (w, b), (dw, db) in zip(params, grads, strict=False)
    ]


# --- digits: seven segments in a 28 by 28 image, moved a little, with noise

SEGMENTS = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg"]
PLACES = {  # the rows and the columns of each segment
    "a": (4, 6, 9, 19),
    "b": (4, 14, 17, 19),
    "c": (13, 23, 17, 19),
    "d": (21, 23, 9, 19),
    "e": (13, 23, 9, 11),
    "f": (4, 14, 9, 11),
    "g": (13, 15, 9, 19),
}


def draw_digits(count, seed):
    """Return images float32 `[count, 784]`, from 0 to 255, and labels int32 `[count]`."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, n_targets, count)
    templates = np.zeros((n_targets, 28, 28), np.float32)
    for digit, segments in enumerate(SEGMENTS):
        for segment in segments:
            top, bottom, left, right = PLACES[segment]
            templates[digit, top:bottom, left:right] = 200
    images = np.stack([np.roll(templates[one], rng.integers(-3, 4, 2), (0, 1)) for one in labels])
    images += rng.uniform(0, 50, images.shape)
    return images.reshape(count, 784).astype(np.float32), labels.astype(np.int32)


# --- training


def two_islands():
    """Return the devices of two islands; of plain JAX's devices, two halves."""
    devices = jax.devices()
    if hasattr(devices[0], "island"):
        names = sorted({one.island for one in devices})[:2]
        return [[one for one in devices if one.island == name] for name in names]
    half = len(devices) // 2
    return [devices[:half], devices[half:]]


def main():
    if "--two-islands" in sys.argv:
        training, evaluating = two_islands()
    else:
        training = evaluating = jax.devices()[:1]
    mesh = Mesh(np.array(training), ("batch",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
    there = NamedSharding(Mesh(np.array(evaluating), ("batch",)), P())
    images, labels = draw_digits(10 * batch_size, seed=0)
    test_images, test_labels = draw_digits(2 * batch_size, seed=1)
    test_set = jax.device_put((test_images, one_hot(test_labels, n_targets)), there)

    params = jax.device_put(init_network_params(layer_sizes, random.key(0)), whole)
    for epoch in range(num_epochs):
        for first in range(0, len(images), batch_size):
            x, y = images[first:][:batch_size], one_hot(labels[first:][:batch_size], n_targets)
            params = update(params, *jax.device_put((x, y), split))
        copies = jax.device_put(params, there)
        tested, right = loss(copies, *test_set), accuracy(copies, *test_set)
        print(f"epoch {epoch}: loss {tested:.9g}, accuracy {right:.3f}")


main()
