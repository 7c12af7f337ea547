"""What is checked here, and how; ``nox -l`` lists it.

Plain ``nox`` runs what finds most faults; ``nox -t full`` runs everything else that has to pass. ``NOT_IN_FULL`` is the
rest.

Packages and requirements are read from ``packages/*/pyproject.toml``, what a session needs besides from the root
``pyproject.toml``, versions from ``constraints.txt``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import fetch_oneccl  # noqa: E402
from link_bytecode import link_bytecode  # noqa: E402
from workspace import Package, Workspace  # noqa: E402

nox.needs_version = ">=2025.10.14"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"
# Sessions for a Python that this machine lacks are skipped with the reason, in CI as well.
nox.options.error_on_missing_interpreters = False
nox.options.report = os.environ.get("NOX_REPORT")

WORKSPACE = Workspace(ROOT)
PACKAGES = WORKSPACE.packages
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")
CONSTRAINTS = ROOT / "constraints.txt"
DIST = ROOT / "dist"
# The package with a native library.
NATIVE = "comm-backend-ccl"
COVERAGE_PERCENT = 85
# Processes that compile or check side by side.
WORKERS = min(os.cpu_count() or 1, 4)
# Processes that run tests side by side: more than cores, as a third of the time of tests is waiting for their ranks.
TEST_WORKERS = min(WORKERS + WORKERS // 2, 4)
# What plain nox leaves out.
FULL = ["full"]
# What neither plain nox nor `nox -t full` runs, and why.
NOT_IN_FULL = {
    "bench": "measures; needs a quiet machine",
    "bench-inference": "measures; needs a quiet machine",
    "bench-peers": "measures; needs a quiet machine",
    "bench-training": "measures; needs a quiet machine",
    "compat(middle)": "between the ends that are promised",
    "mutations": "takes hours; .ci/run plants a tenth of the faults in a turn",
    "native -- --target aarch64": "takes a cross compiler and an emulator, and many times as long; a turn of .ci/run",
}
# What clang-format and clang-tidy read.
NATIVE_SUFFIXES = (".c", ".cpp", ".hpp")
# Benchmarks that run as sessions, and what each measures.
BENCHMARKS = {
    "asynchronous": "comm-orchestrator[ccl]",
    "callback": "comm-orchestrator",
    "dispatch": "comm-orchestrator[ccl]",
    "entry": "comm-orchestrator[ccl]",
    "learning": "comm-orchestrator[ccl]",
    "logger": "comm-orchestrator[ccl]",
    "transports": "comm-orchestrator[ccl]",
}
# What only root on Debian can run in full; the rest is skipped with its reason.
LAUNCHER_TESTS = "tests-integration/launchers"
# What needs DeepSpeed and Accelerate.
ECOSYSTEM_TESTS = "tests-integration/ecosystem"
# Of these, torch's own, which need neither and have a session.
TORCH_TESTS = f"{ECOSYSTEM_TESTS}/test_torch_distributed.py"
# What measures, traces, replays and predicts through the command line takes minutes; over shaped links, root on Debian.
LINK_TESTS = f"{LAUNCHER_TESTS}/test_prediction_links.py"
COMMAND_TESTS = [
    f"tests-integration/test_{name}.py"
    for name in ("bench", "host_profile", "prediction", "terminal", "trace_commands")
]
# Programs with several messages under way; also with checks that send a description before each of them.
MESSAGE_TESTS = ["tests-integration/test_expert_and_context_parallel.py", "tests-integration/test_pipeline.py"]
# What starts and kills jobs, compiles, waits for timeouts, compares many examples, signatures or type checkers, or goes
# through codecs and layouts: ten seconds to minutes for each file.
LONG_TESTS = [
    f"tests-integration/{name}"
    for name in (
        "test_benchmarks.py",
        "test_calls_on_failed_groups.py",
        "test_calls_in_graphs.py",
        "test_ccl_leaves_nothing.py",
        "test_clocks.py",
        "test_compression.py",
        "test_deepspeed_compression.py",
        "test_deepspeed_faults.py",
        "test_deterministic_reductions.py",
        "test_doctor.py",
        "test_error_feedback.py",
        "test_error_feedback_between_hosts.py",
        "test_futures.py",
        "test_hierarchical.py",
        "test_hostile_store.py",
        "test_intel_bindings.py",
        "test_kinds_of_models.py",
        "test_lifecycle.py",
        "test_message_mismatch.py",
        "test_passed_tensors.py",
        "test_placement.py",
        "test_process_limits.py",
        "test_properties.py",
        "test_ranges.py",
        "test_ranks_that_leave.py",
        "test_sharded.py",
        "test_signatures.py",
        "test_start_up_failures.py",
        "test_tensor_parallel.py",
        "test_timeouts.py",
        "test_torch_dump.py",
        "test_transfers.py",
        "test_with_torch.py",
        "typing",
    )
]
# Of the sessions that have everything else installed.
APART = [f"--ignore={path}" for path in (LAUNCHER_TESTS, ECOSYSTEM_TESTS)]

# Of the sessions that run the tests of all packages together.
NOT_WITH_THE_REST = [*APART, *(f"--ignore={path}" for path in COMMAND_TESTS)]

# The ends of what the packages' metadata promises, and a pair between them. CI runs the ends; its main pair is in
# constraints.txt.
COMPATIBILITY = {
    "oldest": ("3.10", "2.6.0"),
    "middle": ("3.12", "2.11.0"),
    "newest": ("3.13", "2.15.0"),
}


def find_python(version: str) -> str:
    """A path to this version of Python where pyenv has one, else ``version``, for nox to look for or to skip."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    return str(found[-1]) if found else version


