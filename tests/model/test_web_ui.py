"""scripts/build/web_ui.py with a fake npm: every failure ends in one line and leaves no files, a built page is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import llama_cpp
import web_ui
from helpers.native import ROOT

SCRIPT = ROOT / "scripts" / "build" / "web_ui.py"
# Defines write_page(directory), which writes a complete page.
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


class PageBuild:
    """A llama.cpp tree with a page to build, a cache, and a directory of programs that is the only entry of PATH."""

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
        """Install a fake npm that runs the Python code of the step in the directory where npm would run it."""
        path = self.programs / "npm"
        path.write_text(f"#!{sys.executable}\nimport os, subprocess, sys, time\nfrom pathlib import Path\n{PAGE}\n"
                        f"with open({str(self.calls)!r}, 'a') as calls: print(sys.argv[1], file=calls)\n"
                        f"Path(os.environ['npm_config_cache']).mkdir(exist_ok=True)\n"
                        f"exec({ci!r} if sys.argv[1] == 'ci' else {build!r})\n")
        path.chmod(0o755)

    def run(self) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, SCRIPT, "build"], env=self.env, capture_output=True, text=True)

    def build(self) -> Path:
        done = self.run()
        assert (done.returncode, done.stderr) == (0, "")
        page = Path(done.stdout.rstrip("\n"))
        assert (page / "index.html").read_text() == "index.html"
        return page

    def assert_fails(self, *words: str) -> None:
        done = self.run()
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1, done.stderr
        for word in words:
            assert word in done.stderr
        assert not self.cache.is_dir() or not list(self.cache.iterdir())

    def n_calls(self) -> int:
        return len(self.calls.read_text().splitlines())


@pytest.fixture
def page_build(tmp_path) -> PageBuild:
    return PageBuild(tmp_path)


def test_page_is_built_once_and_leaves_nothing_else(page_build):
    page_build.npm()
    page = page_build.build()
    assert list(page_build.cache.iterdir()) == [page]
    assert not (page_build.tree / "tools" / "ui" / "node_modules").exists()
    assert page_build.build() == page and page_build.n_calls() == 2  # ci and build ran once
    (page_build.programs / "npm").unlink()
    assert page_build.build() == page


def test_changed_sources_build_another_page(page_build):
    page_build.npm()
    first = page_build.build()
    (page_build.tree / "tools" / "ui" / "src" / "app.html").write_text("another page")
    assert page_build.build() != first and first.exists()


def test_cache_of_the_pinned_tree_has_its_version(page_build, monkeypatch):
    monkeypatch.setenv("GGML_EXT_CACHE_DIR", str(page_build.cache))
    monkeypatch.delenv("GGML_EXT_LLAMA_CPP_DIR", raising=False)
    assert web_ui.cache_entry(page_build.tree) == page_build.cache / f"chat-page-{web_ui.PIN['version']}"


def test_page_in_the_tree_is_used(page_build):
    own = page_build.tree / "tools" / "ui" / "dist"
    own.mkdir()
    (own / "index.html").write_text("index.html")
    assert page_build.build() == own


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
def test_npm_failure_is_one_line_and_leaves_nothing(page_build, step, code, words):
    page_build.npm(**{step: code})
    page_build.assert_fails(*words)


def test_missing_npm_is_reported(page_build):
    page_build.assert_fails("npm is not installed", "install Node.js")


def test_npm_that_cannot_run_is_reported(page_build):
    (page_build.programs / "npm").write_text("#!/nowhere/node\n")
    (page_build.programs / "npm").chmod(0o755)
    page_build.assert_fails(f"npm ci failed: {page_build.programs / 'npm'}")


def test_tree_without_page_sources_is_refused(page_build):
    (page_build.tree / "tools" / "ui" / "package-lock.json").unlink()
    page_build.npm()
    page_build.assert_fails("no sources", "tools/ui/package-lock.json")


@pytest.mark.skipif(sys.platform != "linux", reason="/sys is where not even root may create a folder")
def test_read_only_cache_is_reported(page_build):
    page_build.npm()
    page_build.env["GGML_EXT_CACHE_DIR"] = "/sys/ggml-ext"
    page_build.assert_fails("/sys/ggml-ext", "GGML_EXT_CACHE_DIR")


def test_file_in_place_of_the_cache_is_reported(page_build):
    page_build.npm()
    page_build.cache.touch()
    page_build.assert_fails(str(page_build.cache), "GGML_EXT_CACHE_DIR")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_stopped_build_leaves_no_files(page_build, name):
    """npm sends the signal, as a terminal would."""
    page_build.npm(ci=f"import signal; os.kill(os.getppid(), signal.{name}); time.sleep(0.5)")
    page_build.assert_fails(f"stopped by {name}")


def test_npm_that_hangs_is_stopped(page_build, tmp_path, monkeypatch):
    """With what it started, which holds its output open and would write a file after three seconds."""
    monkeypatch.setattr(web_ui, "STEP_LIMIT", 1)
    page_build.npm(ci="""subprocess.run([sys.executable, "-c", "import time; time.sleep(3); open('late', 'w')"])""")
    with pytest.raises(web_ui.Failure, match="npm ci took longer than"):
        web_ui.run_npm("npm ci", [str(page_build.programs / "npm"), "ci"], tmp_path, page_build.env | {"npm_config_cache": str(tmp_path / "npm")})
    time.sleep(3)
    assert not (tmp_path / "late").exists()


def test_page_of_a_concurrent_build_is_used(page_build):
    page_build.npm()
    entry = page_build.build()
    page_build.npm(build=f"write_page(os.environ['LLAMA_UI_OUT_DIR']); os.rename({str(entry) + '-aside'!r}, {str(entry)!r})")
    os.rename(entry, f"{entry}-aside")
    assert page_build.build() == entry


def test_build_reports_the_page_in_one_line(page_build, tmp_path, monkeypatch):
    """One build directory, so that each build follows another one."""
    tree = llama_cpp.pristine_tree()
    monkeypatch.setenv("GGML_EXT_LLAMA_CPP_DIR", str(tree))
    monkeypatch.setenv("GGML_EXT_CACHE_DIR", str(page_build.cache))
    monkeypatch.setenv("PATH", f"{page_build.programs}{os.pathsep}{os.environ['PATH']}")
    installed = tmp_path / "build" / "llama.cpp" / "tools" / "ui" / "dist" / "index.html"

    def build(*options: str) -> tuple[bool, str]:
        runs = [subprocess.run(["cmake", *command], capture_output=True, text=True) for command in (
            ["-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", *options],
            ["--build", tmp_path / "build", "--target", "llama-ui-assets"])]
        output = "".join(run.stdout + run.stderr for run in runs)
        lines = [line for line in output.splitlines() if "chat page: " in line]
        assert len(lines) == 1 and runs[0].returncode == 0, output
        return runs[1].returncode == 0, lines[0].strip()

    page_build.npm(ci="sys.exit('no such luck')")
    assert build() == (True, "chat page: left out, npm ci failed: no such luck") and not installed.exists()
    assert build("-DGGML_EXT_UI=ON") == (False, "error: chat page: npm ci failed: no such luck; GGML_EXT_UI=OFF leaves it out")
    assert page_build.n_calls() == 2
    page_build.npm()
    assert build("-UGGML_EXT_UI") == (True, "chat page: in llama-server")  # as an older version configured the directory
    assert installed.read_text() == "index.html"
    assert build("-DGGML_EXT_UI=OFF") == (True, "-- chat page: left out, GGML_EXT_UI=OFF")
    assert page_build.n_calls() == 4 and not installed.exists()
