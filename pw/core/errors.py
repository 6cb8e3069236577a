"""Every failure a user can see.

All derive from `Error`. A failure that happens on another process travels as an `ErrorReport` (type
name and text, never a pickled exception) and is raised on the client as the class of that name,
with the remote traceback in its text.
"""

from __future__ import annotations

import traceback as traceback_module

import msgspec


class Error(Exception):
    """Base of all errors of pw."""


class ConnectionFailed(Error):
    """The controller, or a host, could not be reached or stopped answering.

    Cause:
        The address is wrong, nothing listens there, a firewall drops the connection, or the controller
        has been away for longer than `reconnect_s`.

    What to do:
        Compare the address with the line that `pw-controller` printed, and try `pw status --address
        ADDRESS` from the same machine. Start the controller again at the same address: scripts and
        workers find it.
    """


class AccessRefused(ConnectionFailed):
    """A process may not be in the cluster, or may not do what it asked for: its credentials do not allow it.

    Cause:
        A certificate is missing, expired, revoked, of another authority, or of another role; or the
        tenant of the client may not do this.

    What to do:
        `pw keys show FILE` says what is in a file and why it cannot be used. Issue another with `pw
        keys issue`, and install it with `pw join`. On one machine, run as the user who has started the
        cluster.
    """


class QuotaExceeded(Error):
    """A client asks for more than its tenant may have.

    Cause:
        The clients of one tenant together have as many devices, programs, connections or bytes as the
        controller allows; or a client asks for a larger share or priority.

    What to do:
        The message has the numbers. Give back what is not needed (`pw status --tenants` shows what each
        tenant has), ask for less, or ask the operator to raise the right in `pw-controller --tenants`.
    """


class Disconnected(Error):
    """The session has ended, and its arrays, programs and slices with it.

    Cause:
        `pw.disconnect` was called, the controller gave the session up because it was cut off for 10 s or
        silent for 10 minutes, or the process is a fork of one that has a session.

    What to do:
        Call `pw.connect()` for another session, and make arrays and functions anew. Start processes
        with `multiprocessing.get_context("spawn")`.
    """


class VersionMismatch(Error):
    """Two processes run versions of pw or jax that do not understand each other.

    Cause:
        This environment has another jax than pw works with, or two machines have different versions of
        pw or jax.

    What to do:
        Run the `pip install` line of the message; install the same versions on all machines (`pw
        version` prints them).
    """


class ProtocolError(Error):
    """A process received a message that breaks the protocol; please report it.

    Cause:
        A fault of pw, or a process that is not pw talks to the cluster.

    What to do:
        Report it with the whole message. Other clients go on.
    """


class InsufficientDevices(Error):
    """No island can satisfy a request for virtual devices.

    Cause:
        A slice asks for more devices than an island has, for an island or a host that is not there, or
        for hosts that run no Python.

    What to do:
        `pw status` lists islands, hosts and devices. Ask for fewer, name another island, or start
        workers. While the cluster starts, a request waits for its islands.
    """


class PlacementError(Error, ValueError):
    """A computation was placed on devices that cannot run it together.

    Cause:
        The devices of one computation belong to different slices or sessions, are named twice, or were
        released; or a worker does not match its island.

    What to do:
        Take the devices of one computation from one `add_slice`. Between slices, values move in a
        `pw.program` or by `pw.put`.
    """


class ShardingError(Error, ValueError):
    """A sharding does not fit the shape or the mesh it is used with.

    Cause:
        A dimension cannot be divided by the size of its mesh axes, or a sharding has another mesh than its
        computation.

    What to do:
        Compare the shape and the mesh in the message. Pad the dimension, leave it whole (None in the
        spec), or use the mesh of the computation.
    """


class ArgumentError(Error, TypeError):
    """A call's arguments have the wrong shape, dtype, or tree structure.

    Cause:
        An argument is no array or number, or has another shape, dtype or tree than the function was
        traced for.

    What to do:
        The message names the argument and both types. Convert it before the call; mark what is no array
        as static (`static_argnums`).
    """


class TracingError(Error):
    """A function could not be traced or exported.

    Cause:
        The function calls Python at run time (`jax.debug.print`, `pure_callback`, a host function under
        `jax.jit`), or has meshes of this process's own devices.

    What to do:
        Call host functions beside compiled functions, in a `pw.program`. Leave callbacks out, or run
        the script as plain JAX (`JAX_PLATFORMS=pw`), where they work.
    """


class TracerError(Error, TypeError):
    """The trace of a program needs a value, which does not exist yet.

    Cause:
        A `pw.program` looks at a value while it is traced: `if x > 0`, `int(x)`, `np.asarray(x)`,
        `x.sharding`; or a value leaves the branch or loop that made it.

    What to do:
        Move the decision into a `pw.jit` function, or use `pw.cond` and `pw.while_loop`. Make Python
        numbers static arguments (`static_argnums`). Return values from both branches.
    """


class ArrayDeleted(Error, RuntimeError):
    """The array was deleted or donated before this use.

    Cause:
        The array was passed to a function that donates it (`donate_argnums`, a pipeline's state), or
        `delete` was called.

    What to do:
        Use what the function returned. If both are needed, pass a copy (`x.copy()`), or do not donate.
    """