def has_python(version: str) -> bool:
    """Return True where nox finds this version of Python, so that sessions for it are not skipped."""
    found = find_python(version)
    own = ".".join(map(str, sys.version_info[:2]))
    return found != version or own == version or shutil.which(f"python{version}") is not None


# What runs in place of compat(newest), as far as it can, where that is skipped.
HAS_NEWEST = has_python(COMPATIBILITY["newest"][0])
if HAS_NEWEST:
    NOT_IN_FULL["commands"] = "compat(newest) runs the same tests"
# What .ci/run runs in the turn of the newest Python.
NEWEST = "newest"

# What meets torch itself; the rest is our own logic, the same on all of them. Other paths can be given after --.
COMPATIBILITY_TESTS = [
    "packages/comm-backend-torch/tests",
    "packages/comm-backend-ccl/tests",
    "packages/comm-collectives/tests/test_profiler_ranges.py",
    "packages/comm-orchestrator/tests/test_selector.py",
    "tests-integration/test_calls_in_graphs.py",
    "tests-integration/test_ccl.py",
    "tests-integration/test_seed_examples.py",
    "tests-integration/test_fast_path.py",
    "tests-integration/test_signatures.py",
    "tests-integration/test_subgroups.py",
]

# On the newest pair, whose Python measures coverage at little cost, the tests of all packages run, and of those of all
# together what meets torch, starts ranks from the command line, or executes what the tests of packages do not.
NEWEST_TESTS = [
    *(path for path in COMPATIBILITY_TESTS if path.startswith("tests-integration")),
    *COMMAND_TESTS,
    *(
        f"tests-integration/test_{name}.py"
        for name in (
            "coalescing",
            "compression",
            "hierarchical",
            "init_distributed",
            "interoperability",
            "management",
            "point_to_point",
        )
    ),
]

# And on ccl. The hooks of training run on gloo in `integration`.
NEWEST_TESTS_ON_CCL = [
    f"tests-integration/test_{name}.py"
    for name in (
        "data_parallel",
        "expert_and_context_parallel",
        "parallel_groups",
        "pipeline",
        "sharded",
        "sharded_calls",
        "sharded_checkpoint",
        "tensor_parallel",
        "training_from_a_configuration",
        "with_torch",
    )
]

# pip's settings and the variables by which uv, which does not read them, takes the same.
PIP_TO_UV = {
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "cert": ("SSL_CERT_FILE", " "),
}


# A line of a .pth file, which Python executes when it starts.
STARTUP = "import atexit, gc; atexit.register(gc.freeze)\n"


@functools.cache
def uv_environment() -> dict[str, str]:
    """Make uv find what the user's pip is configured to find, such as a folder with a CPU build of torch."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    # In the order of pip's precedence: files, then the environment, which is also all there is without pip.
    settings = {key: ast.literal_eval(value) for key, value in re.findall(r"^global\.([\w-]+)=('.*')$", listed, re.M)}
    settings |= {key: value for key in PIP_TO_UV if (value := os.environ.get(f"PIP_{key.upper().replace('-', '_')}"))}

    env = {"UV_PYTHON_DOWNLOADS": "never"}
    for key, (variable, separator) in PIP_TO_UV.items():
        if key in settings and variable not in os.environ:
            env[variable] = separator.join(settings[key].split())
    if "UV_INDEX" in env:
        # pip takes the best version of all indexes, uv the first index that has the name at all.
        env.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    return env


def install(
    session: nox.Session, *arguments: str, constraints: Path = CONSTRAINTS, env: dict[str, str] | None = None
) -> None:
    session.env.update(uv_environment() if session.venv_backend == "uv" else {})
    # Tests start many processes that import torch, which takes several times as long without cached bytecode.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    for variable in ("UV_BUILD_CONSTRAINT", "PIP_BUILD_CONSTRAINT"):
        session.env[variable] = str(CONSTRAINTS)
    session.install("--constraint", str(constraints), *arguments, env=env)
    share_bytecode(session)


def run_pytest(
    session: nox.Session,
    *arguments: str,
    env: dict[str, str] | None = None,
    parallel: bool = True,
    measuring: bool = False,
) -> None:
    """Run pytest.

    ``parallel``: in several processes, as most tests wait for processes most of the time; ``-n 0`` after ``--`` turns
    that off. ``measuring``: under coverage, which sees ranks as well.

    Where ``TESTS_AGAIN`` is set, as ``.ci/run`` does on a machine that several sessions share, tests that failed run
    once more, one at a time; the session fails with those that fail again.
    """
    compile_torch(session)
    write_startup(session)
    # Sessions run side by side, and each has failures of its own.
    cache = Path(session.virtualenv.location) / "pytest_cache"
    arguments = ("-o", f"cache_dir={cache}", *arguments)
    in_parallel: tuple[str, ...] = ()
    if parallel:
        install(session, *group("parallel"))
        in_parallel = (f"--numprocesses={TEST_WORKERS}", "--dist=worksteal")
        # More threads than cores cost several times the work, as torch's wait for each other actively.
        env = {"OMP_NUM_THREADS": "1", **(env or {})}
    command = ["pytest"]
    if measuring:
        install(session, *group("coverage"))
        command = ["coverage", "run", "-m", "pytest"]
    failures = cache / "v" / "cache" / "lastfailed"
    failures.unlink(missing_ok=True)  # of an earlier run, perhaps of other tests
    try:
        session.run(*command, *in_parallel, *arguments, env=env)
    except nox.command.CommandFailed as error:
        # pytest also exits with 1 for errors outside of tests, such as one as the interpreter ends: it records none.
        if "TESTS_AGAIN" not in os.environ or error.reason != "Returned code 1" or not recorded(failures):
            raise
        session.warn("Tests failed; they run once more, one at a time.")
        session.run("pytest", "--last-failed", "--last-failed-no-failures=none", *arguments, env=env)


def recorded(failures: Path) -> bool:
    return failures.is_file() and bool(json.loads(failures.read_text()))


def share_bytecode(session: nox.Session) -> None:
    """Take the bytecode that another session's environment of the same Python has."""
    location = Path(session.virtualenv.location)
    for site in location.glob("lib/python*/site-packages"):
        found = location.parent.glob(f"*/{site.relative_to(location)}")
        link_bytecode(site, [other for other in found if other != site and (other / "torch" / "__pycache__").exists()])


