"""Where processes that keep a model are found: sockets in a folder that is this user's alone.

The name of a socket says who can use it: `KIND-KEY.sock`. KIND is one for each installed `kv` and for what Python and
libraries read of the environment when they start, KEY for a model and how it is loaded.
"""

import os
import sys

SOCKET, LOCK = ".sock", ".lock"
STARTING, READY, SILENT = "starting", "ready", "not answering"  # what becomes of a process, and has become of it
# Beginnings of variables that are read when Python starts, or when libraries are imported; and one of ours.
_READ_EARLY = (
    *("ATEN_", "CUDA_", "GLIBC_", "GOMP_", "KMP_", "KV_CPU_ISA", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NVIDIA_"),
    *("OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "RAYON_", "RUST_", "TOKENIZERS_", "TORCH", "TRITON_"),
)


def folder() -> str:
    """`$XDG_RUNTIME_DIR/kv`, or one of this user's in /tmp where there is no such folder."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    return f"{given}/kv" if given.startswith("/") and os.path.isdir(given) else f"/tmp/kv-{os.getuid()}"


def is_private(path: str) -> bool:
    """Whether it is a folder of this user's, which nobody else may enter."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return status.st_mode & 0o170077 == 0o040000 and status.st_uid == os.getuid()


def make() -> str:
    """The folder, made if it is missing. Raises OSError, also where it is not private."""
    from contextlib import suppress

    path = folder()
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if not is_private(path):
        raise PermissionError(1, f"{path} is not a folder of this user's alone")
    return path


def kind() -> str:
    """Of this `kv`, as it starts in this process's environment."""
    from _imp import source_hash  # what tells compiled modules apart: there already, as hashlib and zlib are not

    import kvcli
    from kvcli.keepalive import thisprocess

    environment = thisprocess.started_with or os.environ
    read = sorted(item for item in environment.items() if item[0].startswith(_READ_EARLY))
    options = tuple(sys.flags), sorted(sys._xoptions.items())
    facts = kvcli.__version__, kvcli.__file__, sys.version, sys.executable, *options, read
    return source_hash(0, repr(facts).encode("utf-8", "surrogateescape")).hex()[:8]


def sockets(of_kind: str = "") -> "list[str]":
    """Names of sockets there are, the one that was used last first; [] where there is no such folder."""
    place = folder()
    if not is_private(place):
        return []
    found = []
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.name.endswith(SOCKET) and entry.name.startswith(of_kind):
                try:
                    found.append((-entry.stat().st_mtime, entry.name))
                except OSError:  # it went away
                    continue
    return [name for _, name in sorted(found)]


def beginning() -> "list[str]":
    """Names of the sockets that processes will have which have just begun: of these there are only the locks."""
    place = folder()
    there = set(os.listdir(place)) if is_private(place) else set()
    names = [f"{each.removesuffix(LOCK)}{SOCKET}" for each in there if each.endswith(LOCK)]
    return sorted(name for name in names if name not in there)


def reached(name: str) -> "tuple[str, int]":
    """A path of that socket that is short enough for any folder, and the descriptor that is to be closed behind it."""
    place = os.open(folder(), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{place}/{name}", place


def only_one(key: str) -> "int | None":
    """A lock that only one process of a name has; None where another one has it."""
    import fcntl

    path = f"{make()}/{kind()}-{key}{LOCK}"
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.fcntl(lock, fcntl.F_OFD_SETLK, _whole(fcntl.F_WRLCK))
            if os.fstat(lock).st_ino == os.stat(path).st_ino:
                os.truncate(lock, 0)  # one that was killed may have left what it was
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        except FileNotFoundError:  # whoever had it has removed it since
            pass
        os.close(lock)


def owner(name: str) -> bytes:
    """What the process of that socket wrote into its lock; b"" where nobody has it."""
    import fcntl
    import struct
    from contextlib import suppress

    with suppress(OSError), open(f"{folder()}/{name.removesuffix(SOCKET)}{LOCK}", "rb") as lock:
        found = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, _whole(fcntl.F_WRLCK))
        if struct.unpack_from("h", found)[0] != fcntl.F_UNLCK:
            return lock.read()
    return b""


def _whole(kind: int) -> bytes:
    """A `struct flock` of a whole file. Such a lock belongs to an open file, as one of `flock` does, and others can ask
    for it without having it for a moment."""
    import struct

    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)
