"""The dtypes that arrays can have, and their names elsewhere: a new dtype is a line of the table."""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """One dtype."""

    name: str
    """Name of the dtype in numpy or ml_dtypes."""
    mlir: str
    """Element type of the dtype in StableHLO."""
    xla: str
    """Name of XLA's primitive type; empty if XLA has none."""
    is_native: bool = False
    """True if safetensors writes the dtype, and returns it as a numpy array."""
    is_packed: bool = False
    """True if XLA keeps several elements in a byte, which numpy has to unpack."""


_TABLE = (
    Dtype("bool", "i1", "PRED", is_native=True),
    *(Dtype(f"int{bits}", f"i{bits}", f"S{bits}", is_native=True) for bits in (8, 16, 32, 64)),
    *(Dtype(f"uint{bits}", f"ui{bits}", f"U{bits}", is_native=True) for bits in (8, 16, 32, 64)),
    Dtype("int1", "si1", "S1", is_packed=True),  # i1 is a boolean
    *(Dtype(f"int{bits}", f"i{bits}", f"S{bits}", is_packed=True) for bits in (2, 4)),
    *(Dtype(f"uint{bits}", f"ui{bits}", f"U{bits}", is_packed=True) for bits in (1, 2, 4)),
    Dtype("float16", "f16", "F16", is_native=True),
    Dtype("bfloat16", "bf16", "BF16", is_native=True),
    Dtype("float32", "f32", "F32", is_native=True),
    Dtype("float64", "f64", "F64", is_native=True),
    Dtype("complex64", "complex<f32>", "C64", is_native=True),
    Dtype("complex128", "complex<f64>", "C128"),
    Dtype("float4_e2m1fn", "f4E2M1FN", "F4E2M1FN", is_packed=True),
    Dtype("float6_e2m3fn", "f6E2M3FN", ""),
    Dtype("float6_e3m2fn", "f6E3M2FN", ""),
    Dtype("float8_e3m4", "f8E3M4", "F8E3M4"),
    Dtype("float8_e4m3", "f8E4M3", "F8E4M3"),
    Dtype("float8_e4m3b11fnuz", "f8E4M3B11FNUZ", "F8E4M3B11FNUZ"),
    Dtype("float8_e4m3fn", "f8E4M3FN", "F8E4M3FN"),
    Dtype("float8_e4m3fnuz", "f8E4M3FNUZ", "F8E4M3FNUZ"),
    Dtype("float8_e5m2", "f8E5M2", "F8E5M2"),
    Dtype("float8_e5m2fnuz", "f8E5M2FNUZ", "F8E5M2FNUZ"),
    Dtype("float8_e8m0fnu", "f8E8M0FNU", "F8E8M0FNU"),
)

DTYPES = {dtype.name: dtype for dtype in _TABLE}
BY_MLIR = {dtype.mlir: dtype.name for dtype in _TABLE}
"""Name of the dtype of each element type of StableHLO."""
BY_XLA = {dtype.xla: dtype.name for dtype in _TABLE if dtype.xla}
"""Name of the dtype of each primitive type of XLA."""
PACKED = frozenset(dtype.name for dtype in _TABLE if dtype.is_packed)
"""Dtypes of which XLA keeps several elements in a byte."""
