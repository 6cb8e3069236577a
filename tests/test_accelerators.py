"""What is different where devices are no CPU, on stand-ins: the machines that run this have no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.export
import jax.extend.backend
import pytest

import pw


class Gpu:
    """A CPU device that calls its platform what those of CUDA and of ROCm call theirs."""

    platform = "gpu"

    def __init__(self, device: jax.Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def test_what_is_embedded_compiles_for_the_platform_that_its_gpus_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pw.disconnect()
    monkeypatch.delenv("PW_ADDRESS", raising=False)
    backends = jax.extend.backend.backends() | {"cuda": SimpleNamespace(platform="gpu")}
    gpus = [Gpu(device) for device in jax.local_devices()]
    monkeypatch.setattr(jax.extend.backend, "backends", lambda: backends)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: gpus)
    try:
        pw.connect()
        (device,) = pw.make_virtual_device_set().add_slice(devices=1).devices
        assert device.platform == "cuda"
    finally:
        pw.disconnect()
    exported = jax.export.export(jax.jit(lambda x: x), platforms=[device.platform])(1.0)
    assert exported.platforms == ("cuda",)
