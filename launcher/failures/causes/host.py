"""What Python, the dynamic linker, the loader of data and the kernel say when a rank fails, and what it means. Data.

Words of Python 3.10 to 3.14, torch 2.10 to 2.15, glibc and Linux.
"""

from __future__ import annotations

from .rules import Cause, Rule

BUS_ERROR = Cause(
    "bus error",
    "often a full /dev/shm (`df -h /dev/shm`; in a container raise `--shm-size`) or a file that shrank while mapped",
)
#: torch and NCCL say so of their files there.
SHM_FULL = Cause(
    "/dev/shm is full",
    "`df -h /dev/shm`; in a container raise `--shm-size`, in a pod mount an emptyDir of Memory there",
)
_PLAN = "`dsrun plan` shows what the model needs"


#: What names the root.
ROOTS: tuple[Rule, ...] = (
    (
        r"undefined symbol: nccl\w+",
        Cause(
            "another NCCL than torch's own is loaded",
            "LD_LIBRARY_PATH or another package brings an older one: `pip list | grep nccl`, and take it off the path",
        ),
    ),
    (
        r"undefined symbol: ",
        Cause("an extension was built for another torch", "reinstall it for this torch, without cached wheels"),
    ),
    (
        r"lib(cudart|cublas|cublasLt|cudnn|cufft|curand|cusparse|cusolver|nvrtc)\.so[.\d]*: cannot open shared object",
        Cause(
            "an extension needs another CUDA than torch brings",
            "the library's number is that of the CUDA it was built for: install its build for this torch's CUDA",
        ),
    ),
    (
        r"version `(GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found",
        Cause(
            "a library was built on a newer system than this host's",
            "for GLIBCXX a newer libstdc++ on LD_LIBRARY_PATH helps (conda's); for GLIBC only a build for this system",
        ),
    ),
    (r"unable to write to file </torch_[^\n]*No space left", SHM_FULL),
    (
        r"Memory cgroup out of memory: Killed process|oom-kill:constraint=CONSTRAINT_MEMCG|Detected \d+ oom.kill event",
        Cause("out of memory: a memory limit was reached", f"raise the limit (Slurm: `--mem`), or hold less: {_PLAN}"),
    ),
    (
        r"Out of memory: Killed process|oom-kill:constraint=CONSTRAINT_NONE",
        Cause("out of memory: the whole machine", f"fewer ranks, less offload or more swap: {_PLAN}"),
    ),
    (
        # Python's own sockets and pipes. Ranks are connected by torch's, which speak of no exception class or number.
        r"ConnectionResetError|BrokenPipeError|\[Errno (32|104)\]|RemoteDisconnected",
        Cause(
            "the other end closed a connection", "the traceback names it: a download, a database, a process of its own"
        ),
    ),
)

#: What is left where nothing else is named.
CLASSES: tuple[Rule, ...] = (
    (
        r"partially initialized module",
        Cause(
            "an import failed: two modules import each other",
            "or a file of the script's folder has the name of a package and is taken for it",
        ),
    ),
    (
        r"ImportError: cannot import name '(?P<name>[^']+)' from '(?P<module>[^']+)'",
        lambda found: Cause(
            f"an import failed: {found['module']} has no {found['name']}",
            "that package has another version here than the code was written for: `pip show`, on every host",
        ),
    ),
    (
        r"torch_extensions/\S+\.so: cannot open shared object file",
        Cause(
            "an extension was not built",
            "its compiler failed before, here or in another rank: see its lines, then remove that folder",
        ),
    ),
    (
        r"deepspeed is dsrun here",
        Cause("a name of DeepSpeed's is not in dsrun", "its line says why, and what to use instead"),
    ),
    (
        r"ModuleNotFoundError|ImportError|cannot open shared object file|python[\d.]*: No module named",
        Cause("an import failed", "install it for the interpreter that runs the ranks, on every host"),
    ),
    (
        r"[Aa]ddress already in use|EADDRINUSE",
        Cause(
            "a port is taken already",
            "dsrun gives each job its own port in MASTER_PORT; the script, or a server it starts, uses a fixed one",
        ),
    ),
    (
        r"No space left on device|\[Errno 28\]|ENOSPC",
        Cause("no space left on a disk", "`df -h` and `df -i` show which; checkpoints and /dev/shm count too"),
    ),
    (r"Disk quota exceeded|\[Errno 122\]", Cause("the disk quota is used up", "`quota -s` shows it")),
    (
        r"Too many open files|\[Errno 24\]",
        Cause(
            "too many open files",
            "raise `ulimit -n`, or call torch.multiprocessing.set_sharing_strategy('file_system')",
        ),
    ),
    (
        r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) is killed by signal: Killed",
        Cause("a DataLoader worker was killed", "often out of memory: fewer workers, or a smaller prefetch_factor"),
    ),
    (r"[Bb]us error|insufficient shared memory", BUS_ERROR),
    (
        r"DataLoader worker \(pid",
        Cause(
            "a DataLoader worker died", "what it said stands above; num_workers=0 shows its error in the rank itself"
        ),
    ),
    (
        r"can't allocate memory|Cannot allocate memory|^(?:[\w.]+\.)?(?:_Array)?MemoryError\b"
        r"|\[Errno 12\]|std::bad_alloc",
        Cause(
            "out of memory on the host", "fewer DataLoader workers or less offload: `dsrun plan` shows what is needed"
        ),
    ),
    (
        r"[Rr]esource temporarily unavailable|can't start new thread|\[Errno 11\]",
        Cause("no more processes or threads are allowed", "raise `ulimit -u`, or the pids limit of the container"),
    ),
    (
        r"PermissionError|[Pp]ermission denied|\[Errno 13\]",
        Cause("permission denied", "the line above names what; ranks run as the user who started dsrun"),
    ),
    (
        r"Read-only file system|\[Errno 30\]",
        Cause("a folder is read-only", "write to another, or mount it for writing"),
    ),
)
