"""scripts/build/web_ui.py with stand-ins for npm: every failure ends in one line and leaves nothing, a built page is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import llama_cpp
import web_ui
from helpers.native import ROOT

SCRIPT = ROOT / "scripts" / "build" / "web_ui.py"
# writes what a page consists of; argv: folder
PAGE = """
def write_page(folder):
    for name in ("index.html", "manifest.webmanifest", "sw.js", "build.json", "_app/version.json", "_app/bundle.1.js",
                 "_app/bundle.1.css", "workbox-1.js"):
        (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).write_text(name)
"""
OLD_NODE = """npm ERR! code EBADENGINE
npm ERR! engine Unsupported engine
npm ERR! engine Not compatible with your version of node/npm: storybook@10.5.6
npm ERR! notsup Not compatible with your version of node/npm: storybook@10.5.6
npm ERR! notsup Required: {"node":">=20.0.0","yarn":">=1.22.18"}
npm ERR! notsup Actual:   {"npm":"9.2.0","node":"v18.20.4"}
"""
OFFLINE = """npm error code ECONNREFUSED
npm error syscall connect
npm error errno ECONNREFUSED
npm error FetchError: request to http://127.0.0.1:9/zwitch failed, reason: connect ECONNREFUSED 127.0.0.1:9
npm error     at ClientRequest.<anonymous> (index.js:130:14)
npm error A complete log of this run can be found in: /somewhere/debug-0.log
"""


class Place:
    """A llama.cpp tree with a page to build, a cache, and a folder of programs that is the whole PATH."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.cache, self.programs, self.calls = (folder / n for n in ("tree", "cache", "programs", "calls"))
        for path in (self.tree / "ggml", self.tree / "tools" / "ui" / "src", self.programs):
            path.mkdir(parents=True)
        (self.tree / "ggml" / "CMakeLists.txt").touch()
        (self.tree / "tools" / "ui" / "package-lock.json").write_text("{}")
        (self.tree / "tools" / "ui" / "src" / "app.html").write_text("a page")
        self.env = {"PATH": str(self.programs), "GGML_EXT_CACHE_DIR": str(self.cache), "GGML_EXT_LLAMA_CPP_DIR": str(self.tree),
                    "HOME": str(folder)}

    def npm(self, ci: str = "Path('node_modules').mkdir()", build: str = "write_page(os.environ['LLAMA_UI_OUT_DIR'])") -> None:
        """Stands in for npm: runs the Python code of the step in the folder where npm would run it."""
        path = self.programs / "npm"
        path.write_text(f"#!{sys.executable}\nimport os, subprocess, sys, time\nfrom pathlib import Path\n{PAGE}\n"
                        f"with open({str(self.calls)!r}, 'a') as calls: print(sys.argv[1], file=calls)\n"
                        f"Path(os.environ['npm_config_cache']).mkdir(exist_ok=True)\n"
                        f"exec({ci!r} if sys.argv[1] == 'ci' else {build!r})\n")
        path.chmod(0o755)

    def start(self) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, SCRIPT, "build"], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True)

    def end(self, process: subprocess.Popen) -> subprocess.CompletedProcess:
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def build(self) -> Path:
        done = self.end(self.start())
        assert (done.returncode, done.stderr) == (0, "")
        page = Path(done.stdout.rstrip("\n"))
        assert (page / "index.html").read_text() == "index.html"
        return page

    def assert_fails(self, *words: str) -> None:
        self.assert_failed(self.end(self.start()), *words)

    def assert_failed(self, done: subprocess.CompletedProcess, *words: str) -> None:
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1, done.stderr
        for word in words:
            assert word in done.stderr
        assert not self.cache.is_dir() or not list(self.cache.iterdir())

    def n_calls(self) -> int:
        return len(self.calls.read_text().splitlines())

    def wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + 30
        while not path.exists():
            assert time.monotonic() < deadline, f"{path} did not come"
            time.sleep(0.02)


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


def test_a_page_is_built_once_and_nothing_else_stays(place):
    place.npm()
    page = place.build()
    assert [p.name for p in place.cache.iterdir()] == [page.parent.name]
    assert sorted(p.name for p in page.parent.iterdir()) == ["files.sha256", "page"]
    assert not (place.tree / "tools" / "ui" / "node_modules").exists()
    assert place.build() == page and place.n_calls() == 2  # ci and build, once
    (place.programs / "npm").unlink()
    assert place.build() == page


