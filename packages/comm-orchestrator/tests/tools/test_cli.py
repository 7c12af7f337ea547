import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import pytest

from comm_config.environment import unknown_variables
from comm_orchestrator import selector
from comm_orchestrator.tools.commands import app
from comm_utils.backend import Availability
from comm_utils.testing import fork_server, machine, patience


@dataclass
class Shown:
    returncode: int
    stdout: str
    stderr: str


Commctl: TypeAlias = Callable[..., Shown]


@pytest.fixture
def commctl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Commctl:
    """The command in this process, which saves seconds of imports each time."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, **variables: str) -> Shown:
        with monkeypatch.context() as changed:
            changed.setattr(sys, "argv", ["commctl", *arguments])
            for name, value in variables.items():
                changed.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                app()
        captured = capsys.readouterr()
        return Shown(ended.value.code or 0, captured.out, captured.err)  # type: ignore[arg-type]

    return run


def in_a_process(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", **variables}
    command = [sys.executable, "-m", "comm_orchestrator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_help_names_every_command() -> None:
    shown = in_a_process("--help")
    assert shown.returncode == 0
    for command in ("backends", "config", "doctor", "postmortem", "top", "version"):
        assert command in shown.stdout


# A fork for each command, as starting the interpreter and importing the commands takes longer than most of them.
WITHOUT_TORCH = """
import json, os, sys
import comm_orchestrator as dist
from comm_orchestrator.tools import commands
from comm_orchestrator.tools.cli import main
codes = []
for arguments in json.loads(sys.argv[1]):
    if os.fork() == 0:
        sys.argv = ["commctl", *arguments]
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()
        os._exit(99 if "torch" in sys.modules else code or 0)
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
print(json.dumps(codes))
"""
NEED_NO_TORCH = {
    ("--help",): 0,
    ("--version",): 0,
    ("bench", "--help"): 0,
    ("config", "schema"): 0,
    ("config", "check", "FILE"): 0,
    ("config", "check", "/no/such/file"): 1,
    ("trace", "summary", "/no/such/folder"): 2,
    ("postmortem", "no-such-job"): 2,
    ("nonsense",): 2,
}


def test_what_needs_no_torch_does_not_import_it(tmp_path: Path) -> None:
    file = tmp_path / "comm.json"
    file.write_text('{"process_group": {"backend": "gloo"}}')
    given = json.dumps([[str(file) if one == "FILE" else one for one in arguments] for arguments in NEED_NO_TORCH])
    command = [sys.executable, "-c", WITHOUT_TORCH, given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * patience(), check=False)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    assert dict(zip(NEED_NO_TORCH, codes, strict=True)) == NEED_NO_TORCH, done.stderr


def test_version(commctl: Commctl) -> None:
    lines = [line.split() for line in commctl("version").stdout.splitlines()]
    packages = ("orchestrator", "collectives", "backend-torch", "backend-ccl", "config", "utils")
    assert [name for name, *_ in lines] == [*(f"comm-{package}" for package in packages), "torch"]
    assert lines[0][1].startswith("0.")


def test_version_as_an_option(commctl: Commctl) -> None:
    assert commctl("--version").stdout == commctl("version").stdout


@pytest.mark.parametrize("command", [(), ("bench",), ("config", "check"), ("trace", "summary")])
def test_help_shows_no_type_of_flags(commctl: Commctl, command: tuple[str, ...]) -> None:
    shown = commctl(*command, "--help").stdout
    assert "--help" in shown
    assert "<bool>" not in shown


@pytest.mark.parametrize("command", ["bench", "doctor", "config check", "trace replay"])
def test_help_breaks_lines_at_the_width_alone(commctl: Commctl, command: str) -> None:
    lines = [line.strip() for line in commctl(*command.split(), "--help").stdout.splitlines()]
    (last,) = [number for number, line in enumerate(lines) if "Exit code" in line]
    # COLUMNS is 200, and the docstring's lines have 120 at most.
    assert not lines[last - 1] or len(lines[last - 1]) > 120
    assert not lines[last + 1] or len(lines[last]) > 120


@pytest.mark.parametrize("command", ["doctor", "bench -e 8", "tune"])
@pytest.mark.parametrize(
    ("what", "named", "remedy"),
    [
        ("No module named 'torch'", "torch", "-m pip install torch\n"),
        ("libtorch_cpu.so: cannot open shared object file", "torch._C", "-m pip install --force-reinstall torch\n"),
    ],
)
def test_without_torch_the_remedy_is_named(tmp_path: Path, command: str, what: str, named: str, remedy: str) -> None:
    (tmp_path / "torch.py").write_text(f"raise ImportError({what!r}, name={named!r})")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    shown = in_a_process(*command.split(), PYTHONPATH=path)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith(f"error: this command needs torch, which cannot be imported: {what}; ")
    assert shown.stderr.endswith(remedy)


def test_interruption_says_so() -> None:
    # The parent of the tests may ignore SIGINT.
    code = (
        "import os, runpy, signal, sys, threading, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from comm_orchestrator.tools import cli, commands\n"
        "commands.app.command('wait')(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60)))\n"
        "sys.argv = ['commctl', 'wait']\n"
        "cli.main()"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("place", "code", "told"),
    [
        pytest.param(
            ">/dev/full",
            2,
            "error: [Errno 28] No space left on device\n",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full"),
        ),
        (">&-", 0, ""),
        ("| head -c 0", 0, ""),
    ],
    ids=["full", "closed", "unread"],
)
@pytest.mark.parametrize("arguments", ["--help", "version", "config schema", "doctor --timeout 60"])
def test_output_that_has_no_place(arguments: str, place: str, code: int, told: str) -> None:
    line = f"set -o pipefail; {sys.executable} -m comm_orchestrator {arguments} {place}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120 * patience(), check=False)
    assert (done.returncode, done.stderr) == (code, told)


def test_errors_that_nobody_can_read() -> None:
    line = f"{sys.executable} -m comm_orchestrator nonsense 2>&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120 * patience(), check=False)
    assert (done.returncode, done.stdout) == (2, "")


def test_backends_for_people_and_for_programs(commctl: Commctl) -> None:
    assert "gloo" in commctl("backends").stdout
    listed = json.loads(commctl("backends", "--json").stdout)
    assert listed["gloo"]["usable"] is True


def test_brackets_of_a_reason_stand_for_themselves(commctl: Commctl, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Availability(False, "cannot load [/opt/lib/x.so]", "install it with: pip install 'mine[rocm]'")
    monkeypatch.setattr(selector, "available_backends", lambda: {"mine": found})
    shown = commctl("backends").stdout
    assert found.reason in shown
    assert found.remedy in shown


def test_schema_is_json(commctl: Commctl) -> None:
    assert "comms_logger" in json.loads(commctl("config", "schema").stdout)["properties"]


def test_check_of_a_good_file_shows_where_values_come_from(commctl: Commctl, tmp_path: Path) -> None:
    file = tmp_path / "good.json"
    file.write_text('{"comms_logger": {"enabled": true}}')
    shown = commctl("config", "check", str(file), COMM_TIMEOUTS__COLLECTIVE_S="7")
    assert shown.returncode == 0, shown.stderr
    assert "comms_logger.enabled" in shown.stdout
    assert "COMM_TIMEOUTS__COLLECTIVE_S" in shown.stdout
    assert "objects.max_bytes" not in shown.stdout
    assert "settings have their defaults (--all prints them)" in shown.stdout
    assert "objects.max_bytes" in commctl("config", "check", str(file), "--all").stdout
    settings = json.loads(commctl("config", "check", str(file), "--json").stdout)
    assert settings["comms_logger"]["enabled"] is True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"comms_logger": {"enabeld": true}}', "did you mean 'enabled'"),
        ('{"communication_data_type": "fp61"}', "communication_data_type"),
        ("{", "line 1"),
        ('{"process_group": {"backend": "glo"}}', "process_group.backend: got 'glo', expected one of "),
        ('{"process_group": {"backend": "cpu:glo,cuda:nccl"}}', "did you mean 'gloo'?"),
    ],
)
def test_check_of_a_bad_file_names_file_and_key(commctl: Commctl, tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    shown = commctl("config", "check", str(file))
    assert shown.returncode == 1
    assert "bad.json" in shown.stderr
    assert expected in shown.stderr
    assert "Traceback" not in shown.stderr


def test_check_shows_no_commands_to_terminals(commctl: Commctl, tmp_path: Path) -> None:
    file = tmp_path / "odd[red].json"
    file.write_text(json.dumps({"a\x1b[31m\x9bb": 1}))
    shown = commctl("config", "check", str(file))
    assert shown.returncode == 1
    assert r"a\x1b[31m\x9bb" in shown.stderr
    file.write_text('{"comms_logger": {"enabled": true}}')
    assert "odd[red].json" in commctl("config", "check", str(file)).stdout.splitlines()[3]


def test_check_refuses_misspelt_variables(commctl: Commctl, tmp_path: Path) -> None:
    file = tmp_path / "good.json"
    file.write_text("{}")
    shown = commctl("config", "check", str(file), COMM_TIMEOUTS__COLECTIVE_S="7")
    assert shown.returncode == 1
    assert "COMM_TIMEOUTS__COLECTIVE_S is not a setting; did you mean COMM_TIMEOUTS__COLLECTIVE_S?" in shown.stderr
    assert commctl("config", "check", str(file), COMM_OF_ANOTHER_PROGRAM="7").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("top", "--interval", "nan"), "got nan; expected 0.1 to 3600 seconds"),
        (("top", "--interval", "0"), "got 0; expected 0.1 to 3600 seconds"),
        (("doctor", "--timeout", "inf"), "got inf; expected 0.5 to 3600 seconds"),
    ],
)
def test_seconds_out_of_range(commctl: Commctl, arguments: tuple[str, ...], told: str) -> None:
    shown = commctl(*arguments)
    assert shown.returncode == 2
    assert told in shown.stderr


def test_the_variable_of_the_build_is_known() -> None:
    assert unknown_variables({"COMM_CCL_WITHOUT_NATIVE": "1"}) == {}


@pytest.mark.parametrize("module", [fork_server, machine])
def test_variables_of_the_test_runner_are_known(module: ModuleType) -> None:
    names = set(re.findall(r"COMM_TESTS_[A-Z]+", Path(str(module.__file__)).read_text(encoding="utf-8")))
    assert names
    assert unknown_variables(dict.fromkeys(names, "1")) == {}
    assert unknown_variables({"COMM_TESTS_FROK": "1"}) == {"COMM_TESTS_FROK": "COMM_TESTS_FORK"}


def test_without_its_libraries_it_says_how_to_install_them(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    shown = in_a_process("version", PYTHONPATH=str(tmp_path))
    assert shown.returncode == 2
    assert "pip install 'comm-orchestrator[cli]'" in shown.stderr