def compile_torch(session: nox.Session) -> None:
    """Import torch once in a new environment, or all processes of its tests would compile the same modules at once."""
    found = Path(session.virtualenv.location).glob("lib/python*/site-packages/torch")
    folder = next((path for path in found if not (path / "__pycache__").exists()), None)
    if folder is not None:
        session.run("python", "-c", "import torch.distributed.tensor, torch._dynamo")


def write_startup(session: nox.Session) -> None:
    """Let the many processes of tests end without a collection of garbage in all their modules.

    It takes a fifth of the time of a process that does little but import torch. Callbacks at exit, destructors and the
    end of modules are as ever.
    """
    for folder in Path(session.virtualenv.location).glob("lib/python*/site-packages"):
        (folder / "tests_startup.pth").write_text(STARTUP)


def group(name: str) -> list[str]:
    return list(nox.project.dependency_groups(GROUPS, name))


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Keep other runs of nox in this folder, which ``.ci/run`` starts side by side, from doing the same at once."""
    path = ROOT / ".nox" / f"{name}.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch(session: nox.Session, packages: Iterable[str]) -> None:
    """Fetch what some of ``packages`` are built from besides their sources, unless it is there."""
    if NATIVE in packages and fetch_oneccl.is_needed():
        with locked("fetch"):
            # With nox's own Python, as an environment that uv made has no pip.
            session.run_install(sys.executable, "tools/fetch_oneccl.py", external=True)


def install_sources(session: nox.Session, *requirements: str, constraints: Path = CONSTRAINTS) -> list[str]:
    """Install ``requirements``, siblings from their source folders; return the names of all siblings that came."""
    needs = WORKSPACE.needs(requirements)
    fetch(session, needs.siblings)
    arguments = [text for text in requirements if text in needs.others]
    for name, extras in needs.siblings.items():
        suffix = f"[{','.join(sorted(extras))}]" if extras else ""
        arguments += ["--editable", f"{PACKAGES[name].folder}{suffix}"]
    # The native library is in most environments; it is compiled once for each Python.
    python = session.python if isinstance(session.python, str) else f"{sys.version_info[0]}.{sys.version_info[1]}"
    build = ROOT / ".nox" / f"native-{re.sub(r'[^0-9.]+', '-', python).strip('-')}"
    with locked(build.name):
        install(session, *arguments, constraints=constraints, env={"SKBUILD_BUILD_DIR": str(build)})
    return list(needs.siblings)


def write_constraints(session: nox.Session, text: str) -> Path:
    # Not in session.create_tmp(), which would make it the temporary folder of the session's tests as well.
    path = Path(session.virtualenv.bin).parent / "constraints.txt"
    path.write_text(text)
    return path


def all_sources(*more: str) -> list[str]:
    """Requirements for every package, and for the tests of every package."""
    tests = [text for package in PACKAGES.values() for text in package.test_requirements]
    return [*PACKAGES, *dict.fromkeys(tests), *more]


def check_environment(session: nox.Session, package: Package, requirements: Iterable[str]) -> None:
    needs = WORKSPACE.needs(requirements)
    arguments = ["--siblings", *needs.siblings, "--import", package.module]
    if "torch" not in needs.other_names:
        arguments += ["--without", "torch"]
    if not_loading := WORKSPACE.extras_only_modules(package):
        arguments += ["--not-loading", *not_loading]
    session.run("python", "tools/check_environment.py", *arguments)


@nox.session
def imports(session: nox.Session) -> None:
    """The component graph: import-linter's contracts, on the bare sources."""
    if sys.version_info < (3, 11):
        session.skip("import-linter needs Python 3.11")
    install(session, *group("imports"))
    sources = os.pathsep.join(str(package.folder / "src") for package in PACKAGES.values())
    for config in ("pyproject.toml", "tools/import_cycles.toml"):
        session.run("lint-imports", "--no-logo", "--config", config, *session.posargs, env={"PYTHONPATH": sources})


