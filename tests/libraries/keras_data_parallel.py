"""Keras trains data parallel, and names no device."""

import json
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

keras.utils.set_random_seed(0)
keras.distribution.set_distribution(keras.distribution.DataParallel())
numbers = np.random.default_rng(0)
x = numbers.normal(size=(512, 16)).astype(np.float32)
y = np.tanh(x @ numbers.normal(size=(16, 1))).astype(np.float32)
layers = [keras.layers.Dense(32, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
model = keras.Sequential([keras.layers.Input((16,)), *layers])
model.compile("adam", "mse", metrics=["mae"])
history = model.fit(x, y, batch_size=64, epochs=3, verbose=0, shuffle=False)
print(json.dumps([history.history["loss"], history.history["mae"]]))
print(json.dumps(np.round(model.predict(x[:8], verbose=0), 5).tolist()))
