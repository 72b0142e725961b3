import ctypes
import errno
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from opteq import native
from opteq.native import building, compiling

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="no C compiler, or another processor",
)

# A library of its own, so that a compiler takes no time for it.
SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture
def source(tmp_path, monkeypatch):
    """The only source, with a cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    folder = tmp_path / "sources"
    folder.mkdir()
    monkeypatch.setattr(compiling, "SOURCES", folder)
    monkeypatch.setattr(building, "_FUNCTION", "answer")
    path = folder / "answer.c"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def build():
    """Builds afresh."""

    def afresh():
        building.library.cache_clear()
        return building.library()

    yield afresh
    building.library.cache_clear()


def kept(tmp_path):
    return sorted((tmp_path / "cache" / "opteq").iterdir())


def test_a_source_is_compiled_once(source, tmp_path, build, monkeypatch):
    made = build()
    assert made.functions.answer() == 42
    assert "compiled now" in made.account
    (file,) = kept(tmp_path)
    assert str(file) in made.account
    monkeypatch.setattr(compiling, "compile_with", lambda command: pytest.fail("compiled again"))
    again = build()
    assert again.functions.answer() == 42
    assert "compiled now" not in again.account
    assert kept(tmp_path) == [file]


def test_what_is_kept_needs_no_compiler(source, build, monkeypatch):
    build()
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    assert build().functions.answer() == 42


def told(build, caplog):
    """What is said to who asks, and to who does not, the latter once."""
    with caplog.at_level(logging.INFO, "opteq.native"):
        build()
        status = native.status()
        assert building.library() is building.library()
    assert not status.used
    (record,) = caplog.records
    assert status.account in record.getMessage()
    assert "\n" not in record.getMessage()
    assert f"opteq goes without compiled code: {status.account}." == str(status)
    return record.levelname, status.account


def test_a_library_that_is_there_is_told_of_to_who_asks_alone(source, build, caplog, tmp_path):
    with caplog.at_level(logging.INFO, "opteq.native"):
        build()
        assert str(native.status()).startswith("opteq uses compiled code: compiled now, and kept as ")
        build()
        (file,) = kept(tmp_path)
        assert str(native.status()) == f"opteq uses compiled code: kept as {file}."
    assert not caplog.records


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "no-such-compiler -m32", 'cc "'])
def test_without_a_compiler(source, monkeypatch, compiler, build, caplog):
    monkeypatch.setenv("CC", compiler)
    level, account = told(build, caplog)
    assert level == "WARNING"
    assert account == f"there is no C compiler {compiler.removesuffix(' -m32')!r}; install gcc or set CC"


def test_without_the_processor(source, monkeypatch, build, caplog):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    level, account = told(build, caplog)
    assert level == "INFO"
    assert "x86 processors with AVX2" in account


def test_with_a_source_that_does_not_compile(source, build, caplog, tmp_path):
    source.write_text("int answer(void) { return missing; }\n")
    level, account = told(build, caplog)
    assert level == "WARNING"
    assert account.startswith("the C compiler 'cc' failed: ")
    assert "missing" in account
    assert account.endswith("; set CC to another one")
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exec sleep 60", "did nothing for 0.5 seconds"),
        ("while :; do :; done", "did not finish within 0.75 seconds of work"),
        ("exit 3", "failed: exit status 3"),
        ("exit 0", "made nothing that can be used: "),
        ("while [ $1 != -o ]; do shift; done; echo nonsense > $2", "made nothing that can be used: "),
    ],
)
def test_with_a_compiler_that_makes_nothing(source, tmp_path, monkeypatch, script, why, build, caplog):
    monkeypatch.setattr(compiling, "PATIENCE", 0.5)
    monkeypatch.setattr(compiling, "WORK", 0.75)
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    level, account = told(build, caplog)
    assert level == "WARNING"
    assert account.startswith(f"the C compiler '{compiler}' {why}")
    assert [path for path in kept(tmp_path) if path.suffix != ".hung"] == []


def test_a_compiler_that_works_is_waited_for(source, monkeypatch, build, tmp_path):
    """As one that gets a small share of a busy machine: by the clock it takes long."""
    monkeypatch.setattr(compiling, "PATIENCE", 1.5)
    compiler = tmp_path / "compiler"
    # It works in children, as the drivers of compilers do, with pauses in between.
    work = "for i in 1 2 3 4 5 6; do (i=0; while [ $i -lt 40000 ]; do i=$((i + 1)); done); sleep 0.5; done"
    compiler.write_text(f'#!/bin/sh\n{work}\nexec cc "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    begin = time.monotonic()
    assert build().functions.answer() == 42
    assert time.monotonic() - begin > 2 * compiling.PATIENCE
    assert [path.suffix for path in kept(tmp_path)] == [".so"]


def is_running(process):
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_compiler_that_hangs_is_ended_with_its_children_and_not_asked_again(
    source, tmp_path, monkeypatch, build, caplog
):
    monkeypatch.setattr(compiling, "PATIENCE", 0.5)
    compiler, asked = tmp_path / "compiler", tmp_path / "asked"
    # It waits for a child, and for what is typed, as the drivers of compilers do.
    compiler.write_text(f"#!/bin/sh\ncat\n(sleep 60; touch {tmp_path}/survived) & echo $! >> {asked}\nwait\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    assert "did nothing for 0.5 seconds" in build().account
    (child,) = asked.read_text().split()
    deadline = time.monotonic() + 20
    while is_running(int(child)):
        assert time.monotonic() < deadline, "its child goes on"
        time.sleep(0.1)
    (marker,) = kept(tmp_path)
    assert build().account == (
        f"the C compiler '{compiler}' did not finish lately; set CC to another one or delete {marker}"
    )
    assert len(asked.read_text().split()) == 1
    compiler.write_text('#!/bin/sh\nexec cc "$@"\n')
    os.utime(marker, (0, time.time() - 601))
    monkeypatch.setattr(compiling, "PATIENCE", 60)
    assert build().functions.answer() == 42


def test_switched_off(monkeypatch):
    assert native.available()
    assert native.status().used
    monkeypatch.setattr(native, "enabled", False)
    assert not native.available()
    assert not native.status().used
    assert "switched off, by opteq.native.enabled = False" in str(native.status())


def test_another_source_is_another_library(source, tmp_path, build):
    assert build().functions.answer() == 42
    source.write_text(SOURCE.replace("42", "43"))
    assert build().functions.answer() == 43
    source.with_name("header.h").write_text("\n")
    assert build().functions.answer() == 43
    assert len(kept(tmp_path)) == 3


def test_the_folder_belongs_to_the_user_alone(source, tmp_path, build):
    build()
    assert (tmp_path / "cache" / "opteq").stat().st_mode & 0o777 == 0o700


def test_without_a_place_to_keep_it_there_is_one_for_the_process(source, tmp_path, build):
    (tmp_path / "cache").write_text("a file")
    assert build().functions.answer() == 42


def test_a_folder_that_others_can_write_to_is_not_trusted(source, tmp_path, build):
    folder = tmp_path / "cache" / "opteq"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert build().functions.answer() == 42
    assert kept(tmp_path) == []


@pytest.mark.parametrize(("end", "answer"), [('exec cc "$@"', 42), ("exit 1", None)])
def test_a_compiler_may_say_what_is_no_text(source, tmp_path, monkeypatch, end, answer, build):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\nprintf '\\377' >&2\n{end}\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    functions = build().functions
    assert (functions and functions.answer()) == answer


@pytest.mark.parametrize("size", [0, 100, 9000, -1])
def test_a_damaged_library_is_made_again(source, tmp_path, size, build):
    build()
    (made,) = kept(tmp_path)
    # In another file of that name: this process is still at the other one.
    damaged = tmp_path / "damaged"
    damaged.write_bytes(made.read_bytes()[:size])
    damaged.replace(made)
    assert build().functions.answer() == 42
    assert ctypes.CDLL(str(made)).answer() == 42


def test_a_folder_that_can_only_be_read_serves_what_it_keeps(source, tmp_path, build, monkeypatch):
    build()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    assert "kept as" in build().account
    source.write_text(SOURCE.replace("42", "43"))
    made = build()
    assert (made.functions.answer(), made.account) == (43, "compiled now, for this process alone")
    assert len(kept(tmp_path)) == 1


def test_a_home_that_cannot_be_written_to(source, tmp_path, build, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert build().functions.answer() == 42


def test_a_foreign_library_is_made_again(source, tmp_path, build):
    build()
    (made,) = kept(tmp_path)
    other, foreign = tmp_path / "other.c", tmp_path / "other.so"
    other.write_text("int question(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", other, "-o", foreign], check=True)
    foreign.replace(made)
    assert build().functions.answer() == 42
    # Anew, for this process knows the other one under its name.
    script = f"import ctypes, sys; sys.exit(ctypes.CDLL({str(made)!r}).answer() - 42)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_processes_that_compile_at_once_do_not_disturb_each_other(source, tmp_path):
    script = (
        "import sys, pathlib; from opteq.native import building as b, compiling as c; b._FUNCTION = 'answer';"
        f" c.SOURCES = pathlib.Path({str(source.parent)!r}); sys.exit(b.library().functions.answer() - 42)"
    )
    with ThreadPoolExecutor(3) as pool:
        codes = list(pool.map(lambda _: subprocess.run([sys.executable, "-c", script]).returncode, range(3)))
    assert codes == [0, 0, 0]
    assert len(kept(tmp_path)) == 1


def test_the_sources_are_part_of_the_package():
    folder = Path(native.__file__).parent
    found = {path.name for path in folder.glob("*.[ch]")}
    assert found == {"forces.c", "packed.c", "pooling.c", "products.h", "rows.c", "winograd.c"}


@pytest.fixture
def wheel(source, tmp_path, monkeypatch):
    """The folder of an installed `opteq-native`, made from the source."""
    folder = tmp_path / "site" / "opteq_native"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    for processor in compiling.PROCESSORS:
        compiling.make(["cc"], processor, folder / compiling.file_name(processor))
    monkeypatch.syspath_prepend(folder.parent)
    return folder


def test_a_wheel_serves_before_a_compiler_is_asked(wheel, build, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    assert build().functions.answer() == 42
    assert str(native.status()).startswith(f"opteq uses compiled code: from the wheel opteq-native, {wheel}")
    assert not (tmp_path / "cache").exists()
    assert not caplog.records


REFUSED = "the wheel opteq-native is not used: "
OTHER = f"{REFUSED}it is for another version or other processors than x86-64-v"


def test_a_wheel_of_other_sources_is_refused_in_a_sentence(wheel, source, build, caplog, monkeypatch):
    source.write_text(SOURCE.replace("42", "43"))
    made = build()
    assert made.functions.answer() == 43
    assert made.account.startswith("compiled now, and kept as ")
    assert OTHER in made.account
    (record,) = caplog.records
    assert "not used: it is for another version" in record.getMessage()
    assert record.getMessage().endswith("; pip install 'opteq[native]' brings the one for this opteq.")
    # Without a compiler PyTorch does it all.
    source.write_text(SOURCE.replace("42", "44"))
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    made = build()
    assert made.functions is None
    assert made.account.startswith("there is no C compiler 'cc'; install gcc or set CC; the wheel opteq")


def test_a_damaged_wheel_is_refused(wheel, build):
    for path in wheel.glob("*.so"):
        path.write_bytes(path.read_bytes()[:-1])
    made = build()
    assert made.functions.answer() == 42
    assert f"{REFUSED}{wheel}" in made.account
    assert "is damaged; install it again" in made.account


def test_no_wheel_is_taken_from_the_current_folder(wheel, build, monkeypatch):
    monkeypatch.chdir(wheel.parent)
    monkeypatch.syspath_prepend("")
    made = build()
    assert made.functions.answer() == 42
    assert "opteq-native" not in made.account


def test_the_wheel_is_built_for_every_python(source, tmp_path):
    project = tmp_path / "native-wheel"
    shutil.copytree(Path(__file__).parents[2] / "native-wheel", project)
    shutil.copytree(source.parent, project / "sources")
    shutil.copy(compiling.__file__, project / "sources")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (made,) = tmp_path.glob("*.whl")
    assert made.name.startswith("opteq_native-0.1.0-py3-none-")
    held = {name for name in zipfile.ZipFile(made).namelist() if name.startswith("opteq_native/")}
    libraries = {compiling.file_name(processor) for processor in compiling.PROCESSORS}
    assert held == {f"opteq_native/{name}" for name in {"__init__.py", *libraries}}
    zipfile.ZipFile(made).extractall(tmp_path)
    for name in libraries:
        compiling.check_seal(tmp_path / "opteq_native" / name)
