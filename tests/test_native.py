import logging
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from opteq import native

SOURCE = "int answer(void) { return 42; }\n"

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="no C compiler, or another processor",
)


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    return path


def load(path):
    return native.load_native(path, declare)


def declare(library):
    library.answer.argtypes = []


def kept(tmp_path):
    return sorted((tmp_path / "cache" / "opteq").iterdir())


def test_a_source_is_compiled_once(source, tmp_path, monkeypatch):
    library = load(source)
    assert library is not None
    assert library.answer() == 42
    (made,) = kept(tmp_path)
    native._loaded.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
    again = load(source)
    assert again is not None
    assert again.answer() == 42
    assert kept(tmp_path) == [made]


def test_it_can_be_switched_off(source, monkeypatch):
    monkeypatch.setattr(native, "enabled", False)
    assert load(source) is None
    monkeypatch.setattr(native, "enabled", True)
    assert load(source).answer() == 42


def test_another_source_is_another_library(source, tmp_path):
    assert load(source).answer() == 42
    native._loaded.cache_clear()
    source.write_text(SOURCE.replace("42", "43"))
    assert load(source).answer() == 43
    assert len(kept(tmp_path)) == 2


def test_the_folder_belongs_to_the_user_alone(source, tmp_path):
    load(source)
    assert (tmp_path / "cache" / "opteq").stat().st_mode & 0o777 == 0o700


def test_without_a_place_to_keep_it_there_is_one_for_the_process(source, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    assert load(source).answer() == 42


def test_a_folder_that_others_can_write_to_is_not_trusted(source, tmp_path):
    folder = tmp_path / "cache" / "opteq"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert load(source).answer() == 42
    assert kept(tmp_path) == []


def test_a_source_that_does_not_compile_is_done_without(source, caplog, tmp_path):
    source.write_text("int answer(void) { return missing; }\n")
    with caplog.at_level(logging.WARNING):
        assert load(source) is None
    assert "answer.c" in caplog.text
    assert "missing" in caplog.text
    assert kept(tmp_path) == []


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "no-such-compiler -m32"])
def test_without_a_compiler_it_is_done_without(source, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    assert load(source) is None


def test_a_compiler_that_is_no_command_is_done_without(source, monkeypatch):
    monkeypatch.setenv("CC", 'cc "')
    assert load(source) is None


@pytest.mark.parametrize(("end", "answer"), [('exec cc "$@"', 42), ("exit 1", None)])
def test_a_compiler_may_say_what_is_no_text(source, tmp_path, monkeypatch, end, answer):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\nprintf '\\377' >&2\n{end}\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    library = load(source)
    assert (library and library.answer()) == answer


@pytest.mark.parametrize("size", [0, 100])
def test_a_damaged_library_is_made_again(source, tmp_path, size):
    # Not opened in this process before: it would be kept under its name.
    script = f"from pathlib import Path; from opteq import native; native._compiled(Path({str(source)!r}))"
    subprocess.run([sys.executable, "-c", script], check=True)
    (made,) = kept(tmp_path)
    made.write_bytes(made.read_bytes()[:size])
    library = load(source)
    assert library is not None
    assert library.answer() == 42


def test_without_the_processor_it_is_done_without(source, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert load(source) is None


def test_processes_that_compile_at_once_do_not_disturb_each_other(source, tmp_path):
    script = (
        "import sys; from pathlib import Path; from opteq.native import load_native;"
        f" sys.exit(load_native(Path({str(source)!r}), lambda library: None).answer() - 42)"
    )
    with ThreadPoolExecutor(3) as pool:
        codes = list(pool.map(lambda _: subprocess.run([sys.executable, "-c", script]).returncode, range(3)))
    assert codes == [0, 0, 0]
    assert len(kept(tmp_path)) == 1


def test_the_sources_are_part_of_the_package():
    import opteq

    folder = Path(opteq.__file__).parent
    found = {path.name for path in folder.rglob("*.[ch]")}
    assert found == {"forces.c", "packed.c", "products.h", "rows.c", "winograd.c"}


@pytest.fixture(autouse=True)
def _forget():
    native._loaded.cache_clear()
    yield
    native._loaded.cache_clear()