class NotOwner(Error):
    """A client has named an array, slice or program of another client.

    Cause:
        An array or a function of a closed session, of another process, or of devices that were given
        back is used.

    What to do:
        Pass values between clients with `pw.get` and `pw.put`; after `pw.connect`, make arrays and
        functions anew.
    """


class CompileError(Error):
    """A host could not compile a computation.

    Cause:
        XLA refuses the computation, or its compiler crashed, or took more time or memory than the
        worker allows; or a host lacks a module that a Python function imports.

    What to do:
        Run the function with plain JAX on one device to see XLA's own words. Make it smaller, or have
        the operator raise `pw-worker --compile-timeout` and `--compile-memory`.
    """


class CodeRefused(CompileError):
    """The code of a computation asks for something that workers do not do for clients.

    Cause:
        The function calls a native function, or has a compiler option, that could harm other clients of the
        host; the error names it.

    What to do:
        Write that part with jax.numpy or jax.lax, or leave the option out.
        [Plain JAX](jax.md#what-workers-refuse) lists what is refused.
    """


class PythonRefused(CompileError):
    """A host runs no Python functions of clients.

    Cause:
        The worker was started without `--allow-python`, or for other tenants (`--python-tenants`).

    What to do:
        Start it with `--allow-python`; read first what that allows. In tests:
        `pw.LocalCluster(allow_python=True)`.
    """


class ComputationFailed(Error):
    """A computation raised while it ran on a host.

    Cause:
        The function raised on the host (its traceback is a note of the error), its process ended, or it
        ended its host several times in a row.

    What to do:
        Read the traceback in the error. The arrays of that call, and those computed from them, stay
        failed: mend the function and call it again.
    """


class ResultMismatch(ComputationFailed):
    """A host function or a stream made something else than it declared, or a computation impossible counts.

    Cause:
        A host function or a stream returned another shape, dtype or tree than it has declared, or the
        parts of a stream have different lengths.

    What to do:
        Compare the declared type with the returned one in the message; convert in the function
        (`np.asarray(x, np.float32)`).
    """


class NaNFound(Error, FloatingPointError):
    """A computation whose results are checked (`check_nans`) made a NaN.

    Cause:
        `check_nans=True`, or JAX's `jax_debug_nans`, and a result of the named computation has a NaN.

    What to do:
        The message names the computation and the result. Look at its inputs with `np.asarray`; take the
        check out when it is found, since it slows calls down.
    """


class ComputationTimeout(Error, TimeoutError):
    """A run took longer than its `timeout`.

    Cause:
        The call took longer from its launch than its `timeout`: it is slow, it waits for another slice
        or a lost host, or it never ends.

    What to do:
        The message has the text of `pw why`, which names what held it up. Raise `timeout`, or mend
        that. The arguments are still there, unless they were donated.
    """


class Cancelled(Error):
    """The run that would have made the array was cancelled.

    Cause:
        `pw.cancel` or `pw cancel` ended the call.

    What to do:
        Call it again if that was not meant.
    """


class HostLost(Error):
    """A host left its island while it was needed.

    Cause:
        A worker or its machine died, hung, or lost its network. If its island does not come back, the
        error is an `IslandLost`.

    What to do:
        `pw status` shows which host is missing. Start its worker again, or one with `--spare`; then
        call again. The worker's log has its last words.
    """


class IslandLost(HostLost):
    """An island did not come back in time, and was given up.

    Other islands go on, and what lies there is left. `arrays_left` and `arrays_lost` name what this
    client held, by type and by the function that made it, some dozens of each; `pw.arrays_lost(tree)` says
    which arrays of one of the script's own trees are lost. When the island returns, it is a new one.

    Cause:
        Too few hosts of the island have come back within `pw.connect(recovery_timeout=)`, or
        `pw-controller --recovery-timeout` (60 s), and no other island had room. Or a device of the slice has
        failed its test, and no island has as many devices without it.

    What to do:
        Go on with fewer devices: ask for new ones (`pw.make_virtual_device_set()`, in plain JAX
        `jax.devices()`), and begin there from what is left or from the last checkpoint; or start the
        island's workers again. [Elastic training](elastic.md) shows both.
    """

    arrays_left: tuple[str, ...] = ()
    arrays_lost: tuple[str, ...] = ()


class ArrayLost(Error):
    """The buffers of an array are gone and cannot be rebuilt.

    Cause:
        The hosts that had the array are gone, there is no replica, and it cannot be computed again: an
        input was not kept, a host function made it, or the history is too long.

    What to do:
        Start from the last checkpoint on disk (`pw.restore`). In the loop call `pw.checkpoint`; for
        inputs pass `keep=True` to `pw.put`.
    """


class OutOfDeviceMemory(Error, MemoryError):
    """A computation can never fit in the memory of its devices.

    Cause:
        The arguments, results and temporaries of one call are larger than the device, beside arrays
        that nothing will free.

    What to do:
        `pw memory` shows what is there and who made it. Delete arrays, donate state, divide arrays over
        more devices, or use smaller batches.
    """