def test_other_sources_make_another_page(place):
    place.npm()
    first = place.build()
    (place.tree / "tools" / "ui" / "src" / "app.html").write_text("another page")
    assert place.build() != first and first.exists()


def test_the_pinned_tree_goes_by_its_version(place, monkeypatch):
    monkeypatch.setenv("GGML_EXT_CACHE_DIR", str(place.cache))
    monkeypatch.delenv("GGML_EXT_LLAMA_CPP_DIR", raising=False)
    assert web_ui.cache_entry(place.tree) == place.cache / f"llama-ui-{web_ui.PIN['version']}"


def test_a_page_that_the_owner_of_the_tree_has_built_is_taken(place):
    own = place.tree / "tools" / "ui" / "dist"
    own.mkdir()
    (own / "index.html").write_text("index.html")
    assert place.build() == own


@pytest.mark.parametrize("damage", ["cut", "a file less", "no record", "a bad record", "a file in its place"])
def test_a_damaged_cache_is_built_again(place, damage):
    place.npm()
    page = place.build()
    if damage == "cut":
        (page / "workbox-1.js").write_text("work")
    elif damage == "a file less":
        (page / "_app" / "bundle.1.css").unlink()
    elif damage == "no record":
        (page.parent / "files.sha256").unlink()
    elif damage == "a bad record":
        (page.parent / "files.sha256").write_bytes(b"\xff\0")
    else:
        os.rename(page.parent, place.cache / "aside")
        page.parent.touch()
    assert place.build() == page and place.n_calls() == 4
    assert web_ui.is_complete(page.parent)


@pytest.mark.parametrize("step, code, words", [
    ("ci", f"sys.exit({OLD_NODE!r})", ["Node.js 18.20.4 is too old", "storybook@10.5.6 needs >=20.0.0"]),
    ("ci", f"sys.exit({OFFLINE!r})", ["npm ci failed", "connect ECONNREFUSED 127.0.0.1:9"]),
    ("ci", "Path('node_modules').mkdir(); sys.exit('env: node: No such file or directory')", ["npm ci failed", "env: node"]),
    ("ci", "sys.exit(3)", ["npm ci failed", "no output"]),
    ("build", "print('x'); sys.exit('\\x1b[31merror during build:\\x1b[0m\\nRollup failed to resolve\\n  at a:1\\n  at b:2')",
     ["npm run build failed: Rollup failed to resolve"]),
    ("build", "write_page(os.environ['LLAMA_UI_OUT_DIR']); sys.exit('no space left on device')",
     ["npm run build failed", "no space left"]),
    ("build", "pass", ["incomplete", "index.html", "bundle*.js"]),
    ("build", "write_page(os.environ['LLAMA_UI_OUT_DIR']); (Path(os.environ['LLAMA_UI_OUT_DIR']) / 'sw.js').write_text('')",
     ["incomplete", "sw.js"]),
], ids=["old node", "offline", "no node", "silent", "vite", "half a page", "no page", "empty file"])
def test_a_failing_npm_is_one_line_and_leaves_nothing(place, step, code, words):
    place.npm(**{step: code})
    place.assert_fails(*words)


def test_without_npm(place):
    place.assert_fails("npm is not installed", "install Node.js")


def test_a_program_that_cannot_run_in_place_of_npm(place):
    (place.programs / "npm").write_text("#!/nowhere/node\n")
    (place.programs / "npm").chmod(0o755)
    place.assert_fails(f"npm ci failed: {place.programs / 'npm'}")


def test_a_tree_without_the_page(place):
    (place.tree / "tools" / "ui" / "package-lock.json").unlink()
    place.npm()
    place.assert_fails("no sources", "tools/ui/package-lock.json")


@pytest.mark.skipif(sys.platform != "linux", reason="/sys is where not even root may create a folder")
def test_a_cache_that_cannot_be_written(place):
    place.npm()
    place.env["GGML_EXT_CACHE_DIR"] = "/sys/ggml-ext"
    place.assert_fails("/sys/ggml-ext", "GGML_EXT_CACHE_DIR")