@nox.session
def lint(session: nox.Session) -> None:
    """Style and likely mistakes: ruff, words to avoid, the width of Markdown; operations are named in their table."""
    install(session, *group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("python", "tools/check_operation_names.py")
    session.run("python", "tools/check_words.py")
    session.run("clang-format", "--dry-run", "--Werror", *map(str, native_sources()))
    tidy(session, "-checks=-clang-analyzer-*")


def native_sources() -> list[Path]:
    """Return the files of native code, in order."""
    folder = PACKAGES[NATIVE].folder / "native"
    return sorted(path for path in folder.rglob("*") if path.suffix in NATIVE_SUFFIXES)


# They follow paths through functions, which takes twice as long as all other checks: `native` runs them.
ANALYZER_CHECKS = "clang-analyzer-core.*,clang-analyzer-cplusplus.*"


def tidy(session: nox.Session, *arguments: str) -> None:
    """Run clang-tidy on the native library; what cannot be compiled here is left out, with a warning."""
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))):
        session.warn("clang-tidy reads nothing: there is no C++ compiler (Debian: apt-get install g++)")
        return
    package = PACKAGES[NATIVE].folder
    headers = Path(sysconfig.get_path("include"))
    missing = []
    if not (headers / "Python.h").is_file():
        missing.append("headers of Python (Debian: apt-get install python3-dev)")
    if fetch_oneccl.is_for_this_machine() and not fetch_oneccl.is_complete(package / ".oneccl"):
        missing.append("oneCCL (python tools/fetch_oneccl.py)")
    build = Path(session.create_tmp()) / ("tests" if missing else "package")
    options = ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    if not missing:
        source, options = package, [*options, f"-DPython_EXECUTABLE={sys.executable}"]
    else:
        source = package / "native" / "tests"  # the engine, with the module where there are headers
        options += [f"-DPYTHON_HEADERS={headers}"] if (headers / "Python.h").is_file() else []
    session.run("cmake", "-G", "Ninja", "-S", str(source), "-B", str(build), *options, silent=True)
    compiled = {Path(entry["file"]) for entry in json.loads((build / "compile_commands.json").read_text())}
    wanted = [path for path in native_sources() if path.suffix in (".c", ".cpp") and path.parent.name != "tests"]
    if left_out := [str(path.relative_to(package)) for path in wanted if path not in compiled]:
        reason = f"without {' and '.join(missing)}" if missing else "which are not built on this machine"
        session.warn(f"clang-tidy leaves out {len(left_out)} files, {reason}: {', '.join(left_out)}")
    sources = [re.escape(str(path)) for path in wanted if path in compiled]
    session.run("run-clang-tidy.py", "-quiet", *arguments, "-p", str(build), f"-j{WORKERS}", *sources, silent=True)


@nox.session
def types(session: nox.Session) -> None:
    """Types: mypy, strict, over all packages and tools."""
    install_sources(session, *all_sources(*group("types")))
    try:
        session.run("mypy", f"--num-workers={WORKERS}", *session.posargs)
    except nox.command.CommandFailed:
        # On a busy machine its workers do not start within the three seconds that it gives them.
        session.run("mypy", *session.posargs)


@nox.session
def tools(session: nox.Session) -> None:
    """Tests of this repository's own tools, with a planted violation for every import contract; slow ones apart."""
    install(session, *group("tools"))
    run_pytest(session, "tools/tests", "-m", "not slow", *session.posargs)


def add_test_session(package: Package) -> None:
    def test(session: nox.Session) -> None:
        requirements = [package.name, *package.test_requirements]
        install_sources(session, *requirements)
        check_environment(session, package, requirements)
        run_pytest(session, f"packages/{package.folder.name}/tests", "-m", "not slow", *session.posargs)

    test.__doc__ = f"Tests of {package.name}, with what it declares and nothing else."
    nox.session(name=f"test-{package.name}", tags=["test"])(test)


def find_wheel(package: Package) -> Path:
    found = list(DIST.glob(f"{package.module}-{package.version}-*.whl"))
    if len(found) != 1:
        raise FileNotFoundError(f"got {len(found)} wheels of {package.name} {package.version} in {DIST}, expected one")
    return found[0]


def add_install_session(package: Package, extra: str = "") -> None:
    requirement = f"{package.name}[{extra}]" if extra else package.name

    def install_(session: nox.Session) -> None:
        # Names are only ever resolved to the wheels just built, never to a stranger's of the same name in an index.
        wheels = "".join(f"{name} @ {find_wheel(other).as_uri()}\n" for name, other in PACKAGES.items())
        install(session, requirement, constraints=write_constraints(session, CONSTRAINTS.read_text() + wheels))
        check_environment(session, package, [requirement])
        if extra == "ccl":
            launcher = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
            session.env["OMP_NUM_THREADS"] = "1"  # torchrun sets this itself, with a warning
            session.run(*launcher, "tools/reduce_once.py", extra)
        for script in package.scripts if package.extras and not extra else ():
            shown = session.run(script, "--help", silent=True, success_codes=range(256))
            if not re.search(rf"pip install .*{package.name}\[\w+\]", str(shown)):
                session.error(f"{script} does not say which extra to install, but: {shown}")

    install_.__doc__ = f"Installs {requirement} from wheels; exactly its declared siblings come along."
    name = f"install-{package.name}-{extra}" if extra else f"install-{package.name}"
    nox.session(name=name, tags=["install", *FULL], default=False, requires=["wheels"], reuse_venv=False)(install_)


for _package in PACKAGES.values():
    add_test_session(_package)
for _package in PACKAGES.values():
    add_install_session(_package)
for _package, _extra in WORKSPACE.extras_with_siblings():
    add_install_session(_package, _extra)


