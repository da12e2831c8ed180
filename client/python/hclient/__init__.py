# SPDX-License-Identifier: MIT
"""hreduce from Python: collectives through the node's hreduced daemon, on host memory and on torch's CUDA tensors.

    import hclient
    comm = hclient.Comm.from_name("grads")      # under torchrun, mpirun or srun
    comm.all_reduce(array)                      # in place; numpy array, torch CPU tensor, array.array, ...
    op = comm.all_reduce(tensor, op="avg", wait=False)
    op.wait()

On CUDA tensors a call only enqueues, in the order of torch's current stream: what comes after it in that stream sees the
result, and wait=True does not block the processor (Op.wait() does). When such an op fails, the process ends with the
sentence, before anything that comes after it in the stream runs: no optimizer makes a step with what it left. With
on_error="release" the stream goes on instead, and the failure shows in Op.done(), Comm.wait() or Comm.error().

    op = comm.all_reduce(tensor, defer=True)    # no stream waits for it yet ...
    op.stream_wait()                            # ... the current one does from here on

The module needs nothing but ctypes and libhclient.so.0, which it looks for in HREDUCE_LIBRARY (a path), in
build/ of the checkout it lies in (HREDUCE_BUILD names another build directory), and where the system keeps its
libraries. Every failure raises hclient.Error with the library's sentence. Calls release the interpreter lock.
What each call guarantees is written in hclient.h; the rules are the same here.
"""

import ctypes
import ctypes.util
import os
import sys
import weakref

__all__ = ["Comm", "Error", "Op", "SharedBuffer", "get_unique_id", "library"]

OK, IN_PROGRESS = 0, 1
NAMES = {
    2: "invalid argument",
    3: "unsupported",
    4: "mismatch",
    5: "timeout",
    6: "rank lost",
    7: "peer lost",
    8: "aborted",
    9: "superseded",
    10: "daemon lost",
    11: "daemon unresponsive",
    12: "no resource",
    13: "refused",
    14: "protocol error",
    15: "wrong version",
    16: "system error",
    17: "daemon is stopping",
}

DTYPES = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "bfloat16": 3,
    "int8": 4,
    "uint8": 5,
    "int32": 6,
    "uint32": 7,
    "int64": 8,
    "uint64": 9,
}
SIZES = {0: 4, 1: 8, 2: 2, 3: 2, 4: 1, 5: 1, 6: 4, 7: 4, 8: 8, 9: 8}
COLLECTIVES = {"all_reduce": 0, "broadcast": 1, "reduce_scatter": 2, "all_gather": 3, "barrier": 4}
OVERLAPS = {None: 0, "auto": 0, "compute": 1, "idle": 2}
DEFER_WAIT = 1
OPS = {"sum": 0, "prod": 1, "min": 2, "max": 3, "avg": 4}
# struct format characters of a buffer, by kind; the size decides which
FLOATS = {2: "float16", 4: "float32", 8: "float64"}
SIGNED = {1: "int8", 4: "int32", 8: "int64"}
UNSIGNED = {1: "uint8", 4: "uint32", 8: "uint64"}
KINDS = {"e": FLOATS, "f": FLOATS, "d": FLOATS, "b": SIGNED, "i": SIGNED, "l": SIGNED, "q": SIGNED, "n": SIGNED}
KINDS.update({"c": UNSIGNED, "B": UNSIGNED, "I": UNSIGNED, "L": UNSIGNED, "Q": UNSIGNED, "N": UNSIGNED})


