"""Checks of the Python package that run on Windows, under Wine, or with --pretend on a Linux made similar to Windows.

    python windows_checks.py [--pretend] DIRECTORY      prints a line per check; DIRECTORY is an empty one

--pretend hides the modules and functions that Windows lacks, sets sys.platform and replaces msvcrt. os.name stays, because pathlib needs it.
"""
from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

HIDDEN_MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
HIDDEN_FUNCTIONS = (
    "O_CLOEXEC", "O_NOFOLLOW", "SEEK_DATA", "fork", "getloadavg", "geteuid", "getuid", "killpg", "mkfifo", "posix_fadvise", "pread", "pwrite",
    "sched_getaffinity", "setsid", "sysconf",
)


def pretend() -> None:
    """Make this process similar to one on Windows."""
    import asyncio  # noqa: F401  # modules that choose by platform when they are imported
    import concurrent.futures.thread  # noqa: F401
    import fcntl
    import select

    import gguf  # noqa: F401
    import numpy  # noqa: F401
    import tqdm  # noqa: F401

    def locking(fd: int, mode: int, n_bytes: int) -> None:
        assert (mode, n_bytes, os.lseek(fd, 0, os.SEEK_CUR) > 1 << 20) == (2, 1, True)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    def refuse_open(function: Callable) -> Callable:
        def refusing(*paths: Path, **options: int) -> None:
            directory = os.readlink(f"/proc/self/fd/{options['dir_fd']}") if options.get("dir_fd") else ""
            names = {os.path.realpath(os.path.join(directory, path)) for path in paths}
            opened = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
            if any(os.path.realpath(fd) in names for fd in opened):
                raise PermissionError(errno.EACCES, "The process cannot access the file because it is being used by another process")
            if function.__name__ == "rename" and os.path.lexists(paths[1]):
                raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists")
            function(*paths, **options)

        return refusing

    def no_select(*_: object) -> None:
        raise OSError(10038, "An operation was attempted on something that is not a socket")

    msvcrt = types.ModuleType("msvcrt")
    msvcrt.locking, msvcrt.LK_NBLCK = locking, 2  # type: ignore[attr-defined]
    sys.modules["msvcrt"] = msvcrt
    for name in HIDDEN_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in HIDDEN_FUNCTIONS:
        if hasattr(os, name):
            delattr(os, name)
    for name in ("rename", "replace", "remove", "unlink"):
        setattr(os, name, refuse_open(getattr(os, name)))
    select.select = no_select  # type: ignore[assignment]
    os.link = os.symlink = no_link  # type: ignore[assignment]
    sys.platform = "win32"


def no_link(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "A required privilege is not held by the client")


def check_imports(_: Path) -> None:
    import ggml_ext

    names = [m.name for m in pkgutil.walk_packages(ggml_ext.__path__, "ggml_ext.")]
    # the converter is llama.cpp's; __main__ and count_tokens are programs
    names = [n for n in names if not n.startswith("ggml_ext.convert") and not n.endswith(("__main__", "count_tokens"))]
    for name in names:
        importlib.import_module(name)
    assert len(names) > 140, names


def check_file_locks(directory: Path) -> None:
    from ggml_ext._base.files import open_file
    from ggml_ext._base.locks import lock_file

    with open_file(directory / "journal") as first, open_file(directory / "journal") as second:
        first.write(b"line\n")
        first.flush()
        assert lock_file(first.fileno())
        try:
            lock_file(second.fileno())
        except BlockingIOError:
            pass
        else:
            raise AssertionError("two locks on one file")
        assert second.read() == b"line\n"  # under the lock of another
        first.write(b"more\n")
    assert (directory / "journal").read_bytes() == b"line\nmore\n"


def check_directory_locks(directory: Path) -> None:
    from ggml_ext._base.files import remove_stale_directories, temporary_directory
    from ggml_ext._base.locks import lock_directory

    lines: list[str] = []
    killed = directory / ".x-killed"
    killed.mkdir()
    (killed / ".ggml-ext.lock").touch()
    with temporary_directory(directory, ".x-", lines.append) as running:
        for path in (killed, running):
            os.utime(path, (0, 0))
        remove_stale_directories(directory, ".x-", lines.append)
        assert running.exists() and lines == [f"removed temporary files of a killed run: {killed}"], lines
        with lock_directory(running) as has_lock:
            assert not has_lock
    with lock_directory(directory) as has_lock:
        assert has_lock
    assert not any(directory.iterdir())