@nox.session
def integration(session: nox.Session) -> None:
    """Tests of all packages together, without those that are marked as slow or in ``LONG_TESTS``."""
    install_sources(session, *all_sources(*group("integration")))
    without = () if session.posargs else [f"--ignore={path}" for path in LONG_TESTS]
    run_pytest(session, "tests-integration", "-m", "not slow", *NOT_WITH_THE_REST, *without, *session.posargs)


@nox.session(name="integration-long", default=False, tags=FULL)
def integration_long(session: nox.Session) -> None:
    """Tests of all packages together that kill jobs, compile, wait, try random programs, go through codecs."""
    install_sources(session, *all_sources(*group("integration"), *group("typing")))
    run_pytest(session, "-m", "not slow", *(session.posargs or LONG_TESTS))


@nox.session(name="integration-slow", default=False, tags=FULL)
def integration_slow(session: nox.Session) -> None:
    """Tests that are marked as slow, of packages, tools and all together, random programs by the hundred among them."""
    install_sources(session, *all_sources(*group("integration"), *group("tools")))
    folders = ["tests-integration", "tools/tests", *(f"packages/{one.folder.name}/tests" for one in PACKAGES.values())]
    run_pytest(session, *folders, "-m", "slow", *NOT_WITH_THE_REST, *session.posargs)
    if not session.posargs:
        run_pytest(session, *MESSAGE_TESTS, env={"TESTS_MISMATCH": "strict"})


@nox.session(default=False, tags=[] if HAS_NEWEST else [*FULL, NEWEST])
def commands(session: nox.Session) -> None:
    """Tests of commctl's bench, trace, fit and predict with ranks that they start; compat(newest) has them as well."""
    install_sources(session, *all_sources(*group("integration")))
    run_pytest(session, "-rs", *(session.posargs or COMMAND_TESTS))


@nox.session(default=False, tags=FULL)
def links(session: nox.Session) -> None:
    """Predictions of commctl for two hosts, measured over shaped links; skipped without root."""
    install_sources(session, *all_sources(*group("integration"), *group("launchers")))
    run_pytest(session, "-rs", LINK_TESTS, *session.posargs, parallel=False)


@nox.session(default=False, tags=FULL)
def fuzz(session: nox.Session) -> None:
    """Gives changed inputs to everything that reads what another process wrote; ``--seconds`` are for each decoder."""
    install_sources(session, *all_sources(*group("integration"), *group("fuzz")))
    session.env["OMP_NUM_THREADS"] = "1"
    session.env["PYTHONPATH"] = "tests-integration"
    session.run("python", "-m", "fuzz", *session.posargs)


# What holds on every library is tested on gloo, in `integration`, and again here.
ON_EVERY_LIBRARY = [
    f"tests-integration/test_{name}.py"
    for name in (
        "comms_logger",
        "deepspeed_faults",
        "management",
        "objects",
        "point_to_point",
        "seed_examples",
        "fast_path",
        "subgroups",
        "unusual_calls",
        "calls_in_graphs",
        "calls_on_failed_groups",
        "with_torch",
        "wrong_calls",
    )
]
# And what differs between its engines once more, as it is between hosts.
ON_ONECCL_ITSELF = [
    f"tests-integration/test_{name}.py" for name in ("comms_logger", "fast_path", "point_to_point", "wrong_calls")
]


@nox.session(name="integration-ccl", default=False, tags=FULL)
def integration_ccl(session: nox.Session) -> None:
    """Tests of all packages together, on oneCCL."""
    install_sources(session, *all_sources(*group("integration")))
    session.env["TESTS_BACKEND"] = "ccl"
    run_pytest(session, *(session.posargs or ON_EVERY_LIBRARY))
    if not session.posargs:
        run_pytest(session, *ON_ONECCL_ITSELF, env={"CCL_SHARED_MEMORY": "0"})


# On NCCL, wherever there is a device.
GPU_TESTS = [
    "packages/comm-backend-ccl/tests/test_plain_tensor.py",
    "packages/comm-backend-torch/tests/test_conformance.py",
    "packages/comm-collectives/tests/test_codecs_on_devices.py",
    "packages/comm-collectives/tests/test_device_times.py",
    "tests-integration/test_device_calls.py",
    "tests-integration/test_on_devices.py",
]
COUNT_DEVICES = "import torch; print(torch.cuda.device_count() if torch.distributed.is_nccl_available() else -1)"


@nox.session(default=False, tags=FULL)
def gpu(session: nox.Session) -> None:
    """Conformance, the seed examples and the API on NCCL; skipped where there is no device."""
    if shutil.which("nvidia-smi") is None:
        session.skip("there is no NVIDIA driver on this machine: nvidia-smi is missing")
    install_sources(session, *all_sources(*group("integration")))
    devices = int(str(session.run("python", "-c", COUNT_DEVICES, silent=True)).split()[-1])
    if devices < 1:
        session.skip(
            "torch sees no CUDA device; check nvidia-smi and CUDA_VISIBLE_DEVICES"
            if devices == 0
            else "this build of torch has no NCCL; unset PIP_EXTRA_INDEX_URL and remove .nox/gpu"
        )
    session.log(f"{devices} CUDA devices: where there are more ranks, they share the first one")
    # A process that has looked for devices cannot be forked for ranks that use them.
    env = {"COMM_TESTS_FORK": "0"}
    run_pytest(session, "-rs", "-m", "gpu", *GPU_TESTS, *session.posargs, env=env, parallel=False)
    env["TESTS_DEVICE"] = "cuda"
    run_pytest(session, "-rs", "tests-integration/test_seed_examples.py", *session.posargs, env=env, parallel=False)


