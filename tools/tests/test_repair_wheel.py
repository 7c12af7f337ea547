from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

import repair_wheel

# Stands for auditwheel: writes what it was given under a name, with a tag and perhaps a library.
STAND_IN = """\
import sys
import zipfile
from pathlib import Path

folder, wheel = Path(sys.argv[3]), Path(sys.argv[4])
tag, added = {tag!r}, {added!r}
if tag is None:
    sys.exit("cannot repair wheel")
with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(folder / wheel.name.replace("linux_x86_64", tag), "w") as new:
    for item in old.namelist():
        new.writestr(item, tag if item.endswith("/WHEEL") else old.read(item))
    for name in added:
        new.writestr(name, "library")
"""
NAME = "package-1.0-cp310-abi3-{}.whl"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "dist" / NAME.format("linux_x86_64")
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("package/library.so", "code")
        file.writestr("package-1.0.dist-info/WHEEL", "linux_x86_64")
    return path


def install_stand_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tag: str | None, added: tuple[str, ...] = ()
) -> None:
    module = folder / "modules" / "auditwheel"
    module.mkdir(parents=True)
    (module / "__main__.py").write_text(STAND_IN.format(tag=tag, added=added))
    monkeypatch.setenv("PYTHONPATH", str(module.parent))


@pytest.mark.parametrize(
    ("tag", "is_local"),
    [("linux_x86_64", True), ("linux_aarch64", True), ("manylinux_2_35_x86_64", False), ("any", False)],
)
def test_wheels_of_one_machine(tag: str, is_local: bool) -> None:
    assert repair_wheel.is_local(Path(NAME.format(tag))) == is_local


def test_a_wheel_is_replaced(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_stand_in(tmp_path, monkeypatch, "manylinux_2_35_x86_64")
    assert repair_wheel.main([str(wheel)]) == 0
    assert [path.name for path in wheel.parent.iterdir()] == [NAME.format("manylinux_2_35_x86_64")]
    assert "is now package-1.0-cp310-abi3-manylinux_2_35_x86_64.whl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tag", "added", "reason"),
    [
        ("manylinux_2_35_x86_64", ("package.libs/libccl.so",), "would add or change package.libs/libccl.so"),
        ("linux_x86_64", (), "knows no manylinux tag"),
    ],
)
def test_a_wheel_keeps_its_tag(
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tag: str,
    added: tuple[str, ...],
    reason: str,
) -> None:
    install_stand_in(tmp_path, monkeypatch, tag, added)
    assert repair_wheel.main([str(wheel)]) == 0
    assert [path.name for path in wheel.parent.iterdir()] == [wheel.name]
    assert reason in capsys.readouterr().out


def test_auditwheel_fails(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_stand_in(tmp_path, monkeypatch, None)
    with pytest.raises(SystemExit, match="cannot repair wheel"):
        repair_wheel.repair(wheel)
    assert wheel.is_file()


def test_a_wheel_for_any_machine_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert repair_wheel.main([NAME.format("any")]) == 0
    assert "nothing to do" in capsys.readouterr().out