def check_renames(directory: Path) -> None:
    from ggml_ext._base.files import move_into_place, write_atomically

    def write(text: str, force: bool) -> None:
        with write_atomically(directory / "out \u00e9\u4e2d.gguf", force) as path:
            path.write_text(text)

    write("first", False)
    write("second", True)
    try:
        write("third", False)
    except FileExistsError:
        pass
    else:
        raise AssertionError("an existing file was replaced")
    assert [p.read_text() for p in directory.iterdir()] == ["second"]
    (directory / "partial").write_text("x")
    move_into_place(directory / "partial", directory / "new", force=False)
    assert (directory / "new").read_text() == "x"


def check_outputs(directory: Path) -> None:
    """An aborted run leaves nothing, a second run is refused, and a finished one replaces the file."""
    import numpy as np

    from ggml_ext._base.errors import UserError
    from ggml_ext._encode.accuracy import Accuracy
    from ggml_ext._output.output import Output

    path = directory / "out.gguf"

    def write(force: bool, stop: bool) -> None:
        with Output(path, force) as output:
            output.plan_parts([4], n_header=4, alignment=4, max_bytes=None, describe_input=lambda _: None)
            output.begin({"input": "x"}, [b"head"], [{"F32": 4}], print)
            output.start(0)
            try:
                with Output(path, True):
                    raise AssertionError("two runs write one file")
            except UserError as e:
                assert "another run is writing" in str(e), e
            if stop:
                raise ValueError
            output.write(np.frombuffer(b"data", np.uint8))
            output.finish("F32", Accuracy(), 0.0, [])
            output.complete([b"HEAD"])
            output.publish()

    try:
        write(False, True)
    except ValueError:
        pass
    assert not any(directory.iterdir()), list(directory.iterdir())
    write(False, False)
    write(True, False)
    assert [p.name for p in directory.iterdir()] == ["out.gguf"] and path.read_bytes() == b"HEADdata"


def check_reader(directory: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from ggml_ext._base.file_reader import FileReader

    data = bytes(range(256)) * 64 + b"\r\n\x1a\n"  # Windows changes line ends, and ends at 0x1a, in text mode
    (directory / "data").write_bytes(data)
    reader = FileReader(directory / "data")
    assert reader.read(0, len(data)) == data and not reader.is_hole(0, 1)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda i: reader.read(i, 99) == data[i : i + 99], range(2000)))


def check_programs(directory: Path) -> None:
    from ggml_ext._native.process import run_captured, run_logged, run_streamed

    def command(code: str) -> list[str]:
        return [sys.executable, "-c", code]

    outputs: list[str] = []
    code, log = run_streamed(command("import time; print('a', flush=True); time.sleep(2); print('b'); exit(3)"), directory, outputs.append)
    assert (code, log.split(), outputs[0].split(), outputs[-1]) == (3, ["a", "b"], ["a"], log)
    code, log = run_logged(command("import sys; print('out'); print('err', file=sys.stderr)"), directory, outputs.append)
    assert code == 0 and sorted(log.split()) == ["err", "out"]
    code, out, log = run_captured(command("import sys; print('out'); print('err', file=sys.stderr)"), directory)
    assert (code, out.split(), log.split()) == (0, ["out"], ["err"])
    stays = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(2)'], stdout=sys.stdout)"
    assert run_logged(command(stays), directory) == (0, "")  # Windows removes no file that is open elsewhere
    assert not any(directory.iterdir())


def check_machine(_: Path) -> None:
    from ggml_ext._base.threads import usable_cores
    from ggml_ext._evaluation.load import OtherLoad
    from ggml_ext._native.programs import find_tool

    assert usable_cores() >= 1 and OtherLoad().warning() is None
    if hasattr(sys, "getwindowsversion"):
        from ggml_ext._base.memory import available_memory

        assert 1 << 26 < available_memory() < 1 << 50
    tool = find_tool("llama-cli")
    assert tool is None or tool.name == "llama-cli.exe"


def check_command_line(directory: Path) -> None:
    """A command prints one line for a missing file, and its exit code is 1."""
    done = subprocess.run([sys.executable, "-m", "ggml_ext", "inspect", str(directory / "no.gguf")], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


CHECKS = (check_imports, check_file_locks, check_directory_locks, check_renames, check_outputs, check_reader, check_programs, check_machine,
          check_command_line)


def main() -> None:
    if sys.argv[1] == "--pretend":
        pretend()
    for check in CHECKS:
        directory = Path(sys.argv[-1], check.__name__)
        directory.mkdir()
        check(directory)
        print("passed", check.__name__, flush=True)


if __name__ == "__main__":
    main()