@nox.session(default=False, tags=FULL)
def triton(session: nox.Session) -> None:
    """The codecs' kernels for GPUs, interpreted on the CPU; `nox -s gpu` compares them on a GPU."""
    package = PACKAGES["comm-collectives"]
    install_sources(session, package.name, *package.test_requirements, *group("triton"))
    run_pytest(session, "-rs", "packages/comm-collectives/tests/test_device_kernels.py", *session.posargs)


@nox.session(default=False, tags=FULL)
def launchers(session: nox.Session) -> None:
    """Tests that start ranks for real: three mpiruns, a Slurm cluster of two nodes, torchrun on two hosts."""
    install_sources(session, *all_sources(*group("integration"), *group("launchers")))
    uv = {"UV": nox.virtualenv.UV} if session.venv_backend == "uv" else {}
    session.run("python", "tools/install_launchers.py", env=uv)
    # One Slurm cluster serves all of them.
    run_pytest(session, "-rs", LAUNCHER_TESTS, f"--ignore={LINK_TESTS}", *session.posargs, parallel=False)


@nox.session(default=False, tags=FULL)
def ecosystem(session: nox.Session) -> None:
    """DeepSpeed with its communication replaced, and Accelerate (compiles a part of DeepSpeed)."""
    install_sources(session, *all_sources(*group("docs"), *group("ecosystem")))
    # Beside the release with 1-bit optimizers, one that has them no more; it needs the same packages.
    newest = Path(session.virtualenv.location) / "deepspeed-newest"
    if not newest.is_dir():
        none = write_constraints(session, "")
        install(session, "--no-deps", "--target", str(newest), *group("ecosystem-newest"), constraints=none)
    if newest.is_dir():  # nox -R installs nothing
        session.env["DEEPSPEED_NEWEST"] = str(newest)
    if session.posargs:
        run_pytest(session, "-rs", ECOSYSTEM_TESTS, *session.posargs, parallel=False)
    else:
        run_pytest(session, "-rs", ECOSYSTEM_TESTS, f"--ignore={TORCH_TESTS}", parallel=False)
        run_pytest(session, "docs/tests/test_code_blocks.py", "-k", "test_python and migrating", parallel=False)


@nox.session(name="torch-tests", default=False, tags=FULL)
def torch_tests(session: nox.Session) -> None:
    """torch's own tests of torch.distributed, through our API on gloo and unchanged on ccl, on three ranks."""
    install_sources(session, *all_sources(*group("torch-tests")))
    run_pytest(session, TORCH_TESTS, *session.posargs, parallel=False)


@nox.session(default=False, tags=FULL)
def docs(session: nox.Session) -> None:
    """Executes the code of README.md, CHANGELOG.md and docs/."""
    install_sources(session, *all_sources(*group("docs")))
    session.run("python", "tools/compatibility.py", "--check")
    run_pytest(session, "docs/tests", *session.posargs)


@nox.session(default=False, venv_backend="none", tags=FULL)
def model(session: nox.Session) -> None:
    """Checks a model of shared memory's flags in all interleavings, and that planted faults are found (needs spin)."""
    for program, package in (("spin", "spin"), (os.environ.get("CC", "cc"), "gcc")):
        if shutil.which(program) is None:
            session.skip(f"{program} is missing; on Debian, it is in the package {package}")
    session.run(sys.executable, f"packages/{NATIVE}/native/model/check.py", *session.posargs, external=True)


@nox.session(default=False, tags=["install", *FULL])
def wheels(session: nox.Session) -> None:
    """Builds each package's sdist, and its wheel from that sdist, into dist/, and checks their metadata.

    Wheels with native code get the manylinux tag that auditwheel finds.
    """
    # In this environment too: nox finds a uv that is not on PATH, build does not.
    uv, installer = (["build[uv]"], ["--installer", "uv"]) if session.venv_backend == "uv" else ([], [])
    install(session, *group("wheels"), *uv)
    fetch(session, PACKAGES)
    shutil.rmtree(DIST, ignore_errors=True)
    env = {"UV_CONSTRAINT": str(CONSTRAINTS), "PIP_CONSTRAINT": str(CONSTRAINTS)}
    for package in PACKAGES.values():
        session.run("pyproject-build", "--outdir", str(DIST), *installer, str(package.folder), env=env)
        session.run("python", "tools/repair_wheel.py", str(find_wheel(package)))
    session.run("twine", "check", "--strict", *map(str, sorted(DIST.iterdir())))


@nox.session(default=False, tags=FULL)
def demo(session: nox.Session) -> None:
    """The main job: 2 processes train on digits; 1, 2 and 4 end with the same weights, on every library.

    What it communicates is traced, and made again without the model, on every library.
    """
    install_sources(session, "comm-orchestrator[ccl,cli]", *group("demo"))
    session.env["OMP_NUM_THREADS"] = "1"  # torchrun sets this itself, with a warning
    trace = Path(session.create_tmp()) / "trace"
    session.env["COMM_COMMS_LOGGER__TRACE"] = str(trace)
    launcher = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    session.run(*launcher, "docs/examples/digits.py", *session.posargs)
    del session.env["COMM_COMMS_LOGGER__TRACE"]
    for backend in ("gloo", "ccl"):
        session.run("commctl", "trace", "replay", str(trace), "--backend", backend)
    if not session.posargs:
        session.run("python", "docs/examples/same_weights.py", "gloo", "ccl")


