"""Records of the ranks are signed with a secret that they share, and everything else is refused."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from comm_config.secret import SECRET_VARIABLE
from comm_orchestrator.rendezvous import authentication
from comm_orchestrator.rendezvous.authentication import (
    Seal,
    environment_secret,
    file_secret,
    remove_secrets,
    share_secret,
)
from comm_utils.errors import LaunchError
from comm_utils.testing import patience

SECRET = b"0" * 32


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(authentication, "_PARENTS", (tmp_path,))
    yield tmp_path / f"comm-{os.getuid()}"
    remove_secrets()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_record_comes_back(secret: bytes | None) -> None:
    seal = Seal(secret, "here")
    assert seal.check("key", seal.sign("key", {"a": [1, "µ"]}).encode(), 1000) == {"a": [1, "µ"]}
    assert seal.signs == (secret is not None)


def test_a_rank_without_the_secret_reads_signed_records() -> None:
    """So that it can raise the error that the others signed."""
    assert Seal().check("key", Seal(SECRET, "here").sign("key", 1).encode(), 1000) == 1


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (Seal(b"1" * 32, "here").sign("key", 1).encode(), "'key' is signed with another secret"),
        (Seal(SECRET, "elsewhere").sign("key", 1).encode(), "'key' is signed with another secret"),
        (Seal(SECRET, "here").sign("other", 1).encode(), "'key' is signed with another secret"),
        (Seal(SECRET, "here").sign("key", 1).encode().replace(b" 1", b" 2"), "'key' is signed with another secret"),
        (b"1", "'key' is not signed with the secret of this job"),
        (b"hmac-sha256:00 1", "'key' is not signed with the secret of this job"),
        (b"\xff\xfe", "'key' is not text"),
        (b"1" * 1001, "'key' has 1001 bytes; expected at most 1000"),
    ],
)
def test_what_others_write_is_refused(raw: bytes, text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        Seal(SECRET, "here").check("key", raw, 1000)
    assert text in str(caught.value)
    assert SECRET_VARIABLE in str(caught.value)


def test_a_secret_of_any_bytes() -> None:
    """Python shows bytes of the environment that are no text as surrogates."""
    secrets = {environment_secret({SECRET_VARIABLE: f"{first}abcdefghijklmnopqrst"}) for first in "\udcff\udcfe"}
    assert len(secrets - {None}) == 2


def test_text_that_no_terminal_can_print_is_replaced() -> None:
    assert Seal().check("key", b'{"host": "\\ud800"}', 1000) == {"host": "?"}


@pytest.mark.parametrize("raw", [b"{", b"[" * 900, b"[" * 70 + b"]" * 70, b"1" * 30, b"", b"nan"])
def test_what_is_not_json_is_refused(raw: bytes) -> None:
    with pytest.raises(LaunchError, match="'key' is not JSON"):
        Seal().check("key", raw, 1000)


def test_the_processes_of_a_user_share_a_file(folder: Path) -> None:
    secret = share_secret("job")
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret is not None
    assert len(secret) == 32
    assert secret not in file.name.encode()
    code = (
        "import sys; from pathlib import Path; from comm_orchestrator.rendezvous import authentication as a\n"
        f"a._PARENTS = (Path({str(folder.parent)!r}),)\n"
        "print(a.share_secret('job').hex(), a.file_secret('job').hex(), a.share_secret('other').hex())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert printed[:2] == [secret.hex()] * 2
    assert printed[2] != secret.hex()
    assert [one.name for one in folder.iterdir()] == [file.name]  # the other process has removed its own
    remove_secrets()
    assert not folder.exists()


def test_processes_share_a_file_where_there_are_no_hard_links(folder: Path) -> None:
    code = (
        "import errno, os, sys; from pathlib import Path\n"
        "from comm_orchestrator.rendezvous import authentication as a\n"
        "def refuse(*_): raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))\n"
        f"os.link, a._PARENTS = refuse, (Path({str(folder.parent)!r}),)\n"
        "print(a.share_secret('job').hex(), a.file_secret('job').hex(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with contextlib.ExitStack() as stack:  # closing their input ends them
        started = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(3)
        ]
        secrets = {secret for one in started if one.stdout is not None for secret in one.stdout.readline().split()}
        (file,) = folder.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [one.returncode for one in started] == [0, 0, 0]
    assert len(secrets) == 1
    assert not folder.exists()


def test_what_a_killed_process_left_is_removed(folder: Path) -> None:
    code = (
        "import os; from pathlib import Path; from comm_orchestrator.rendezvous import authentication as a\n"
        f"a._PARENTS = (Path({str(folder.parent)!r}),)\n"
        "a.share_secret('old'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(list(folder.iterdir())) == 1
    share_secret("new")
    assert len(list(folder.iterdir())) == 1


_RANKS_AT_ONCE = """
import json, os, subprocess, sys
from pathlib import Path
from comm_orchestrator.rendezvous import authentication

