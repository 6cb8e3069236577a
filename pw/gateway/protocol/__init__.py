"""The words of JAX's remote protocol: HTTP/2, gRPC, messages, dtypes, shardings, status codes."""