@nox.session(default=False, tags=FULL)
def faults(session: nox.Session) -> None:
    """Faults of ranks on every backend: what the others get, and what is left; ``--help`` after -- lists the parts."""
    install_sources(session, "comm-orchestrator[ccl,cli]")
    # After Ctrl-C, time to end the ranks.
    session.run(
        "python", "-m", "faults", *session.posargs, env={"PYTHONPATH": "tests-integration"}, interrupt_timeout=10
    )


@nox.session(default=False)
@nox.parametrize("program", [nox.param(name, id=name) for name in BENCHMARKS])
def bench(session: nox.Session, program: str) -> None:
    """Measures what a call costs, alone and above torch.distributed, and moving data; options go to all."""
    install_sources(session, BENCHMARKS[program], *group("bench"))
    # After Ctrl-C, time to end the ranks and to remove their shared memory.
    session.run("python", f"benchmarks/{program}.py", *session.posargs, interrupt_timeout=10)


@nox.session(name="bench-peers", default=False)
def bench_peers(session: nox.Session) -> None:
    """Compares all collectives with three MPIs, oneCCL, DeepSpeed's operator and gloo (compiles that operator)."""
    install_sources(session, "comm-orchestrator[ccl]", *group("bench-peers"))
    uv = {"UV": nox.virtualenv.UV} if session.venv_backend == "uv" else {}
    session.run("python", "tools/install_launchers.py", env=uv)
    # After Ctrl-C, time to end the ranks and to remove their shared memory.
    session.run("python", "benchmarks/peers", *session.posargs, interrupt_timeout=30)


@nox.session(name="bench-inference", default=False)
def bench_inference(session: nox.Session) -> None:
    """Compares tensor-parallel decoding on DeepSpeed's communication, gloo and ours (compiles DeepSpeed's operator)."""
    install_sources(session, "comm-orchestrator[ccl]", *group("bench-inference"))
    # After Ctrl-C, time to end the ranks and to remove their shared memory.
    session.run("python", "benchmarks/inference", *session.posargs, interrupt_timeout=30)


@nox.session(name="bench-training", default=False)
def bench_training(session: nox.Session) -> None:
    """Compares steps of data-parallel and sharded training with DDP, FSDP2 and DeepSpeed's ZeRO, and their memory."""
    install_sources(session, "comm-orchestrator[ccl,cli,plot]", *group("bench-training"))
    # After Ctrl-C, time to end the ranks and to remove their shared memory.
    session.run("python", "benchmarks/training", *session.posargs, interrupt_timeout=30)


# How the tests of the native engine are built, and how long the one that does many operations goes on.
NATIVE_BUILDS = {"plain": ("", 1_000_000), "address": ("address,undefined", 20_000), "thread": ("thread", 5_000)}


@nox.session(default=False)
def mutations(session: nox.Session) -> None:
    """Plants faults into the sources, one after the other, and asks that tests catch each; names go after --."""
    install_sources(session, *all_sources(*group("integration"), "cmake", "ninja", "nox"))
    compile_torch(session)
    session.env["MUTATIONS_BUILD"] = session.create_tmp()
    session.run("python", "tools/mutate.py", *session.posargs)


# Of another architecture: Debian's cross compiler and emulator, which take ten times as long for less.
CROSS = {"aarch64": ("aarch64-linux-gnu-", "g++-aarch64-linux-gnu", ("--operations=30", "--most-mib=6"))}


def native_options(session: nox.Session) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s native --")
    parser.add_argument("--fast", action="store_true", help="without ThreadSanitizer, and with fewer operations")
    parser.add_argument("--target", choices=CROSS, help="build for this architecture, and run by emulation")
    parser.add_argument("names", nargs="*", metavar="TEST")
    return parser.parse_args(session.posargs)


@nox.session(default=False, tags=FULL)
def native(session: nox.Session) -> None:
    """Tests of the engine in shared memory without Python, also with sanitizers; names of tests go after --.

    ``--fast`` leaves out ThreadSanitizer, which takes minutes, and most of the many operations. ``--target aarch64``
    builds for that architecture, runs the tests by emulation, and links the module. Clang's analyzer reads the sources,
    where no names are given.
    """
    options = native_options(session)
    # What the machine has does as well.
    missing = [name for name in ("cmake", "ninja") if not shutil.which(name)]
    if missing:
        install(session, *missing)
    if options.target:
        native_on(session, options.target, options.names)
        return
    source = PACKAGES[NATIVE].folder / "native" / "tests"
    for name, (sanitize, operations) in NATIVE_BUILDS.items():
        if options.fast and name == "thread":
            continue
        build = Path(session.create_tmp()) / name
        option = f"-DSANITIZE={sanitize}"
        session.run("cmake", "-G", "Ninja", "-S", str(source), "-B", str(build), option, external=True)
        session.run("cmake", "--build", str(build), external=True)
        # GCC's ThreadSanitizer finds no room for itself where addresses are more random than it knows.
        randomness = Path("/proc/sys/vm/mmap_rnd_bits")
        too_random = name == "thread" and randomness.exists() and int(randomness.read_text()) > 28
        still = ["setarch", "--addr-no-randomize"] if too_random else []
        # Everything takes several times as long with sanitizers, above all where 64 ranks share few cores with others.
        limits = ["--limit=600", "--patience=60"]
        operations = min(operations, 5_000) if options.fast else operations
        tests = [str(build / "native_tests"), f"--operations={operations}", *limits, *options.names]
        session.run(*still, *tests, external=True)
    if not options.names:
        install(session, *group("lint"))
        tidy(session, f"-checks=-*,{ANALYZER_CHECKS}")