parent, rounds, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
authentication._PARENTS = (parent,)
folder = parent / f"comm-{os.getuid()}"
folder.mkdir(mode=0o700)
path = folder / authentication._file_name("job")
killed = subprocess.Popen(["true"])
killed.wait()
left = json.dumps({"pid": killed.pid, "pids": authentication._pid_namespace(), "secret": "00" * 32})
for _ in range(rounds):
    path.write_text(left)
    path.chmod(0o600)
    start, begin = os.pipe()
    stay, leave = os.pipe()
    found, say = os.pipe()
    pids = []
    for _ in range(ranks):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.close(begin)
            os.close(leave)
            os.read(start, 1)
            secret = authentication.share_secret("job")
            os.write(say, (secret.hex() if secret else "none").encode() + b" ")
            os.read(stay, 1)
            os._exit(0)
    os.close(begin)
    os.close(say)
    texts = b""
    while texts.count(b" ") < ranks and (more := os.read(found, 4096)):
        texts += more
    os.close(leave)
    for pid in pids:
        os.waitpid(pid, 0)
    for one in (start, stay, found):
        os.close(one)
    path.unlink()
    print(len(texts.split()), len(set(texts.split())))
"""


def test_a_forked_child_leaves_the_secret_to_its_parent(folder: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom comm_orchestrator.rendezvous import authentication as a\n"
        f"a._PARENTS = (Path({str(folder.parent)!r}),)\n"
        "secret, child = a.share_secret('job'), os.fork()\n"
        "if child == 0: sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0 and a.file_secret('job') == secret"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60 * patience())
    assert not folder.exists(), "the parent removes it"


def test_ranks_that_start_at_once_agree_where_a_killed_job_left_its_secret(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _RANKS_AT_ONCE, str(tmp_path), "30", "8"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed.split("\n")[:-1] == ["8 1"] * 30


def test_a_job_whose_id_is_no_text_has_a_secret(folder: Path) -> None:
    """Python shows bytes of the environment that are no text as surrogates."""
    assert share_secret("127.0.0.1:29500 h\udcf6st") is not None


def test_a_folder_or_file_of_somebody_else_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "_APPEARS_S", 0.0)
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(LaunchError, match=rf"{folder}, where the ranks share a secret, is not a private folder"):
        share_secret("job")
    assert file_secret("job") is None
    folder.chmod(0o700)
    assert share_secret("job") is not None
    (file,) = folder.iterdir()
    file.chmod(0o644)
    assert file_secret("job") is None
    file.chmod(0o600)
    file.write_text(json.dumps({"secret": "00"}))
    assert file_secret("job") is None


def test_a_umask_takes_no_rights_of_the_owner(folder: Path) -> None:
    umask = os.umask(0o777)
    try:
        secret = share_secret("job")
    finally:
        os.umask(umask)
    (file,) = folder.iterdir()
    assert [stat.S_IMODE(one.stat().st_mode) for one in (folder, file)] == [0o700, 0o600]
    assert file_secret("job") == secret


_MAY_NOT_READ = """
import sys
from pathlib import Path
from comm_orchestrator.rendezvous import authentication