class OutOfHostMemory(Error, MemoryError):
    """A host has no memory to receive a buffer.

    Cause:
        A host could not allocate memory for an array that comes from another host, a client or a file.

    What to do:
        Look at the memory of that machine. Move less at once, or divide arrays over more hosts.
    """


class NameNotFound(Error, LookupError):
    """A name has no arrays for this client, or not the version that it asked for.

    Cause:
        No session has published the name yet, its publisher has left and did not ask for `keep`, a newer
        version has replaced the one that was asked for, or the name belongs to a tenant that did not publish
        it to this one.

    What to do:
        `pw names` lists the names that you may read, with their versions. Give `wait=` to wait for a
        publisher; a name of another tenant is `"tenant/name"`.
    """


class CheckpointFailed(Error, OSError):
    """A checkpoint could not be written, or read.

    Cause:
        The disk is full or read-only, hosts do not see one file system, a file is damaged, or replicas
        could not be made within their time.

    What to do:
        The message names the host and the file. Use an absolute path on a file system that all hosts
        share, and check the space there; then call `pw.checkpoint` again.
    """


class CheckpointNotFound(CheckpointFailed, FileNotFoundError):
    """There is no complete checkpoint at the path.

    Cause:
        The path is wrong, the checkpoint was not complete when its writer ended, or this host does not
        see the file system.

    What to do:
        Take the last complete path. Call `result()` of a checkpoint before the script ends.
    """


class CheckpointExists(CheckpointFailed, FileExistsError):
    """The path of a new checkpoint exists already.

    Cause:
        An earlier run has written there.

    What to do:
        Use another path for each step, or pass `overwrite=True`.
    """


class TransferFailed(Error):
    """Bytes could not be moved from one process to another.

    Cause:
        The connection between two hosts, or from a client to a host, broke, or a host cannot be reached
        at its `--advertise` address.

    What to do:
        The runtime repeats transfers between hosts. If it comes again, try the address in the
        message from the other machine; open the port, or correct `--bind` and `--advertise`.
    """


class IslandFull(Error):
    """A host asked to join an island that already has all its hosts.

    Cause:
        A worker wants to join an island that has all its hosts, or gives another `--island-hosts` than
        the others.

    What to do:
        Give it another `--island`, raise `--island-hosts` on all of them, or start it with `--spare`.
    """


class InternalError(Error):
    """pw broke one of its own rules; please report it.

    Cause:
        A fault of pw.

    What to do:
        Report it with the whole message, and the logs of the named host.
    """


_FAULTS = frozenset(kind.__name__ for kind in (InternalError, ProtocolError))
_FAULT = ". This is a fault of pw, not of your program: please report it, with this whole message"

INFRASTRUCTURE = frozenset(kind.__name__ for kind in (HostLost, TransferFailed, ConnectionFailed))
"""Names of errors without a cause in the program: one host of a gang may have them alone, and a replay
helps."""

SKIPPED = "Skipped"
"""Kind of the error in the place of values that a branch which was not taken would have made. No user sees it:
the results of a program are merges of such values (`pw.core.programs.guards`)."""


def kinds(base: type[Error] = Error) -> list[type[Error]]:
    """Return an error and all that derive from it, in the order of their definitions."""
    return [base, *(kind for sub in base.__subclasses__() for kind in kinds(sub))]


class ErrorReport(msgspec.Struct, frozen=True, array_like=True):
    """An error in a message: the class name, the text, the host, and the remote traceback."""

    kind: str
    message: str
    where: str = ""
    traceback: str = ""
    left: tuple[str, ...] = ()
    """Names of arrays that are left, of an `IslandLost`."""
    lost: tuple[str, ...] = ()
    """Names of arrays that are lost with the island."""

    @classmethod
    def of(
        cls, error: BaseException, where: str = "", kind: type[Error] | None = None
    ) -> ErrorReport:
        """Describe `error`; an exception that is not pw's own becomes `kind` (or InternalError)."""
        if isinstance(error, Error):
            remote = error.__notes__[0] if getattr(error, "__notes__", None) else ""
            report = cls(type(error).__name__, str(error), where, remote)
            if isinstance(error, IslandLost):
                lists = {"left": error.arrays_left, "lost": error.arrays_lost}
                report = msgspec.structs.replace(report, **lists)
            return report
        text = "".join(traceback_module.format_exception(error))
        name = (kind or InternalError).__name__
        return cls(name, f"{type(error).__name__}: {error}", where, text)

    def exception(self) -> Error:
        """Return the exception to raise in the client."""
        where = f" [on {self.where}]" if self.where else ""
        fault = _FAULT if self.kind in _FAULTS and not self.message.endswith(_FAULT) else ""
        by_name = {kind.__name__: kind for kind in kinds()}
        error = by_name.get(self.kind, Error)(f"{self.message}{where}{fault}")
        if isinstance(error, IslandLost):
            error.arrays_left, error.arrays_lost = self.left, self.lost
        if self.traceback:
            error.add_note(f"Traceback on {self.where or 'the remote side'}:\n{self.traceback}")
        return error