class Error(RuntimeError):
    """A call that failed. code: HCLIENT_* as a number; str(): the sentence."""

    def __init__(self, code, text):
        super().__init__(f"{NAMES.get(code, code)}: {text}")
        self.code = code


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class _Op(ctypes.Structure):
    _fields_ = [("comm", ctypes.c_void_p), ("number", ctypes.c_uint64)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("socket", ctypes.c_char_p),
        ("setup_timeout_ms", ctypes.c_uint32),
        ("op_timeout_ms", ctypes.c_uint32),
        ("algo", ctypes.c_int),
        ("reproducible", ctypes.c_int),
        ("wire_f32", ctypes.c_int),
        ("transport", ctypes.c_int),
        ("require", ctypes.c_uint32),
        ("service_level", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("overlap", ctypes.c_int),
        ("on_error", ctypes.c_int),
    ]


class _Args(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("coll", ctypes.c_int),
        ("send", ctypes.c_void_p),
        ("recv", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        ("redop", ctypes.c_int),
        ("root", ctypes.c_int),
        ("stream", ctypes.c_void_p),
        ("overlap", ctypes.c_int),
        ("flags", ctypes.c_uint32),
    ]


class _Info(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("nranks", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("nnodes", ctypes.c_int),
        ("node", ctypes.c_int),
        ("local_size", ctypes.c_int),
        ("local_rank", ctypes.c_int),
        ("op_timeout_ms", ctypes.c_uint32),
        ("id", ctypes.c_char * 40),
        ("daemon_version", ctypes.c_char * 32),
    ]


_P, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES = {
    "hclient_get_unique_id": [ctypes.POINTER(_UniqueId)],
    "hclient_comm_init_rank_config": [ctypes.POINTER(_P), _INT, _UniqueId, _INT, ctypes.POINTER(_Config)],
    "hclient_comm_init_name": [ctypes.POINTER(_P), ctypes.c_char_p, ctypes.POINTER(_Config)],
    "hclient_comm_destroy": [_P],
    "hclient_comm_abort": [_P],
    "hclient_comm_get_async_error": [_P, ctypes.POINTER(_INT)],
    "hclient_comm_get_info": [_P, ctypes.POINTER(_Info)],
    "hclient_comm_path": [_P, ctypes.POINTER(_P)],
    "hclient_comm_wait": [_P],
    "hclient_mem_alloc": [ctypes.POINTER(_P), _SIZE],
    "hclient_mem_free": [_P],
    "hclient_collective": [_P, ctypes.POINTER(_Args), ctypes.POINTER(_Op)],
    "hclient_stream_wait": [_Op, _P],
    "hclient_wait": [_Op],
    "hclient_test": [_Op],
    "hclient_group_start": [],
    "hclient_group_end": [],
}

_library = None


def _candidates():
    if os.environ.get("HREDUCE_LIBRARY"):
        yield os.environ["HREDUCE_LIBRARY"]
        return
    checkout = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "build")
    build = os.path.join(os.environ.get("HREDUCE_BUILD", checkout), "libhclient.so.0")
    if os.path.exists(build):
        yield build
    yield "libhclient.so.0"


def library():
    """The loaded library, as ctypes has it."""
    global _library
    if _library is None:
        tried = []
        for path in _candidates():
            try:
                lib = ctypes.CDLL(path)
                break
            except OSError as error:
                tried.append(str(error))
        else:
            raise ImportError(
                "cannot load libhclient.so.0: " + "; ".join(tried) + ". Build it (make) or set HREDUCE_LIBRARY to its path"
            )
        for name, types in _SIGNATURES.items():
            function = getattr(lib, name)
            function.argtypes = types
            function.restype = _INT
        lib.hclient_last_error.argtypes = [_P]
        lib.hclient_last_error.restype = ctypes.c_char_p
        lib.hclient_free.argtypes = [_P]
        lib.hclient_free.restype = None
        _library = lib
    return _library


def _call(name, *args):
    """Calls and turns a failure into Error."""
    lib = library()
    code = getattr(lib, name)(*args)
    if code > IN_PROGRESS:
        raise Error(code, (lib.hclient_last_error(None) or b"").decode("utf-8", "replace"))
    return code


def _how(wait=True, overlap=None, defer=False):
    return wait, overlap, defer


def get_unique_id():
    """128 bytes that name a new communicator; carry them to the other ranks."""
    uid = _UniqueId()
    _call("hclient_get_unique_id", ctypes.byref(uid))
    return ctypes.string_at(ctypes.byref(uid), ctypes.sizeof(uid))


def _config(
    socket=None,
    setup_timeout=0,
    op_timeout=0,
    algo=0,
    reproducible=None,
    wire_f32=None,
    transport=0,
    require=0,
    service_level=None,
    traffic_class=None,
    overlap="auto",
    on_error="trap",
):
    def tristate(value):
        return 0 if value is None else 2 if value else 1

    def ms(seconds):
        return 0xFFFFFFFF if seconds == float("inf") else int(seconds * 1000)

    return _Config(
        ctypes.sizeof(_Config),
        os.fsencode(socket) if socket else None,
        ms(setup_timeout),
        ms(op_timeout),
        algo,
        tristate(reproducible),
        tristate(wire_f32),
        transport,
        require,
        0 if service_level is None else service_level + 1,
        0 if traffic_class is None else traffic_class + 1,
        OVERLAPS[overlap],
        ("release", "trap").index(on_error) + 1,
    )


class _View:
    """Address, length and element type of something that holds numbers, and what keeps it alive."""

    stream = None  # of a tensor on a GPU: the current one
    device = None

    def __init__(self, thing, writable):
        if hasattr(thing, "data_ptr") and hasattr(thing, "is_contiguous"):
            self._from_tensor(thing)
        else:
            self._from_buffer(thing, writable)

    def _from_tensor(self, tensor):
        if not tensor.is_contiguous():
            raise ValueError("the tensor is not contiguous; pass tensor.contiguous()")
        name = str(tensor.dtype).rsplit(".", maxsplit=1)[-1]
        if name not in DTYPES:
            raise TypeError(f"tensors of {tensor.dtype} cannot be reduced; use one of {', '.join(DTYPES)}")
        self.dtype = DTYPES[name]
        self.count = tensor.numel()
        self.address = tensor.data_ptr() if self.count else None
        self.owner = tensor
        if getattr(tensor, "is_cuda", False):
            # The caching allocator must not give the memory to another stream before this one has passed the op.
            self.device = tensor.device
            self.stream = sys.modules["torch"].cuda.current_stream(tensor.device)
            tensor.record_stream(self.stream)

    def _from_buffer(self, thing, writable):
        view = memoryview(thing)
        if not view.c_contiguous:
            raise ValueError("the buffer is not contiguous")
        if writable and view.readonly:
            raise ValueError("the buffer is read-only, the result has no place in it")
        name = KINDS.get(view.format.lstrip("@=<"), {}).get(view.itemsize)
        if name is None:
            raise TypeError(f"buffers of format {view.format!r} cannot be reduced; use one of {', '.join(DTYPES)}")
        self.dtype = DTYPES[name]
        self.count = view.nbytes // view.itemsize
        self.address = _address_of(view) if self.count else None
        self.owner = view


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", _P),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", _INT),
        ("ndim", _INT),
        ("format", ctypes.c_char_p),
        ("shape", _P),
        ("strides", _P),
        ("suboffsets", _P),
        ("internal", _P),
    ]