authentication._PARENTS, authentication._APPEARS_S = (Path(sys.argv[1]),), 0.0
print(authentication.file_secret("job"))
"""


def test_a_secret_that_cannot_be_read_is_said(folder: Path) -> None:
    assert share_secret("job") is not None
    (file,) = folder.iterdir()
    file.chmod(0)
    capabilities = "-dac_override,-dac_read_search"
    as_others = ["setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}"]
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root reads every file without setpriv")
    command = [*(as_others if os.geteuid() == 0 else []), sys.executable, "-c", _MAY_NOT_READ, str(folder.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert f"LaunchError: init_distributed: the ranks share a secret in {file}, which this process may" in done.stderr


def test_the_variable_of_a_job_over_several_hosts() -> None:
    assert environment_secret({}) is None
    first, second = (environment_secret({SECRET_VARIABLE: text * 16}) for text in "ab")
    assert first is not None
    assert first != second
    with pytest.raises(LaunchError, match=f"{SECRET_VARIABLE}: got 3 characters; expected at least 16"):
        environment_secret({SECRET_VARIABLE: "abc"})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_for_a_secret_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(authentication, "_PARENTS", (tmp_path, tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(authentication, "_write", refuse)
    with pytest.raises(LaunchError) as caught:
        authentication.share_secret("job")
    said = f"no room is left in {tmp_path} ({os.strerror(number)}) and {tmp_path / 'elsewhere'} "
    assert said in str(caught.value)
    assert "COMM_JOB_SECRET" in str(caught.value)


_FULL = 'mount -t tmpfs -o size=16k tmpfs "$1" && { head -c 16k /dev/zero > "$1/full" || true; }; shift; exec "$@"'
_TWO_RANKS = """
import os
import sys
from pathlib import Path
import comm_orchestrator as dist
from comm_orchestrator.rendezvous import authentication

authentication._PARENTS = (Path(sys.argv[1]),)
for rank in range(2):
    if os.fork() == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        try:
            dist.init_distributed("gloo", timeout=20)
        except dist.CommError as error:
            print(f"{type(error).__name__}: {error}\\n", end="", flush=True)
        os._exit(0)
for rank in range(2):
    os.wait()
"""


@pytest.mark.parametrize("lack", ["space", "size of files"])
def test_all_ranks_learn_that_there_is_no_room_for_a_secret(tmp_path: Path, lack: str) -> None:
    begin = ["sh", "-c", 'ulimit -f 0 && exec "$@"', "sh"]
    if lack == "space":
        begin = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _FULL, "sh", str(tmp_path)]
        if not shutil.which("unshare") or subprocess.run([*begin, "true"], capture_output=True, check=False).returncode:
            pytest.skip("needs a mount namespace and tmpfs")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env = {name: text for name, text in os.environ.items() if name != SECRET_VARIABLE} | place
    command = [*begin, sys.executable, "-c", _TWO_RANKS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * patience(), check=False, env=env)
    for rank, line in enumerate(sorted(done.stdout.splitlines(), key=lambda line: "rank 1" in line)):
        told = f"LaunchError: init_distributed: rank {rank} of 2: the ranks share a secret in a file, for which no room"
        assert line.startswith(f"{told} is left in {tmp_path} ("), done
    assert len(done.stdout.splitlines()) == 2, done


_FOR_A_MOMENT = """
import os
import sys
import time
from pathlib import Path
from comm_orchestrator.rendezvous import authentication

folder = Path(sys.argv[1])
authentication._PARENTS, authentication._LOOK_S = (folder,), 0.0
check = authentication.RoomCheck()
check()
(folder / "full").rename(folder / "part")
os.truncate(folder / "part", 0)
check()
rest = os.open(folder / "rest", os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(rest, bytes(1024))
except OSError as error:
    print(error.strerror)
begin = time.monotonic()
try:
    while True:
        check()
        time.sleep(0.01)
except authentication.LaunchError as error:
    print(time.monotonic() - begin >= authentication._LACKS_S, error)
"""


def test_a_rank_that_waits_endures_a_lack_of_room_for_a_moment(tmp_path: Path) -> None:
    apart = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _FULL, "sh", str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace and tmpfs")
    command = [*apart, sys.executable, "-c", _FOR_A_MOMENT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * patience(), check=False)
    no_space = os.strerror(errno.ENOSPC)
    assert done.stdout.startswith(f"{no_space}\nTrue the ranks share a secret in a file, for which no room is"), done


def test_a_rank_that_waits_finds_room(folder: Path) -> None:
    authentication.RoomCheck()()
    assert not folder.exists()
    assert not list(folder.parent.iterdir())
