"""Runs JAX's own test suite against the gateway and compares with plain JAX on CPU devices.

    git clone --depth 1 --branch jax-v0.10.2 https://github.com/jax-ml/jax
    python -m tests.jax_suite pjit pmap --jax jax --out results.json

Each test file runs twice, in processes of its own: with plain JAX (`JAX_PLATFORMS=cpu`), then with
the gateway (`JAX_PLATFORMS=pw`). The second run has only the tests that passed in the first. A
process that crashes or hangs costs the test that was running; the others go on in a new process.

What makes the comparison fair:

- Both runs have the same number of devices: `JAX_NUM_CPU_DEVICES` for plain JAX, `PW_DEVICES` for the
  gateway. The variable is set from outside, so that the files' own `request_cpu_devices` changes
  nothing.
- JAX's tests ask the default backend for its platform, and choose dtypes, tolerances and skips by
  the answer. A gateway over CPU hosts answers `cpu`, as plain JAX does: both runs have the same tests.
- `JAX_NUM_GENERATED_CASES` is the same in both runs, and JAX draws cases from a fixed seed.
- `JAX_ENABLE_CHECKS` is on and slow tests are skipped, as in JAX's own continuous integration.
- pytest runs with the settings of JAX's `pyproject.toml`: a warning is an error.
- A test that skips itself with the gateway only is counted apart, and does not count as passed.

A few tests ask for `jax.devices("cpu")` by name, and get the gateway's devices. Another plugin, or a
gateway in another process:
`--platform proxy --env JAX_BACKEND_TARGET=grpc://localhost:29000`.

Outcomes of plain JAX are kept with `--baseline FILE`. `--again RESULTS` runs what did not pass in
earlier results; the logs beside the results have all tracebacks. A whole file takes minutes, so
`--sample 4` runs a quarter of each file.
"""