def native_on(session: nox.Session, target: str, names: list[str]) -> None:
    """Run the tests by user-mode emulation, and link the module with the headers of this Python."""
    prefix, package, less = CROSS[target]
    emulator = shutil.which(f"qemu-{target}") or shutil.which(f"qemu-{target}-static")
    if emulator is None or shutil.which(f"{prefix}g++") is None:
        session.skip(
            f"a compiler or an emulator for {target} is missing; "
            f"Debian: apt-get install --no-install-recommends {package} qemu-user"
        )
    source = PACKAGES[NATIVE].folder / "native" / "tests"
    build = Path(session.create_tmp()) / target
    toolchain = source.parent / f"{target}.cmake"
    headers = python_headers(build, prefix)
    # What a debugger needs would take a quarter of the time.
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O2"]
    options += [f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", f"-DPYTHON_HEADERS={headers}"]
    session.run("cmake", "-G", "Ninja", "-S", str(source), "-B", str(build), *options, external=True)
    session.run("cmake", "--build", str(build), external=True)
    if headers:
        module = str(build / "shared_memory" / "_shared_memory.abi3.so")
        session.run(sys.executable, "tools/check_undefined.py", "--nm", f"{prefix}nm", module, external=True)
    else:
        session.log("the module is not linked: headers of Python are missing (Debian: apt-get install python3-dev)")
    emulated = [emulator, "-L", f"/usr/{prefix.rstrip('-')}", str(build / "native_tests")]
    # Emulation is slow, and CI gives it only what others leave.
    session.run(*emulated, *less, "--limit=1200", "--patience=240", *names, external=True)


def python_headers(build: Path, prefix: str) -> str:
    """Return the folders of headers, with which an architecture of the same word size compiles as well; "" for none."""
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").is_file():
        return ""
    # Debian's pyconfig.h includes <ARCHITECTURE/python3.N/pyconfig.h>.
    if debians := sysconfig.get_config_var("MULTIARCH"):
        folder = Path("/usr/include", debians)
        if (folder / Path(headers).name).is_dir():
            build.mkdir(parents=True, exist_ok=True)
            link = build / "headers" / prefix.rstrip("-")
            link.parent.mkdir(exist_ok=True)
            if not link.exists():
                link.symlink_to(folder)
            return f"{headers};{link.parent}"
    return headers


COMPATIBILITY_TAGS = {"oldest": FULL, "middle": [], "newest": [*FULL, NEWEST]}


@nox.session(default=False)
@nox.parametrize(
    "python,torch",
    [
        nox.param(find_python(python), torch, id=name, tags=COMPATIBILITY_TAGS[name])
        for name, (python, torch) in COMPATIBILITY.items()
    ],
)
def compat(session: nox.Session, torch: str) -> None:
    """Tests on the oldest, a middle and the newest torch and Python (downloads torch's default builds)."""
    pins = re.sub(r"(?m)^torch==.*$", f"torch=={torch}", CONSTRAINTS.read_text())
    pins = re.sub(r"(?m)^triton==.*$", "", pins)  # that version of torch has one of its own
    install_sources(session, *all_sources(*group("integration")), constraints=write_constraints(session, pins))
    # A release that deprecates something that the tests use has not broken a promise.
    options = ("-W", "default")
    if session.posargs or torch != COMPATIBILITY["newest"][1]:
        run_pytest(session, *options, *(session.posargs or COMPATIBILITY_TESTS))
        return
    install(session, *group("coverage"))
    session.run("coverage", "erase")
    env = {"COVERAGE_CORE": "sysmon"}
    for package in PACKAGES.values():
        run_pytest(session, *options, f"packages/{package.folder.name}/tests", env=env, measuring=True)
    run_pytest(session, *options, *NEWEST_TESTS, env=env, measuring=True)
    with_ccl = {**env, "TESTS_BACKEND": "ccl"}
    run_pytest(session, *options, *NEWEST_TESTS_ON_CCL, env=with_ccl, measuring=True)


@nox.session(default=False, requires=["compat(newest)"], tags=[*FULL, NEWEST])
def coverage(session: nox.Session) -> None:
    """Asks that the tests on the newest Python, ranks counted, execute 85 % of the statements of every package."""
    if not list(ROOT.glob(".coverage.*")):
        session.skip("compat(newest) recorded nothing: see why it was skipped")
    install(session, *group("coverage"))
    session.run("coverage", "combine", "--quiet")
    # What is left was being written by a rank that a test killed.
    for unfinished in ROOT.glob(".coverage.*"):
        unfinished.unlink()
    low = []
    for package in PACKAGES.values():
        session.log(package.name)
        include = f"--include=packages/{package.folder.name}/src/*"
        limit = f"--fail-under={COVERAGE_PERCENT}"
        # 2 is how coverage says that a limit was missed: the other packages are reported all the same.
        session.run("coverage", "report", include, limit, success_codes=[0, 2])
        total = session.run("coverage", "report", include, "--format=total", silent=True, log=False)
        if int(str(total).split()[-1]) < COVERAGE_PERCENT:
            low.append(package.name)
    if low:
        session.error(f"below {COVERAGE_PERCENT} %: {', '.join(low)}")
