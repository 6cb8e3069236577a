"""The gateway: serves JAX's own remote protocol (IFRT proxy) over a session."""