def test_a_file_where_the_cache_should_be(place):
    place.npm()
    place.cache.touch()
    place.assert_fails(str(place.cache), "GGML_EXT_CACHE_DIR")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_stopped_build_leaves_no_files_and_no_processes(place, name):
    """Also none of the processes that npm started."""
    pids = place.programs / "pids"
    place.npm(ci="Path('node_modules').mkdir()\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'])\n"
                 f"Path('{pids}.part').write_text(f'{{os.getpid()}} {{child.pid}}'); os.rename('{pids}.part', '{pids}')\n"
                 "time.sleep(120)")
    process = place.start()
    place.wait_for(pids)
    process.send_signal(getattr(signal, name))
    place.assert_failed(place.end(process), f"stopped by {name}")
    deadline = time.monotonic() + 10
    for pid in map(int, pids.read_text().split()):
        while is_running(pid):
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.05)


def is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return state not in ("", "Z")  # a zombie has ended, whoever inherits it


def test_an_npm_that_does_not_end(place, monkeypatch):
    place.npm(ci="time.sleep(120)")
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(web_ui, "LIMIT_S", 0.5)
    with pytest.raises(web_ui.Failure, match="npm ci did not end within 0.5 s"):
        web_ui.build()
    assert not list(place.cache.iterdir())


def test_what_a_killed_build_left_is_removed_by_the_next(place):
    place.npm(ci="Path('node_modules').mkdir(); time.sleep(120)")
    process = place.start()
    place.wait_for(place.calls)
    process.kill()
    place.end(process)
    assert list(place.cache.glob(f"{web_ui.WORK}*"))
    place.npm()
    page = place.build()
    assert list(place.cache.iterdir()) == [page.parent]


def test_two_builds_at_once(place):
    place.npm(ci="time.sleep(1)")
    processes = [place.start(), place.start()]
    done = [place.end(process) for process in processes]
    assert [(d.returncode, d.stderr) for d in done] == [(0, "")] * 2 and done[0].stdout == done[1].stdout
    assert place.n_calls() == 2  # the second waited for the first
    assert len(list(place.cache.iterdir())) == 1


def test_another_process_was_faster_and_there_are_no_locks(place, monkeypatch):
    """On a file system without them both build; the later one must not fail."""
    place.npm()
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(web_ui, "fcntl", None)
    first = web_ui.build()
    monkeypatch.setattr(web_ui, "is_complete", lambda entry: False)
    assert web_ui.build() == first
    assert len(list(place.cache.iterdir())) == 1


def test_the_build_says_in_one_line_what_became_of_the_page(place, tmp_path, monkeypatch):
    """One folder, so that each configuration meets what another has left."""
    tree = llama_cpp.pristine_tree()
    monkeypatch.setenv("GGML_EXT_LLAMA_CPP_DIR", str(tree))
    monkeypatch.setenv("GGML_EXT_CACHE_DIR", str(place.cache))
    monkeypatch.setenv("PATH", f"{place.programs}{os.pathsep}{os.environ['PATH']}")
    copied = tmp_path / "build" / "llama.cpp" / "tools" / "ui" / "dist" / "index.html"

    def configure(*options: str) -> tuple[bool, str]:
        done = subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}",
                               *options], capture_output=True, text=True)
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "chat page" in line]
        assert len(lines) == 1, done.stdout + done.stderr
        return done.returncode == 0, lines[0].strip()

    place.npm(ci="sys.exit('no such luck')")
    assert configure() == (True, "-- chat page: left out, npm ci failed: no such luck") and not copied.exists()
    done, line = configure("-DGGML_EXT_UI=ON")
    assert not done and line.startswith("chat page: npm ci failed: no such luck")
    assert place.n_calls() == 2
    place.npm()
    assert configure("-UGGML_EXT_UI") == (True, "-- chat page: in llama-server")  # as an older version has left the folder
    assert copied.read_text() == "index.html"
    assert configure("-DGGML_EXT_UI=OFF") == (True, "-- chat page: left out, GGML_EXT_UI=OFF")
    assert place.n_calls() == 4 and not copied.exists()