def _address_of(view):
    """The address of a memoryview, also of a read-only one, which ctypes' from_buffer refuses."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = buffer.buf
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


class Op:
    """One collective that was posted. It keeps its buffers alive until it is complete."""

    def __init__(self, handle, keep, deferred=None):
        self._handle = handle
        self._keep = keep
        self._deferred = deferred  # of the communicator: keeps ops that no stream waits for

    def _taken(self):
        if self._deferred is not None:
            self._deferred.pop(self._handle.number, None)

    def stream_wait(self, stream=None):
        """What is put into the stream (default: torch's current one) after this call sees the result. Does not block the
        processor. For ops on CUDA tensors."""
        views = [view for view in self._keep or () if view.device is not None]
        if stream is None:
            if not views:
                raise ValueError("the op has no CUDA tensors that are still held; name the stream")
            stream = sys.modules["torch"].cuda.current_stream(views[0].device)
        for view in set(views):
            view.owner.record_stream(stream)
        _call("hclient_stream_wait", self._handle, stream.cuda_stream)
        self._taken()

    def wait(self):
        """Blocks until the result is in place; raises Error when the op failed."""
        try:
            _call("hclient_wait", self._handle)
        finally:
            self._keep = None
            self._taken()

    def done(self):
        """Whether it is complete; raises Error when it failed."""
        if _call("hclient_test", self._handle) == IN_PROGRESS:
            return False
        self._keep = None
        self._taken()
        return True


class SharedBuffer:
    """Memory shared with the daemon: collectives on it copy nothing. Supports the buffer protocol through
    `view` (numpy.frombuffer(b.view, "f4"), torch.frombuffer(b.view, dtype=torch.float32)); freed with the
    object, so keep it as long as anything made from the view."""

    def __init__(self, nbytes):
        pointer = _P()
        _call("hclient_mem_alloc", ctypes.byref(pointer), nbytes)
        self.address = pointer.value
        self.view = memoryview((ctypes.c_ubyte * nbytes).from_address(self.address)).cast("B")
        self._free = weakref.finalize(self, library().hclient_mem_free, self.address)
        self._free.atexit = False

    def free(self):
        """Frees it now. What was made from the view must not be touched afterwards."""
        self._free()


class Comm:
    """A communicator. Close it, or use it in a `with` block; what is left at exit the daemon cleans up."""

    def __init__(self, handle):
        self._handle = handle
        self._deferred = {}
        info = _Info(ctypes.sizeof(_Info))
        _call("hclient_comm_get_info", handle, ctypes.byref(info))
        self.rank, self.nranks = info.rank, info.nranks
        self.node, self.nnodes = info.node, info.nnodes
        self.local_size, self.local_rank = info.local_size, info.local_rank
        self.id = info.id.decode()
        self.daemon_version = info.daemon_version.decode()

    @classmethod
    def from_name(cls, name, **config):
        """Joins the ranks of this job that use the same name; rank and size come from the launcher (torchrun,
        mpirun, srun). config: socket, setup_timeout and op_timeout in seconds (float("inf"): none), algo,
        reproducible, wire_f32, transport, require, service_level, traffic_class, overlap ("auto", "compute",
        "idle"), on_error ("trap", which is the default here, or "release"), as in hclient_comm_config_t."""
        handle = _P()
        settings = _config(**config)
        _call("hclient_comm_init_name", ctypes.byref(handle), os.fsencode(name), ctypes.byref(settings))
        return cls(handle)

    @classmethod
    def from_id(cls, uid, nranks, rank, **config):
        """Joins by the 128 bytes of get_unique_id()."""
        if len(uid) != 128:
            raise ValueError(f"an id has 128 bytes, this one {len(uid)}")
        handle = _P()
        settings = _config(**config)
        unique = _UniqueId.from_buffer_copy(uid)
        _call("hclient_comm_init_rank_config", ctypes.byref(handle), nranks, unique, rank, ctypes.byref(settings))
        return cls(handle)

    def _post(self, coll, views, how, count=0, redop=0, root=0):
        """views: of input and output. how: the keyword arguments of every collective."""
        wait, overlap, defer = _how(**how)
        out = views[-1] if views else None
        stream = out.stream if out else None
        args = _Args(
            ctypes.sizeof(_Args),
            COLLECTIVES[coll],
            views[0].address if views else None,
            out.address if out else None,
            count,
            out.dtype if out else 0,
            redop,
            root,
            stream.cuda_stream if stream else None,
            OVERLAPS[overlap],
            DEFER_WAIT if defer else 0,
        )
        handle = _Op()
        _call("hclient_collective", self._handle, ctypes.byref(args), ctypes.byref(handle))
        posted = Op(handle, views, self._deferred if defer else None)
        if defer and stream:
            self._deferred[handle.number] = posted
        if defer or not wait:
            return posted
        if stream:
            return None  # whoever looks at the result does so in the stream
        posted.wait()
        return None

    @staticmethod
    def _pair(send, recv):
        """Views of input and output; recv None: in place."""
        out = _View(send if recv is None else recv, True)
        source = out if recv is None else _View(send, False)
        if source.dtype != out.dtype:
            raise TypeError("input and output have different element types")
        return source, out

    def all_reduce(self, send, recv=None, op="sum", **how):
        """recv (default: send itself) becomes the sum, prod, min, max or avg over all ranks. All collectives take also:
        wait (default True; False: gives back an Op), overlap ("auto", "compute", "idle": for this op), and defer
        (True: gives back an Op, and no stream waits for it before Op.stream_wait())."""
        source, out = self._pair(send, recv)
        if source.count != out.count:
            raise ValueError(f"input has {source.count} elements, output {out.count}")
        return self._post("all_reduce", (source, out), how, out.count, OPS[op])

    def broadcast(self, buffer, root=0, **how):
        """buffer becomes root's, in place."""
        view = _View(buffer, True)
        return self._post("broadcast", (view,), how, view.count, root=root)

    def reduce_scatter(self, send, recv, op="sum", **how):
        """recv becomes this rank's part of the reduction of send, which has nranks times as many elements."""
        source, out = self._pair(send, recv)
        if source.count != out.count * self.nranks:
            raise ValueError(f"input has {source.count} elements, {self.nranks} ranks times {out.count} are needed")
        return self._post("reduce_scatter", (source, out), how, out.count, OPS[op])

    def all_gather(self, send, recv, **how):
        """recv becomes all ranks' send, one after the other; it has nranks times as many elements."""
        source, out = self._pair(send, recv)
        if out.count != source.count * self.nranks:
            raise ValueError(f"output has {out.count} elements, {self.nranks} ranks times {source.count} are needed")
        return self._post("all_gather", (source, out), how, source.count)

    def barrier(self, wait=True):
        """Returns when every rank has called it."""
        return self._post("barrier", (), {"wait": wait})

    def wait(self):
        """Waits for everything that was posted."""
        try:
            _call("hclient_comm_wait", self._handle)
        finally:
            self._deferred.clear()

    def path(self):
        """The path report: a JSON text."""
        text = _P()
        _call("hclient_comm_path", self._handle, ctypes.byref(text))
        try:
            return ctypes.string_at(text.value).decode("utf-8", "replace")
        finally:
            library().hclient_free(text)

    def error(self):
        """None while the communicator works, else the Error that ended it. Never waits."""
        code = _INT()
        _call("hclient_comm_get_async_error", self._handle, ctypes.byref(code))
        if code.value == OK:
            return None
        return Error(code.value, library().hclient_last_error(self._handle).decode("utf-8", "replace"))

    def abort(self):
        """Ends it on all ranks; may be called from another thread."""
        _call("hclient_comm_abort", self._handle)

    def close(self):
        """Leaves. Ops that are not complete are abandoned."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _call("hclient_comm_destroy", handle)
        self._deferred.clear()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
