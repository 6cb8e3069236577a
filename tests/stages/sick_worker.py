"""`pw-worker` with a sick device: `python -m` this, with the options of `pw-worker`.

The device is the first one. `SICK` says how it is sick: `bits` in tests, `errors` in each computation called
`sick`. The runtime is a fork of the supervisor, so it has what is replaced here.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from pw.cli.worker import main
from pw.devices.jax import device_tests
from pw.devices.jax.compile import Executable
from pw.devices.jax.enqueue import Enqueuer

SICK = os.environ["SICK"].split(",")


def _flipped(array: jax.Array) -> np.ndarray[Any, Any]:
    bits = _bits_of(array)
    (device,) = array.devices()
    if device.id == 0:
        bits = bits.copy()
        bits.flat[0] += 1
    return bits


def _crash(*arrays: Any) -> Any:
    raise jax.errors.JaxRuntimeError("INTERNAL: uncorrectable ECC error encountered")


def _publish(self: Enqueuer, key: bytes, executable: Executable | None) -> None:
    if executable is not None and executable.name == "sick":
        executable = executable._replace(call=_crash)
    _published(self, key, executable)


_bits_of, _published = device_tests.bits_of, Enqueuer.publish
if "bits" in SICK:
    device_tests.bits_of = _flipped
if "errors" in SICK:
    Enqueuer.publish = _publish  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
