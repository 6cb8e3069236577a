"""Forks of a process whose JAX has virtual devices: they cannot use them, and disturb nothing."""

from __future__ import annotations

import pytest

from tests.gateway.test_pathways import AS_PROXY
from tests.stages.gateway_stage import Stage
from tests.stages.scripts import Client, finish, start_client

pytestmark = pytest.mark.processes

SCRIPT = """
import contextlib, multiprocessing, socket, stat, subprocess, threading
from concurrent.futures import ProcessPoolExecutor

context = multiprocessing.get_context("fork")
triple = jax.jit(lambda v: v * 3)
x = jnp.arange(4.0)
read, unread = triple(x), triple(x)
print(read, x + 2)
compiled = triple.lower(x).compile()
held = pw.put(np.arange(4.0))
double = pw.jit(lambda v: v * 2)
double(held)

USES = {
    "an operator": lambda: x + 2,
    "a compiled call": lambda: triple(x),
    "an executable": lambda: compiled(x),
    "a new computation": lambda: jax.jit(jnp.sin)(x),
    "a new computation of numpy's values": lambda: jax.jit(jnp.cos)(np.ones(3)),
    "a new array": lambda: jnp.zeros(3),
    "a key": lambda: jax.random.key(0),
    "an upload": lambda: jax.device_put(np.ones(3)),
    "a copy": lambda: jax.device_put(x, jax_devices[1]),
    "a read": lambda: np.asarray(unread),
    "a wait": lambda: jax.block_until_ready(unread),
    "a wait for two": lambda: jax.block_until_ready([unread, x]),
    "a shard": lambda: x.addressable_shards[0].data,
    "a size": lambda: x.on_device_size_in_bytes(),
    "a layout": lambda: x.format,
    "its devices": jax.devices,
    "the other platform": lambda: jax.devices("cpu"),
    "a read of pw": lambda: np.asarray(held),
    "a call of pw": lambda: double(held),
    "an upload of pw": lambda: pw.put(np.ones(3)),
}
jax_devices = jax.devices()

def trouble(name):
    try:
        USES[name]()
    except pw.Disconnected as error:
        return "" if "forked" in str(error) and "\\n" not in str(error) else repr(error)
    except BaseException as error:
        return repr(error)
    return "was allowed"

def batch(number):
    return np.full(4, number + float(np.asarray(read)[1]))  # that value was read before the fork

def end(number):
    trouble("an operator")
    sys.exit(number)

def forked(body):
    process = os.fork()
    if not process:
        body()
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

def connections():
    address, count = os.environ.get("JAX_BACKEND_TARGET", "/gateway").rpartition(":")[2], 0
    for path in map("/proc/self/fd/{}".format, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(path).st_mode):
                with socket.socket(fileno=os.dup(int(path.rpartition("/")[2]))) as one:
                    count += address in str(one.getpeername())
    return count

def check():
    np.testing.assert_array_equal(x + 2, [2, 3, 4, 5])
    np.testing.assert_array_equal(triple(x), [0, 3, 6, 9])
    np.testing.assert_array_equal(double(held), [0, 2, 4, 6])

failures, is_over = [], threading.Event()

def go_on():  # the forks have its stream in any state
    try:
        while not is_over.is_set():
            check()
    except BaseException as error:
        failures.append(error)

going_on = threading.Thread(target=go_on)
going_on.start()
try:
    assert connections()
    assert forked(lambda: sys.exit(connections())) == 0
    assert forked(lambda: end(5)) == 5
    assert forked(lambda: sys.exit(forked(lambda: end(6)))) == 6
    for touches in (False, True):
        process = context.Process(target=trouble if touches else len, args=("a read",))
        process.start()
        process.join()
        assert process.exitcode == 0
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        found = dict(zip(USES, executor.map(trouble, USES)))
        assert not any(found.values()), found
    with context.Pool(2) as loaders:
        for number, loaded in enumerate(loaders.imap(batch, range(4))):
            np.testing.assert_array_equal(triple(loaded), np.full(4, 3 * (number + 3)))
    for before in (None, lambda: None):
        command = [sys.executable, "-c", "print(1)"]
        assert subprocess.run(command, preexec_fn=before, capture_output=True).stdout == b"1\\n"
finally:
    is_over.set()
    going_on.join()
assert not failures, failures
check()
large = np.arange(1 << 20, dtype=np.float32)  # JAX hands it over in a file
np.testing.assert_array_equal(jnp.asarray(large) + 1, large + 1)
print("well")
"""


VIRTUAL = {"JAX_PLATFORMS": "pw", "PW_DEVICES": "2", "XLA_FLAGS": ""}


def goes_on(client: Client) -> None:
    assert finish(client).splitlines()[-1] == "well"


def test_a_fork_cannot_use_jax_and_its_parent_goes_on() -> None:
    goes_on(start_client("", SCRIPT, **VIRTUAL))


@pytest.mark.parametrize(
    "setting", [pytest.param("a cluster", marks=pytest.mark.long), "a gateway"]
)
def test_a_fork_of_a_client_of_a_cluster_is_no_client(setting: str) -> None:
    with Stage() as stage:
        if setting == "a cluster":
            goes_on(start_client(stage.cluster.address or "", SCRIPT, **VIRTUAL))
        else:
            proxy = {"JAX_PLATFORMS": "proxy,cpu", "JAX_BACKEND_TARGET": stage.address}
            goes_on(start_client("", AS_PROXY + SCRIPT, **proxy))
